"""What multi-turn rollouts cost when tools take time: `python benchmarks/rollout.py --tool-ms 50` (or 2000).

The same episodes in several ways in one process, on a model of random weights: turns of random length, a tool between them
that sleeps, its answer as new tokens. "continuous" is the engine as it is: an episode goes on as soon as its tool answers, and
feeds the new tokens only; with half the slots, those of waiting episodes move to host memory. "lock-step" is how synchronous
trainers roll out: all sample, then all wait for the slowest tool, then comes the next turn; with the cache kept, or with the
whole conversation prefilled again at every turn.

Prints wall seconds and sampled tokens per second; ratios are within the run. `--parts` times the engine's programs instead,
`--tails` two orders in which episodes get their slots: a few tasks take many times the turns of the others, and slots are
scarce. Rollouts, agent and engine are the trainer's, all tokens are the same in both orders, and the tasks come twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from clocked import GRAIN
from decode import SHAPES
from flax import nnx
from scheduling import Shape, Tools, Unranked

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.engine.memory import copied_length
from jaxagent.heap import keep_freed_memory
from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
from jaxagent.rollout import RolloutOptions, Rollouts, wait
from jaxagent.sharding import DeviceMesh
from jaxagent.types import SampleRequest, Sampling, sampling_key


@dataclass(frozen=True)
class Episode:
    """One trajectory: what it is told, how much it samples each turn, and how long each tool takes."""

    name: str
    group: str
    fed: list[list[int]]
    budgets: list[int]
    tool_s: list[float]


def main() -> None:
    """Measures and prints a table in Markdown, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=24, help="sampled tokens of a turn, in the mean")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--tool-ms", type=float, default=50.0)
    parser.add_argument("--tool-sigma", type=float, default=0.0, help="of the logarithm of the tool's time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--tails", action="store_true")
    parser.add_argument("--slots", type=int, default=16, help="of --tails")
    parser.add_argument("--long", type=int, default=1, help="tasks of --tails whose episodes take the most turns")
    parser.add_argument("--most", type=int, default=0, help="turns of these; 0: 10 times --turns")
    parser.add_argument("--sorted", action="store_true", help="these tasks come last, as where tasks grow harder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    keep_freed_memory()
    found = parts(options) if options.parts else tails(options) if options.tails else modes(options)
    if options.json:
        print(json.dumps({"options": vars(options), **found}))
        return
    names = list(next(iter(found.values())))
    print(f"| | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
    for name, row in found.items():
        print(f"| {name} | {' | '.join(f'{row[column]:.3g}' for column in names)} |")


def make_episodes(options: argparse.Namespace, vocab: int, longest: int) -> list[Episode]:
    """Episodes by a fixed seed; a group shares its prompt."""
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    prompts = [words(options.prompt_tokens) for _ in range(-(-options.episodes // options.group))]
    episodes = []
    for i in range(options.episodes):
        fed = [prompts[i // options.group], *(words(options.answer_tokens) for _ in range(options.turns - 1))]
        budgets = [min(longest, 1 + int(rng.expovariate(1 / options.turn_tokens))) for _ in range(options.turns)]
        slow = [options.tool_ms / 1e3 * rng.lognormvariate(0, options.tool_sigma) for _ in range(options.turns - 1)]
        episodes.append(Episode(str(i), str(i // options.group), fed, budgets, slow))
    return episodes


def make_engine(options: argparse.Namespace, slots: int, slot_tokens: int, vocab_size: int = 0, **changes: Any) -> Engine:
    sizes = SHAPES[options.model]
    config = DecoderConfig(**{**sizes, "vocab_size": vocab_size or sizes["vocab_size"]})
    shape = {"slots": slots, "slot_tokens": slot_tokens, "chunk": 64, "decode_tokens": 8, "append_rows": 8}
    engine = Engine(
        config, EngineOptions(**{**shape, "append_tokens": (16, 64), "exact": False, **changes}), DeviceMesh.build(1)
    )
    engine.publish(jax.jit(lambda: params_of(Decoder(config, nnx.Rngs(0)))[1])(), version=0)
    engine.warm_up().result()
    return engine


def modes(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The least wall seconds of each way to roll out, taken in turns."""
    longest = 4 * options.turn_tokens
    tokens = options.prompt_tokens + options.turns * longest + (options.turns - 1) * options.answer_tokens
    slot_tokens = -(-tokens // 64) * 64
    episodes = make_episodes(options, SHAPES[options.model]["vocab_size"], longest)
    sampled = sum(sum(episode.budgets) for episode in episodes)
    whole = make_engine(options, options.episodes, slot_tokens)
    half = make_engine(options, options.episodes // 2, slot_tokens, offload_after_s=options.tool_ms / 4e3)
    ways: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "continuous": lambda: continuous(whole, episodes),
        "continuous, half the slots": lambda: continuous(half, episodes),
        "lock-step, cache kept": lambda: lock_step(whole, episodes, keep=True),
        "lock-step, prefilled again": lambda: lock_step(whole, episodes, keep=False),
    }
    best = dict.fromkeys(ways, float("inf"))
    for repeat in range(options.repeats + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            asyncio.run(way())
            if repeat:
                best[name] = min(best[name], time.perf_counter() - began)
    whole.close()
    half.close()
    return {
        name: {"wall s": s, "sampled tokens/s": sampled / s, "of continuous": best["continuous"] / s}
        for name, s in best.items()
    }


async def say(engine: Engine, episode: Episode, turn: int, tokens: list[int], start: int, suffix: str = "") -> list[int]:
    """Samples one turn of an episode after `tokens`."""
    request = SampleRequest(
        episode.name + suffix,
        tuple(tokens),
        start,
        sampling_key(0, episode.name, 0),
        (),
        Sampling(max_tokens=episode.budgets[turn]),
        episode.group + suffix,
    )
    return (await engine.generate(request)).tokens


async def continuous(engine: Engine, episodes: list[Episode]) -> None:
    async def play(episode: Episode) -> None:
        held = 0
        for turn, fed in enumerate(episode.fed):
            held += len(fed) + len(await say(engine, episode, turn, fed, held))
            if turn < len(episode.tool_s):
                await asyncio.sleep(episode.tool_s[turn])
        engine.release(episode.name)

    await asyncio.gather(*map(play, episodes))


async def lock_step(engine: Engine, episodes: list[Episode], keep: bool) -> None:
    rows: list[list[int]] = [[] for _ in episodes]
    for turn in range(len(episodes[0].fed)):

        async def sample(i: int, turn: int = turn) -> None:
            episode, row, suffix = episodes[i], rows[i], "" if keep else f"/{turn}"
            fed = episode.fed[turn] if keep else [*row, *episode.fed[turn]]
            row += [*episode.fed[turn], *await say(engine, episode, turn, fed, len(row) if keep else 0, suffix)]
            if not keep or turn == len(episode.tool_s):
                engine.release(episode.name + suffix)

        await asyncio.gather(*map(sample, range(len(episodes))))
        if turn < len(episodes[0].tool_s):
            await asyncio.gather(*(asyncio.sleep(episode.tool_s[turn]) for episode in episodes))


def tails(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds of all episodes, first come first served and long ones first, when tasks come first and when they come again."""
    groups, template = -(-options.episodes // options.group), PlainTemplate()
    most = options.most or 10 * options.turns
    row_tokens = options.prompt_tokens + most * (options.turn_tokens + options.answer_tokens + 4)
    lengths = {"groups": groups, "rollouts": options.group, "turns": (options.turns, most), "endless": options.long}
    tools = {"tool_s": options.tool_ms / 1e3, "tool_sigma": options.tool_sigma, "sorted": options.sorted}
    sizes = {"prompt_tokens": GRAIN * options.prompt_tokens, "answer_tokens": GRAIN * options.answer_tokens}
    world = Tools(Shape(**lengths, **tools, **sizes))
    engine = make_engine(options, options.slots, -(-row_tokens // 64) * 64, template.vocab_size, exact=True)
    ways: dict[str, Callable[[Any], Any]] = {"fifo": Unranked, "long first": lambda sampler: sampler}
    found: dict[str, dict[str, float]] = {}
    for repeat in range(options.repeats):
        rows: dict[str, list[list[int]]] = {}
        for name, through in ways.items():
            agent = Agent(template, (), through(engine), Limits(10**6, row_tokens))
            rollouts = Rollouts(world, agent, lambda: None, repeat, RolloutOptions(concurrency=10**6))
            for visit in ("first visit, s", "second visit, s"):
                named = [(f"{visit}/{i}", world.task("train", i)) for i in range(groups)]
                began = time.perf_counter()
                played = rollouts.play(named, options.group, Sampling(max_tokens=options.turn_tokens))
                rows[name] = [row.tokens for futures in played for row in wait(futures)]
                took = time.perf_counter() - began
                best = found.setdefault(name, {})
                best[visit] = min(took, best.get(visit, took))
            rollouts.close()
        assert rows["fifo"] == rows["long first"], "who goes first must not change what is sampled"
    engine.close()
    return {**found, "ratio": {visit: s / found["long first"][visit] for visit, s in found["fifo"].items()}}


def parts(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """CPU milliseconds of what an engine does instead of another thing, taken in turns, and their ratio."""
    config = DecoderConfig(**SHAPES[options.model])
    held, new, group = 1024, 64, options.group
    engine = make_engine(
        options, group, held + 2 * new, append_rows=group, append_tokens=(new, held), exact=True, chunk=held + 2 * new
    )
    short = make_engine(options, group, 256, append_rows=group, append_tokens=(new,), chunk=64, exact=False)
    wide = make_engine(options, group, 4096, append_rows=group, append_tokens=(new,), chunk=64, exact=False)
    one = make_engine(options, group, held + 2 * new, append_rows=1, append_tokens=(held,), chunk=held + 2 * new)
    rng = np.random.default_rng(0)

    def append(engine: Engine, rows: int, count: int, start: int) -> None:
        tokens = rng.integers(0, config.vocab_size, (rows, count)).astype(np.int32)
        full = np.full(rows, count, np.int32)
        slots, at = np.arange(rows, dtype=np.int32), np.full(rows, start, np.int32)
        engine._memory.cache, *_ = engine._steps.append(engine._params, engine._memory.cache, slots, tokens, at, full)
        jax.block_until_ready(engine._memory.cache)

    def fork() -> None:
        append(one, 1, held, 0)
        slots = np.zeros(1, np.int32)
        for member in range(1, group):
            one._memory.cache = one._steps.fork(
                one._memory.cache, slots, np.asarray([member], np.int32), copied_length(one.options, held)
            )
        jax.block_until_ready(one._memory.cache)

    def decode(engine: Engine, used: int) -> None:
        armed = {name: np.array(value) for name, value in engine._arming.nothing.items()}
        armed["mask"][:] = armed["live"][:] = True
        armed["pos"][:], armed["left"][:], armed["top_p"][:], armed["temperature"][:] = 100, 1000, 1.0, 1.0
        slots = np.arange(group, dtype=np.int32)
        state = engine._params, engine._memory.cache, engine._rows, engine._arming.place(armed), engine.controls.grammars
        out = engine._steps.decode(*state, slots, used)
        engine._memory.cache, engine._rows, *_ = jax.block_until_ready(out)

    pairs = {
        f"a group's prompt of {held}: {group} prefills / one and copies": (lambda: append(engine, group, held, 0), fork),
        f"{new} tokens onto {held}: prefill again / append": (
            lambda: (append(engine, group, held, 0), append(engine, group, new, held)),
            lambda: append(engine, group, new, held),
        ),
        "decode with 128 in use: of 4096 / of 256": (lambda: decode(wide, 128), lambda: decode(short, 128)),
    }
    found = {}
    for name, pair in pairs.items():
        best = [float("inf")] * 2
        for _ in range(options.repeats + 1):
            for i, work in enumerate(pair):
                began = time.process_time()
                work()
                best[i] = min(best[i], time.process_time() - began)
        found[name] = {"first ms": best[0] * 1e3, "second ms": best[1] * 1e3, "ratio": best[0] / best[1]}
    for each in (engine, short, wide, one):
        each.close()
    return found


if __name__ == "__main__":
    main()
