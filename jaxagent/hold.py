"""What an episode that is played is held by, from outside: by it `rollout.Rollouts` ends episodes and says where they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxagent.envs.env import Env
from jaxagent.types import StopReason, Trajectory


@dataclass
class Hold:
    """How an episode is ended from outside, and what is said of it then."""

    asked_s: float
    task: asyncio.Task[Any] | None = None
    over: bool = False  # its rows are whole, though its world may still be closed
    stop: StopReason | None = None  # it is to end, and this is said of it
    why: str = ""
    session: str = ""  # the name under which its world asks the sandbox
    opened: list[Env] = field(default_factory=list)  # its world, as soon as there is one
    rows: list[Trajectory] = field(default_factory=list)  # what there is of it
    heard: list[Callable[[], None]] = field(default_factory=list)  # told when it is over

    @property
    def left(self) -> bool:
        """Something of it is still to be waited for: its world may hang where its rows are whole."""
        return self.task is not None or not self.over

    def begin(self) -> None:
        """Called in the episode's own task. Raises CancelledError where it was ended before it began."""
        self.task = asyncio.current_task()
        if self.stop:
            raise asyncio.CancelledError

    def end(self, stop: StopReason, why: str) -> None:
        """Ends the episode, in its loop; where its rows are whole, only what it still waits for, and no straggler for that."""
        if self.over and stop is StopReason.STRAGGLER:
            return
        if not self.over and self.stop is None:
            self.stop, self.why = stop, why
        if self.task:
            self.task.cancel()

    def caught(self) -> None:
        """A cancellation was caught in the episode's task: that of `end`, or one that nobody owns up to."""
        if self.task and self.task.cancelling():
            self.task.uncancel()
        if self.stop is None:
            self.stop, self.why = StopReason.INFRA_FAILURE, "cancelled from elsewhere"

    def tell(self) -> None:
        self.over, self.task = True, None
        for heard in self.heard:
            heard()
