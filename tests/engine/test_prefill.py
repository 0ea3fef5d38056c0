"""What is fed goes into the cache a part at a time where others decode: they hardly wait for it, and no bit changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tiny
from at_once import PATIENCE_S, Answer, say

from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.types import Sample, SampleRequest, Sampling, sampling_key

CONFIG = tiny.config()
SIZES = {"slots": 4, "slot_tokens": 256, "chunk": 32, "decode_tokens": 2, "append_rows": 2, "append_tokens": (4, 8)}
OPTIONS = EngineOptions(**SIZES, fork_min_tokens=6, stop_tokens=2, overlap=True, recompute=True)
MOST = 64  # tokens before a call that one row waits for: 2 x 4 slots x 2 tokens x 4


@pytest.fixture(scope="module", params=[0, 33], ids=["slots", "pages"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(CONFIG, replace(OPTIONS, pages=request.param), next(tiny.mesh(data=2).replicas()))
    engine.publish(tiny.params(CONFIG), version=0)
    yield engine
    assert not engine.table.rows
    engine.close()


def words(name: str, count: int) -> tuple[int, ...]:
    rng = random.Random(name)
    return tuple(rng.randrange(40) for _ in range(count))


def ask(name: str, tokens: tuple[int, ...], most: int, start: int = 0, group: str = "", **rest: Any) -> SampleRequest:
    return SampleRequest(name, tokens, start, sampling_key(0, name, 0), (), Sampling(max_tokens=most), group, **rest)


def sample(engine: Engine, request: SampleRequest) -> Sample:
    """A turn of a trajectory that is released then."""
    answer = say(engine, request).wait()
    engine.release(request.trajectory)
    assert isinstance(answer, Sample)
    return answer


class Burst:
    """Long answers that all come after the first tokens of a turn have been read, and how the turn goes on meanwhile."""

    def __init__(self, engine: Engine, requests: list[SampleRequest], then: Callable[[], None] = lambda: None):
        self.engine, self.requests, self.then = engine, requests, then
        self.answers: list[Answer] = []
        self.prefilled: list[int] = []  # tokens, whenever some of the turn were read
        self.calls: list[int] = []

    def hear(self, tokens: list[int]) -> None:
        self.prefilled.append(self.engine._stats.prefilled)
        self.calls.append(self.engine._stats.append_calls)
        if not self.answers:
            self.answers = [say(self.engine, request) for request in self.requests]
            self.then()

    def wait(self) -> list[Sample]:
        """The answers' turns; their trajectories are released."""
        samples = [answer.wait() for answer in self.answers]
        for request in self.requests:
            self.engine.release(request.trajectory)
        return samples


def test_a_turn_goes_on_while_long_answers_of_others_come_in(engine: Engine) -> None:
    steady = ask("steady", (1, 2), 90)
    long = [ask(name, words(name, 200), 3) for name in "abc"]
    alone = [sample(engine, request) for request in (steady, *long)]
    engine.take_stats()
    burst = Burst(engine, long)
    found = sample(engine, replace(steady, hear=burst.hear))
    assert [found, *burst.wait()] == alone  # no bit changes
    between = [after - before for before, after in zip(burst.prefilled, burst.prefilled[1:], strict=False)]
    calls = [after - before for before, after in zip(burst.calls, burst.calls[1:], strict=False)]
    assert sum(between) == 3 * 199
    assert max(between) == MOST
    assert max(calls) == MOST // 16
    assert sum(calls) == 50  # as many as at once
    assert sum(count > 0 for count in calls) >= 12  # calls of the device that the turn went on by meanwhile


def test_mates_wait_for_the_prompt_that_they_fork(engine: Engine) -> None:
    steady, prompt = ask("steady", (1, 2), 60), words("prompt", 180)
    alone = [sample(engine, ask(name, prompt, 5)) for name in "ab"]
    engine.take_stats()
    burst = Burst(engine, [ask(name, prompt, 5, group="g") for name in "ab"])
    sample(engine, replace(steady, hear=burst.hear))
    assert burst.wait() == alone
    stats = engine.take_stats()
    assert (stats.prefilled, stats.forked) == (1 + 179, 179)
    assert sum(after > before for before, after in zip(burst.calls, burst.calls[1:], strict=False)) > 3


def test_turns_that_are_computed_again_sample_nothing_until_all_of_it_is_there(engine: Engine) -> None:
    """Published are the same weights: their tokens must be what they would have been, but for rounding."""
    old = [ask(name, words(name, 100), 40) for name in "abc"]
    want = [sample(engine, request).tokens for request in old]
    published: list[Any] = []
    meanwhile: list[int] = []
    # Nothing of it is cached: it goes on at once, and the others wait. Over pages those come first, which are here.
    fresh = ask("fresh", (5,), 20, hear=lambda tokens: meanwhile.append(engine._stats.append_calls))

    def publish() -> None:
        published.append(engine.post(partial(engine._publish, tiny.params(CONFIG), 0)))

    burst = Burst(engine, [fresh], publish)
    engine.take_stats()
    answers = [say(engine, request) for request in (*old[:2], replace(old[2], hear=burst.hear))]
    assert [answer.wait().tokens for answer in answers] == want
    published[0].result(PATIENCE_S)
    assert burst.wait()[0].tokens == sample(engine, fresh).tokens
    assert len(set(meanwhile)) > 5 or engine.options.pages
    for request in old:
        engine.release(request.trajectory)


def play(engine: Engine, turns: list[tuple[str, tuple[int, ...], int]], together: bool) -> dict[str, list[Sample]]:
    """The turns of each trajectory one after the other, and trajectories so too, or at once: each as soon as it may."""
    left: dict[str, list[tuple[str, tuple[int, ...], int]]] = {}
    for turn in turns:
        left.setdefault(turn[0], []).append(turn)
    done: dict[str, list[Sample]] = {name: [] for name in left}

    def held(name: str) -> int:
        return sum(len(one.fed) + len(one.tokens) for one in done[name])

    for names in [list(left)] if together else [[name] for name in left]:
        going: dict[str, Answer] = {}
        while going or any(left[name] for name in names):
            for name in names:
                if name not in going and left[name]:
                    _, tokens, most = left[name].pop(0)
                    going[name] = say(engine, ask(name, tokens, most, held(name)))
            name = next((name for name, answer in going.items() if answer.done()), next(iter(going)))
            done[name].append(going.pop(name).wait())
            if not left[name]:
                engine.release(name)
    return done


@pytest.mark.parametrize("seed", range(3))
def test_what_a_trajectory_samples_does_not_depend_on_how_its_prefill_is_spread_over_calls(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    names = [f"{seed}/{i}" for i in range(4)]
    turns = [
        (name, words(f"{name}{turn}", rng.choice((1, 3, 40, 55))), rng.randrange(2, 20)) for name in names for turn in range(3)
    ]
    alone = play(engine, turns, together=False)
    spread: list[bool] = []
    steps = engine._steps

    def decode(*given: Any) -> Any:
        spread.append(any(row.backlog for row in engine.table.rows.values()))
        return steps.decode(*given)

    engine.run(lambda: setattr(engine, "_steps", replace(steps, decode=decode)))
    assert play(engine, turns, together=True) == alone
    engine.run(lambda: setattr(engine, "_steps", steps))
    assert any(spread)
