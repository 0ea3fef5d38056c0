"""Everything that a request may ask, through the async door: no compilation, no bit of a neighbour, exact ends, valid forms."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compilations import compiled

from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.types import Constraint, Either, Json, Sample, SampleRequest, Sampling, Vocabulary, sampling_key

CONFIG = tiny.config()
OPTIONS = EngineOptions(
    slots=4,
    slot_tokens=64,
    chunk=16,
    decode_tokens=3,
    append_rows=2,
    append_tokens=(4, 8),
    fork_min_tokens=6,
    stop_tokens=2,
    bias_entries=3,
    stop_sequences=2,
    stop_sequence_tokens=3,
    top_logprobs=3,
    prompt_logprobs=True,
    constraint_states=192,
    overlap=True,
)
STOP, CALL = (3, 7), 11
LETTERS = '{}:, "[]-.0123456789abcdefklnorstu'  # with the three control tokens, all but three of forty ids
PIECES = [LETTERS[i : i + 1].encode() for i in range(len(LETTERS))]
for control in (*STOP, CALL):
    PIECES.insert(control, b"<%d>" % control)
VOCABULARY = Vocabulary(tuple(PIECES), frozenset({*STOP, CALL}))
DECLARED = {"a": {"type": "integer"}, "bet": {"enum": ["on", "off"]}, "l": {"type": "array", "items": {"type": "boolean"}}}
SCHEMA = json.dumps({"type": "object", "properties": DECLARED, "required": ["a"]})
ARGUMENTS = Constraint(Json(SCHEMA))
NAMES = Constraint(Either(("look", "locker", "boss")))
TOOL = Constraint(('{"n": ', Either(('"look"', '"boss"')), "}", CALL), after=(CALL,))
PATIENCE_S = 120.0  # a hang fails by this; nothing is measured


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(CONFIG, OPTIONS, next(tiny.mesh(data=2).replicas()), VOCABULARY)
    engine.publish(tiny.params(CONFIG), version=0)
    engine.warm_up().result()
    yield engine
    assert not engine.table.rows
    engine.close()


def run(story: Coroutine[Any, Any, Any]) -> Any:
    async def patiently() -> Any:
        return await asyncio.wait_for(story, PATIENCE_S)

    return asyncio.run(patiently())


def ask(name: str, tokens: list[int], start: int = 0, stop: tuple[int, ...] = STOP, **settings: Any) -> SampleRequest:
    sampling = Sampling(**{"max_tokens": 9, **settings})
    return SampleRequest(name, tuple(tokens), start, sampling_key(0, name, 0), stop, sampling)


def one(engine: Engine, request: SampleRequest) -> Sample:
    async def story() -> Sample:
        try:
            return await engine.generate(request)
        finally:
            engine.release(request.trajectory)

    return run(story())


def said(sample: Sample) -> str:
    return b"".join(PIECES[token] for token in sample.tokens if token not in STOP).decode()


def drawn_settings(rng: random.Random) -> dict[str, Any]:
    """Each setting with a chance of its own; none of them for a third of the turns."""
    if rng.random() < 0.3:
        return {}
    choices: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 2.0]),
        "top_k": rng.choice([0, 1, 5]),
        "top_p": rng.choice([1.0, 0.5, 0.9]),
        "min_p": rng.choice([0.0, 0.1]),
        "repetition_penalty": rng.choice([0.7, 1.5]),
        "presence_penalty": rng.choice([-0.5, 0.5]),
        "frequency_penalty": rng.choice([-0.5, 0.5]),
        "logit_bias": tuple((token, rng.uniform(-3, 3)) for token in rng.sample(range(40), rng.randrange(4))),
        "stop_sequences": tuple(tuple(rng.sample(range(40), rng.randrange(1, 4))) for _ in range(rng.randrange(3))),
        "stop_strings": tuple(rng.sample(["a", "12", "} ", "no"], rng.randrange(3))),
        "constraint": rng.choice([ARGUMENTS, NAMES, TOOL]),
        "top_logprobs": rng.randrange(4),
        "prompt_logprobs": True,
        "max_tokens": rng.randrange(1, 9),
    }
    return {name: value for name, value in choices.items() if rng.random() < 0.4}


async def play(engine: Engine, name: str, turns: int = 3) -> list[Sample]:
    """A trajectory of which everything depends on its name only."""
    rng = random.Random(name)
    unfed, held, samples = [rng.randrange(40) for _ in range(rng.randrange(1, 12))], 0, []
    for _ in range(turns):
        samples.append(await engine.generate(ask(name, unfed, held, **drawn_settings(rng))))
        held += len(unfed) + len(samples[-1].tokens)
        unfed = [rng.randrange(40) for _ in range(rng.randrange(1, 5))]
    engine.release(name)
    return samples


def test_two_hundred_episodes_of_all_settings_compile_nothing_after_warm_up(engine: Engine) -> None:
    async def story() -> list[list[Sample]]:
        return await asyncio.gather(*(play(engine, f"e{i}") for i in range(200)))

    compiled.clear()
    episodes = run(story())
    assert compiled == []
    samples = [sample for episode in episodes for sample in episode]
    assert all(np.isfinite(sample.logprobs).all() for sample in samples)
    assert {sample.stopped for sample in samples} == {True, False}


def test_tokens_and_logprobs_are_bit_equal_alone_and_among_others_with_other_settings(engine: Engine) -> None:
    names = [f"e{i}" for i in range(24)]

    async def together() -> list[list[Sample]]:
        return await asyncio.gather(*(play(engine, name) for name in names))

    for name, samples in zip(names, run(together()), strict=True):
        assert run(play(engine, name)) == samples


@pytest.mark.parametrize("how", ["strings", "sequences"])
def test_a_row_that_stopped_late_goes_on_as_one_that_stopped_there(engine: Engine, how: str) -> None:
    """The cache, the draws and the log-probs of the second turn are those of a row whose budget ended at the same token."""

    async def story(name: str, **first: Any) -> list[Sample]:
        before = await engine.generate(ask(name, [1, 2, 5], stop=(), **first))
        # Penalties read the tokens of the row, too.
        after = ask(name, [4, 6], 3 + len(before.tokens), repetition_penalty=1.3, prompt_logprobs=True)
        samples = [before, await engine.generate(after)]
        engine.release(name)
        return samples

    lengths = set()
    for i in range(12):
        free = run(story(f"s{i}", max_tokens=20))[0]
        at = 4 + i % 5
        ending = tuple(free.tokens[at - 2 : at])
        if how == "strings":
            text = b"".join(PIECES[token] for token in ending if token < len(PIECES)).decode()
            if not text:
                continue
            stopped = run(story(f"s{i}", max_tokens=20, stop_strings=(text, "no such text")))
        else:
            stopped = run(story(f"s{i}", max_tokens=20, stop_sequences=(ending, (39, 39, 39))))
        n = len(stopped[0].tokens)
        assert stopped[0].stopped
        assert n <= at
        assert stopped[0].tokens == free.tokens[:n]
        assert stopped[0].logprobs == free.logprobs[:n]
        budgeted = run(story(f"s{i}", max_tokens=n))
        assert stopped[1] == budgeted[1]
        lengths.add(n % OPTIONS.decode_tokens)
    assert lengths == {0, 1, 2}  # at the end of a call, and with one and two tokens to discard


def test_a_row_that_ended_by_a_string_is_frozen_on_the_device(engine: Engine) -> None:
    live: list[list[bool]] = []

    async def story() -> Sample:
        sample = await engine.generate(ask("f", [1, 2], stop=(), max_tokens=40, stop_strings=tuple("abcdefklnorstu")))
        await engine.generate(ask("other", [1], max_tokens=1))  # what the device is told goes with the next call
        await asyncio.to_thread(engine.run, lambda: live.append(np.asarray(engine._rows["live"]).tolist()))
        engine.release("f")
        engine.release("other")
        return sample

    assert len(run(story()).tokens) < 30
    assert not any(live[0])


def log_softmax(tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    padded = jnp.asarray([tokens + [0] * (OPTIONS.slot_tokens - len(tokens))])
    return np.asarray(
        FORWARD(padded)[0, : len(tokens)] / temperature
        - jax.nn.logsumexp(FORWARD(padded)[0, : len(tokens)] / temperature, axis=-1, keepdims=True)
    )


FORWARD = jax.jit(tiny.policy(CONFIG).__call__)


def test_the_logprobs_of_fed_tokens_are_those_of_the_full_forward_at_the_temperature(engine: Engine) -> None:
    prompt = [1, 2, 5, 8, 9, 10, 12, 13, 14, 15, 16]  # more than a call of append takes

    async def story() -> list[Sample]:
        first = await engine.generate(ask("p", prompt, prompt_logprobs=True, temperature=0.7, top_k=2))
        known = len(prompt) + len(first.tokens)
        second = await engine.generate(ask("p", [4, 6, 9], known, prompt_logprobs=True, temperature=0.0))
        third = await engine.generate(ask("p", [4], known + 3 + len(second.tokens), max_tokens=1))
        engine.release("p")
        return [first, second, third]

    first, second, third = run(story())
    row = [*prompt, *first.tokens, 4, 6, 9]
    full = log_softmax(row, 0.7)
    assert first.fed_logprobs[0] is None
    want = [full[at - 1, row[at]] for at in range(1, len(prompt))]
    np.testing.assert_allclose(np.asarray(first.fed_logprobs[1:], float), want, atol=1e-5)
    full, at = log_softmax(row), len(prompt) + len(first.tokens)
    np.testing.assert_allclose(second.fed_logprobs, [full[at + i - 1, row[at + i]] for i in range(3)], atol=1e-5)
    assert third.fed_logprobs == []


def test_a_row_that_was_stopped_asks_the_device_for_nothing_more(engine: Engine) -> None:
    one(engine, ask("stopped", [1, 2], stop_strings=("a",)))
    one(engine, ask("after", [1, 2]))
    found: list[np.ndarray] = []
    engine.run(lambda: found.extend(np.asarray(engine._rows[name]) for name in ("top_p", "live")))
    assert (found[0] > 0).all()
    assert not found[1].any()


def test_what_is_cached_again_under_new_weights_tells_the_logprobs_of_its_turn_once() -> None:
    engine = Engine(CONFIG, replace(OPTIONS, recompute=True), next(tiny.mesh(data=2).replicas()), VOCABULARY)
    engine.publish(tiny.params(CONFIG), version=0)
    prompt = [1, 2, 5, 8, 9, 10, 12]

    async def story() -> list[Sample]:
        first = await engine.generate(ask("p", prompt, prompt_logprobs=True))
        await asyncio.to_thread(engine.publish, tiny.params(CONFIG), 1)  # between two turns
        long = ask("p", [4, 6, 9], len(prompt) + len(first.tokens), stop=(), prompt_logprobs=True, max_tokens=25)
        second = asyncio.create_task(engine.generate(long))
        while not second.done():  # and in the middle of one
            await asyncio.to_thread(engine.publish, tiny.params(CONFIG), 2)
        return [first, await second]

    try:
        first, second = run(story())
    finally:
        engine.close()
    row, at = [*prompt, *first.tokens, 4, 6, 9], len(prompt) + len(first.tokens)
    full = log_softmax(row)
    assert len(first.fed_logprobs) == len(prompt)
    np.testing.assert_allclose(second.fed_logprobs, [full[at + i - 1, row[at + i]] for i in range(3)], atol=1e-5)


def test_a_group_mate_that_asks_for_the_logprobs_of_its_prompt_gets_those_of_its_leader(engine: Engine) -> None:
    async def story() -> list[Sample]:
        asked = [ask(f"g{i}", list(range(20, 30)), prompt_logprobs=i != 1) for i in range(3)]
        samples = await asyncio.gather(*(engine.generate(replace(request, group="g")) for request in asked))
        for request in asked:
            engine.release(request.trajectory)
        return samples

    engine.take_stats()
    leader, forked, asking = run(story())
    assert engine.take_stats().forked == 9
    assert forked.fed_logprobs == []
    assert asking.fed_logprobs == leader.fed_logprobs
    assert len(leader.fed_logprobs) == 10


def test_the_likeliest_tokens_are_those_of_the_full_forward(engine: Engine) -> None:
    sample = one(engine, ask("t", [1, 2], top_logprobs=2, temperature=0.8))
    full = log_softmax([1, 2, *sample.tokens], 0.8)
    for at, (best, token, logprob) in enumerate(zip(sample.top_logprobs, sample.tokens, sample.logprobs, strict=True), start=1):
        assert [i for i, _ in best] == np.argsort(-full[at])[:2].tolist()
        np.testing.assert_allclose([p for _, p in best], np.sort(full[at])[::-1][:2], atol=1e-5)
        assert all(p == pytest.approx(logprob, abs=1e-5) for i, p in best if i == token)


def test_temperature_alone_is_the_distribution_that_the_learner_trains(engine: Engine) -> None:
    sample = one(engine, ask("t", [1, 2], temperature=0.8))
    full = log_softmax([1, 2, *sample.tokens], 0.8)
    want = [full[1 + i, token] for i, token in enumerate(sample.tokens)]
    np.testing.assert_allclose(sample.logprobs, want, atol=1e-5)
    assert not Sampling(temperature=0.8).restricted
    assert all(
        Sampling(**setting).restricted
        for setting in (
            {"top_k": 1},
            {"min_p": 0.1},
            {"logit_bias": ((1, 1.0),)},
            {"constraint": NAMES},
            {"presence_penalty": 1.0},
        )
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_constrained_turn_has_the_form_that_was_asked_for(engine: Engine, seed: int) -> None:
    arguments = one(engine, ask(f"a{seed}", [1, 2], constraint=ARGUMENTS, max_tokens=60))
    if arguments.stopped:
        value = json.loads(said(arguments))
        assert {"a"} <= set(value) <= set(DECLARED)
        assert isinstance(value["a"], int)
    name = one(engine, ask(f"n{seed}", [1, 2], constraint=NAMES, max_tokens=8))
    assert name.stopped
    assert said(name) in ("look", "locker", "boss")
    greedy = one(engine, ask(f"n{seed}", [1, 2], constraint=NAMES, max_tokens=8, temperature=0.0))
    assert said(greedy) in ("look", "locker", "boss")


def test_some_constrained_arguments_are_written_to_their_end(engine: Engine) -> None:
    turns = [one(engine, ask(f"a{seed}", [1, 2], constraint=ARGUMENTS, max_tokens=60)) for seed in range(8)]
    assert sum(turn.stopped for turn in turns) >= 2


def test_a_call_has_its_form_wherever_it_begins_and_what_stands_around_it_is_free(engine: Engine) -> None:
    called = 0
    for seed in range(12):
        wish = ((CALL, 2.0),)
        sample = one(engine, ask(f"c{seed}", [1, 2], stop=(), constraint=TOOL, max_tokens=60, logit_bias=wish))
        parts = "".join(PIECES[token].decode() if token < len(PIECES) else "?" for token in sample.tokens).split("<11>")
        for call in parts[1:-1:2]:
            assert call in ('{"n": "look"}', '{"n": "boss"}')
            called += 1
    assert called > 5


def test_the_logprobs_of_a_constrained_turn_are_of_what_was_allowed(engine: Engine) -> None:
    sample = one(engine, ask("n1", [1, 2], constraint=Constraint("look"), temperature=1.5))
    assert sample.logprobs[:4] == [0.0] * 4  # nothing else could be drawn
    assert sample.logprobs[4] < 0  # two stop tokens could
    full = log_softmax([1, 2, *sample.tokens], 1.5)[5]
    want = full[sample.tokens[4]] - np.logaddexp(*full[list(STOP)])
    assert sample.logprobs[4] == pytest.approx(want, abs=1e-5)


def test_constraints_give_way_to_others_when_no_turn_needs_them(engine: Engine) -> None:
    chains = [Constraint(letter * 50) for letter in "abcdef"]  # a block each, of the three that there are
    for _ in range(2):
        for chain in chains:
            assert said(one(engine, ask("c", [1], constraint=chain, max_tokens=51))) == chain.form


def test_a_constraint_for_which_others_leave_no_room_is_refused_and_they_go_on(engine: Engine) -> None:
    async def story() -> list[Any]:
        asked = [ask(f"c{letter}", [1], constraint=Constraint(letter * 50), max_tokens=51) for letter in "abcd"]
        samples = await asyncio.gather(*(engine.generate(request) for request in asked), return_exceptions=True)
        for request in asked:
            engine.release(request.trajectory)
        return samples

    *served, refused = run(story())
    assert [said(sample) for sample in served] == ["a" * 50, "b" * 50, "c" * 50]
    assert isinstance(refused, ValueError)
    assert "need 256 states, engine.constraint_states is 192" in str(refused)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be at least 0, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive, got 0.0"),
        ({"presence_penalty": float("inf")}, "must be finite, got inf, 0.0"),
        ({"logit_bias": tuple((i, 1.0) for i in range(4))}, r"at most 3 entries of logit_bias \(engine.bias_entries\), got 4"),
        ({"logit_bias": ((1, float("inf")),)}, "a logit_bias must be a number below infinity"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias names a token twice"),
        ({"logit_bias": ((40, 1.0),)}, "name token 40, not in a vocabulary of 40"),
        ({"stop_sequences": ((1,), (2,), (3,))}, r"at most 2 stop_sequences \(engine.stop_sequences\), got 3"),
        ({"stop_sequences": ((1, 2, 3, 4),)}, "a stop sequence has 1 to 3 tokens"),
        ({"stop_sequences": ((),)}, "a stop sequence has 1 to 3 tokens"),
        ({"stop_strings": ("",)}, "an empty stop string would end every turn"),
        ({"top_logprobs": 4}, r"at most 3 top_logprobs \(engine.top_logprobs\), got 4"),
        ({"constraint": Constraint("A")}, "no token with which this constraint goes on"),
        ({"constraint": Constraint("a" * 200)}, "of 202 states does not fit: engine.constraint_states is 192"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_had_are_refused_by_name(engine: Engine, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        one(engine, ask("new", [1], **settings))


def test_what_an_engine_was_not_built_for_is_refused_by_name() -> None:
    engine = Engine(CONFIG, EngineOptions(slots=1, slot_tokens=16, chunk=16), tiny.mesh())
    try:
        for settings, told in (
            ({"stop_strings": ("a",)}, "stop_strings need an engine that was given a vocabulary"),
            ({"constraint": NAMES}, "a constraint needs an engine with a vocabulary and engine.constraint_states above 0"),
            ({"prompt_logprobs": True}, r"prompt_logprobs are off in this engine \(engine.prompt_logprobs\)"),
        ):
            with pytest.raises(ValueError, match=told):
                one(engine, ask("new", [1], **settings))
    finally:
        engine.close()
