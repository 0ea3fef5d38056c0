"""What a chat template must do, and how a whole dialogue is rendered from its pieces.

A conversation only ever grows: prompt, then the sampled turn, then the observation, each appended to the ids before it.
Nothing is decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxagent.types import Constraint, Message, ToolSpec, Vocabulary


class Template(Protocol):
    """A family's way to write messages as ids. `stop` holds the ids that end a sampled turn and belong to it."""

    vocab_size: int
    stop: tuple[int, ...]

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The ids of a dialogue's beginning, up to and with the header after which the policy writes."""
        ...

    def extend(self, messages: Sequence[Message], *, closed: bool = True, after: Message | None = None) -> list[int]:
        """The ids that follow a sampled turn: what closes it, the new messages, and the next header.

        Args:
            closed: false where the turn ran out of budget before its stop token.
            after: the turn as it was read, for families whose tool results name the call that they answer.
        """
        ...

    def restart(self, told: Sequence[Message], messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The ids of a new segment, where appending `messages` to `told` would rewrite it and a segment is what was chosen.

        Nothing where the conversation is to be extended.
        """
        ...

    def turn(self, message: Message) -> list[int]:
        """An assistant message as the policy would sample it, stop token included."""
        ...

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        """A sampled turn as a message; `error` says what could not be read."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """The ids for human eyes, control tokens visible."""
        ...

    def raw(self, text: str) -> list[int]:
        """A whole context that its writer has marked up: names of control tokens are control tokens. Never for messages."""
        ...

    def vocabulary(self) -> Vocabulary:
        """What every id says, for a sampler that looks for texts or holds turns to a form."""
        ...

    def constraint(self, tools: Sequence[ToolSpec], parallel: bool = True) -> Constraint:
        """Holds every call of a turn to a tool's name and schema; its form is that of one call or, if `parallel`, of several.

        Raises ValueError in a family where that cannot be said.
        """
        ...


def render(template: Template, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[list[int], list[bool]]:
    """A whole dialogue as (ids, mask); the mask is true on what the assistant wrote, stop tokens included."""
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    ids = list(template.prompt(messages[:first], tools))
    mask = [False] * len(ids)
    at = first
    while at < len(messages):
        turn = template.turn(messages[at])
        until = next((i for i in range(at + 1, len(messages)) if messages[i].role == "assistant"), len(messages))
        observation = template.extend(messages[at + 1 : until], after=messages[at]) if until > at + 1 else []
        ids += [*turn, *observation]
        mask += [True] * len(turn) + [False] * len(observation)
        at = until
    return ids, mask
