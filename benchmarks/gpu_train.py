"""How fast a training step is on a GPU, and how much memory it takes: `python benchmarks/gpu_train.py`.

The step is the learner's own: the gradient of every micro-batch of packed rows by the loss of GRPO, then the division, the clip
and AdamW, for known models' shapes with random float32 weights and bf16 passes. Trajectories are log-normal, a quarter of a row
in the middle, none longer than a row. FLOPs are those that a step needs: 6 for each weight and token, 12 N H for each pair of
tokens of a trajectory that see each other, in every layer; neither padding nor what is computed again. MFU is against the rate
of a large bf16 product in the same process. A row that does not fit is a row.

Memory, three times: what the allocator had in use at most (told once it rises: rows are run by their forecast, the smallest
first), what XLA says of the same programs, and what `jaxagent plan` forecasts without compiling; then the most with the
learner's warm-up, by which runs begin.

Arms: the names of learner.attention; `blocked` is XLA in blocks for any length; `cudnn-128` leaves segments up to 128 tokens to
XLA instead of 512. `--profile` adds where a step's time goes, by kernels. `--compile H200` needs no GPU, only JAX's plug-in for
CUDA: bytes by XLA and by the forecast, for arms of XLA. `--agreement` samples with the engine (pages) and scores with the
learner: how far the log-probs of the two are apart.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from gpu_engine import MODELS, ceilings, profile, shape_of

from jaxagent.algos.table import TABLE
from jaxagent.data.pack import Batch, Row, fill, pack, unpack
from jaxagent.engine.engine import Engine
from jaxagent.estimates import gradient_temporaries, update_temporaries
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.models.attention_blocked import Blocked
from jaxagent.models.attention_choice import NAMES, Choice
from jaxagent.models.attention_context import over_mesh
from jaxagent.models.attention_cudnn import Cudnn
from jaxagent.models.transformer import REMAT, Decoder, DecoderConfig, Params, params_of
from jaxagent.sharding import DeviceMesh
from jaxagent.topology import active_weights, devices_of, kernels_for, size_bytes, uncached
from jaxagent.types import Sample, SampleRequest, Sampling, sampling_key

HEAD = (
    *(
        "model",
        "rows x tokens",
        "remat",
        "attention",
        "gradient ms",
        "update ms",
        "tokens/s",
        "MFU",
        "not padding",
        "compile s",
    ),
    *("peak GB", "XLA GB", "plan GB", "plan of peak", "peak with warm-up GB"),
)


@dataclass(frozen=True)
class Job:
    """A row of the table."""

    model: str
    row_tokens: int
    rows: int
    remat: str
    arm: str
    dtype: str = "bfloat16"

    def learner(self, mesh: DeviceMesh, params: Params | None = None) -> Learner:
        """Args: params: none for a learner of shapes alone."""
        config = DecoderConfig(**MODELS[self.model])
        shapes = params_of(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[1]
        named = self.arm if self.arm in NAMES else "xla"
        options = LearnerOptions(self.rows, self.row_tokens, remat=self.remat, dtype=self.dtype, attention=named)
        learner = Learner(config, shapes if params is None else params, mesh, TABLE["grpo"], options)
        if self.arm == "blocked":
            learner.attention = Choice("blocked", "XLA in blocks", over_mesh(Blocked(config.attention), mesh))
        elif self.arm not in NAMES:
            kernel = Cudnn(config.attention, short=int(self.arm.removeprefix("cudnn-")))
            learner.attention = Choice("cudnn", self.arm, over_mesh(kernel, mesh))
        return learner


def main() -> None:
    """Prints rows of Markdown as they are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["0.5B", "1.5B"], choices=MODELS)
    parser.add_argument("--row-tokens", nargs="*", type=int, default=[4096, 32768])
    parser.add_argument("--tokens", type=int, default=32768, help="of a micro-batch: so many rows, at least one")
    parser.add_argument("--remat", nargs="*", default=["full", "attention", "dots", "none"], choices=list(REMAT))
    parser.add_argument("--arms", nargs="*", default=["auto"], help="auto, cudnn, xla, blocked, cudnn-SHORT")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compile", choices=["H100", "H200"], help="for a GPU that need not be here")
    parser.add_argument("--agreement", action="store_true")
    parser.add_argument("--trajectories", type=int, default=64, help="of --agreement")
    parser.add_argument("--length", type=int, default=512, help="tokens of a trajectory of --agreement")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if options.compile:
        compiled(options)
        return
    device, ceiling = jax.devices()[0], ceilings()
    print(f"{device.device_kind}, jax {jax.__version__}: " + ", ".join(f"{k} {v:.4g}" for k, v in ceiling.items()), flush=True)
    if options.agreement:
        agreements(options)
        return
    table(HEAD)
    most = 0
    for job in jobs(options, DeviceMesh.build(1)):
        try:
            told, most = step(job, most, ceiling["tflops"], options)
        except Exception as error:  # a row that does not fit is a row
            told, most = [f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"], max(most, in_use("peak_bytes_in_use"))
        print(f"| {' | '.join([*named(job), *told])} |", flush=True)
        gc.collect()


def table(head: tuple[str, ...]) -> None:
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)


def named(job: Job) -> list[str]:
    return [job.model, f"{job.rows} x {job.row_tokens}", job.remat, job.arm]


def jobs(options: argparse.Namespace, mesh: DeviceMesh) -> list[Job]:
    """All rows, those first that are forecast to need least."""
    choices = itertools.product(options.models, options.row_tokens, options.remat, options.arms)
    found = [Job(model, length, max(1, options.tokens // length), remat, arm) for model, length, remat, arm in choices]
    return sorted(found, key=lambda job: forecast(job.learner(mesh)))


# ---------------------------------------------------------------------- memory


def held_bytes(learner: Learner) -> int:
    """Weights, moments and the gradient's sum."""
    return size_bytes(learner.params) + sum(size_bytes(part) for part in learner.held().values())


def forecast(learner: Learner) -> int:
    """The most in use of a learner alone, as `jaxagent plan` says without compiling."""
    return held_bytes(learner) + max(gradient_temporaries(learner), update_temporaries(learner))


def by_xla(learner: Learner, programs: dict[str, Any]) -> int:
    """The same, as XLA says of the compiled programs."""
    return held_bytes(learner) + max(program.memory_analysis().temp_size_in_bytes for program in programs.values())


def in_use(name: str) -> int:
    return int((jax.devices()[0].memory_stats() or {}).get(name, 0))


def compiled(options: argparse.Namespace) -> None:
    """Bytes of each job by XLA and by the forecast."""
    mesh = DeviceMesh.build(devices=devices_of(f"{options.compile}:1"))
    table(
        ("model", "rows x tokens", "remat", "attention", "held GB", "gradient GB", "update GB", "plan of XLA", "compile CPU s")
    )
    options.arms = ["blocked" if arm == "auto" else arm for arm in options.arms]
    for job in jobs(options, mesh):
        learner, began = job.learner(mesh), time.process_time()
        with uncached(), kernels_for(mesh):
            programs = {name: lowered.compile() for name, lowered in learner.lower().items()}
        sizes = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
        told = [f"{size / 1e9:.2f}" for size in (held_bytes(learner), sizes["accumulate"], sizes["apply"])]
        told += [f"{forecast(learner) / by_xla(learner, programs):.2f}", f"{time.process_time() - began:.0f}"]
        print(f"| {' | '.join([*named(job), *told])} |", flush=True)


# ---------------------------------------------------------------------- a step


def step(job: Job, most: int, tflops: float, options: argparse.Namespace) -> tuple[list[str], int]:
    """A row's cells from milliseconds on, and the most that was ever in use. `most`: before it."""
    mesh = DeviceMesh.build(1)
    learner = job.learner(mesh, random_weights(job.model))
    learner.begin(OptimizerOptions(), steps=100)
    began = time.perf_counter()
    programs = {name: lowered.compile() for name, lowered in learner.lower().items()}
    compile_s = time.perf_counter() - began
    learner._accumulate, learner._apply = programs["accumulate"], programs["apply"]  # not to be compiled twice
    rows = list(trajectories(job, options.micro_batches))
    batches = pack(rows, batch_rows=job.rows, row_tokens=job.row_tokens)[: options.micro_batches]
    times = np.median([timed(learner, batches) for _ in range(1 + options.repeats)][1:], axis=0)
    peak = in_use("peak_bytes_in_use")
    if options.profile:
        print(profile(lambda: sum(timed(learner, batches[:1])), 1), flush=True)
    learner.warm_up()
    after = in_use("peak_bytes_in_use")
    tokens, seconds = sum(int((batch.segment > 0).sum()) for batch in batches), sum(times)
    rate = flops(learner, batches) / seconds / 1e12
    told = [f"{times[0] / len(batches) * 1e3:.1f}", f"{times[1] * 1e3:.1f}", f"{tokens / seconds:.0f}", f"{rate / tflops:.1%}"]
    told += [f"{fill(batches):.0%}", f"{compile_s:.0f}", f"{peak / 1e9:.2f}" if peak > most else f"below {most / 1e9:.2f}"]
    expected = forecast(learner)
    told += [f"{size / 1e9:.2f}" for size in (by_xla(learner, programs), expected)]
    told += [f"{expected / peak:.2f}" if peak > most else "-", f"{after / 1e9:.2f}" if after > peak else "no more"]
    return told, after


def random_weights(model: str) -> Params:
    config = DecoderConfig(**MODELS[model])
    found: Params = jax.jit(lambda: params_of(Decoder(config, nnx.Rngs(0)))[1])()
    return found


def timed(learner: Learner, batches: list[Batch]) -> tuple[float, float]:
    """Seconds of all gradients of a step, and of its update."""
    times = [time.perf_counter()]
    for batch in batches:
        learner.accumulate(batch)
    learner.wait()
    times.append(time.perf_counter())
    learner.apply()
    jax.block_until_ready(learner.params)
    times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1]


def trajectories(job: Job, micro_batches: int) -> Iterator[Row]:
    """More than fill so many micro-batches; the first quarter of each is its prompt."""
    rng, left = np.random.default_rng(0), 2 * micro_batches * job.rows * job.row_tokens
    vocab_size = MODELS[job.model]["vocab_size"]
    while left > 0:
        n = int(np.clip(rng.lognormal() * job.row_tokens / 4, 8, job.row_tokens))
        mask, ones = np.arange(n) >= max(1, n // 4), np.ones(n)
        advantage = np.full(n, rng.choice([-1.0, 1.0]))
        yield Row(rng.integers(0, vocab_size, n), mask, -np.log(vocab_size) * ones, advantage, ones, mask * 1.0)
        left -= n


def flops(learner: Learner, batches: list[Batch]) -> float:
    """That a step needs: 6 per weight and token, 12 N H per layer and pair of a trajectory's tokens that see each other."""
    c = learner.config
    pairs = sum(int((batch.position + 1)[batch.segment > 0].sum()) for batch in batches)
    tokens = sum(int((batch.segment > 0).sum()) for batch in batches)
    return 6.0 * active_weights(c, learner.params) * tokens + 12.0 * c.layers * c.heads * c.head_width * pairs


# ---------------------------------------------------------------------- sampler and trainer


def agreements(options: argparse.Namespace) -> None:
    """How far the engine's log-probs are from the learner's under the same weights, and both from those in float32.

    Random weights spread the probability over the whole vocabulary; with the last norm's weights larger, so are logits and what
    rounding does to them, and tokens are as likely as a trained model's.
    """
    head = "model", "logits x", "sampler", "trainer", "tokens", "nats a token", "mean gap", "max gap", "mean ratio", "k3"
    table((*head, "sampler to float32", "trainer to float32"))
    for model, larger in itertools.product(options.models, (1.0, 5.0)):
        weights = random_weights(model)
        weights = {**weights, "norm": larger * weights["norm"]}
        rows = sampled(model, weights, options)
        mask = np.concatenate([row.mask for row in rows])
        sampler = np.concatenate([row.logprob for row in rows])[mask]
        job = Job(model, options.row_tokens[0], max(1, options.tokens // options.row_tokens[0]), "none", "auto")
        with jax.default_matmul_precision("highest"):
            exact = scores(replace(job, arm="blocked", dtype="float32", rows=1), weights, rows)[mask]
        for arm in options.arms:
            try:
                trainer = scores(replace(job, arm=arm), weights, rows)[mask]
            except Exception as error:
                print(f"| {model} | {larger:g} | pages | {arm} | {type(error).__name__}: {str(error)[:160]} |", flush=True)
                continue
            gap = trainer - sampler
            told = [
                f"{-exact.mean():.2f}",
                f"{np.abs(gap).mean():.2e}",
                f"{np.abs(gap).max():.2e}",
                f"{np.exp(gap).mean():.5f}",
            ]
            told += [f"{np.mean(np.expm1(gap) - gap):.2e}"]
            told += [f"{np.abs(x - exact).mean():.2e}" for x in (sampler, trainer)]
            print(f"| {model} | {larger:g} | pages | {arm} | {mask.sum()} | {' | '.join(told)} |", flush=True)
        gc.collect()


def scores(job: Job, weights: Params, rows: list[Row]) -> np.ndarray:
    """The trainer's log-probs of all tokens, one row after the other."""
    learner = job.learner(DeviceMesh.build(1), weights)
    batches = pack(rows, batch_rows=job.rows, row_tokens=job.row_tokens)
    found = [learner.score(batch) for batch in batches]
    return np.concatenate(unpack(rows, found, batch_rows=job.rows, row_tokens=job.row_tokens))


def sampled(model: str, weights: Params, options: argparse.Namespace) -> list[Row]:
    """Trajectories of the engine in bf16 over pages: prompts of unequal length, then as many tokens as there is room for."""
    config, rng = DecoderConfig(**MODELS[model]), np.random.default_rng(1)
    shape = shape_of(min(options.trajectories, 64), options.length, 16, paged=True)
    engine = Engine(config, replace(shape, exact=False), next(DeviceMesh.build(1).replicas()))
    prompts = [rng.integers(0, config.vocab_size, rng.integers(8, options.length // 4)) for _ in range(options.trajectories)]

    async def turn(i: int, prompt: np.ndarray) -> Sample:
        sampling = Sampling(max_tokens=options.length - len(prompt))
        name = f"{i}"
        request = SampleRequest(name, tuple(map(int, prompt)), 0, sampling_key(0, name, 0), (), sampling)
        sample = await engine.generate(request)
        engine.release(name)
        return sample

    async def all_turns() -> list[Sample]:
        return await asyncio.gather(*(turn(i, prompt) for i, prompt in enumerate(prompts)))

    try:
        engine.publish(weights, version=0)
        samples = asyncio.run(all_turns())
    finally:
        engine.close()
    rows = []
    for prompt, sample in zip(prompts, samples, strict=True):
        tokens = np.concatenate([prompt, sample.tokens])
        said = np.concatenate([np.zeros(len(prompt)), sample.logprobs])
        mask = np.arange(len(tokens)) >= len(prompt)
        rows.append(Row(tokens, mask, said, 0 * said, 0 * said, 0 * said))
    return rows


if __name__ == "__main__":
    main()
