"""What a run would be, before anything runs: meshes, bytes per device, programs, an iteration's work; and whether it fits.

Shapes tell the weights, moments, sums, copies and caches exactly. What a program needs beside them while it runs is estimated
(estimates.py); with a topology the real programs are compiled for it, and the compiler says.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent.algos.table import Algorithm, choose
from jaxagent.compiled import collectives, summary, totals
from jaxagent.engine.engine import EngineOptions, used_lengths
from jaxagent.envs import env as envs
from jaxagent.estimates import append_temporaries, decode_temporaries, gradient_temporaries, update_temporaries, width_bytes
from jaxagent.feed import FeedOptions
from jaxagent.hosts import Hosts, check_mesh
from jaxagent.learner import Learner, LearnerOptions
from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
from jaxagent.objective import ProcessObjective
from jaxagent.parts import decoder_of, faults, published_dtype, puts_together, use_devices
from jaxagent.rollout import RolloutOptions
from jaxagent.sharding import AXES, DeviceMesh
from jaxagent.topology import (
    CHIPS,
    EngineShapes,
    active_weights,
    chip_of,
    devices_of,
    linked_bytes,
    one_host,
    roofline_s,
    size_bytes,
    uncached,
)

GIB = 2**30
# CPU seconds of the sandbox server (docs/BENCHMARKS.md): a session opened and closed, a function's call, a program's start.
SESSION_CPU_S, CALL_CPU_S, PROGRAM_CPU_S = 0.00454, 0.00060, 0.00100


def plan(
    config: str, overrides: Sequence[str], topology: str, *, as_json: bool, iteration_s: float, layers: Sequence[int] = ()
) -> int:
    """The command `jaxagent plan`. Raises ValueError, after it has told the rest, where the run does not fit.

    Args:
        layers: two depths from which the engine's programs are counted, as in `measures`.
    """
    if layers and not topology:
        raise ValueError(f"--layers={list(layers)} are depths to compile, and without --topology nothing is compiled")
    tree, found = configs.load(config, overrides)
    if found:
        raise configs.ConfigError([*found, *faults(tree)])
    if found := faults(tree):
        raise configs.ConfigError(found)
    run = Shapes(tree, topology)
    told = forecast(run, iteration_s)
    if topology:
        with uncached():
            told["compiled"] = compiled(run, told, layers)
    print(json.dumps(told, indent=2) if as_json else "\n".join(lines(told)), flush=True)
    if refusal := does_not_fit(told):
        raise ValueError(refusal)
    return 0


class Shapes:
    """A run's learner, critic and engine on their meshes, with shapes in place of arrays."""

    def __init__(self, config: ConfigDict, topology: str = ""):
        """Raises ValueError for a topology or a mesh that cannot be."""
        self.config = config
        if not topology:
            use_devices(config)
        self.devices = devices_of(topology) if topology else jax.devices()
        self.world = envs.find(config.env.name)(**config.env.options)
        self.algorithm: Algorithm = choose(**config.algo)
        self.decoder: DecoderConfig = decoder_of(config)
        self.mesh = DeviceMesh.build(**{axis: config.mesh[axis] for axis in AXES}, devices=self.devices)
        self.replicas = list(self.mesh.replicas())
        options = LearnerOptions(**config.learner, temperature=config.sampling.temperature)
        if topology and self.mesh.platform == "gpu" and options.attention == "auto":
            options = replace(options, attention="xla")  # cuDNN's kernels are compiled by the GPU's own library, on one
        self.learner = self._learner(self.decoder, options)
        of, own, mode = replace(self.decoder, value_head=True), replace(options, replay_routing=False), config.finetune.mode
        process = mode == "rest_mcts" or self.algorithm.process
        critic = mode == "rest_mcts" or (self.algorithm.has_critic and not mode)
        self.critic = self._learner(of, own, ProcessObjective(self.algorithm) if process else None) if critic else None
        self.engine_options = EngineOptions(**config.engine, record_routing=config.learner.replay_routing)
        hosts = len({device.process_index for device in self.devices})
        check_mesh(self.mesh, Hosts(0, hosts))
        self.together, given = puts_together(self.mesh, hosts), self.learner.params
        if self.together and (dtype := published_dtype(self.decoder, self.engine_options.dtype)):
            given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), given)
        replica, chips = self.replicas[0], self.mesh.size["tensor"]
        if topology and self.mesh.platform == "tpu" and 1 < chips <= 4:
            replica = one_host(topology, chips)
        self.engine = EngineShapes(self.decoder, self.engine_options, replica, given)
        self.chip, self.chip_name, self.limit_bytes = chip_of(self.devices[0], topology, len(self.devices))

    def _learner(self, decoder: DecoderConfig, options: LearnerOptions, objective: ProcessObjective | None = None) -> Learner:
        shapes = params_of(nnx.eval_shape(lambda: Decoder(decoder, nnx.Rngs(0))))[1]
        return Learner(decoder, shapes, self.mesh, self.algorithm, options, objective)

    @property
    def overlap(self) -> dict[str, bool]:
        """How sampling and training are on the devices at once, as `peaks` asks."""
        c, hosts = self.config, len({device.process_index for device in self.devices})
        early = self.algorithm.by_group and c.train.minibatches == 1 and hosts == 1  # as in update.py
        return {"streamed": early and not c.finetune.mode, "ahead": c.feed.max_staleness > 0 and not c.finetune.mode}

    @property
    def scores(self) -> bool:
        """Whether log-probs or values are computed by a forward pass of their own."""
        a, c = self.algorithm, self.config
        asked = c.train.old_logprob == "trainer" or a.kl_in_loss or a.kl_in_reward or self.critic is not None
        return c.finetune.mode in ("dpo", "rest_mcts") or (asked and not c.finetune.mode)


# ---------------------------------------------------------------------- the forecast


def forecast(run: Shapes, iteration_s: float) -> dict[str, Any]:
    """All that can be told without compiling, as JSON."""
    c = run.config
    held = held_bytes(run)
    published = run.engine.part_bytes if run.together else 0
    if envs.past_of(run.world):  # earlier versions come from the host, whole and as they were trained
        published = max(published, run.mesh.size["fsdp"] * size_bytes(run.learner.trained))
    temporaries = {
        "gradient": gradient_temporaries(run.learner),
        "update": update_temporaries(run.learner),
        "publish": published,
        "append": append_temporaries(run.engine),
        "decode": decode_temporaries(run.engine),
    }
    return {
        "chip": run.chip_name,
        "devices": len(run.devices),
        "memory_bytes": run.limit_bytes,
        "training_mesh": run.mesh.size,
        "sampling": {"replicas": len(run.replicas), "devices_each": run.mesh.size["tensor"], "slots_each": c.engine.slots},
        "attention": run.learner.attention.note,
        "weights": sum(x.size for x in jax.tree.leaves(run.learner.params)),
        "trained_weights": sum(x.size for x in jax.tree.leaves(run.learner.trained)),
        "held_bytes": held,
        "temporary_bytes": temporaries,
        "peak_bytes": peaks(held, temporaries, **run.overlap),
        "programs": programs(run),
        "iteration": iteration(run, iteration_s),
    }


def held_bytes(run: Shapes) -> dict[str, int]:
    """Bytes on a device by part, exactly, with everything of an odd size where a device has the most."""
    held = run.learner.held()
    found = {
        "weights": size_bytes(run.learner.params),
        "moments": size_bytes(held["moments"]),
        "gradient sum": size_bytes(held["sums"]),
        "reference": 0,
        "critic": 0,
        "sampler copy": size_bytes(run.engine.weights),
        "key-value cache": size_bytes(run.engine.cache),
        "rows": size_bytes(run.engine.rows),
        "past versions": 0,
    }
    if envs.past_of(run.world):  # engines of their own
        found["past versions"] = sum(size_bytes(part) for part in (run.engine.weights, run.engine.cache, run.engine.rows))
    if run.algorithm.kl_coef and not run.config.finetune.mode:
        narrow = run.learner.options.dtype == "bfloat16"
        found["reference"] = size_bytes(run.learner.trained) // (2 if narrow else 1)
    if run.critic:  # what is frozen it shares with the policy
        found["critic"] = size_bytes(run.critic.trained) + sum(size_bytes(part) for part in run.critic.held().values())
    return found


def peaks(held: dict[str, int], temporaries: dict[str, int], *, streamed: bool = False, ahead: bool = False) -> dict[str, int]:
    """The most that a device holds in each phase: all that stays, with what the phase adds.

    Weights are published in place of the sampler's copy, part by part: where they are not the learner's own, the largest is
    added.

    Args:
        streamed: gradients are summed between calls of the engines, so that the sum is there while they sample.
        ahead: the engines sample for later steps while gradients are computed.
    """
    everything = sum(held.values())
    always = everything - held["gradient sum"]
    sampling = max(temporaries.get(name, 0) for name in ("append", "decode", "verify"))
    beside = sampling if ahead else 0
    return {
        "gradient": everything + temporaries["gradient"] + beside,
        "update": everything + temporaries["update"] + beside,
        "publish": always + temporaries["publish"],
        "sampling": (everything if streamed else always) + sampling,
    }


def programs(run: Shapes) -> dict[str, Any]:
    """What is compiled at the start: the engine's for each replica, and the learner's."""
    o = run.engine_options
    doublings = length = 0
    while length < o.slot_tokens:
        length, doublings = min(max(o.chunk, 2 * length), o.slot_tokens), doublings + 1
    widths = {-(-o.slots // parts) for parts in (1, 4)}
    positions = [o.slot_tokens] if o.exact or o.pages else used_lengths(o.chunk, o.slot_tokens)
    engine = {
        "append": len(o.append_tokens),
        "decode": 1 if o.exact else len(widths) * len(positions),
        "verify": len(widths) if o.draft_tokens else 0,
        "fork": (1 if o.pages else doublings) if o.fork_min_tokens <= o.slot_tokens else 0,
        "stash and restore": 2 * doublings if o.offload_after_s or o.pages else 0,
        "publish and settle": 4,  # a table, a vector, a layer
    }
    learner = {"gradient and update": 2, "zeros": 2, "score": 1 if run.scores else 0}
    learner["critic"] = 5 if run.critic else 0
    learner["weights put together"] = len(run.learner.params) if run.together else 0
    total = sum(engine.values()) * len(run.replicas) + sum(learner.values())
    return {
        "prefill_lengths": list(o.append_tokens),
        "decode_positions": positions,
        "of_each_replica": engine,
        "of_the_learner": learner,
        "all": total,
    }


def iteration(run: Shapes, iteration_s: float) -> dict[str, Any]:
    """The work of one iteration, where every seat of every episode uses all of its budgets: nothing can be more, unless the
    infrastructure fails. Continuations of turns are counted as episodes.
    """
    c, seats = run.config, envs.seats_of(run.world)
    feed = FeedOptions(**{**c.feed, "branches": 0 if c.finetune.mode else c.feed.branches})
    rounds = c.feed.max_rounds if run.algorithm.select == "mixed" and not c.finetune.mode else 1  # groups that are replaced
    trained = c.feed.prompts * (c.feed.rollouts + feed.branches)
    episodes = trained * rounds
    sampled = episodes * seats * min(c.agent.max_tokens, c.agent.max_turns * c.sampling.max_tokens)
    tuned = c.finetune.batch * (2 if c.finetune.mode == "dpo" else 1)
    rows, steps = (tuned, 1) if c.finetune.mode else (trained * seats, c.train.minibatches)
    fitting = max(1, c.learner.row_tokens // c.agent.max_tokens)
    packed = math.ceil(rows / steps / fitting)
    calls = episodes * seats * c.agent.max_turns if run.world.tools else 0
    each = PROGRAM_CPU_S if getattr(run.world, "runs_code", False) else CALL_CPU_S
    cpu_s = calls * each + (episodes * SESSION_CPU_S if run.world.functions or getattr(run.world, "runs_code", False) else 0)
    return {
        "episodes": episodes,
        "trajectory_tokens": episodes * seats * c.agent.max_tokens,
        "sampled_tokens": sampled,
        "packed_rows": packed * steps,
        "micro_batches": math.ceil(packed / c.learner.batch_rows) * steps,
        "optimizer_steps": steps,
        "staleness": c.feed.max_staleness,
        "rollouts_end_within_s": feed.budget_s(RolloutOptions(**c.rollout), mixed=rounds > 1),
        "sandbox_calls": calls,
        "sandbox_cpu_s": round(cpu_s, 3),
        "sandbox_cores": round(cpu_s / iteration_s, 2),
        "for_iterations_of_s": iteration_s,
    }


# ---------------------------------------------------------------------- what the compiler says


def compiled(run: Shapes, told: dict[str, Any], layers: Sequence[int] = ()) -> dict[str, Any]:
    """The real programs: their true bytes per chip, their collectives, and the least time that the chip's sheet allows.

    Args:
        layers: two depths from which the engine's programs are counted, as in `measures`.
    """
    return judged(run, told, {name: measure() for name, measure in measures(run, layers).items()})


def measures(run: Shapes, layers: Sequence[int] = ()) -> dict[str, Callable[[], dict[str, Any]]]:
    """For each of the largest programs a function that compiles it, and returns what it needs and moves.

    Args:
        layers: two depths. The learner's programs loop over layers and take as long to compile at any depth. The engine's hold
            each layer by itself: compiled at two depths, they are continued to the model's in a straight line.
    """
    lowered = cache(run.learner.lower)
    found: dict[str, Callable[[], dict[str, Any]]] = {
        name: partial(_measured, lambda program=program: lowered()[program])
        for name, program in (("gradient", "accumulate"), ("update", "apply"))
    }
    if layers and (len(set(layers)) != 2 or min(layers) < 2):  # of one layer a compiler makes what it makes of no other
        raise ValueError(f"--layers takes two different depths from 2 on, for a straight line through them, got {list(layers)}")
    if not layers or run.decoder.layers <= max(layers):
        return found | {name: partial(_measured, partial(run.engine.lower_one, name)) for name in run.engine.arguments()}
    engines = [run.engine.shallow(depth) for depth in sorted(layers)]
    deep = {name: partial(_continued, engines, name, run.decoder.layers) for name in run.engine.arguments()}
    return found | deep | {"publish": partial(_measured, partial(run.engine.lower_one, "publish"))}  # of one layer


def _continued(engines: list[EngineShapes], name: str, layers: int) -> dict[str, Any]:
    """What a program needs with so many layers, by the straight line through two depths."""
    low, high = (_measured(partial(engine.lower_one, name)) for engine in engines)
    if "refused" in (low | high):
        return high
    first, second = (engine.config.layers for engine in engines)

    def line(a: Any, b: Any) -> Any:
        if isinstance(b, dict):
            return {key: line(a.get(key, {"runs": 0, "bytes": 0}), b[key]) for key in b}
        return a + (b - a) * (layers - first) / (second - first)

    counted = ("argument_bytes", "temporary_bytes", "flop_with_loops_once", "bytes_with_loops_once", "linked_bytes")
    found = {key: round(line(low[key], high[key])) for key in counted}
    runs = jax.tree.map(round, line(low["runs"], high["runs"]))
    said = ", ".join(f"{x['runs']} {kind} {x['bytes'] / 1e6:.1f} MB" for kind, x in runs.items()) or "none"
    seconds = round(low["compile_cpu_s"] + high["compile_cpu_s"], 1)
    return {**found, "collectives": said, "runs": runs, "compile_cpu_s": seconds, "from_layers": [first, second]}


def judged(run: Shapes, told: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What follows from what programs need: the most at once, and the least time of an iteration; some may be missing."""
    work = at_least(run)
    for name, one in found.items():
        if run.chip and "collectives" in one:
            one["flop_at_least"] = work[name]["flop"]
            one["at_least"] = roofline_s(run.chip, **work[name], linked_bytes=one["linked_bytes"])
    temporaries = {name: one["temporary_bytes"] for name, one in found.items() if "temporary_bytes" in one}
    if "publish" in temporaries:
        temporaries["publish"] += told["temporary_bytes"]["publish"]
    told_iteration, seconds = told["iteration"], {}
    if set(found) >= set(work) - {"verify"} and all("at_least" in one for one in found.values()):
        best = {name: max(one["at_least"].values()) for name, one in found.items()}
        calls = told_iteration["sampled_tokens"] / (
            len(run.replicas) * run.engine_options.slots * run.engine_options.decode_tokens
        )
        seconds = {
            "sampling_s": best["decode"] * math.ceil(calls),
            "training_s": best["gradient"] * told_iteration["micro_batches"]
            + best["update"] * told_iteration["optimizer_steps"],
            "publish_s": best["publish"],
        }
    most = peaks(told["held_bytes"], told["temporary_bytes"] | temporaries, **run.overlap)
    return {"programs": found, "peak_bytes": most, "iteration_at_least": seconds}


def _measured(lower: Callable[[], jax.stages.Lowered]) -> dict[str, Any]:
    """What a program needs and moves; of one that its chip cannot hold, what the compiler said."""
    began = time.process_time()
    try:
        program: Any = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": str(error).splitlines()[0]}
    memory, moved = program.memory_analysis(), collectives(program.as_text())
    cost = program.cost_analysis() or {}  # none for GPUs that are not here
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "flop_with_loops_once": cost.get("flops", 0.0),
        "bytes_with_loops_once": cost.get("bytes accessed", 0.0),
        "linked_bytes": linked_bytes(moved),
        "collectives": summary(moved, smallest_bytes=100_000),
        "runs": totals(moved),
        "compile_cpu_s": round(time.process_time() - began, 1),
    }


def at_least(run: Shapes) -> dict[str, dict[str, float]]:
    """FLOP and bytes of a chip that no compiler can spare, by program.

    A weight costs a token 2 FLOP forward, 4 backward and 2 more where layers are computed again; attention 2 N H for each pair
    of tokens of an episode, as often. A pass reads the weights three times, its gradient is read and written; an update reads
    and writes weights, moments and sums; a decoded token reads the weights, and the cache half full.
    """
    c, o, e = run.decoder, run.learner.options, run.engine_options
    chips, tensor = run.mesh.mesh.size, run.mesh.size["tensor"]
    weights = active_weights(c, run.learner.params)
    tokens, span = o.batch_rows * o.row_tokens, min(o.row_tokens, run.config.agent.max_tokens)
    passes = 3 if o.remat == "none" else 4
    forward = 2 * weights + 2 * c.layers * c.heads * c.head_width * span
    held, sampler, cache = size_bytes(run.learner.trained), size_bytes(run.engine.weights), size_bytes(run.engine.cache)
    fed = e.append_rows * e.append_tokens[-1]
    attended = 4 * c.layers * c.heads * c.head_width * e.slot_tokens / 2
    one, passed = (2 * weights + attended) / tensor, 3 * weights / tensor * width_bytes(o.dtype) + 2 * held
    return {
        "gradient": {"flop": passes * forward * tokens / chips, "moved_bytes": passed},
        "update": {"flop": 0.0, "moved_bytes": 7.0 * held},
        "publish": {"flop": 0.0, "moved_bytes": float(size_bytes(run.engine.given) + sampler)},
        "append": {"flop": one * fed, "moved_bytes": float(sampler)},
        "decode": {"flop": one * e.slots * e.decode_tokens, "moved_bytes": e.decode_tokens * (sampler + cache / 2)},
        "verify": {"flop": one * e.slots * (e.draft_tokens + 1), "moved_bytes": sampler + cache / 2},
    }


# ---------------------------------------------------------------------- what is told


def does_not_fit(told: dict[str, Any]) -> str:
    """A sentence where a device has not the memory for some phase; empty where it has."""
    limit, known = told["memory_bytes"], told.get("compiled")
    refused = {name: one["refused"] for name, one in known["programs"].items() if "refused" in one} if known else {}
    if refused:
        name, said = next(iter(refused.items()))
        return f"does not fit: the compiler refuses the program {name} for a {told['chip']}: {said}"
    phases = known["peak_bytes"] if known else told["peak_bytes"]
    phase = max(phases, key=lambda name: phases[name])
    if phases[phase] <= limit:
        return ""
    part = max(told["held_bytes"], key=lambda name: told["held_bytes"][name])
    exact = sum(told["held_bytes"].values())
    guessed = "" if known or exact > limit else " by the estimate of its temporaries (--topology asks the compiler)"
    remedy = "raise mesh.fsdp, lower learner.row_tokens or learner.batch_rows, or set learner.remat=full"
    if phase in ("publish", "sampling"):
        remedy = "raise mesh.tensor, lower engine.slots or engine.slot_tokens, or set engine.dtype=bfloat16"
    return (
        f"does not fit{guessed}: a device needs {phases[phase] / GIB:.2f} GiB in the phase {phase!r} and a {told['chip']} has "
        f"{limit / GIB:.2f}; the largest part that stays is the {part} with {told['held_bytes'][part] / GIB:.2f} GiB: {remedy}"
    )


def lines(told: dict[str, Any]) -> list[str]:
    """The plan as one reads it."""
    size = lambda n: f"{n / GIB:.3f} GiB" if n >= GIB / 10 else f"{n / 2**20:.2f} MiB"  # noqa: E731
    axes = " x ".join(f"{name} {n}" for name, n in told["training_mesh"].items() if n > 1) or "one device"
    s, i, p = told["sampling"], told["iteration"], told["programs"]
    work = (
        f"{i['episodes']} episodes, {i['sampled_tokens']} sampled tokens, {i['packed_rows']} packed rows in "
        f"{i['micro_batches']} micro-batches, {i['optimizer_steps']} optimizer steps"
    )
    text = [
        f"{told['weights'] / 1e6:.2f}M weights, {told['trained_weights'] / 1e6:.2f}M trained, on {told['devices']} devices "
        f"({told['chip']}, {size(told['memory_bytes'])} each)",
        f"training mesh: {axes}; {told['attention']}",
        f"sampling: {s['replicas']} replicas of {s['devices_each']} devices, {s['slots_each']} trajectories each",
        "",
        "bytes of a device that stay",
        *(f"  {name:<18}{size(n):>14}" for name, n in told["held_bytes"].items() if n),
        "bytes of a device while it runs (estimated)",
        *(f"  {name:<18}{size(n):>14}" for name, n in told["temporary_bytes"].items()),
        "the most at once (estimated)",
        *(f"  {name:<18}{size(n):>14}" for name, n in told["peak_bytes"].items()),
        "",
        f"programs to compile: {p['all']}; prefill lengths {p['prefill_lengths']}, positions read {p['decode_positions']}",
        f"an iteration at most: {work}, staleness {i['staleness']}; rollouts end within {i['rollouts_end_within_s']:g} s",
        f"sandbox at most: {i['sandbox_calls']} calls, {i['sandbox_cpu_s']:g} CPU-s beside the programs' own: "
        f"{i['sandbox_cores']:g} cores for iterations of {i['for_iterations_of_s']:g} s",
    ]
    if known := told.get("compiled"):
        chip = CHIPS[told["chip"]]
        text += [
            "",
            f"a {told['chip']}: {chip.tflops:g} bf16 TFLOP/s, memory {chip.memory_gbps:g} GB/s, links {chip.link_gbps:g} GB/s",
            "as compiled, for each program: arguments, temporaries, TFLOP at least and by the compiler (loops once), seconds",
            "at least, what goes over links",
        ]
        for name, one in known["programs"].items():
            if "refused" in one:
                text += [f"  {name:<10}{one['refused']}"]
                continue
            bound = max(one["at_least"], key=lambda limit: one["at_least"][limit])
            least = f"{one['at_least'][bound]:.2e} s ({bound.removesuffix('_s')})"
            sizes = f"{size(one['argument_bytes']):>12}{size(one['temporary_bytes']):>14}"
            work = f"{one['flop_at_least'] / 1e12:8.3f}{one['flop_with_loops_once'] / 1e12:8.3f}"
            text += [f"  {name:<10}{sizes}  {work}  {least}  {one['collectives']}"]
        text += ["the most at once", *(f"  {name:<18}{size(n):>14}" for name, n in known["peak_bytes"].items())]
        text += [
            f"an iteration at least: {name.removesuffix('_s')} {x:.3g} s" for name, x in known["iteration_at_least"].items()
        ]
    return text
