"""The engines of a run as one: who is held while the learner has the devices, and when they are free."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tiny

from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.engine.replicas import Replicas


@contextmanager
def engines(tensor: int) -> Iterator[Replicas]:
    """Two engines that hold no weights and sample nothing."""
    options = EngineOptions(slots=1, slot_tokens=16, chunk=16)
    made = Replicas([Engine(tiny.config(), options, place) for place in tiny.mesh(data=2, tensor=tensor).replicas()])
    try:
        yield made
    finally:
        made.close()


def test_engines_of_several_devices_make_no_call_while_they_are_held() -> None:
    with engines(tensor=2) as replicas:
        done: list[int] = []
        with replicas.hold():
            futures = [engine.post(lambda: done.append(1)) for engine in replicas.engines]
            time.sleep(0.05)
            assert not done
        for future in futures:
            future.result(timeout=60)
        assert len(done) == 2


def test_engines_of_one_device_are_not_held() -> None:
    with engines(tensor=1) as replicas, replicas.hold():
        for engine in replicas.engines:
            engine.post(lambda: None).result(timeout=60)


def test_what_fails_while_engines_are_held_lets_them_go() -> None:
    with engines(tensor=2) as replicas:
        with pytest.raises(ZeroDivisionError), replicas.hold():
            _ = 1 / 0
        for engine in replicas.engines:
            engine.post(lambda: None).result(timeout=60)


def test_engines_without_anything_to_decode_leave_the_devices_free() -> None:
    with engines(tensor=1) as replicas:
        deadline = time.monotonic() + 60
        while not replicas.idle() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert replicas.idle()
