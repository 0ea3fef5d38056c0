"""Everything a run is made of, built from its config once. The config object stops here and in the stories."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent.agent import Agent, Limits
from jaxagent.algos.table import Algorithm, choose
from jaxagent.chat.family import template_of
from jaxagent.chat.template import Template
from jaxagent.checkpoint import Checkpoints
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.engine.replicas import Replicas
from jaxagent.envs import env as envs
from jaxagent.feed import FeedOptions
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.models import hf
from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.sharding import DeviceMesh
from jaxagent.types import Sampling
from sandbox_client import EmbeddedServer, SandboxClient


def faults(config: ConfigDict) -> list[str]:
    """Everything that is wrong with a config, as far as it can be told without devices."""

    builders: dict[str, Callable[..., Any]] = {
        "agent": Limits,
        "sampling": Sampling,
        "rollout": RolloutOptions,
        "feed": FeedOptions,
        "algo": choose,
        "engine": EngineOptions,
        "learner": LearnerOptions,
        "optimizer": OptimizerOptions,
        "warmup_optimizer": OptimizerOptions,
    }
    try:
        builders["env.options"] = envs.find(config.env.name)
    except ValueError as error:
        return [*configs.faults_of(config, builders), str(error)]
    return configs.faults_of(config, builders)


def use_devices(config: ConfigDict) -> None:
    """Asks for the wanted number of CPU devices and keeps compiled programs on disk between runs."""
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
    """The sandbox of a run: a server that is given, or the embedded one, which is started again when it dies."""

    def __init__(self, config: ConfigDict, functions: tuple[str, ...], log: Path | None):
        self._timeout_s = config.timeout_s
        self._server: EmbeddedServer | None = None
        self._stopped = threading.Event()
        if config.url:
            self.url, self.token = config.url, Path(config.token_file).read_text().strip()
            return
        self._server = EmbeddedServer(functions, code=config.code, min_isolation=config.min_isolation, log_file=log)
        self._server.start()
        self.url, self.token = self._server.url, self._server.token
        threading.Thread(target=self._watch, name="sandbox-watch", daemon=True).start()

    def client(self) -> SandboxClient:
        return SandboxClient(self.url, self.token, timeout_s=self._timeout_s)

    @property
    def description(self) -> str:
        if not self._server:
            return f"sandbox {self.url}"
        return f"embedded sandbox {self.url}, isolation {self._server.level}"

    @property
    def restarts(self) -> int:
        return self._server.restarts() if self._server else 0

    def _watch(self) -> None:
        while not self._stopped.wait(0.2):
            if self._server and not self._server.alive():
                self._server.restart()

    def close(self) -> None:
        self._stopped.set()
        if self._server:
            self._server.stop()


@dataclass
class Parts:
    world: envs.World
    template: Template
    decoder: DecoderConfig
    algorithm: Algorithm
    learner: Learner
    engines: Replicas
    rollouts: Rollouts
    sandbox: Sandbox

    def compile(self) -> None:
        """Compiles the engines' and the learner's programs side by side; the engines then hold the learner's weights."""
        self.engines.publish(self.learner.params, version=0)
        engines = threading.Thread(target=self.engines.warm_up, name="compile-engines")
        engines.start()
        self.learner.warm_up()
        engines.join()

    def close(self) -> None:
        self.rollouts.close()
        self.engines.close()
        self.sandbox.close()


def build(config: ConfigDict, log: Path | None = None) -> Parts:
    """Builds every part; what needs something outside (task file, checkpoint, sandbox) comes before what compiles.

    Args:
        log: where the embedded sandbox server writes what it has to say.
    """
    world = envs.find(config.env.name)(**config.env.options)
    template, decoder, policy = start_policy(config)
    sandbox = Sandbox(config.sandbox, (world.functions,) if world.functions else (), log)
    algorithm = choose(**config.algo)
    mesh = DeviceMesh.build(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    learner_options = LearnerOptions(**config.learner, temperature=config.sampling.temperature)
    learner = Learner(decoder, params_of(policy)[1], mesh, algorithm, learner_options)
    engines = Replicas([Engine(decoder, EngineOptions(**config.engine), place) for place in mesh.replicas()])
    agent = Agent(template, world.tools, engines, Limits(**config.agent))
    rollouts = Rollouts(world, agent, sandbox.client, config.seed, RolloutOptions(**config.rollout))
    return Parts(world, template, decoder, algorithm, learner, engines, rollouts, sandbox)


def restore_weights(parts: Parts, workdir: Path, keep: int) -> int:
    """Puts the weights of a run's last checkpoint into learner and engines; returns its step."""
    checkpoints = Checkpoints(workdir / "checkpoints", keep)
    try:
        step = checkpoints.latest()
        if step is None:
            raise ValueError(f"{workdir}: no checkpoint there yet")
        parts.learner.params = checkpoints.trees(step, {"params": parts.learner.params})["params"]
    finally:
        checkpoints.close()
    parts.engines.publish(parts.learner.params, version=step)
    return step


def start_policy(config: ConfigDict) -> tuple[Template, DecoderConfig, Decoder]:
    """The policy to start from: the checkpoint of `init_from` with its own chat template, or a small one from scratch."""
    if config.init_from:
        hf.read_config(config.init_from)  # its complaint about a missing checkpoint comes before the tokenizer's
    template = template_of(config.init_from)
    if config.init_from:
        policy = hf.load(config.init_from)
        if template.vocab_size > policy.config.vocab_size:
            raise ValueError(
                f"{config.init_from}: the tokenizer has {template.vocab_size} ids, the model's vocabulary only "
                f"{policy.config.vocab_size}: they do not belong together"
            )
        return template, policy.config, policy
    decoder = DecoderConfig(vocab_size=template.vocab_size, qk_norm=True, **config.model)
    return template, decoder, Decoder(decoder, nnx.Rngs(config.seed))
