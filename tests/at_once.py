"""Asks an engine from any thread, its own too, and has what it tells happen in its thread at that very moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jaxagent.engine.engine import Engine
from jaxagent.types import SampleRequest

PATIENCE_S = 300.0  # a hang fails by this; nothing is measured


class AtOnce:
    """A loop that is always awake."""

    def call_soon_threadsafe(self, what: Callable[..., object], *args: Any) -> None:
        what(*args)


class Answer:
    """Where a sample arrives that nobody awaits."""

    def __init__(self) -> None:
        self.sample: Any = None
        self.there = threading.Event()

    def done(self) -> bool:
        return self.there.is_set()

    def cancel(self) -> None:
        self.there.set()

    def set_result(self, sample: Any) -> None:
        self.sample = sample
        self.there.set()

    set_exception = set_result

    def wait(self) -> Any:
        assert self.there.wait(PATIENCE_S)
        return self.sample


def say(engine: Engine, request: SampleRequest) -> Answer:
    """Asks for a turn."""
    answer = Answer()
    engine._hand_in(lambda: engine._accept(request, (AtOnce(), answer)))  # type: ignore[arg-type]
    return answer
