"""Through the async door: a trajectory's bits are its own, a held slot keeps its cache, and nothing hangs or leaks."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compilations import compiled
from flax import nnx

from jaxagent.engine.engine import Engine, EngineOptions, used_lengths
from jaxagent.engine.replicas import Replicas
from jaxagent.models.attention import packed
from jaxagent.models.transformer import Decoder, params_of
from jaxagent.types import Sample, Sampler, SampleRequest, Sampling, sampling_key

CONFIG = tiny.config()
SIZES = {"slots": 4, "slot_tokens": 32, "chunk": 8, "decode_tokens": 3, "append_rows": 2, "append_tokens": (4, 8)}
OPTIONS = EngineOptions(**SIZES, fork_min_tokens=6, stop_tokens=2, overlap=True)  # always a call under way: the harder way
PATIENCE_S = 120.0  # a hang fails by this; nothing is measured

Turns = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[..., Engine]]:
    """Makes engines that are closed in the end."""
    engines = []

    def start(replica: int = 0, publish: bool = True, options: EngineOptions = OPTIONS) -> Engine:
        engine = Engine(CONFIG, options, list(tiny.mesh(data=2).replicas())[replica])
        engines.append(engine)
        if publish:
            engine.publish(tiny.params(CONFIG), version=0)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def shared(make: Callable[..., Engine]) -> Engine:
    return make()


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The shared engine, which every test leaves empty."""
    shared.take_stats()
    yield shared
    shared.run(lambda: None)
    assert not shared.table.rows
    assert not shared.table.waiting


def run(story: Coroutine[Any, Any, Any]) -> Any:
    async def patiently() -> Any:
        return await asyncio.wait_for(story, PATIENCE_S)

    return asyncio.run(patiently())


def ask(name: str, tokens: list[int], start: int = 0, group: str = "", **sampling: Any) -> SampleRequest:
    settings = Sampling(**{"max_tokens": 5, **sampling})
    return SampleRequest(name, tuple(tokens), start, sampling_key(0, name, 0), (3, 7), settings, group)


async def play(
    sampler: Sampler, name: str, *, slow: random.Random | None = None, group: str = "", turn: asyncio.Barrier | None = None
) -> Turns:
    """Three turns of a trajectory whose tools answer sooner or later; everything it is told depends on its name only."""
    rng = random.Random(group or name)
    unfed, held, turns = [rng.randrange(40) for _ in range(rng.randrange(1, 10))], 0, []
    for _ in range(3):
        sample = await sampler.generate(ask(name, unfed, held, group))
        turns.append((sample.tokens, sample.logprobs))
        held += len(unfed) + len(sample.tokens)
        unfed = [rng.randrange(40) for _ in range(rng.randrange(1, 4))]
        if turn:
            await turn.wait()
        for _ in range(slow.randrange(3) if slow else 0):
            await asyncio.sleep(slow.random() * 0.003 if slow else 0)
    sampler.release(name)
    return turns


async def play_all(sampler: Sampler, names: list[str], seed: int | None = None, group: str = "") -> dict[str, Turns]:
    slow = None if seed is None else random.Random(seed)
    return dict(zip(names, await asyncio.gather(*(play(sampler, name, slow=slow, group=group) for name in names)), strict=True))


NAMES = [f"t{i}" for i in range(10)]  # more than there are slots


@pytest.fixture(scope="module")
def alone(shared: Engine) -> dict[str, Turns]:
    """Every trajectory, played when nobody else is there."""

    async def one_by_one() -> dict[str, Turns]:
        return {name: await play(shared, name) for name in NAMES}

    return run(one_by_one())


def test_the_trajectories_differ_from_each_other(alone: dict[str, Turns]) -> None:
    """Without this the equalities below could hold of constants."""
    assert len({str(turns) for turns in alone.values()}) == len(NAMES)
    assert any(len(tokens) < 5 for turns in alone.values() for tokens, _ in turns)  # a stop token is met
    assert any(len(tokens) == 5 for turns in alone.values() for tokens, _ in turns)  # and a budget used up


def test_a_trajectory_is_bit_equal_alone_and_among_more_than_there_are_slots(engine: Engine, alone: dict[str, Turns]) -> None:
    assert run(play_all(engine, NAMES)) == alone


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_arrival_changes_no_bit(engine: Engine, alone: dict[str, Turns], seed: int) -> None:
    names = random.Random(seed).sample(NAMES, len(NAMES))
    assert run(play_all(engine, names, seed=seed)) == alone


def test_another_replica_that_reads_every_call_before_the_next_gives_the_same_bits(
    make: Callable[..., Engine], engine: Engine, alone: dict[str, Turns]
) -> None:
    both = Replicas([engine, make(replica=1, options=replace(OPTIONS, overlap=False))])
    assert run(play_all(both, NAMES, seed=0)) == alone
    assert both.take_stats().turns == 3 * len(NAMES)
    assert run(play_all(both.engines[1], NAMES[:2])) == {name: alone[name] for name in NAMES[:2]}


def test_a_forked_prompt_changes_no_bit_and_is_prefilled_once(engine: Engine) -> None:
    names = [f"member{i}" for i in range(4)]
    group = next(f"g{i}" for i in range(99) if random.Random(f"g{i}").randrange(1, 10) == 9)  # a prompt of nine tokens

    async def apart() -> dict[str, Turns]:
        return {name: await play(engine, name, group=group) for name in names}

    before = run(apart())
    assert engine.take_stats().forked == 0

    async def together() -> list[Sample]:
        rng = random.Random(group)
        prompt = [rng.randrange(40) for _ in range(rng.randrange(1, 10))]
        return await asyncio.gather(*(engine.generate(ask(name, prompt, group=group)) for name in names))

    for name, sample in zip(names, run(together()), strict=True):
        assert (sample.tokens, sample.logprobs) == before[name][0]
        engine.release(name)
    stats = engine.take_stats()
    assert (stats.prefilled, stats.forked) == (8, 3 * 8)


def test_a_held_slot_keeps_its_cache_while_a_tool_runs(engine: Engine) -> None:
    async def story() -> None:
        first = await engine.generate(ask("a", [1, 2, 3, 4, 5, 6]))
        assert engine.take_stats().prefilled == 5  # the last fed token is pending
        await play(engine, "other")  # the tool runs; somebody else is served
        engine.take_stats()
        await engine.generate(ask("a", [8, 9], 6 + len(first.tokens)))
        assert engine.take_stats().prefilled == 2  # the last sampled token and all but the last new one
        engine.release("a")

    run(story())


def test_a_sample_tells_what_it_was_fed_and_why_it_ended(engine: Engine) -> None:
    async def story() -> list[Sample]:
        samples = []
        for i in range(8):
            samples.append(await engine.generate(ask(f"s{i}", [i, 2], max_tokens=4)))
            engine.release(f"s{i}")
        return samples

    samples = run(story())
    for i, sample in enumerate(samples):
        assert (sample.fed_start, sample.fed) == (0, [i, 2])
        assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions) <= 4
        assert sample.stopped == (sample.tokens[-1] in (3, 7))
        assert not set(sample.tokens[:-1]) & {3, 7}
        assert sample.stopped or len(sample.tokens) == 4
    assert {sample.stopped for sample in samples} == {True, False}


def test_greedy_and_restricted_rows_are_served_beside_each_other(engine: Engine) -> None:
    async def story() -> list[Sample]:
        asked = [ask("hot", [1, 2]), ask("greedy", [1, 2], temperature=0.0), ask("top", [1, 2], top_k=1)]
        return await asyncio.gather(*(engine.generate(request) for request in asked))

    _, greedy, top = run(story())
    assert greedy.tokens == top.tokens  # the only token of top-1 is the likeliest
    assert set(greedy.logprobs) == {0.0}
    for name in ("hot", "greedy", "top"):
        engine.release(name)


def test_a_released_slot_serves_the_next_and_a_held_one_does_not(engine: Engine) -> None:
    async def story() -> None:
        for i in range(4):
            await engine.generate(ask(f"holder{i}", [1, 2]))
        fifth = asyncio.create_task(engine.generate(ask("fifth", [1, 2])))
        await engine.generate(ask("holder0", [1], engine.table.rows["holder0"].known))
        assert not fifth.done()
        engine.release("holder2")
        assert (await fifth).tokens
        for name in ("holder0", "holder1", "holder3", "fifth"):
            engine.release(name)

    run(story())


def test_releasing_in_the_middle_of_a_turn_cancels_it_and_frees_the_slot(engine: Engine) -> None:
    async def story() -> None:
        turns = [asyncio.create_task(engine.generate(ask(f"r{i}", [1, 2], max_tokens=30))) for i in range(6)]
        await asyncio.sleep(0)
        for i in range(6):
            engine.release(f"r{i}")
        ended = await asyncio.gather(*turns, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError | Sample) for end in ended)
        assert (await play(engine, "t0")) == (await play(engine, "t0"))
        engine.release("nobody")  # unknown names are fine

    run(story())


def test_a_name_may_be_used_again_after_its_release(engine: Engine, alone: dict[str, Turns]) -> None:
    async def story() -> Turns:
        await play(engine, "t1")
        return await play(engine, "t1")

    assert run(story()) == alone["t1"]


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (ask("new", [1], start=2), "holds 0 tokens, the request starts at 2"),
        (ask("new", []), "at least one token"),
        (ask("new", [1] * 30), "do not fit a slot of 32 tokens"),
        (ask("new", [1], max_tokens=0), "max_tokens must be at least 1"),
        (ask("new", [1, 40]), "token 40 is not in a vocabulary of 40"),
        (ask("new", [-1]), "token -1 is not in a vocabulary of 40"),
        (SampleRequest("new", (1,), 0, (0, 0), (1, 2, 3)), "at most 2 stop ids"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_the_engine_goes_on(
    engine: Engine, alone: dict[str, Turns], request_: SampleRequest, told: str
) -> None:
    async def story() -> Turns:
        with pytest.raises(ValueError, match=told):
            await engine.generate(request_)
        return await play(engine, "t2")

    assert run(story()) == alone["t2"]


def test_a_gap_an_overlap_and_a_second_turn_at_once_are_refused(engine: Engine) -> None:
    async def story() -> None:
        sample = await engine.generate(ask("a", [1, 2]))
        held = 2 + len(sample.tokens)
        for start in (0, held - 1, held + 1):
            with pytest.raises(ValueError, match=f"holds {held} tokens, the request starts at {start}"):
                await engine.generate(ask("a", [1], start))
        first = asyncio.create_task(engine.generate(ask("a", [1], held)))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="already sampling"):
            await engine.generate(ask("a", [1], held))
        await first
        engine.release("a")

    run(story())


def test_publishing_between_two_turns_stamps_each_with_its_version(make: Callable[..., Engine]) -> None:
    engine = make()

    async def story() -> list[Sample]:
        samples: list[Sample] = []
        for version in (4, 5):
            await asyncio.to_thread(engine.publish, tiny.params(CONFIG, seed=version), version)
            samples.append(await engine.generate(ask("a", [1, 2], sum(2 + len(s.tokens) for s in samples))))
        return samples

    for version, sample in zip((4, 5), run(story()), strict=True):
        assert sample.versions == [version] * len(sample.tokens)


def test_publishing_the_same_weights_in_the_middle_of_a_turn_changes_the_stamps_only(make: Callable[..., Engine]) -> None:
    engine, weights = make(), tiny.params(CONFIG)
    asked = SampleRequest("a", (1, 2), 0, (5, 6), (), Sampling(max_tokens=30))

    async def story() -> tuple[Sample, Sample]:
        still = await engine.generate(asked)
        engine.release("a")
        turn, version = asyncio.create_task(engine.generate(asked)), 0
        while not turn.done():
            version += 1
            await asyncio.to_thread(engine.publish, weights, version)
        return still, await turn

    still, moved = run(story())
    assert (still.tokens, still.logprobs) == (moved.tokens, moved.logprobs)
    assert set(still.versions) == {0}
    assert moved.versions == sorted(moved.versions)
    assert moved.versions[-1] > 0


def test_without_weights_a_request_is_refused(make: Callable[..., Engine]) -> None:
    with pytest.raises(ValueError, match="no weights, none yet"):
        run(make(publish=False).generate(ask("a", [1])))


def test_an_error_in_the_engines_thread_reaches_every_caller_and_nothing_hangs(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.publish(tiny.params(tiny.config(head_width=6)), version=1)  # another model: its keys do not fit the cache

    async def story() -> list[Any]:
        asked = (engine.generate(ask(f"{i}", [1, 2])) for i in range(6))  # two of them wait for a slot
        return await asyncio.gather(*asked, return_exceptions=True)

    for error in run(story()):
        assert isinstance(error, RuntimeError)
        assert str(error).startswith("the engine stopped: ")
        assert error.__cause__ is not None
    with pytest.raises(RuntimeError, match="the engine stopped: "):
        run(engine.generate(ask("later", [1])))
    with pytest.raises(RuntimeError, match="the engine stopped: "):
        engine.publish(tiny.params(CONFIG), version=2)
    engine.close()


def test_closing_answers_whoever_still_waits_and_ends_the_thread(make: Callable[..., Engine]) -> None:
    engine = make()

    async def story() -> list[Any]:
        turns = [asyncio.create_task(engine.generate(ask(f"{i}", [1, 2]))) for i in range(4)]
        await asyncio.gather(*turns)  # all slots are held
        waiting = asyncio.create_task(engine.generate(ask("fifth", [1, 2])))
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(waiting, return_exceptions=True)

    (error,) = run(story())
    assert isinstance(error, RuntimeError)
    assert "closed before the turn ended" in str(error)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        run(engine.generate(ask("later", [1])))
    engine.close()  # a second time
    assert not [thread for thread in threading.enumerate() if thread is engine._thread]


def test_a_caller_whose_loop_ended_does_not_harm_the_others(engine: Engine, alone: dict[str, Turns]) -> None:
    async def abandon() -> None:
        turn = asyncio.create_task(engine.generate(ask("abandoned", [1, 2], max_tokens=30)))
        await asyncio.sleep(0)
        turn.cancel()

    asyncio.run(abandon())
    assert run(play(engine, "t3")) == alone["t3"]
    engine.release("abandoned")


def test_nothing_compiles_after_warm_up(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.warm_up().result()
    engine.take_stats()
    compiled.clear()
    run(play_all(engine, NAMES))
    names = [f"member{i}" for i in range(4)]
    run(play_all(engine, names, group="gg"))
    engine.publish(tiny.params(CONFIG), version=1)
    assert compiled == []
    assert engine.take_stats().compiled == 0


def test_more_trajectories_than_slots_make_progress_at_once_and_no_bit_changes(
    make: Callable[..., Engine], alone: dict[str, Turns]
) -> None:
    engine = make(options=replace(OPTIONS, offload_after_s=1e-6))
    turn = asyncio.Barrier(len(NAMES))  # nobody begins a turn before all have ended the one before: slots alone would not do

    async def together() -> dict[str, Turns]:
        return dict(zip(NAMES, await asyncio.gather(*(play(engine, name, turn=turn) for name in NAMES)), strict=True))

    assert run(together()) == alone
    stats = engine.take_stats()
    assert stats.offloaded > 0
    assert stats.prefilled < sum(len(tokens) for turns in alone.values() for tokens, _ in turns)  # what was held came back


def test_new_weights_recompute_what_is_cached_where_that_is_asked_for(make: Callable[..., Engine]) -> None:
    other = jax.tree.map(lambda w: w * 1.5, tiny.params(CONFIG))
    found = []
    for recompute in (False, True):
        engine = make(options=replace(OPTIONS, recompute=recompute))

        async def across(engine: Engine = engine) -> tuple[Sample, Sample]:
            first = await engine.generate(ask("a", [1, 2, 3, 4]))
            await asyncio.to_thread(engine.publish, other, 1)
            second = await engine.generate(ask("a", [5], 4 + len(first.tokens), temperature=0.0))
            engine.release("a")
            return first, second

        first, second = run(across())
        found.append((first, second))
    (first, kept), (again, second) = found
    assert first.tokens == again.tokens
    assert kept.tokens != second.tokens
    row = [1, 2, 3, 4, *first.tokens, 5, *second.tokens]
    policy = Decoder(CONFIG, nnx.Rngs(0))
    logits = jax.jit(lambda p, t: nnx.merge(params_of(policy)[0], p)(t))(other, jnp.asarray([row]))[0]
    want = jnp.argmax(logits[5 + len(first.tokens) - 1 : -1], -1)
    assert second.tokens == want.tolist()


def test_without_exactness_the_trajectories_are_the_same_up_to_rounding_and_nothing_compiles_after_warm_up(
    make: Callable[..., Engine], alone: dict[str, Turns]
) -> None:
    engine = make(options=replace(OPTIONS, exact=False, chunk=16))
    engine.warm_up().result()
    compiled.clear()
    played = [run(play_all(engine, NAMES)), run(play_all(engine, NAMES[:1]))]  # in a crowd, and alone
    assert compiled == []
    for name, turns in (pair for found in played for pair in found.items()):
        for (tokens, logprobs), (want, want_logprobs) in zip(turns, alone[name], strict=True):
            assert tokens == want
            np.testing.assert_allclose(logprobs, want_logprobs, atol=1e-5)


def test_the_lengths_that_are_read_double_and_end_with_the_slot() -> None:
    assert used_lengths(8, 32) == [8, 16, 32]
    assert used_lengths(64, 1000) == [64, 128, 256, 512, 1000]
    assert used_lengths(32, 32) == [32]


def test_shapes_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of engine\.chunk, got 30 and 8"):
        EngineOptions(slot_tokens=30, chunk=8)
    with pytest.raises(ValueError, match=r"multiple of engine\.chunk, got 32 and 0"):
        EngineOptions(slot_tokens=32, chunk=0)
    with pytest.raises(ValueError, match="from 1 on, got \\(0, 8\\)"):
        EngineOptions(append_tokens=(0, 8))
    with pytest.raises(ValueError, match="increasing lengths"):
        EngineOptions(append_tokens=(8, 4))


def test_the_recorded_experts_are_those_of_the_full_forward() -> None:
    config = tiny.config(experts=4, experts_per_token=2)
    policy = tiny.policy(config)
    options = replace(OPTIONS, record_routing=True)
    engine = Engine(config, options, tiny.mesh())

    async def story() -> list[list[tuple[list[int], Sample]]]:
        async def row(name: str) -> list[tuple[list[int], Sample]]:
            first = await engine.generate(ask(name, list(range(8)), group="prompt"))  # long enough to be forked
            fed = list(range(8))
            second = await engine.generate(ask(name, [5, 6], len(fed) + len(first.tokens)))
            engine.release(name)
            return [(fed, first), ([5, 6], second)]

        return await asyncio.gather(row("a"), row("b"))

    try:
        engine.publish(params_of(policy)[1], version=0)
        played = run(story())
        assert engine.take_stats().forked
    finally:
        engine.close()
    forward = jax.jit(lambda tokens: routed(policy, tokens))
    for turns in played:
        tokens = [token for fed, sample in turns for token in (*fed, *sample.tokens)]
        recorded = np.concatenate([sample.routing for _, sample in turns])
        assert recorded.shape == (len(tokens) - 1, config.layers, config.experts_per_token)
        padded = np.pad(np.asarray(tokens), (0, 24 - len(tokens)))[None]
        full = np.asarray(forward(padded))[:, 0, : len(tokens) - 1].transpose(1, 0, 2)
        np.testing.assert_array_equal(np.sort(recorded, -1), np.sort(full, -1))


def routed(policy: Decoder, tokens: jax.Array) -> jax.Array:
    attend = packed(jnp.ones_like(tokens), policy.config.attention)
    routing = policy.hidden(tokens, jnp.arange(tokens.shape[1])[None], attend)[1]
    assert routing is not None
    return routing.experts_BTk
