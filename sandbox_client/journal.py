"""What a session has done so far, so that it can be done again in another one: after a loss, or to branch from a prefix.

Only steps that the caller declares replayable are worth recording, and a replay that does not end as the first time is no
replay: the results' digests must agree.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from . import wire
from .wire import CallResult, ExecResult

_MAX_STEPS, _MAX_BYTES = 256, 8 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """One operation and the digest of what it gave."""

    operation: str
    arguments: dict[str, Any]
    digest: str
    size_bytes: int


@dataclass(slots=True)
class Journal:
    """The steps of a session, in order, while they are few and small enough to be done again."""

    steps: list[Step] = field(default_factory=list)
    overflown: bool = False

    def record(self, operation: str, arguments: dict[str, Any], result: Any) -> None:
        """Adds a step that has been done; past the limits the journal gives up and says so."""
        size = sum(len(value) for value in arguments.values() if isinstance(value, str | bytes)) + 64
        self.steps.append(Step(operation, arguments, digest(result), size))
        if len(self.steps) > _MAX_STEPS or sum(step.size_bytes for step in self.steps) > _MAX_BYTES:
            self.steps.clear()
            self.overflown = True

    def copy(self) -> "Journal":
        """Returns the steps so far, untouched by later ones."""
        return Journal(list(self.steps), self.overflown)


def digest(result: Any) -> str:
    """Returns what identifies a result: all of it but the time it took and the attempts."""
    if isinstance(result, ExecResult):
        words: Any = [result.outcome, result.stdout, result.stderr, result.exit_code, result.value, result.error]
    elif isinstance(result, CallResult):
        words = [result.outcome, result.value, result.error]
    elif isinstance(result, bytes):
        return hashlib.blake2b(result, digest_size=16).hexdigest()
    else:
        words = result
    return hashlib.blake2b(wire.encode(words), digest_size=16).hexdigest()
