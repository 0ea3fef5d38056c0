"""A call under way while the host goes on: it is sent before the last one is read, and what happens meanwhile harms nobody."""

from __future__ import annotations

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
OPTIONS = EngineOptions(
    slots=4, slot_tokens=32, chunk=8, decode_tokens=3, append_rows=2, append_tokens=(4, 8), fork_min_tokens=6, stop_tokens=2
)


@pytest.fixture(scope="module", params=[(True, 0), (False, 0), (True, 17)], ids=["ahead", "in turns", "ahead, over pages"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    overlap, pages = request.param
    engine = Engine(CONFIG, replace(OPTIONS, overlap=overlap, pages=pages), next(tiny.mesh(data=2).replicas()))
    engine.publish(tiny.params(CONFIG), version=0)
    yield engine
    engine.close()


def begin(engine: Engine, name: str, hear: Callable[[list[int]], None] | None = None, most: int = 18) -> Answer:
    key, sampling = sampling_key(0, name, 0), Sampling(max_tokens=most)
    return say(engine, SampleRequest(name, (1, 2, len(name)), 0, key, (), sampling, hear=hear))


def sample(engine: Engine, name: str, **asked: Any) -> Sample:
    answer = begin(engine, name, **asked).wait()
    engine.release(name)
    assert isinstance(answer, Sample)
    return answer


def test_every_call_but_the_last_is_sent_before_the_one_before_it_is_read(engine: Engine) -> None:
    engine.run(lambda: None)
    engine.take_stats()
    sent: list[int] = []
    sample(engine, "a", hear=lambda tokens: sent.append(engine._stats.decode_calls))
    calls = list(range(1, 7))  # 18 tokens, three a call
    assert sent == ([*calls[1:], 6] if engine.options.overlap else calls)  # none in vain: the budget is known


def test_a_slot_that_is_released_while_a_call_writes_to_it_serves_the_next_with_its_own_bits(engine: Engine) -> None:
    want = sample(engine, "next")
    held = [begin(engine, f"held{i}", most=1) for i in range(3)]
    assert all(answer.wait() for answer in held)
    after: list[Answer] = []

    def replace_it(tokens: list[int]) -> None:
        engine.release("first")  # of one turn, whose next call is on its way
        after.append(begin(engine, "next"))

    first = begin(engine, "first", hear=lambda tokens: None if after else replace_it(tokens))
    assert first.wait() is None
    assert after[0].wait() == want
    for name in ("next", *(f"held{i}" for i in range(3))):
        engine.release(name)


def test_weights_that_come_while_a_call_is_under_way_are_not_said_to_have_sampled_it(engine: Engine) -> None:
    want = sample(engine, "a")
    published: list[Any] = []

    def publish(tokens: list[int]) -> None:
        if not published:
            published.append(engine.post(partial(engine._publish, tiny.params(CONFIG), 1)))

    found = sample(engine, "a", hear=publish)
    published[0].result(PATIENCE_S)
    engine.publish(tiny.params(CONFIG), version=0)
    assert (found.tokens, found.logprobs) == (want.tokens, want.logprobs)
    old = 6 if engine.options.overlap else 3  # those of the calls that were sent before
    assert found.versions == [0] * old + [1] * (18 - old)


def test_work_between_two_calls_finds_none_under_way(engine: Engine) -> None:
    under_way: list[bool] = []

    def look(tokens: list[int]) -> None:
        engine.post(lambda: under_way.append(engine._flight is not None))

    sample(engine, "a", hear=look)
    engine.run(lambda: None)
    assert under_way == [False] * 6
