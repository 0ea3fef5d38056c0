"""An engine over pages gives the bits of one over slots, also where there are too few pages, and gives all of them back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from at_once import PATIENCE_S, say

from jaxagent.engine.cache import cache_of
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.engine.flight import Pace
from jaxagent.engine.pages import PageTable
from jaxagent.engine.replicas import Replicas
from jaxagent.engine.steps import make_steps, new_rows
from jaxagent.models.attention_paged import Paged
from jaxagent.types import SampleRequest, Sampling, Vocabulary, sampling_key

CONFIG = tiny.config()
SLOTS = EngineOptions(
    slots=4, slot_tokens=48, chunk=8, decode_tokens=3, append_rows=2, append_tokens=(4, 8), fork_min_tokens=6, stop_tokens=2
)
# Seven pages hold one trajectory to its end and a page more: four at once must give way to each other. Only published weights
# make cached keys be computed again.
PAGES = replace(SLOTS, pages=8, recompute=True, overlap=True)  # always a call under way, where pages allow it: the harder way
VOCABULARY = Vocabulary(tuple(bytes([65 + i]) for i in range(CONFIG.vocab_size)), frozenset({3, 7}))

Turns = list[tuple[list[int], list[float]]]


def start(options: EngineOptions) -> Engine:
    engine = Engine(CONFIG, options, next(tiny.mesh(data=1).replicas()), VOCABULARY)
    engine.publish(tiny.params(CONFIG), version=0)
    return engine


@pytest.fixture(scope="module")
def slots() -> Iterator[Engine]:
    engine = start(SLOTS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def opened() -> Iterator[Engine]:
    engine = start(PAGES)
    yield engine
    engine.close()


@pytest.fixture
def pages(opened: Engine) -> Iterator[Engine]:
    """The engine over pages, which every test leaves empty."""
    opened.take_stats()
    yield opened
    opened.run(lambda: None)
    assert not opened.table.rows
    assert opened.table.pages is not None
    assert opened.table.pages.free == PAGES.pages - 1


def run(story: Coroutine[Any, Any, Any]) -> Any:
    async def patiently() -> Any:
        return await asyncio.wait_for(story, PATIENCE_S)

    return asyncio.run(patiently())


def ask(name: str, tokens: list[int], start: int = 0, group: str = "", **sampling: Any) -> SampleRequest:
    settings = Sampling(**{"max_tokens": 6, **sampling})
    return SampleRequest(name, tuple(tokens), start, sampling_key(0, name, 0), (3, 7), settings, group)


async def play(engine: Engine | Replicas, name: str, group: str = "", seed: int | None = None) -> Turns:
    """Turns until the trajectory is long; what it is told and asks for depends on its name only, when on the seed."""
    rng, slow = random.Random(name), random.Random(f"{seed} {name}")
    prompt = random.Random(group or name)
    unfed, held, turns = [prompt.randrange(40) for _ in range(prompt.randrange(7, 14))], 0, []
    for _ in range(rng.randrange(2, 5)):
        settings = {"max_tokens": rng.randrange(2, 9), "presence_penalty": rng.choice([0.0, 0.0, 1.5])}
        settings["stop_strings"] = rng.choice([(), (), ("B", "K", "V", "ab")])  # ends of which the device knows nothing
        sample = await engine.generate(ask(name, unfed, held, group, **settings))
        turns.append((sample.tokens, sample.logprobs))
        held += len(unfed) + len(sample.tokens)
        unfed = [rng.randrange(40) for _ in range(rng.randrange(1, 4))]
        if held + len(unfed) + 9 > SLOTS.slot_tokens:
            break
        if seed is not None:
            await asyncio.sleep(slow.random() * 0.004)
    engine.release(name)
    return turns


async def play_all(engine: Engine | Replicas, seed: int | None = None) -> dict[str, Turns]:
    names = [(f"t{i}", "") for i in range(5)] + [(f"m{i}", f"g{i % 2}") for i in range(7)]
    random.Random(seed).shuffle(names)
    turns = await asyncio.gather(*(play(engine, name, group, seed) for name, group in names))
    return {name: turns[i] for i, (name, _) in enumerate(names)}


@pytest.fixture(scope="module")
def wanted(slots: Engine) -> dict[str, Turns]:
    return run(play_all(slots))


def test_the_turns_end_in_every_way(wanted: dict[str, Turns]) -> None:
    """Without this the equalities below could hold of fewer."""
    ends = [tokens[-1] for turns in wanted.values() for tokens, _ in turns]
    assert {3, 7} & set(ends)
    assert {1, 10, 21} & set(ends)  # a stop string
    assert len(set(ends)) > 5  # budgets


@pytest.mark.parametrize("overlap", [True, False], ids=["two calls deep", "one"])
@pytest.mark.parametrize("seed", range(5))
def test_episodes_with_forks_are_bit_equal_to_slots_though_there_are_too_few_pages(
    pages: Engine, wanted: dict[str, Turns], seed: int, overlap: bool
) -> None:
    pages.run(lambda: setattr(pages, "pace", Pace(overlap)))
    assert run(play_all(pages, seed)) == wanted
    pages.run(lambda: setattr(pages, "pace", Pace(True)))
    stats = pages.take_stats()
    assert stats.offloaded > 0  # they did give way
    assert stats.turns == sum(len(turns) for turns in wanted.values())


def test_who_comes_back_to_the_slot_of_a_slow_tool_takes_no_pages_of_a_turn_that_a_call_samples(
    wanted: dict[str, Turns],
) -> None:
    engine = start(replace(PAGES, pages=9, slots=3, offload_after_s=1e-6))
    for seed in range(6):
        assert run(play_all(engine, seed)) == wanted
    assert engine.take_stats().offloaded > 0
    engine.close()


def test_engines_over_pages_and_over_slots_serve_beside_each_other(
    pages: Engine, slots: Engine, wanted: dict[str, Turns]
) -> None:
    assert run(play_all(Replicas([pages, slots]), seed=9)) == wanted


def test_a_fork_shares_its_sources_full_pages_and_is_prefilled_once(pages: Engine) -> None:
    prompt = [i % 40 for i in range(20)]  # two full pages and three tokens beside the pending one

    async def story() -> None:
        await pages.generate(ask("a", prompt, group="g", max_tokens=1))
        pages.take_stats()
        await pages.generate(ask("b", prompt, group="g", max_tokens=1))
        table = pages.table.pages
        assert table is not None
        a, b = (pages.table.rows[name].slot for name in "ab")
        assert table.table[a, :2].tolist() == table.table[b, :2].tolist()
        assert table.table[a, 2] != table.table[b, 2]
        assert table.free == PAGES.pages - 1 - 4
        pages.release("a")
        pages.release("b")

    run(story())
    stats = pages.take_stats()
    assert (stats.prefilled, stats.forked) == (0, 19)


def test_long_turns_over_the_pages_of_one_pause_and_all_come_to_the_same_end(pages: Engine, slots: Engine) -> None:
    async def story(engine: Engine) -> list[Any]:
        asked = [ask(f"long{i}", [i, 2], max_tokens=40) for i in range(4)]
        asked = [replace(request, stop=()) for request in asked]
        samples = await asyncio.gather(*(engine.generate(request) for request in asked))
        for request in asked:
            engine.release(request.trajectory)
        return [(sample.tokens, sample.logprobs) for sample in samples]

    turns = run(story(pages))
    assert [len(tokens) for tokens, _ in turns] == [40] * 4
    assert pages.take_stats().offloaded > 0
    assert turns == run(story(slots))


def test_idle_trajectories_that_hold_all_pages_do_not_keep_a_new_one_waiting(pages: Engine) -> None:
    async def story() -> None:
        for name in ("a", "b"):  # both hold three of seven pages, and their tools never answer
            await pages.generate(ask(name, [1] * 20, max_tokens=1))
        await pages.generate(ask("new", [2] * 20, max_tokens=1))
        assert pages.take_stats().offloaded > 0
        again = await pages.generate(ask("a", [5], pages.table.rows["a"].known))
        assert again.tokens
        for name in ("a", "b", "new"):
            pages.release(name)

    run(story())


def test_new_weights_in_the_middle_of_turns_are_computed_again_in_pages_of_each_rows_own(pages: Engine) -> None:
    prompt = [i % 40 for i in range(12)]

    published: list[Any] = []

    def publish(tokens: list[int]) -> None:
        if not published:
            published.append(pages.post(partial(pages._publish, tiny.params(CONFIG, seed=1), 1)))

    async def afterwards() -> list[Any]:
        second = await pages.generate(ask("w0", [5], 12 + len(first[0].tokens), temperature=0.0))
        again = await pages.generate(ask("fresh", [*prompt, *first[0].tokens, 5], temperature=0.0))
        return [second, again]

    asked = [replace(ask(f"w{i}", prompt, group="g", max_tokens=20), stop=()) for i in range(4)]
    answers = [say(pages, request) for request in (replace(asked[0], hear=publish), *asked[1:])]
    first = [answer.wait() for answer in answers]
    published[0].result(PATIENCE_S)
    assert set(first[0].versions) == {0, 1}
    for name in ("w1", "w2", "w3"):  # the rest has room enough
        pages.release(name)
    second, again = run(afterwards())
    assert second.tokens == again.tokens  # as if these weights had been there from the beginning
    for name in ("w0", "fresh"):
        pages.release(name)
    pages.publish(tiny.params(CONFIG), version=0)


def test_without_exactness_the_tokens_are_the_same(wanted: dict[str, Turns]) -> None:
    engine = start(replace(PAGES, exact=False))
    found = run(play_all(engine, seed=3))
    engine.close()
    assert {name: [tokens for tokens, _ in turns] for name, turns in found.items()} == {
        name: [tokens for tokens, _ in turns] for name, turns in wanted.items()
    }


def test_a_cache_of_fewer_pages_than_a_trajectory_needs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.pages must be 0 or more than a slot's slot_tokens / chunk = 6"):
        replace(SLOTS, pages=6)


@pytest.mark.parametrize("tensor", [1, 4], ids=["one device", "four, more than key heads"])
def test_the_tpus_kernel_decodes_what_slots_decode(tensor: int) -> None:
    """Interpreted, since this is no TPU: append, fork and decode with the kernel against the same with slots."""
    mesh = next(tiny.mesh(tensor=tensor, data=1).replicas())
    options = replace(SLOTS, slot_tokens=32, decode_tokens=2, pages=11)
    form = Paged(CONFIG.attention, mesh, interpret=True)
    table = PageTable(4, 32, 8, options.pages)
    table.grow(0, 13)
    table.grow(2, 12)
    [(source, target)] = table.fork(0, 3, 9)
    found = []
    for pages in (None, form):
        settings = {"dtype": jnp.float32, "chunk": 8, "decode_tokens": 2}
        steps: Any = make_steps(CONFIG, **settings, mesh=mesh, pages=pages)
        params = steps.publish(tiny.params(CONFIG))
        cache = mesh.place(cache_of(CONFIG, options, pages), (None, "kv_heads"))
        where = () if pages is None else (table.table,)
        tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
        numbers = np.asarray([0, 2], np.int32), tokens, np.zeros(2, np.int32), np.asarray([8, 5], np.int32)
        cache, *_ = steps.append(params, cache, *numbers, None, *where)
        one = np.asarray([0]), np.asarray([[30]], np.int32), np.asarray([8]), np.asarray([1])
        cache, *_ = steps.append(params, cache, *one, None, *where)
        if pages is None:
            cache = steps.fork(cache, np.asarray([0]), np.asarray([3]), 16)
        else:
            cache = steps.fork(cache, np.asarray([source]), np.asarray([target]))
        rows = new_rows(4, 1)
        armed = {name: np.array(value) for name, value in rows.items()} | {"mask": np.ones(4, bool)}
        armed |= {"token": np.asarray([7, 0, 8, 9]), "pos": np.asarray([9, 0, 5, 9]), "live": np.asarray([1, 0, 1, 1], bool)}
        armed |= {"left": np.full(4, 9), "temperature": np.zeros(4, np.float32), "stop": np.full((4, 1), -1)}
        _, rows, emitted, _, _, _ = steps.decode(params, cache, rows, armed, None, None, 0, *where)
        found.append((np.asarray(emitted).tolist(), jax.device_get(rows["pos"]).tolist()))
    assert found[0] == found[1]
    assert found[0][0][1] == [-1, -1]
    assert len({str(row) for row in found[0][0]}) == 4
