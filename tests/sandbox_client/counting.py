"""Fixed functions for the tests: a counter per session, and some that misbehave."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any


def session_functions(options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Returns the functions of one session; `start` is where its counter begins."""
    count = int(options.get("start", 0))

    def add(amount: int = 1) -> int:
        nonlocal count
        count += amount
        return count

    def sleep(seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def echo(value: Any) -> Any:
        return value

    def fail(text: str) -> None:
        raise LookupError(text)

    def infinite() -> float:
        return float("inf")

    def where() -> int:
        return os.getpid()

    def shout(size: int) -> None:
        print("x" * size)
        print("y" * size, file=sys.stderr)

    return {f.__name__: f for f in (add, sleep, echo, fail, infinite, where, shout)}
