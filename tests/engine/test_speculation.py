"""Drafts spare calls and change nothing else: tokens, log-probs, ends, forms. And they are verified only where that pays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxagent.engine.cache import new_cache
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.engine.slots import Row
from jaxagent.engine.speculation import Costs, Guess, Speculation
from jaxagent.engine.steps import make_steps, new_rows
from jaxagent.types import Constraint, Either, Sample, SampleRequest, Sampling, Vocabulary, sampling_key

CONFIG = tiny.config()
OPTIONS = EngineOptions(
    slots=4,
    slot_tokens=64,
    chunk=64,
    decode_tokens=3,
    append_rows=2,
    append_tokens=(8,),
    exact=False,
    draft_tokens=4,
    fork_min_tokens=6,
    stop_tokens=2,
    bias_entries=3,
    stop_sequences=2,
    stop_sequence_tokens=3,
    top_logprobs=3,
    constraint_states=128,
)
STOP = (3, 7)
LETTERS = '{}:, "[]-.0123456789abcdefklnorstu()'
VOCABULARY = Vocabulary((b"<0>", b"<1>", b"<2>", b"<3>", *(bytes([ord(c)]) for c in LETTERS)), frozenset(range(8)) - {4, 5, 6})
WORDS = Constraint((Either(("look", "locker", "boss")), " ", Either(("on", "off"))))
PATIENCE_S = 120.0  # a hang fails by this; nothing is measured


class Said(Costs):
    """Costs as a test says them, by kind and width; decoding takes 1 where nothing else is said."""

    def __init__(self, **seconds: float):
        super().__init__()
        self.said = seconds

    def of(self, verified: bool, width: int) -> float | None:
        return self.said.get(f"{'verify' if verified else 'decode'}{width}", 1e-6 if verified else 1.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(CONFIG, OPTIONS, tiny.mesh(), VOCABULARY)
    engine.publish(tiny.params(CONFIG), version=0)
    engine.warm_up().result()
    yield engine
    assert not engine.table.rows
    engine.close()


@pytest.fixture
def plain(engine: Engine) -> Iterator[Engine]:
    yield engine
    engine.speculation.draft_tokens = OPTIONS.draft_tokens


def run(story: Coroutine[Any, Any, Any]) -> Any:
    async def patiently() -> Any:
        return await asyncio.wait_for(story, PATIENCE_S)

    return asyncio.run(patiently())


def ask(name: str, tokens: list[int], start: int = 0, **settings: Any) -> SampleRequest:
    sampling = Sampling(**{"max_tokens": 9, **settings})
    return SampleRequest(name, tuple(tokens), start, sampling_key(0, name, start), STOP, sampling, group="group")


async def play(engine: Engine, name: str, **settings: Any) -> list[Sample]:
    """Three turns, of a group that shares its prompt and what it is told."""
    rng = random.Random(name)
    unfed, held, samples = [8, 9, 10, 11, 12, 13, 14], 0, []
    for turn in range(3):
        samples.append(await engine.generate(ask(name, unfed, held, **(settings or drawn_settings(rng)))))
        held += len(unfed) + len(samples[-1].tokens)
        unfed = [20 + turn, 8, 9, 10]
    engine.release(name)
    return samples


def drawn_settings(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.2, 0.5]),
        "top_k": rng.choice([1, 2, 5]),
        "top_p": rng.choice([0.5, 0.9]),
        "min_p": 0.1,
        "repetition_penalty": rng.choice([0.7, 1.5]),
        "presence_penalty": rng.choice([-0.5, 0.5]),
        "frequency_penalty": rng.choice([-0.5, 0.5]),
        "logit_bias": ((8, 2.0), (3, -1.0)),
        "stop_sequences": ((8, 9), (10,)),
        "stop_strings": ("a", "12"),
        "constraint": WORDS,
        "top_logprobs": 3,
        "max_tokens": rng.randrange(1, 12),
    }
    return {name: value for name, value in choices.items() if rng.random() < 0.3}


def played(engine: Engine, names: list[str], costs: Costs | None = None, **settings: Any) -> dict[str, list[Sample]]:
    """What all say when drafts are verified as these costs let it seem right; without costs, by decoding alone."""
    engine.speculation.draft_tokens = OPTIONS.draft_tokens if costs else 0
    engine.speculation.costs = costs or Said()

    async def together() -> list[list[Sample]]:
        return await asyncio.gather(*(play(engine, name, **settings) for name in names))

    engine.take_stats()
    return dict(zip(names, run(together()), strict=True))


def assert_same(found: dict[str, list[Sample]], want: dict[str, list[Sample]]) -> None:
    for name, turns in want.items():
        for got, expected in zip(found[name], turns, strict=True):
            assert got.tokens == expected.tokens
            assert got.stopped == expected.stopped
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
            for best, wanted in zip(got.top_logprobs, expected.top_logprobs, strict=True):
                assert [token for token, _ in best] == [token for token, _ in wanted]
                np.testing.assert_allclose([p for _, p in best], [p for _, p in wanted], atol=1e-5)


# ---------------------------------------------------------------------- through the door


NAMES = [f"t{i}" for i in range(24)]
SOME = Said(verify4=1e6)  # one row is verified at a time, and the others are decoded


@pytest.mark.parametrize("costs", [Said(), SOME], ids=["all rows", "one row beside others"])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_the_same_seeds_give_the_same_tokens_and_log_probs(plain: Engine, temperature: float, costs: Costs) -> None:
    want = played(plain, NAMES[:8], temperature=temperature)
    assert plain.take_stats().verified == 0
    found = played(plain, NAMES[:8], costs, temperature=temperature)
    stats = plain.take_stats()
    assert stats.drafted >= stats.accepted
    assert stats.verified > 0
    assert_same(found, want)


def test_what_a_sibling_said_comes_true_and_spares_calls_where_drawing_is_greedy(plain: Engine) -> None:
    want = played(plain, NAMES[:1], temperature=0.0, max_tokens=16)
    before = plain.take_stats()
    played(plain, NAMES[1:2], Said(), temperature=0.0, max_tokens=16)
    assert_same({NAMES[0]: played(plain, NAMES[2:3], Said(), temperature=0.0, max_tokens=16)[NAMES[2]]}, want)
    stats = plain.take_stats()
    assert stats.sampled == before.sampled
    assert stats.accepted > 0.9 * stats.drafted
    assert stats.decode_calls < 0.8 * before.decode_calls


def test_penalties_forms_stops_and_likeliest_tokens_are_those_of_decoding(plain: Engine) -> None:
    want = played(plain, NAMES)
    found = played(plain, NAMES, Said())
    stats = plain.take_stats()
    assert stats.accepted > 0
    assert stats.compiled == 0  # since warm-up
    assert_same(found, want)
    assert any(sample.top_logprobs for turns in want.values() for sample in turns)


def test_what_is_drawn_with_drafts_has_the_exact_distribution(plain: Engine) -> None:
    """Three tokens of two choices each, with 600 keys: chi-square on seven degrees, above 29.9 once in ten thousand."""
    prompt, count = [8, 9, 10, 11, 12, 13, 14], 600
    plain.speculation.costs = Said()
    settings = Sampling(temperature=1.0, top_k=2, max_tokens=3)

    async def one(i: int) -> tuple[int, ...]:
        name = f"drawn{i}"
        sample = await plain.generate(SampleRequest(name, tuple(prompt), 0, sampling_key(5, name, i), (), settings, group="d"))
        plain.release(name)
        return tuple(sample.tokens)

    async def all_of() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(one(i) for i in range(count)))

    plain.take_stats()
    drawn = run(all_of())
    assert plain.take_stats().accepted > 0.2 * count
    forward = jax.jit(tiny.policy(CONFIG).__call__)
    chance = {(): 1.0}
    for _ in range(3):
        longer = {}
        for said, p in chance.items():
            row = jnp.asarray([[*prompt, *said, *[0] * (3 - len(said))]])
            z = np.asarray(forward(row))[0, len(prompt) + len(said) - 1]
            best = np.argsort(z)[-2:]
            share = np.exp(z[best] - z[best].max()) / np.exp(z[best] - z[best].max()).sum()
            longer |= {(*said, int(token)): p * float(q) for token, q in zip(best, share, strict=True)}
        chance = longer
    assert set(drawn) <= set(chance)
    off = sum((drawn.count(said) - count * p) ** 2 / (count * p) for said, p in chance.items())
    assert min(chance.values()) * count > 5
    assert off < 29.9


def test_exact_bits_and_drafts_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"engine.draft_tokens=4 needs engine.exact=False"):
        EngineOptions(draft_tokens=4)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        EngineOptions(draft_tokens=-1)
    with pytest.raises(ValueError, match=r"engine.draft_tokens does not go with engine.pages"):
        EngineOptions(exact=False, draft_tokens=4, pages=9)
    with pytest.raises(ValueError, match=r"engine.overlap does not go with"):
        EngineOptions(exact=False, draft_tokens=4, overlap=True)


# ---------------------------------------------------------------------- what pays


def row(name: str = "a", left: int = 100, group: str = "g") -> Row:
    request = SampleRequest(name, (1, 2), 0, (0, 0), (), Sampling(max_tokens=left), group=group)
    return Row(name, group, 0, held=[1, 2], prompt=(1, 2), request=request)


def guesses(*expected: float, left: int = 96, usual: float = 0.0) -> list[Guess]:
    return [Guess(row(left=left), [1] * 4, 2, e, usual) for e in expected]


def speculation(costs: Costs) -> Speculation:
    made = Speculation(draft_tokens=4, decode_tokens=8, widths=[2, 8], remembered=1000)
    made.costs = costs
    return made


def verified(made: Speculation, guesses: list[Guess]) -> int:
    some, others = made.parted(guesses)
    assert sorted(map(id, [*some, *others])) == sorted(map(id, guesses))
    return len(some)


@pytest.mark.parametrize(
    ("costs", "expected", "usual", "found"),
    [
        ({"verify2": 0.2, "verify8": 0.4}, [3.0, 3.0], 3.0, 2),  # 4 of 96 tokens in .2, 8 in 1
        ({"verify2": 0.6, "verify8": 0.6}, [3.0, 3.0], 3.0, 0),
        ({"verify2": 0.2, "verify8": 0.4}, [0.1, 0.1], 0.1, 0),
        ({"verify2": 0.2, "verify8": 0.2}, [3.0, 3.0, 3.0, 2.0], 3.0, 4),  # who has less comes along
        ({"verify2": 0.05, "verify8": 9.0, "decode2": 0.3}, [3.0, 0.0, 3.0, 0.0], 0.0, 2),  # two and two: .35 instead of 1
        ({"verify2": 0.05, "verify8": 9.0}, [3.0, 3.0, *[0.0] * 6], 0.0, 0),
    ],
)
def test_what_ends_all_turns_soonest_is_done(costs: dict[str, float], expected: list[float], usual: float, found: int) -> None:
    assert verified(speculation(Said(**costs)), guesses(*expected, usual=usual)) == found


def test_a_turn_is_not_brought_forward_by_less_than_a_call_of_decoding() -> None:
    """With 8 tokens a call, 4 accepted ones spare a call of 84 left (11 calls or 10), and none of 88."""
    costs = Said(verify2=0.4)
    assert verified(speculation(costs), guesses(3.0, 3.0, left=84)) == 2
    assert verified(speculation(costs), guesses(3.0, 3.0, left=88)) == 0
    assert verified(speculation(costs), guesses(3.0, 3.0, left=88, usual=3.0)) == 2  # as those behind them do


def test_where_turns_end_is_learned_from_those_that_ended() -> None:
    made = speculation(Said())
    for tokens in (5, 5, 13):
        one = row(left=tokens)
        for _ in made.calls([one]):
            one.tokens = [9] * tokens
            one.held, one.request = one.held + one.tokens, None
    rows = [row(left=100), row(left=9), row(left=100), row(left=100)]
    rows[2].tokens, rows[3].tokens = [9] * 7, [9] * 20
    left, chance = made._turns.left(rows)
    assert (left * chance).sum(axis=1).tolist() == pytest.approx([23 / 3, 19 / 3, 6, 80])  # longer than all: up to its budget


def test_a_turn_that_is_nearly_over_gains_no_whole_segment_by_decoding() -> None:
    short = [Guess(row(left=2), [1], 2, 0.9)]
    assert verified(speculation(Said(verify2=0.5)), short) == 1
    assert verified(speculation(Said(verify2=0.5)), guesses(0.9)) == 0


def test_decoding_is_measured_first_and_what_was_not_measured_for_long_is_tried_again() -> None:
    costs = Costs()
    made = speculation(costs)
    likely = guesses(3.0, 3.0, usual=3.0)
    assert verified(made, likely) == 0
    for _ in range(2):  # the first may have compiled
        costs.add(False, 2, 1.0)
    assert verified(made, likely) == 2  # not known, so thought to be cheap
    for _ in range(2):
        costs.add(True, 2, 0.5)
    assert verified(made, likely) == 0
    for _ in range(100):
        costs.add(False, 2, 1.0)
    assert verified(made, likely) == 0
    costs.add(False, 2, 1.0)
    assert verified(made, likely) == 2
    costs.add(True, 2, 0.5)
    assert verified(made, likely) == 0


def test_a_cost_is_not_the_luckiest_call() -> None:
    costs = Costs()
    for seconds in (9.0, 0.1, 2.0, 2.1, 2.2, 2.0, 9.0, 2.1, 2.0):
        costs.add(True, 2, seconds)
    assert costs.known(True, 2) == 2.0


@pytest.mark.parametrize(("repeats", "most"), [(1.0, 0.75), (0.95, 1.01), (0.9, 1.02), (0.8, 1.01), (0.0, 1.001)])
def test_drafts_never_cost_more_than_they_bring_however_often_siblings_repeat_each_other(repeats: float, most: float) -> None:
    """Device seconds by a virtual clock, as a CPU takes them, of three rounds in which nothing is known at first."""
    now = [0.0]
    made = Speculation(8, 16, [2, 8], 100_000, lambda: now[0])
    spent = {drafts: sum(simulated(made, drafts, repeats, i, now) for i in range(3)) for drafts in (0, 8)}
    assert spent[8] <= most * spent[0]


def simulated(made: Speculation, draft_tokens: int, repeats: float, run: int, now: list[float]) -> float:
    """32 trajectories of three turns of 64 tokens in 8 slots, each token with chance `repeats` that of its group."""
    made.draft_tokens, rng, began = draft_tokens, random.Random(3), now[0]
    common = [[rng.randrange(50, 4000) for _ in range(3 * 64)] for _ in range(4)]
    said = [[token if rng.random() < repeats else rng.randrange(50, 4000) for token in common[i % 4]] for i in range(32)]
    seconds = {(False, 2): 0.048, (False, 8): 0.082, (True, 2): 0.0075, (True, 8): 0.0173}
    waiting, on = [row(f"{i}", 64, f"{draft_tokens}/{run}/{i % 4}") for i in range(32)], list[Row]()
    while waiting or on:
        on += [waiting.pop(0) for _ in range(min(len(waiting), 8 - len(on)))]
        for rows, drafts in made.calls(list(on)):
            now[0] += seconds[drafts is not None, 2 if len(rows) <= 2 else 8]
            for i, one in enumerate(rows):
                to_come = said[int(one.trajectory)][64 * one.turns_done :][len(one.tokens) : 64]
                draft = to_come[:16].copy() if drafts is None else [*drafts[i].tolist(), -1]
                true = next((n for n, (a, b) in enumerate(zip(draft, to_come, strict=False)) if a != b), len(to_come))
                one.tokens += to_come[: min(16, true) if drafts is None else true + 1]
                if len(one.tokens) == 64:
                    one.held, one.request = one.held + one.tokens, None
        for one in [one for one in on if one.request is None]:
            one.turns_done += 1
            if one.turns_done == 3:
                on.remove(one)
            else:
                one.held, one.tokens, one.request = [*one.held, 7, 8], [], row(left=64).request
    return now[0] - began


def test_what_drafts_came_to_is_learned_from_decoding_too_and_by_the_length_of_their_match() -> None:
    made, rng = speculation(Said(verify2=1e6)), random.Random(0)
    repeats, differs = row("a", left=1000, group="a"), row("b", left=1000, group="b")
    for _ in range(60):
        for rows, drafts in made.calls([repeats, differs]):
            assert len(rows) == 2 and drafts is None
            repeats.tokens += [5, 6, 1, 2]
            differs.tokens += [rng.randrange(9, 10_000), rng.randrange(9, 10_000), 1, 2]
    made.costs = Said(verify2=0.3)
    calls = [(rows, drafts) for rows, drafts in made.calls([repeats])]
    assert calls[0][1].tolist() == [[5, 6, 1, 2]]
    assert [drafts for _, drafts in made.calls([differs])] == [None]  # though there is a draft, of a match that means little
    assert differs.stream.draft(4)[1] == 2


def test_the_index_holds_a_trajectory_once_whatever_its_turns() -> None:
    made, one = speculation(Said()), row()
    for fed in ([], [30, 31], [32]):
        one.held += fed
        one.tokens = []
        one.request = row().request
        for _ in range(2):
            for _ in made.calls([one]):
                one.tokens += [len(one.held) + len(one.tokens), 5]
        for _ in made.calls([one]):  # the call that ends the turn
            one.tokens += [6]
            one.held, one.request = one.held + one.tokens, None
        assert one.stream.tokens == one.held


def test_indices_of_groups_that_are_over_are_dropped_the_oldest_first() -> None:
    made = Speculation(draft_tokens=4, decode_tokens=8, widths=[2], remembered=100)
    for i in range(20):
        one = row(f"r{i}", group=f"g{i}")
        one.held += list(range(18))
        list(made.calls([one]))
    assert 1 < len(made._groups) <= 7
    assert list(made._groups)[-1] == "g19"


# ---------------------------------------------------------------------- the program


def test_the_recorded_experts_are_those_of_decoding() -> None:
    config = tiny.config(experts=4, experts_per_token=2)
    shapes = {"dtype": jnp.dtype("float32"), "chunk": 8, "decode_tokens": 3, "mesh": tiny.mesh(), "record_routing": True}
    steps = make_steps(config, **shapes)
    params = steps.publish(tiny.params(config))
    rows = new_rows(2, 1)
    armed = {name: np.zeros(old.shape, old.dtype) for name, old in rows.items()}
    armed |= {"mask": np.ones(2, bool), "live": np.ones(2, bool), "left": np.full(2, 9, np.int32)}
    armed |= {"token": np.asarray([4, 5], np.int32), "stop": np.full((2, 1), -1, np.int32)}  # temperature 0
    slots = np.asarray([1, 0], np.int32)
    cache = lambda: new_cache(config, 2, 16, jnp.float32)  # noqa: E731
    _, _, tokens, _, want, _ = steps.decode(params, cache(), rows, armed, None, slots, 8)
    drafts = np.asarray(tokens)[:, :2].copy()
    drafts[1, 1] = (drafts[1, 1] + 1) % 40
    _, after, got, _, routing, _ = steps.verify(params, cache(), new_rows(2, 1), armed, None, slots, drafts)
    np.testing.assert_array_equal(got, np.where([[True] * 3, [True, True, False]], tokens, -1))
    assert after["pos"].tolist() == [2, 3]
    np.testing.assert_array_equal(np.asarray(routing)[0], np.asarray(want)[0])
    np.testing.assert_array_equal(np.asarray(routing)[1, :2], np.asarray(want)[1, :2])
