"""A door's memory: the ids that were sampled for what a client sends back, and the rows of tokens that a sampler holds.

Sampled ids are the only truth. A client sends messages; where one of them is a turn that was sampled here, its ids are taken
as they were and never encoded again. A prompt that extends a row of earlier tokens exactly goes on in that row, and only what
is new is fed; any other begins a row of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import secrets
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from jaxagent.chat.template import Template, render
from jaxagent.door.ask import UNSAID, Answer, Ask, Refused
from jaxagent.door.told import Visible, read_turn
from jaxagent.types import Constraint, Json, Message, Sample, Sampler, SampleRequest, Sampling, ToolSpec, sampling_key

REMEMBERED = 4_000_000  # tokens of sampled turns, and all before them, that are found again; then the oldest are forgotten
FAULTS = 1000  # of a session that are remembered, the latest


@dataclass(eq=False)
class Row:
    """Tokens that follow each other: prompts, turns, observations. `held` of them are in the sampler."""

    name: str
    key: tuple[int, int]
    tokens: list[int] = field(default_factory=list)
    held: int = 0
    busy: bool = False


class Slots:
    """A sampler's room, shared by all sessions. Rows that no call uses give theirs up, the longest unused first."""

    def __init__(self, template: Template, sampler: Sampler, capacity: int):
        self.template, self.sampler, self.capacity = template, sampler, capacity
        self._there: dict[str, Row] = {}

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """The bytes of every id."""
        return self.template.vocabulary().pieces

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """The names of the template's control tokens."""
        control = sorted(self.template.vocabulary().control)
        return tuple(self.pieces[i].decode(errors="replace") for i in control)

    def enter(self, row: Row) -> None:
        """A call begins in a row."""
        self._there.pop(row.name, None)
        self._there[row.name] = row
        row.busy = True
        self._make_room()

    def leave(self, row: Row) -> None:
        """The call ended, and what it sampled is held."""
        row.busy, row.held = False, len(row.tokens)
        self._make_room()

    def drop(self, row: Row) -> None:
        """Nothing of the row is held any more, and what was being sampled in it is given up."""
        row.busy, row.held = False, 0
        if self._there.pop(row.name, None):
            self.sampler.release(row.name)

    def _make_room(self) -> None:
        for row in list(self._there.values()):
            if len(self._there) > self.capacity and not row.busy:
                self.drop(row)


@dataclass(frozen=True)
class Rules:
    """What a session allows.

    Args:
        row_tokens: the most tokens of a row.
        sampling: of a policy in training, whatever the client asks; None leaves it to the client.
        calls: the most calls; 0 is any number.
        blind: results of tools say nothing, as in `envs.env.Ablated`.
    """

    row_tokens: int
    sampling: Sampling | None = None
    calls: int = 0
    blind: bool = False


@dataclass(eq=False)
class Asked:
    """A request, word for word. `earlier` is the same one, which a fault of ours had left without an answer."""

    words: bytes
    earlier: Asked | None = None
    again: bool = False  # it is asked again just now
    fault: str = ""


@dataclass(frozen=True)
class Prompt:
    """The ids that a call goes on from, and the messages that they say, thoughts included."""

    ids: list[int]
    told: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    retokenised: bool = False


@dataclass(frozen=True)
class Said:
    """A sampled turn with all before it."""

    ids: array
    told: tuple[Message, ...]


class Session:
    """The calls of one client, all in one loop.

    `heard(row, before, sample, told)` is called for each: the row had `before` tokens, and the dialogue is now `told`.
    """

    def __init__(self, name: str, slots: Slots, rules: Rules, key: tuple[int, int] | None = None, group: str = ""):
        """Args:
        key: fixes the draws of all calls; without one, a call's seed does, or chance.
        group: of sessions whose equal prompts are prefilled once, while one that began with it holds it.
        """
        self.name, self.template, self.slots, self.rules, self.key = name, slots.template, slots, rules, key
        self.group = group
        self.heard: Callable[[Row, int, Sample, tuple[Message, ...]], None] | None = None
        self.calls = 0
        self.responses: dict[str, tuple[Message, ...]] = {}  # dialogues by the id of an answer, for `previous_response_id`
        self.exhausted = ""  # the budget that a refused call would have exceeded: calls or tokens
        self.faults: list[Asked] = []  # requests that a fault of ours has left without an answer
        self._rows: list[Row] = []
        self._numbers = itertools.count()
        self._said: dict[bytes, Said] = {}
        self._remembered = 0
        self._begun: dict[bytes, int] = {}
        self._closed = False

    async def complete(self, ask: Ask, hear: Callable[[int, str], None] | None = None) -> list[Answer]:
        """Samples the answers to a request. Raises Refused.

        Args:
            hear: is told the text of a choice as it becomes certain.
        """
        if self._closed:
            raise Refused("this session is over", status=403, code="session_over")
        if self.rules.calls and self.calls + ask.n > self.rules.calls:
            self.exhausted = "calls"
            raise Refused(f"at most {self.rules.calls} calls in an episode (agent.max_turns)", status=403, code="budget")
        prompt = self._prompt(ask)
        sampling = self._sampling(ask, len(prompt.ids))
        self.calls += ask.n
        group = f"{self.name}+{next(self._numbers)}" if ask.n > 1 and self.key is None else ""
        tasks = [asyncio.ensure_future(self._sample(ask, prompt, sampling, i, group, hear)) for i in range(ask.n)]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException as fault:
            if not isinstance(fault, Refused) and not ended_from_outside(fault):
                self.calls -= ask.n  # our own faults cost no call: it may be asked again
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def asked(self, path: str, body: bytes) -> Iterator[Asked]:
        """Around the answer to a request. A fault of ours stands in `faults` until the same is asked again and answered."""
        words = hashlib.blake2b(path.encode() + b"\n" + body, digest_size=16).digest()
        earlier = next((one for one in self.faults if one.words == words and not one.again), None)
        asked = Asked(words, earlier)
        if earlier:
            earlier.again = True
        try:
            yield asked
        except BaseException as fault:
            self.faulted(asked, fault)
            raise
        finally:
            if earlier:
                earlier.again = False

    def answered(self, asked: Asked) -> None:
        """To be called before a client can know of it, as is `faulted`: its program may end at once."""
        self.faults = [one for one in self.faults if one is not asked.earlier]

    def faulted(self, asked: Asked, fault: BaseException) -> None:
        """A refusal is no fault of ours, nor is a client that leaves."""
        if isinstance(fault, Refused | ConnectionResetError) or ended_from_outside(fault):
            return
        self.answered(asked)  # one fault in place of the other
        asked.fault = f"{type(fault).__name__}: {fault}"
        self.faults = [*self.faults, asked][-FAULTS:]

    def close(self) -> None:
        """No call is answered any more; the sampler lets all rows go."""
        self._closed = True
        self.responses.clear()
        for row in self._rows:
            self.slots.drop(row)

    # ------------------------------------------------------------------ from messages to ids

    def _prompt(self, ask: Ask) -> Prompt:
        if ask.prompt:
            return Prompt(list(ask.prompt))
        messages, tools = self._blinded(ask.messages), ask.offered
        if not messages or messages[-1].role == "assistant":
            raise Refused("the last message must be the user's or a tool's result", param="messages")
        keys = _keys(messages, tools)
        known = next(
            (i for i in range(len(messages), 0, -1) if messages[i - 1].role == "assistant" and keys[i] in self._said), 0
        )
        try:
            if known:
                return self._continued(self._said[keys[known]], messages[known:], tools)
            foreign = any(message.role == "assistant" for message in messages)
            ids = self._foreign(messages, tools) if foreign else self.template.prompt(messages, tools)
            return Prompt(ids, messages, tools, foreign)
        except ValueError as error:
            raise Refused(f"the chat template of this policy refuses these messages: {error}", param="messages") from None

    def _continued(self, said: Said, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> Prompt:
        """The recorded ids, and what follows them; turns of an assistant that were not sampled here are encoded."""
        ids, told, foreign = list(said.ids), list(said.told), False
        while messages:
            n = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
            new = messages[:n]
            closed = ids[-1] in self.template.stop
            ids = self.template.restart(told, new, tools) or [
                *ids,
                *self.template.extend(new, closed=closed, after=told[-1]),
            ]
            told += messages[: n + 1]
            if n < len(messages):
                ids, foreign = ids + self.template.turn(messages[n]), True
            messages = messages[n + 1 :]
        return Prompt(ids, tuple(told), tools, foreign)

    def _foreign(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """A dialogue with turns of others: as the template writes them one by one, or else all at once."""
        try:
            return render(self.template, messages, tools)[0]
        except ValueError:
            return self.template.prompt(messages, tools)

    def _blinded(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if not self.rules.blind:
            return messages
        return tuple(replace(m, content="." * len(m.content)) if m.role == "tool" else m for m in messages)

    # ------------------------------------------------------------------ how a turn is sampled

    def _sampling(self, ask: Ask, known: int) -> Sampling:
        room, fixed = self.rules.row_tokens - known, self.rules.sampling
        if room < 1:
            self.exhausted = "tokens"
            text = f"the prompt has {known} tokens, and with one more does not fit a row of {self.rules.row_tokens}"
            raise Refused(text, param="messages", code="context_length_exceeded")
        asked = ask.sampling
        most = min(room, asked.max_tokens if asked.max_tokens != UNSAID else room)
        if fixed is None:
            return replace(asked, max_tokens=most, constraint=self._constraint(ask))
        if ask.schema:
            raise Refused("a policy in training is not held to a form: leave out response_format", param="response_format")
        return replace(fixed, max_tokens=min(most, fixed.max_tokens), stop_strings=asked.stop_strings)

    def _constraint(self, ask: Ask) -> Constraint | None:
        if ask.schema:
            return Constraint(Json(ask.schema))
        forced = ask.choice == "required" or ask.choice.startswith("=")
        if not forced and not (ask.strict and ask.offered):
            return None
        named = tuple(tool for tool in ask.tools if ask.choice == f"={tool.name}") or ask.tools
        try:
            calls = self.template.constraint(named, ask.parallel)
        except ValueError as error:
            raise Refused(f"calls cannot be forced or held to their schemas here: {error}", param="tool_choice") from None
        return Constraint((calls.after[0], calls.form)) if forced else calls

    async def _sample(
        self, ask: Ask, prompt: Prompt, sampling: Sampling, index: int, group: str, hear: Callable[[int, str], None] | None
    ) -> Answer:
        row = self._row_for(prompt.ids)
        before, cached = len(row.tokens), row.held
        visible = Visible(self.template, ask, self.slots.marks, prompt.ids) if hear else None
        told = partial(_tell, visible, hear, index) if visible and hear else None
        key = row.key if self.key is not None else _drawn(ask.seed, index)
        if self.group:  # by what it begins with: a prompt of another sort must not stand where its own is looked for
            group = f"{self.group}+{_digest(prompt.ids).hex()}"
        request = SampleRequest(
            row.name, tuple(prompt.ids[cached:]), cached, key, self.template.stop, sampling, "" if cached else group, told
        )
        self.slots.enter(row)
        try:
            sample = await self.slots.sampler.generate(request)
        except BaseException as error:
            self.slots.drop(row)
            if isinstance(error, ValueError):
                raise Refused(str(error)) from None
            raise
        if sample.fed_start != cached or sample.fed != prompt.ids[cached:]:
            raise RuntimeError(f"{row.name}: the sampler was fed other tokens than the prompt's")
        row.tokens = [*prompt.ids, *sample.tokens]
        self.slots.leave(row)
        message, finish, string = read_turn(self.template, ask, sample.tokens)
        message = visible.finished(message) if visible else message
        name = hashlib.blake2b(f"{row.name}/{len(row.tokens)}".encode(), digest_size=9).hexdigest()
        calls = tuple(replace(call, id=call.id or f"call_{name}{i}") for i, call in enumerate(message.calls))
        message = replace(message, calls=calls)
        if prompt.told:
            self._remember(prompt, message, row.tokens)
        if self.heard:
            self.heard(row, before, sample, (*prompt.told, message))
        answer = Answer(message, finish, string, sample.tokens, len(prompt.ids), cached, prompt.retokenised)
        return replace(answer, logprobs=sample.logprobs, top=sample.top_logprobs) if ask.logprobs else answer

    def _row_for(self, ids: list[int]) -> Row:
        """The longest row that the ids extend and no call uses, or a new one."""
        if self.key is None:
            self._rows = [row for row in self._rows if row.held or row.busy]
        free = (row for row in self._rows if not row.busy and 0 < len(row.tokens) < len(ids))
        fit = max((row for row in free if row.tokens == ids[: len(row.tokens)]), key=lambda row: len(row.tokens), default=None)
        if fit is None:
            fit = Row(f"{self.name}/{next(self._numbers)}", self._key_of(ids))
            self._rows.append(fit)
        fit.busy = True
        return fit

    def _key_of(self, ids: list[int]) -> tuple[int, int]:
        """A row's own key, from what it begins with: the order in which calls arrive side by side changes no draw."""
        first = _digest(ids)
        times = self._begun[first] = self._begun.get(first, -1) + 1
        return sampling_key(0, f"{self.key}/{first.hex()}", times)

    def _remember(self, prompt: Prompt, message: Message, tokens: list[int]) -> None:
        told = (*prompt.told, message)
        key = _keys(told, prompt.tools)[-1]
        if old := self._said.pop(key, None):
            self._remembered -= len(old.ids)
        self._said[key] = Said(array("q", tokens), told)
        self._remembered += len(tokens)
        while self._remembered > REMEMBERED and len(self._said) > 1:
            self._remembered -= len(self._said.pop(next(iter(self._said))).ids)


def ended_from_outside(fault: BaseException) -> bool:
    """Whether it is the request that is cancelled, and not the turn that it waited for."""
    task = asyncio.current_task()
    return isinstance(fault, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _tell(visible: Visible, hear: Callable[[int, str], None], index: int, tokens: list[int]) -> None:
    if new := visible.more(tokens):
        hear(index, new)


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).digest()


def _drawn(seed: int | None, index: int) -> tuple[int, int]:
    return (secrets.randbits(32), secrets.randbits(32)) if seed is None else sampling_key(seed, "door", index)


def _keys(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[bytes]:
    """A number for every beginning of a dialogue, by what a client sees of it: no thoughts, no ids of calls."""
    said = [[tool.name, tool.description, tool.parameters] for tool in tools]
    keys = [hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).digest()]
    for m in messages:
        calls = [[call.name, call.arguments] for call in m.calls]
        text = json.dumps([m.role, m.content.strip() if m.role == "assistant" else m.content, calls, m.name], sort_keys=True)
        keys.append(hashlib.blake2b(keys[-1] + text.encode(), digest_size=16).digest())
    return keys
