"""One episode played by a model that answers elsewhere, through OpenAI's chat completions: the same worlds, the same harness.

Nothing is learnt from such an episode, and its tokens are not known: its row holds turns, rewards and tool calls. Tools go by
the API's own calls. A call whose arguments are no JSON object, or that names no tool, is a malformed turn as it is of a policy
here. How many tokens a dialogue may have is for the endpoint to say: where it refuses one as too long, the policy's budget is
used up.

Faults that pass (no connection, 408, 409, 429, 5xx) are tried again, at most `attempts` times with growing pauses; then the
episode broke, which is data and nobody's failure. An endpoint that knows neither key nor model is asked no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from jaxagent.agent import Limits, beside
from jaxagent.envs.env import Env, Step, Task
from jaxagent.types import Message, Sampling, StopReason, ToolCall, ToolSpec, Trajectory, Turn

UNREAD = "X-Unread"  # the header in which `jaxagent serve` says what was wrong with a turn
_PASSING = {408, 409, 425, 429}
_FINAL = {401, 403, 404}
_ANSWER_BYTES = 32 << 20
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class EndpointOptions:
    """Where the policy is asked, and how patiently. `fields` are added to every request; null takes one away."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    fields: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 6
    timeout_s: float = 120.0
    pause_s: float = 1.0  # before the second attempt, twice as long before each one after it


class EndpointFailed(Exception):
    """The endpoint did not answer, or refused a request that the same policy here would have answered."""


class _TooLong(Exception):
    """The dialogue does not fit the model."""


@dataclass
class _Seat:
    """One agent at the table: its row, and the dialogue as it is sent."""

    row: Trajectory
    messages: list[dict[str, Any]] = field(default_factory=list)
    owed: list[str] = field(default_factory=list)  # ids of the last turn's calls
    reads_all: bool = False  # whether results of no call can be sent as such


class Endpoint:
    """Implements `agent.Player`. `limits.max_turns` bounds the turns of a seat."""

    def __init__(self, tools: Sequence[ToolSpec], limits: Limits, options: EndpointOptions):
        self.tools, self.limits, self.options = tools, limits, options
        self.fault = ""  # why it is asked no more
        self._http: aiohttp.ClientSession | None = None

    async def play(self, env: Env, task: Task, rows: list[Trajectory], key: tuple[int, int], sampling: Sampling) -> None:
        """Plays one episode into `rows`. Raises EndpointFailed, and what the environment raises."""
        seats = dict[str, _Seat]()
        rows[0].waiting = "environment"
        step = await env.reset(task, rows[0].seed)
        rows[0].waiting = ""
        while not (stop := self._ended(step)):
            seat = self._seat(seats, step, rows)
            if len(seat.row.turns) >= self.limits.max_turns:
                stop = StopReason.MAX_TURNS
                break
            _tell(seat, step.messages)
            try:
                action = await self._act(seat, step, key, sampling)
            except _TooLong:
                stop = StopReason.MAX_TOKENS
                break
            seat.row.waiting = "environment"
            step = await env.step(action)
            seat.row.waiting = ""
            turn = seat.row.turns[-1]
            turn.reward, turn.reason, turn.tools = step.reward, step.reason, step.tools
            turn.parts, turn.checks = dict(step.parts), dict(step.checks)
            turn.outcome = step.parts.get("outcome", step.reward - sum(step.parts.values())) if step.parts else None
            for agent, reward in step.rewards.items():
                if agent in seats:
                    seats[agent].row.turns[-1].earn(reward)
        for row in rows:
            row.stop, row.error = stop, step.error

    def release(self, rows: Sequence[Trajectory]) -> None:
        """Nothing is held."""

    async def close(self) -> None:
        if self._http:
            await self._http.close()

    # ------------------------------------------------------------------ a turn

    @staticmethod
    def _ended(step: Step) -> StopReason | None:
        if step.truncated:
            return StopReason.ENV_TRUNCATED
        if step.terminated:
            return StopReason.ANSWERED if step.answered else StopReason.ENV_TERMINATED
        return None

    def _seat(self, seats: dict[str, _Seat], step: Step, rows: list[Trajectory]) -> _Seat:
        if step.past:
            raise EndpointFailed(f"{step.agent} is to be an earlier version of the policy, and an endpoint has none")
        if step.agent not in seats:
            if seats:
                rows.append(beside(rows[0]))
            rows[-1].role, rows[-1].seat = step.agent.partition("#")[0], len(seats)
            seats[step.agent] = _Seat(rows[-1])
        return seats[step.agent]

    async def _act(self, seat: _Seat, step: Step, key: tuple[int, int], sampling: Sampling) -> Message:
        """Asks for one turn and notes it."""
        number = len(seat.row.turns)
        body: dict[str, Any] = {
            "model": self.options.model,
            "messages": seat.messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": (key[0] ^ key[1] ^ (seat.row.seat << 8) ^ number) & 0x7FFFFFFF,
        }
        if self.tools:
            body["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        body |= self.options.fields
        seat.row.waiting = "endpoint"
        answer, unread = await self._ask({name: value for name, value in body.items() if value is not None})
        action, told = read_answer(answer, self.tools, unread)
        seat.messages.append(told)
        seat.owed = [call["id"] for call in told.get("tool_calls", ())]
        seat.reads_all |= bool(unread)
        text = action.content + "".join(f"\n{call.name} {json.dumps(call.arguments)}" for call in action.calls)
        seat.row.turns.append(Turn(0, 0, 0, step.state, text=text.strip(), error=action.error))
        return action

    async def _ask(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The answer to a request, and what its header says was wrong with the turn."""
        options, why, pause_s = self.options, "", 0.0
        for attempt in range(options.attempts):
            if self.fault:
                raise EndpointFailed(self.fault)
            if attempt:
                await asyncio.sleep(
                    min(_LONGEST_PAUSE_S, max(pause_s, options.pause_s * 2 ** (attempt - 1) * random.uniform(1, 1.5)))
                )
            try:
                status, said, headers = await self._post(body)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                why, pause_s = f"{type(error).__name__} {error}".strip(), 0.0
                continue
            if status == 200 and (answer := _object(said)) and answer.get("choices"):
                return answer, unquote(headers.get(UNREAD, ""))
            why, pause_s = f"status {status}: {_complaint(said)}", _seconds(headers.get("Retry-After", ""))
            if status in _FINAL:
                self.fault = f"{options.url} with model {options.model!r}: {why}"
            elif 300 <= status < 500 and status not in _PASSING:
                if _says_too_long(said):
                    raise _TooLong
                raise EndpointFailed(f"{options.url}: {why}")
        raise EndpointFailed(self.fault or f"{options.url}: {options.attempts} attempts: {why}")

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes, Mapping[str, str]]:
        if self._http is None:
            headers = {"Authorization": f"Bearer {self.options.key}"} if self.options.key else {}
            self._http = aiohttp.ClientSession(
                headers={**headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=self.options.timeout_s),
                trust_env=False,  # else a login in ~/.netrc would be sent too
            )
        url = f"{self.options.url.rstrip('/')}/chat/completions"
        async with self._http.post(url, data=json.dumps(body).encode(), allow_redirects=False, proxy=_proxy(url)) as reply:
            said = bytearray()
            async for piece in reply.content.iter_chunked(1 << 16):
                said += piece
                if len(said) > _ANSWER_BYTES:
                    raise EndpointFailed(f"{url}: an answer of more than {_ANSWER_BYTES} bytes")
            return reply.status, bytes(said), reply.headers


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for an address."""
    place = urlsplit(url)
    return None if proxy_bypass(place.hostname or "") else getproxies().get(place.scheme)


def _function(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _tell(seat: _Seat, messages: Sequence[Message]) -> None:
    """Adds an observation: every call of the last turn gets a result, whatever the world made of it."""
    owed, rest = list(seat.owed), []
    for message in messages:
        if message.role == "tool" and owed:
            seat.messages.append({"role": "tool", "tool_call_id": owed.pop(0), "content": message.content})
        elif message.role == "tool" and seat.reads_all:
            rest.append({"role": "tool", "tool_call_id": "none", "content": message.content})
        else:
            rest.append({"role": "user" if message.role == "tool" else message.role, "content": message.content})
    seat.messages += [{"role": "tool", "tool_call_id": name, "content": ""} for name in owed]
    seat.messages += rest
    seat.owed = []


def read_answer(answer: Mapping[str, Any], tools: Sequence[ToolSpec], unread: str = "") -> tuple[Message, dict[str, Any]]:
    """(the turn, the message that goes back with the next request). Args: unread: what the endpoint found wrong with it.

    Raises EndpointFailed for an answer in another shape.
    """
    try:
        choice = answer["choices"][0]
        said = choice["message"]
        content = said.get("content") or said.get("refusal") or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        raw = [(str(c["id"]), str(c["function"]["name"]), c["function"].get("arguments")) for c in said.get("tool_calls") or ()]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise EndpointFailed(f"the answer is no chat completion: {error!r}: {json.dumps(answer)[:200]}") from None
    cut = "the turn did not end within its token budget" if choice.get("finish_reason") == "length" else ""
    error, calls = unread or cut, list[ToolCall]()
    known = {tool.name for tool in tools}
    for name_of_call, name, arguments in raw:
        given = arguments if isinstance(arguments, dict) else _object(arguments or "{}")
        if given is None:
            error = error or f"the arguments of {name!r} are no JSON object"
        elif name not in known:
            error = error or f"no tool {name!r}; there are {', '.join(sorted(known))}"
        else:
            calls.append(ToolCall(name, given, name_of_call))
    if error:  # a call that cannot be read goes back as the text that it is
        text = "\n".join([*([text] if text else []), *(f"{name} {arguments}" for _, name, arguments in raw)])
        return Message("assistant", text, error=error), {"role": "assistant", "content": text}
    told: dict[str, Any] = {"role": "assistant", "content": text}
    if raw:
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": one} for call, one in zip(calls, functions, strict=True)
        ]
    return Message("assistant", text, str(said.get("reasoning_content") or ""), tuple(calls)), told


def _object(said: str | bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(said)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _complaint(said: bytes) -> str:
    found = _object(said) or {}
    error = found.get("error", found)
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or said.decode(errors="replace"))[:300].strip() or "it says nothing"


def _says_too_long(said: bytes) -> bool:
    error = (_object(said) or {}).get("error")
    code = error.get("code") if isinstance(error, dict) else ""
    return code == "context_length_exceeded" or "maximum context length" in _complaint(said)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    return 0.0
