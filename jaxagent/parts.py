"""Everything a run is made of, built from its config once. The config object stops here and in the stories."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent.agent import Agent, Limits, Player
from jaxagent.alarms import Alarms
from jaxagent.algos.table import Algorithm, Choice, choose
from jaxagent.chat.family import template_of
from jaxagent.chat.history import ChatOptions
from jaxagent.chat.template import Template
from jaxagent.checkpoint import Checkpoints
from jaxagent.critic import CriticOptions, critic_of
from jaxagent.door.session import Slots
from jaxagent.echoes import MetricsOptions
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.engine.replicas import Replicas
from jaxagent.envs import env as envs
from jaxagent.feed import FeedOptions, stream_of
from jaxagent.heap import give_back_freed_memory, keep_freed_memory
from jaxagent.hosts import ALONE, Hosts, check_mesh, here, is_here, meet, spread_fn
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions, trained_of
from jaxagent.models import peft
from jaxagent.models.adapters import fresh_adapters, is_adapter, lora_spec, merged
from jaxagent.models.transformer import Decoder, DecoderConfig, Params, logical_axes, params_of
from jaxagent.objective import ProcessObjective
from jaxagent.programs import Programs
from jaxagent.rewards.shaping import Shaping
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.selection import SEARCHES, FinetuneOptions
from jaxagent.selves import Selves
from jaxagent.sharding import AXES, CUT_FOR_STORAGE, DeviceMesh
from jaxagent.supervised import warmup_optimizer
from jaxagent.types import Sampling
from sandbox_client import (
    EmbeddedServer,
    InfrastructureError,
    Readiness,
    RequestRefused,
    SandboxClient,
    SandboxStartError,
    Unsupported,
)
from sandbox_client.fleet import Fleet
from sandbox_client.fleet import read as read_fleet

READY_S = 10.0  # for which a given sandbox server is asked whether it is there


def faults(config: ConfigDict) -> list[str]:
    """Everything that is wrong with a config, as far as it can be told without devices."""

    builders: dict[str, Callable[..., Any]] = {
        "agent": Limits,
        "chat": ChatOptions,
        "sampling": Sampling,
        "rollout": RolloutOptions,
        "feed": FeedOptions,
        "algo": Choice,
        "critic": CriticOptions,
        "engine": EngineOptions,
        "lora": lora_spec,
        "learner": LearnerOptions,
        "optimizer": OptimizerOptions,
        "warmup_optimizer": warmup_optimizer,
        "reward": shaping_within(config),
        "alarms": Alarms,
        "metrics": MetricsOptions,
        "finetune": FinetuneOptions,
    }
    try:
        builders["env.options"] = envs.find(config.env.name)
    except ValueError as error:
        return [*configs.faults_of(config, builders), str(error)]
    return configs.faults_of(config, builders)


def use_devices(config: ConfigDict) -> None:
    """Asks for the wanted number of CPU devices and keeps compiled programs on disk between runs."""
    keep_freed_memory()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    settings = {
        "jax_num_cpu_devices": config.mesh.cpu_devices,
        "jax_compilation_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(cache / "jaxagent" / "xla")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        try:
            jax.config.update(name, value)
        except RuntimeError:  # devices exist already, as in a notebook: they are used as they are
            continue


class Sandbox:
    """The sandbox of a run: servers that are given, or the embedded one, which is started again when it dies."""

    def __init__(self, config: ConfigDict, world: envs.World, log: Path | None):
        """Raises ValueError for given servers that are not there or not fit, SandboxStartError for the embedded one."""
        functions = tuple(filter(None, world.functions.split(",")))
        runs_code = getattr(world, "runs_code", False)
        self._timeout_s = config.timeout_s
        self.silent: tuple[str, ...] = ()  # of several given servers, those that did not answer at the start
        self._server: EmbeddedServer | None = None
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sandbox-watch", daemon=True)
        if config.url:
            self._fleet = fleet_of(config)
            self._ask(functions, runs_code)
            return
        if runs_code and config.code == "off":
            raise ValueError("sandbox.code=off, but the policy of this world writes programs: leave it at auto")
        code = "require" if runs_code else config.code
        self._server = EmbeddedServer(functions, code=code, min_isolation=config.min_isolation, log_file=log)
        self._server.start()
        self._fleet = Fleet((self._server.url,), {"token": self._server.token})
        self._watcher.start()

    def client(self) -> SandboxClient:
        return self._fleet.client(timeout_s=self._request_s)

    @property
    def _request_s(self) -> float:
        """The time limit of a request: the fleet file's, where it says one."""
        own: float = self._fleet.settings.get("timeout_s", self._timeout_s)
        return own

    @property
    def description(self) -> str:
        if not self._server:
            silent = f"; no answer from {', '.join(self.silent)}" if self.silent else ""
            return f"sandbox {', '.join(self._fleet.urls)}{silent}"
        return f"embedded sandbox {self._server.url}, isolation {self._server.level}"

    @property
    def restarts(self) -> int:
        return self._server.restarts() if self._server else 0

    def _ask(self, functions: tuple[str, ...], runs_code: bool) -> None:
        """Asks every given server whether it is ready for this run: better now than in its first episode."""
        _want_abilities(self._fleet, functions, runs_code)

        most_s = min(self._request_s, READY_S)

        async def ready(client: SandboxClient) -> Readiness | Exception | None:
            async with client:
                try:
                    return await client.ready()
                except Unsupported:
                    return None  # a service that cannot be asked
                except (InfrastructureError, RequestRefused) as error:
                    return error

        async def all_ready() -> list[Readiness | Exception | None]:
            return await asyncio.gather(*(ready(client) for client in self._fleet.each(timeout_s=most_s)))

        with ThreadPoolExecutor(1) as apart:  # in a notebook this thread has a loop of its own
            answers = dict(zip(self._fleet.urls, apart.submit(asyncio.run, all_ready()).result(), strict=True))
        silent = {url: answer for url, answer in answers.items() if isinstance(answer, InfrastructureError)}
        if len(silent) == len(answers):
            url, error = next(iter(silent.items()))
            raise ValueError(f"sandbox.url={url}: no sandbox server answers there: {error}") from None
        self.silent = tuple(silent)
        for url, answer in answers.items():
            if isinstance(answer, RequestRefused):
                raise ValueError(f"sandbox.url={url}: the server refuses this run: {answer} (sandbox.token_file)")
            if isinstance(answer, Readiness):
                _want_ready(url, answer, functions, runs_code)

    def _watch(self) -> None:
        while not self._stopped.wait(0.2):
            with contextlib.suppress(SandboxStartError):  # tried again; meanwhile episodes say what they miss
                if self._server:
                    self._server.restart(only_if_dead=True)

    def close(self) -> None:
        self._stopped.set()
        if self._server:
            self._watcher.join()  # it must not start again what is stopped here
            self._server.stop()


def _want_ready(url: str, found: Readiness, functions: tuple[str, ...], runs_code: bool) -> None:
    """Raises ValueError where a server lacks what the world needs."""
    if missing := [name for name in functions if name not in found.functions]:
        raise ValueError(
            f"sandbox.url={url}: the server does not hold the functions of {missing[0]}, it holds "
            f"{', '.join(found.functions) or 'none'}; start it with --functions={','.join(functions)}"
        )
    if runs_code and not found.code:
        raise ValueError(f"sandbox.url={url}: the server runs no programs: {found.reason}. {found.remedy or ''}")


def _want_abilities(fleet: Fleet, functions: tuple[str, ...], runs_code: bool) -> None:
    """Raises ValueError where the service of a fleet has not what the world needs."""
    backend = fleet.make_backend()
    wanted = {"sessions": bool(functions) or runs_code, "functions": bool(functions), "exec": runs_code}
    if missing := [name for name, needed in wanted.items() if needed and not getattr(backend.can, name)]:
        raise ValueError(
            f"sandbox.url={fleet.urls[0]}: {backend.name} has no {missing[0]}, which this world needs: choose another backend"
        )


def fleet_of(config: ConfigDict) -> Fleet:
    """The given servers of a sandbox section. Raises ValueError for a file that cannot be read or says something else."""
    if not configs.is_fleet(config.url):
        return Fleet(tuple(configs.servers_of(config.url)), {"token": read_token(config.token_file)})
    try:
        return read_fleet(config.url.strip())
    except ValueError as error:
        raise ValueError(f"sandbox.url={error}") from None


def read_token(path: str) -> str:
    """The bearer token in a file. Raises ValueError where it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise ValueError(f"sandbox.token_file={path}: the server's bearer token cannot be read from it: {reason}") from None


@dataclass
class Learning:
    """What is taught, and what of: without what plays."""

    world: envs.World
    template: Template
    decoder: DecoderConfig
    algorithm: Algorithm
    learner: Learner
    critic: Learner | None
    selves: Selves | None  # earlier versions of the policy, where the world plays with them


@dataclass
class Parts(Learning):
    engines: Replicas
    rollouts: Rollouts
    sandbox: Sandbox
    hosts: Hosts = ALONE

    def compile(self, *, scores: bool = False) -> None:
        """Compiles all programs, the engines' and the learner's side by side where they may. The engines hold its weights then.

        scores: the policy's log-probs are taken anew in every step.
        """
        self.engines.publish(self.learner.params, version=0)
        if self.selves:
            self.selves.begin()
        with ThreadPoolExecutor(1, "compile-engines") as beside:
            engines = beside.submit(self._warm_engines)
            # No two threads may send collectives to the same devices, nor load a program of a GPU while another is captured.
            if self.learner.mesh.platform == "gpu" or any(engine.devices > 1 for engine in self.engines.engines):
                engines.result()
            kl = self.algorithm.kl_in_loss or self.algorithm.kl_in_reward
            self.learner.warm_up(scores=scores or kl)
            if self.critic:
                self.critic.warm_up(scores=True)
            engines.result()
        give_back_freed_memory()

    def _warm_engines(self) -> None:
        for engines in self.sampling:
            engines.warm_up()  # earlier versions' after the others: they find their programs on disk

    @property
    def sampling(self) -> tuple[Replicas, ...]:
        """The engines of the policy, and those of its earlier versions."""
        return (self.engines, self.selves.engines) if self.selves else (self.engines,)

    def close(self) -> None:
        self.rollouts.close()
        for engines in self.sampling:
            engines.close()
        self.sandbox.close()
        envs.end(self.world)


def build(config: ConfigDict, log: Path | None = None, *, with_critic: bool = True) -> Parts:
    """Builds every part; what needs something outside (task file, checkpoint, sandbox) comes before what compiles.

    log: where the embedded sandbox server writes; with_critic: for algorithms that have one, evaluation needs none.
    """
    world = envs.find(config.env.name)(**config.env.options)
    if config.warmup.steps and not hasattr(world, "demonstrate"):
        raise ValueError(
            f"warmup.steps={config.warmup.steps}, but the world {config.env.name} has no demonstrations: set it to 0"
        )
    stream_of(world, config.seed, FeedOptions(**config.feed))  # its complaint comes before the weights are read
    _want_slots(config, envs.seats_of(world))
    _want_one_player(config, world)
    algorithm = choose(**config.algo)
    mesh, hosts = DeviceMesh.build(**{axis: config.mesh[axis] for axis in AXES}), here()
    check_hosts(config, algorithm, world, mesh, hosts)
    template, decoder = policy_shape(config)
    learner_options = LearnerOptions(**config.learner, temperature=config.sampling.temperature)
    trained_of(decoder, learner_options)  # its complaint about a pattern comes before the weights are read
    with contextlib.ExitStack() as undo:  # what was started is stopped where something after it fails
        if hosts.count > 1 and mesh.platform == "cpu":
            meet(mesh)
        sandbox = Sandbox(config.sandbox, world, log)
        undo.callback(sandbox.close)
        learner = Learner(decoder, start_weights(config, decoder, mesh), mesh, algorithm, learner_options)
        critic = critic_beside(learner, algorithm, process=config.finetune.mode == "rest_mcts") if with_critic else None
        most = max(EngineOptions.stop_tokens, len(template.stop))
        engine_options = EngineOptions(**config.engine, stop_tokens=most, record_routing=config.learner.replay_routing)
        by_program = getattr(world, "runs_program", False)
        vocabulary = template.vocabulary() if by_program else None  # programs may ask for stop strings
        places = [place for place in mesh.replicas() if is_here(place)]
        together = puts_together(mesh, hosts.count)
        spread = spread_weights(decoder, engine_options.dtype, mesh, places) if together else None
        engines = Replicas([Engine(decoder, engine_options, place, vocabulary) for place in places], spread)
        undo.callback(engines.close)
        limits = Limits(**config.agent)
        selves = None
        if past := envs.past_of(world):
            others = Replicas([Engine(decoder, engine_options, place) for place in places])
            undo.callback(others.close)
            selves = Selves(learner, others, past, config.seed)
        agent: Player = Agent(template, world.tools, engines, limits, past=selves.engines if selves else None)
        if by_program:
            agent = Programs(Slots(template, engines, engine_options.slots * len(engines.engines)), limits)
        rollouts = Rollouts(world, agent, sandbox.client, config.seed, RolloutOptions(**config.rollout))
        undo.pop_all()
    return Parts(world, template, decoder, algorithm, learner, critic, selves, engines, rollouts, sandbox, hosts)


def check_hosts(config: ConfigDict, algorithm: Algorithm, world: envs.World, mesh: DeviceMesh, hosts: Hosts) -> None:
    """Raises ValueError for what several hosts cannot do together."""
    if hosts.count == 1:
        return
    check_mesh(mesh, hosts)
    if config.finetune.mode:
        raise ValueError(f"jaxagent finetune runs in one process, here are {hosts.count}")
    if config.feed.prompts < hosts.count:
        raise ValueError(f"feed.prompts={config.feed.prompts} must be at least the number of hosts, {hosts.count}")
    if envs.past_of(world) or algorithm.process:
        what = f"algo.name={config.algo.name}" if algorithm.process else f"env.name={config.env.name} with earlier versions"
        raise ValueError(f"{what} runs in one process, here are {hosts.count}")
    if algorithm.whiten or algorithm.baseline_decay:
        raise ValueError(
            f"algo.name={config.algo.name} compares the rollouts of all groups of a step, and a host knows its own only: "
            "choose an algorithm that compares within groups, as grpo, or run in one process"
        )


def puts_together(mesh: DeviceMesh, hosts: int) -> bool:
    """Whether published weights are other arrays than the learner's: of several hosts, or cut for storage by the mesh."""
    return hosts > 1 or any(mesh.parts(axis) > 1 for axis in (*CUT_FOR_STORAGE, "experts"))


def published_dtype(decoder: DecoderConfig, dtype: str) -> jnp.dtype | None:
    """What weights are cast to before they travel to the engines; None for adapters, which are merged there in their own."""
    return None if decoder.lora else jnp.dtype(dtype)


def spread_weights(
    decoder: DecoderConfig, dtype: str, mesh: DeviceMesh, places: Sequence[DeviceMesh]
) -> Callable[[Params], Iterable[Sequence[Params]]]:
    """How published weights come to this host's engines, part by part. Adapters are merged there, as precise as here."""
    axes = logical_axes(nnx.eval_shape(lambda: Decoder(decoder, nnx.Rngs(0))))
    return spread_fn(mesh, axes, published_dtype(decoder, dtype), places)


def learning(config: ConfigDict) -> Learning:
    """The parts of a run that learn, on its mesh where this machine has the devices for it, else on one device."""
    world = envs.find(config.env.name)(**config.env.options)
    algorithm = choose(**config.algo)
    template, decoder = policy_shape(config)
    try:
        mesh = DeviceMesh.build(**{axis: config.mesh[axis] for axis in AXES})
    except ValueError:
        mesh = DeviceMesh.build(data=1)
    options = LearnerOptions(**config.learner, temperature=config.sampling.temperature)
    learner = Learner(decoder, start_weights(config, decoder, mesh), mesh, algorithm, options)
    critic = critic_beside(learner, algorithm)
    return Learning(world, template, decoder, algorithm, learner, critic, selves=None)


def critic_beside(learner: Learner, algorithm: Algorithm, *, process: bool = False) -> Learner | None:
    """The critic of an algorithm that has one; a process reward model is one with another objective."""
    objective = ProcessObjective(algorithm) if process or algorithm.process else None
    return critic_of(learner, objective) if process or algorithm.has_critic else None


def _want_slots(config: ConfigDict, seats: int) -> None:
    """Raises ValueError where episodes could wait for each other for ever: a seat keeps its slot until its episode ends."""
    slots, at_once = config.engine.slots, config.rollout.concurrency
    if seats > 1 and not config.engine.offload_after_s and at_once * seats > slots:
        raise ValueError(
            f"an episode of the world {config.env.name} keeps up to {seats} slots, and {at_once} are played at once "
            f"(rollout.concurrency): engine.slots={slots} could all be kept by seats that wait for others. Set "
            f"rollout.concurrency to {max(1, slots // seats)} or less, engine.slots to {at_once * seats}, or "
            "engine.offload_after_s=0.1, which takes slots from those who wait"
        )


def _want_one_player(config: ConfigDict, world: envs.World) -> None:
    """Raises ValueError for what cannot be done with several seats, earlier versions or programs."""
    past, seats, name = envs.past_of(world), envs.seats_of(world), config.env.name
    if past and config.mesh.tensor > 1:
        raise ValueError(
            f"mesh.tensor={config.mesh.tensor}: earlier versions of the policy play in the world {name}, by engines of their "
            "own, and two engines of several devices each could wait for each other for ever; set it to 1"
        )
    mode, branches = config.finetune.mode, config.feed.branches
    again = f"finetune.mode={mode}" if mode in SEARCHES else f"feed.branches={branches}" if branches and not mode else ""
    by_program = getattr(world, "runs_program", False)
    if again and (past or seats > 1 or by_program):
        who = "programs" if by_program else "earlier versions of the policy too" if past else f"{seats} seats"
        raise ValueError(f"{again} has turns taken again, those of one agent alone; in the world {name} {who} play")


def shaping_within(config: ConfigDict) -> Callable[..., Shaping]:
    """Shaping for a run's episodes, whose sampled tokens are bounded by their turns and by their whole row."""
    limit = min(config.agent.max_tokens, config.agent.max_turns * config.sampling.max_tokens)
    return partial(Shaping, limit=limit, turns=config.agent.max_turns)


def restore_weights(parts: Parts, workdir: Path, keep: int) -> int:
    """Puts the weights of a run's last checkpoint into learner and engines; returns its step."""
    checkpoints = Checkpoints(workdir / "checkpoints", keep)
    try:
        step = checkpoints.latest()
        if step is None:
            raise ValueError(f"{workdir}: no checkpoint there yet")
        parts.learner.restore_weights(checkpoints.trees(step, parts.learner.weights()))
        versions = checkpoints.facts(step).get("past", [])
        if parts.selves and versions:
            parts.selves.restore(checkpoints.trees(step, parts.selves.like(versions)))
            parts.selves.sit(step)
    finally:
        checkpoints.close()
    parts.engines.publish(parts.learner.params, version=step)
    return step


def policy_shape(config: ConfigDict) -> tuple[Template, DecoderConfig]:
    """The chat template and the sizes of the policy to start from, without its weights.

    Raises ValueError for a checkpoint of `init_from` that is missing, not supported, or does not fit its tokenizer, and for
    adapters that do not fit it.
    """
    decoder = decoder_of(config)  # its complaint about a missing checkpoint comes before the tokenizer's
    if not config.init_from:
        return template_of(""), decoder
    template = template_of(peft.base_of(config.init_from), ChatOptions(**config.chat))
    if template.vocab_size > decoder.vocab_size:
        raise ValueError(
            f"{config.init_from}: the tokenizer has {template.vocab_size} ids, the model's vocabulary only "
            f"{decoder.vocab_size}: they do not belong together"
        )
    return template, decoder


def decoder_of(config: ConfigDict) -> DecoderConfig:
    """The sizes of the policy to start from, for which the config.json of `init_from` is enough; raises as `policy_shape`."""
    if not config.init_from:
        vocabulary = template_of("").vocab_size
        return DecoderConfig(vocab_size=vocabulary, qk_norm=True, lora=lora_spec(**config.lora), **config.model)
    decoder = peft.read_config(config.init_from)
    lora, there = lora_spec(**config.lora, experts=bool(decoder.experts)), decoder.lora
    if lora and there and lora != there:
        raise ValueError(
            f"{config.init_from}: its adapters have rank {there.rank}, alpha {there.alpha} and targets "
            f"{','.join(there.targets)}, the config's lora has {lora.rank}, {lora.alpha} and {','.join(lora.targets)}: set "
            "them alike to train these adapters on, or lora.rank=0 to merge them into their base and train that"
        )
    return replace(decoder, lora=lora)


def start_weights(config: ConfigDict, decoder: DecoderConfig, mesh: DeviceMesh) -> Params:
    """The weights to start from: those of the checkpoint or the adapters of `init_from`, on the mesh, or small random ones."""
    if not config.init_from:
        return params_of(Decoder(decoder, nnx.Rngs(config.seed)))[1]
    base_is_frozen = all(is_adapter(name) for name in trained_of(decoder, LearnerOptions(**config.learner)))
    policy = peft.load(config.init_from, mesh, config.learner.frozen_dtype if base_is_frozen else "float32")
    params = params_of(policy)[1]
    if policy.config.lora and not decoder.lora:
        return jax.jit(lambda w: merged(w, policy.config))(params)
    if decoder.lora and not policy.config.lora:
        return {**params, "blocks": {**params["blocks"], **fresh_adapters(decoder, config.seed)}}
    return params
