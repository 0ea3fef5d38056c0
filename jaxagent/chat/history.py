"""Whether a chat template leaves alone what was said: found out with a scripted dialogue when a checkpoint is loaded.

A conversation is trained on as it was sampled, so it may only be appended to. Some templates rewrite its past instead: they
drop earlier thoughts once the user speaks again (Qwen3), or move the system message to the last user message (Mistral). What
then happens is declared by `ChatOptions.history`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxagent.types import Message, ToolCall, ToolSpec

PROBE_TOOL = ToolSpec("probe", "Looks it up.", {"type": "object", "properties": {"key": {"type": "string"}}})
_AFTER = {"tool": "tool results follow", "user": "a new user message follows", "turn": "the policy's turn follows"}


@dataclass(frozen=True)
class ChatOptions:
    """How conversations are carried on.

    Args:
        history: where the checkpoint's template rewrites what was said before. "refuse" fails: when the checkpoint is loaded
            if tool results alone cause it, which every agent has; in the first episode if it takes a system message, and at
            the first extension if it takes a new user message, which worlds of tools alone never send. "keep" leaves what
            was said as it was sampled, and appends. "segment" begins a new row of the same rollout with the whole history as
            the template now renders it.
    """

    history: str = "refuse"

    def __post_init__(self) -> None:
        if self.history not in ("refuse", "keep", "segment"):
            raise ValueError(f"chat.history must be one of refuse, keep, segment; got {self.history!r}")


@dataclass(frozen=True)
class Tongue:
    """What is needed of a template to try it: rendering, with the header of the next turn or without; text as ids and back.

    `to_end` cuts a rendered dialogue at the end of its last turn: what follows there comes with the next message.
    """

    render: Callable[[Sequence[Message], Sequence[ToolSpec], bool], str]
    to_end: Callable[[str], str]
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Rewriting:
    """The first place where a template changes the past.

    Args:
        after: what causes it: a message of role tool or user, or the policy's own turn.
        system: whether it takes a system message.
        turn: which of the policy's turns is changed; 0 is what came before the first.
        token: the first id that does not stay, and its text; `was` and `becomes` are the words around it.
    """

    after: str
    system: bool
    turn: int
    token: int
    text: str
    was: str
    becomes: str

    def __str__(self) -> str:
        where = ", in dialogues with a system message," if self.system else ""
        return (
            f"the chat template rewrites what was said before once {_AFTER[self.after]}{where} so that a conversation is not a "
            f"pure append: in turn {self.turn} the token {self.token} ({self.text!r}) in {self.was!r} does not stay, which "
            f"becomes {self.becomes!r}. Choose chat.history=keep, which leaves what was said as it was sampled, or "
            "chat.history=segment, which begins a new row with the history as the template renders it then"
        )


def probe_dialogue(*, system: bool, parallel: bool) -> tuple[Message, ...]:
    """Thoughts, a turn of several calls where there may be such, a turn of one, an answer, and another question."""
    calls = tuple(ToolCall(PROBE_TOOL.name, {"key": key}) for key in ("37", "38")[: 2 if parallel else 1])
    results = tuple(Message("tool", f"5{i}", name=PROBE_TOOL.name) for i, _ in enumerate(calls))
    return (
        *((Message("system", "Be brief."),) if system else ()),
        Message("user", "What is at 37?"),
        Message("assistant", thinking="I should look.", calls=calls),
        *results,
        Message("assistant", thinking="Once more.", calls=calls[:1]),
        results[0],
        Message("assistant", "It is 50.", thinking="Now I know."),
        Message("user", "And at 39?"),
        Message("assistant", "I cannot say.", thinking="I do not know."),
    )


def rewritings(tongue: Tongue, *, parallel: bool) -> list[Rewriting]:
    """How a template rewrites the probe dialogue: the first place after tool results and the first after a user message."""
    found: dict[str, Rewriting] = {}
    for system in (False, True):
        dialogue, ends = probe_dialogue(system=system, parallel=parallel), []
        begun = len(tongue.render(dialogue[: 2 if system else 1], (PROBE_TOOL,), False))
        for i, message in enumerate(dialogue[:-1]):
            if message.role != "assistant":
                continue
            after = dialogue[i + 1].role
            until = next(j for j in range(i + 1, len(dialogue)) if dialogue[j].role == "assistant")
            asked = tongue.render(dialogue[:i], (PROBE_TOOL,), False)  # what was there when the turn was sampled
            said = tongue.to_end(tongue.render(dialogue[: i + 1], (PROBE_TOOL,), False))
            becomes = tongue.render(dialogue[:until], (PROBE_TOOL,), True)
            ends.append(len(said))
            was = next((was for was in (asked, said) if not becomes.startswith(was)), "")
            if was and after not in found:
                at = next((k for k, (a, b) in enumerate(zip(was, becomes, strict=False)) if a != b), len(becomes))
                turn = 1 + sum(end <= at for end in ends) if at >= begun else 0
                found[after] = compare(tongue, was, becomes, after=after, system=system, turn=turn)
    return list(found.values())


def compare(tongue: Tongue, was: str, becomes: str, *, after: str, system: bool, turn: int) -> Rewriting:
    """The first token of `was` that `becomes` does not have in its place."""
    old, new = tongue.encode(was), tongue.encode(becomes)
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old) - 1, len(new)))
    near, decode = slice(max(0, at - 6), at + 6), tongue.decode
    return Rewriting(after, system, turn, old[at], decode(old[at : at + 1]), decode(old[near]), decode(new[near]))
