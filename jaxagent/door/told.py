"""What a client is told of a sampled turn: its text, its calls, and as much of the text as is certain while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxagent.chat.template import Template
from jaxagent.door.ask import Ask
from jaxagent.types import Message

_GROWTH = 64  # a turn is read anew when it has grown by this part of it: always at first, and in all not quadratically often
_MAY_CALL = "<[{`"  # with one of these, or with a control token, the calls of all families begin


def read_turn(template: Template, ask: Ask, tokens: Sequence[int]) -> tuple[Message, str, str]:
    """(the turn as a message, why it ended: stop, length or calls, and the stop string that ended it, if one did).

    Where the turn cannot be read, `error` says why, and the text is all that was written.
    """
    ended = bool(tokens) and tokens[-1] in template.stop
    text = template.text(tokens[:-1] if ended else tokens)
    message = Message("assistant", text) if ask.prompt else _parsed(template, ask, tokens, ended)
    if message.error or (message.calls and not ask.offered):
        message = Message("assistant", text, error=message.error)
    if not ask.parallel:
        message = replace(message, calls=message.calls[:1])
    ends = ((at, string) for string in ask.sampling.stop_strings if (at := message.content.find(string)) >= 0)
    cut, string = min(ends, default=(-1, ""))
    if string:
        message = replace(message, content=message.content[:cut])
    finish = "calls" if message.calls else "stop" if ended or string else "length"
    return message, finish, string


def _parsed(template: Template, ask: Ask, tokens: Sequence[int], ended: bool) -> Message:
    """A turn that was cut short is read as if it had ended there, where that makes sense and no call of it."""
    if ended:
        return template.parse(tokens, ask.tools)
    found = [template.parse([*tokens, stop], ask.tools) for stop in template.stop]
    fit = (message for message in found if not message.error and not message.calls)
    return next(fit, Message("assistant", template.text(tokens), error="the turn did not end within its token budget"))


class Visible:
    """The text of a turn that is being sampled, as far as nothing that follows can change it."""

    def __init__(self, template: Template, ask: Ask, marks: Sequence[str], prompt: Sequence[int]):
        """Args: marks: the names of the control tokens. prompt: what the turn follows: some templates open a thought there."""
        self.template, self.ask, self.marks = template, ask, marks
        self.thinks = not ask.prompt and template.text(prompt[-4:]).rstrip().endswith("<think>")
        self.said, self.read = "", 0

    def more(self, tokens: Sequence[int]) -> str:
        """What is certain beyond what was certain before."""
        if len(tokens) - self.read < len(tokens) // _GROWTH:
            return ""
        self.read = len(tokens)
        text = self._certain(tokens)
        if not text.startswith(self.said):
            return ""
        new, self.said = text[len(self.said) :], text
        return new

    def finished(self, message: Message) -> Message:
        """The whole turn, beginning with what was said of it already."""
        content = message.content
        if not content.startswith(self.said):
            content = self.said + content[content.find(self.said) + len(self.said) :] if self.said in content else self.said
        return replace(message, content=content)

    def _certain(self, tokens: Sequence[int]) -> str:
        message, *_ = read_turn(self.template, self.ask, tokens)
        if message.error or message.calls or (self.thinks and "</think>" not in self.template.text(tokens)):
            return self.said
        text = message.content
        for mark in (*self.marks, *(_MAY_CALL if self.ask.offered else ())):
            text = text.partition(mark)[0]
        text = text.rstrip("\ufffd")  # a character whose bytes are not all there
        strings = [string for string in self.ask.sampling.stop_strings if string]
        held = (n for string in strings for n in range(len(string) - 1, 0, -1) if text.endswith(string[:n]))
        text = text[: len(text) - max(held, default=0)]
        return text if self.ask.prompt else text.rstrip()
