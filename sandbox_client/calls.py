"""One operation's way to a server and back: deadline, attempts, backoff, hedges, and what it means when it fails.

What may be sent again is the request's to say (`Safety`), and a request that may have begun is sent again only where that
cannot run it twice. Waiting is bounded everywhere by the operation's one deadline, on the monotonic clock.
"""

import asyncio
import contextlib
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from . import wire
from .breaker import Hedges
from .endpoints import Endpoint, choose
from .limits import Window
from .tokens import Token
from .transport import BadReply, NotSent, Reply, ReplyLost, Request, Safety, Socket, Transport
from .wire import (
    Cancelled,
    CodeRefused,
    InfrastructureError,
    Overloaded,
    ProtocolError,
    RequestRefused,
    SessionLost,
    Unknown,
    Unreachable,
)

T = TypeVar("T")

_BACKOFF_S, _BACKOFF_MAX_S = 0.05, 2.0
_LEAST_S = 0.01  # a further attempt with less time is not begun: cut off, nobody would know whether it was carried out
_BUSY_S, _BUSY_TIMES = 0.25, 4
_CONNECT_S = 5.0
_TAKE_BACK_S = 2.0
_ASK_S = 0.25  # at most between two questions after a call that is being carried out
_NO_WINDOW = contextlib.nullcontext()  # one endpoint's own window is as wide


@dataclass(frozen=True, slots=True)
class Again:
    """A reply that decides nothing: what it would mean if no better one comes, and when to ask again."""

    kind: type[InfrastructureError]
    text: str
    least_s: float = 0.0
    times: int | None = None  # at most so many more attempts


class _NotNow(Exception):
    """The endpoint's breaker opened while the call waited for its turn."""


class Call:
    """One operation: its deadline, its history, and the endpoint it is bound to, if any."""

    def __init__(
        self, caller: "Caller", what: str, timeout_s: float, route: str = "", endpoint: Endpoint | None = None
    ) -> None:
        """Args: route: what decides the endpoint where none is given: the trajectory, or anything for a stateless call."""
        self.caller, self.what, self.route, self.endpoint = caller, what, route, endpoint
        self.id = secrets.token_hex(8)
        self.deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self.movable = False  # it gives an endpoint up that stays out of reach, so that it can be made again at another
        self.avoided: list[Endpoint] = []  # given up
        self.count = self.asks = 0
        self.sent = False
        self.answered_by: Endpoint | None = None
        self.unanswered: set[Endpoint] = set()  # where the request under way may be, with nobody waiting for it
        self.last: tuple[type[InfrastructureError], str] = (Unreachable, "the deadline passed before the first attempt")

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def late(self) -> bool:
        """Whether more than half of its time is over."""
        return self.left_s < self._timeout_s / 2

    @property
    def attempts(self) -> int:
        """How often the request that took the most was sent: an operation of several requests is one attempt."""
        return self.count - max(0, self.asks - 1)

    async def ask(self, request: Request) -> Reply:
        """Returns a reply that the adapter's judge accepts. Raises InfrastructureError or RequestRefused."""
        self.asks += 1
        return await self.caller.ask(self, request)

    async def json(self, request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
        """Returns the parsed JSON reply; one that is against its schema raises ProtocolError."""
        reply = await self.ask(request)
        return self.parsed(lambda: parse(wire.decode(reply.body, unique=True)))

    async def connect(self, url: str, headers: dict[str, str], max_bytes: int = wire.REPLY_MAX_BYTES) -> Socket:
        """Returns an open WebSocket."""
        self.asks += 1
        return await self.caller.connect(self, url, headers, max_bytes)

    def parsed(self, parse: Callable[[], T]) -> T:
        """Returns what `parse` makes of a reply, a ValueError or KeyError becoming a ProtocolError."""
        try:
            return parse()
        except (ValueError, KeyError, RecursionError) as error:
            raise ProtocolError(f"{self.what}: {error}", self.attempts, may_have_executed=True) from None

    def failure(self) -> InfrastructureError:
        """Returns the error of a call whose time is over."""
        kind, text = self.last
        if self.sent and kind is not ProtocolError:
            kind = Unknown  # an earlier attempt may have arrived
        return kind(f"{self.what}: {text}", self.attempts, self.sent)

    def lost(self, text: str, by_program: bool = False, began: bool = False) -> SessionLost:
        """Returns the error of a call whose session is gone; `began`: while this call was carried out."""
        return SessionLost(f"{self.what}: {text}", self.attempts, self.sent or began, by_program)

    def again(self, error: InfrastructureError) -> None:
        """Takes over an attempt that the adapter made by itself, over a socket."""
        self.sent = self.sent or error.may_have_executed
        self.last = type(error), str(error)


Judge = Callable[[Call, Reply], Again | None]


class Caller:
    """The client's engine: all calls of all sessions pass here."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        token: Token,
        headers: Callable[[str], dict[str, str]],
        judge: Judge,
        make_transport: Callable[[int], Transport],
        max_connections: int,
    ) -> None:
        """Args: headers: from the token to what goes with every request; judge: what a reply's status means."""
        self.endpoints = list(endpoints)
        self._token, self._headers, self._judge = token, headers, judge
        self._make_transport, self._max_connections = make_transport, max_connections
        self._all = Window(max_connections)
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[asyncio.Task[Any], int] = {}
        self._loose: set[asyncio.Task[Any]] = set()
        self._drained: asyncio.Future[None] | None = None
        self.hedges = Hedges()
        self.closed = False
        self.counts: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    @contextlib.asynccontextmanager
    async def running(self, call: Call) -> AsyncIterator[None]:
        """Around a whole operation: closing the client ends it with Cancelled."""
        task = asyncio.current_task()
        assert task is not None
        self._opened()
        self._tasks[task] = self._tasks.get(task, 0) + 1
        try:
            yield
        except asyncio.CancelledError:
            if self.closed and not task.cancelling() > 1:
                task.uncancel()
                raise Cancelled(f"{call.what}: the client was closed", call.attempts, call.count > 0) from None
            raise
        except InfrastructureError as error:
            self.counts["failures"] += 1
            self.counts["may_have_executed"] += error.may_have_executed
            raise
        finally:
            self._tasks[task] -= 1
            if not self._tasks[task]:
                del self._tasks[task]
            if self._drained and not self._tasks and not self._drained.done():
                self._drained.set_result(None)

    def loose(self, work: Any) -> None:
        """Runs a coroutine for its effect alone; close() waits for it or ends it."""
        task = asyncio.ensure_future(work)
        self._loose.add(task)
        task.add_done_callback(self._loosed)

    def _loosed(self, task: "asyncio.Task[Any]") -> None:
        self._loose.discard(task)
        if not task.cancelled():
            task.exception()  # best effort: nobody asks

    async def close(self, patience_s: float = 1.0) -> None:
        """Ends what is in flight with Cancelled and closes the connections."""
        self.closed = True
        mine = asyncio.current_task()
        others = [task for task in self._tasks if task is not mine]
        if others:
            self._drained = asyncio.get_running_loop().create_future()
            for task in others:
                task.cancel()
            await self._drained
        if self._loose:
            _, late = await asyncio.wait(self._loose, timeout=patience_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._transport:
            await self._transport.close()
            self._transport = None

    def _opened(self) -> Transport:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError("this SandboxClient was first used in another event loop: make one client per loop")
        if self.closed and self._transport is None:
            raise Cancelled("the client is closed")
        if self._transport is None:
            self._loop = loop
            self._transport = self._make_transport(self._max_connections)
        return self._transport

    def _leaves(self, call: Call, endpoint: Endpoint, tried: Sequence[Endpoint]) -> bool:
        """Gives `endpoint` up for a call that can move, where it stays out of reach and another server does not."""
        others = [one for one in self.endpoints if one is not endpoint and one not in call.avoided]
        if not call.movable or not any(one.breaker.admits_in_s() == 0 for one in others):
            return False
        away = endpoint.breaker.admits_in_s() > 0
        if away and not call.count:
            call.last = Unreachable, f"{endpoint.url} does not answer"
        if away or (call.late and endpoint in tried and call.last[0] is Unreachable):
            call.avoided.append(endpoint)
            return True
        return False

    def repeatable(self, request: Request, endpoint: Endpoint | None) -> bool:
        """Returns whether a request that may have begun at `endpoint` may be sent there again."""
        if request.safety is Safety.KEYED:
            return endpoint is not None and endpoint.remembers
        return request.safety is not Safety.ONCE

    async def ask(self, call: Call, request: Request) -> Reply:
        """Returns a reply that the judge accepts, retrying until the deadline. What may go on unheeded is taken back."""
        call.unanswered.clear()
        try:
            return await self._asked(call, request)
        finally:
            for endpoint in call.unanswered:
                if request.fate and endpoint.tells:
                    self.loose(self._take_back(request, endpoint))

    async def _take_back(self, request: Request, endpoint: Endpoint) -> None:
        call = Call(self, "taking back a call", _TAKE_BACK_S, endpoint=endpoint)
        with contextlib.suppress(InfrastructureError, RequestRefused):
            await self.ask(call, Request("DELETE", request.fate, answer_s=_TAKE_BACK_S / 2))

    async def _asked(self, call: Call, request: Request) -> Reply:
        wait_s, tried, more = _BACKOFF_S, list(call.avoided), -1
        while call.left_s > 0 and more != 0:
            endpoint = call.endpoint or choose(call.route, self.endpoints, tried)
            if self._leaves(call, endpoint, tried):
                break
            least_s = endpoint.breaker.admits_in_s()
            if least_s == 0:
                # where the request may have arrived, the server is asked about it and not to carry it out
                doubted = endpoint in call.unanswered and endpoint.tells and request.fate
                attempt = request.inquiry() if doubted else request
                try:
                    verdict = await self._tried(call, attempt, endpoint)
                except _NotNow:
                    continue
                if isinstance(verdict, Reply):
                    if attempt is request:
                        return verdict  # a hedge may have given it: then `endpoint` still owes its own
                    if verdict.status != 202:
                        call.unanswered.discard(endpoint)
                    if verdict.status == 200:
                        return verdict
                    if verdict.status == 404:  # it never came
                        continue
                    verdict, wait_s = Again(Unknown, "it is still being carried out"), min(wait_s, _ASK_S)
                tried.append(endpoint)
                call.last, least_s = (verdict.kind, verdict.text), verdict.least_s
                more = more - 1 if more > 0 else -1 if verdict.times is None else verdict.times
                if verdict.kind is Unknown:
                    call.sent = True
                    if not self.repeatable(request, endpoint):
                        break
                    if request.safety is Safety.KEYED:
                        call.endpoint = endpoint  # only this one remembers
            pause_s = max(least_s, random.uniform(0, wait_s))  # full jitter: a herd spreads out
            if call.endpoint is None and any(e not in tried and not e.breaker.admits_in_s() for e in self.endpoints):
                pause_s = 0.0  # another endpoint first
            if pause_s + _LEAST_S >= call.left_s:
                break
            await asyncio.sleep(pause_s)
            if call.left_s < _LEAST_S:  # woken late
                break
            wait_s = min(2 * wait_s, _BACKOFF_MAX_S)
        raise call.failure()

    async def _tried(self, call: Call, request: Request, endpoint: Endpoint) -> Reply | Again:
        """Returns one attempt's good reply, or what speaks for another attempt. Raises what is final."""
        delay_s = self.hedges.begin() if request.safety is Safety.PURE else None
        try:
            if delay_s is None:
                reply = await self._attempt(call, request, endpoint)
            else:
                reply = await self._hedged(call, request, endpoint, delay_s)
        except NotSent as error:
            return Again(Unreachable, str(error))
        except ReplyLost as error:
            return Again(Unknown, str(error))
        except BadReply as error:
            raise ProtocolError(f"{call.what}: {error}", call.attempts, may_have_executed=True) from None
        return reply if reply.status in request.expect else self._judge(call, reply) or reply

    async def _hedged(self, call: Call, request: Request, endpoint: Endpoint, delay_s: float) -> Reply:
        """Returns the first good reply of the call and, where it is late, of a second sending. The loser is cancelled."""
        tasks = {asyncio.create_task(self._attempt(call, request, endpoint))}
        try:
            done, _ = await asyncio.wait(tasks, timeout=delay_s)
            if not done and self.hedges.take():
                self.counts["hedges"] += 1
                other = choose(call.route, self.endpoints, [endpoint])
                tasks.add(asyncio.create_task(self._attempt(call, request, other)))
            pending = tasks
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not pending or (task.exception() is None and task.result().status < 300):
                        return task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _attempt(self, call: Call, request: Request, endpoint: Endpoint) -> Reply:
        """One exchange, in its turn. Raises NotSent, ReplyLost, BadReply, Overloaded (of our own queue)."""
        try:
            alone = len(self.endpoints) == 1 and endpoint is self.endpoints[0]
            outer = _NO_WINDOW if alone else self._all.enter(call.left_s)
            async with outer, endpoint.window.enter(call.left_s):
                if endpoint.breaker.admits_in_s() > 0:
                    raise _NotNow
                token, generation = await self._credentials(call)
                reply = await self._sent(call, request, endpoint, token)
                if reply.status == 401 and not request.own_credentials:
                    token, newer = await self._credentials(call, generation)
                    if newer != generation:  # it was refused before anything was done: once more with the fresh token
                        reply = await self._sent(call, request, endpoint, token)
                return reply
        except TimeoutError:
            if call.sent:
                raise call.failure() from None
            text = f"{endpoint.window.in_flight} calls were before it at {endpoint.url}"
            raise Overloaded(f"{call.what}: {text}", call.attempts, call.sent) from None

    async def _credentials(self, call: Call, stale: int = -1) -> tuple[str, int]:
        if (known := self._token.known) is not None:
            return known, 0
        try:
            async with asyncio.timeout(call.left_s):
                return await self._token.get(stale)
        except InfrastructureError:
            raise
        except Exception as error:  # the provider is the user's: whatever it raises, the call was not sent
            raise Unreachable(f"{call.what}: no token: {type(error).__name__}: {error}", call.attempts, call.sent) from error

    async def _sent(self, call: Call, request: Request, endpoint: Endpoint, token: str) -> Reply:
        call.count += 1
        self.counts["attempts"] += 1
        timeout_s = max(0.001, call.left_s)
        own = {} if request.own_credentials else self._headers(token)
        headers = {
            **own,
            "X-Deadline-Ms": str(int(timeout_s * 1000)),
            wire.CALL_ID: f"{call.id}.{call.count}",
            **request.headers,
        }
        url = request.url if "://" in request.url else endpoint.url + request.url
        if request.answer_s is not None and self.repeatable(request, endpoint):
            timeout_s = min(timeout_s, request.answer_s)
        breaker, window, start = endpoint.breaker, endpoint.window, time.monotonic()
        probe = breaker.begin()
        if request.fate:
            call.unanswered.add(endpoint)
        try:
            reply = await self._opened().send(request, url, headers, timeout_s)
            if request.fate and reply.status not in wire.WRECKED:
                call.unanswered.discard(endpoint)
        except (NotSent, ReplyLost, BadReply) as error:
            if isinstance(error, NotSent):
                call.unanswered.discard(endpoint)
            breaker.failed(time.monotonic() - start)
            raise
        finally:
            breaker.end(probe)
        seconds = time.monotonic() - start
        if reply.status in wire.WRECKED:
            breaker.failed(seconds)
        elif reply.status in (429, 503):
            window.refused()
        else:
            breaker.succeeded(seconds)
            window.succeeded()
            if request.safety is Safety.PURE:
                self.hedges.answered(seconds)
        endpoint.remembers = endpoint.remembers or wire.WIRE_HEADER in reply.headers
        if not endpoint.tells:
            told = reply.headers.get(wire.WIRE_HEADER, "")
            endpoint.tells = told.isdigit() and int(told) >= wire.WIRE_TELLS
        echoed = wire.CALL_ID in reply.headers or wire.CALL_ID.lower() in reply.headers
        if endpoint.echoes and not echoed and reply.status < 300:
            raise BadReply(f"a reply without {wire.CALL_ID} from a server that sends it")
        endpoint.echoes = endpoint.echoes or echoed
        call.answered_by = endpoint
        return reply

    async def connect(self, call: Call, url: str, headers: dict[str, str], max_bytes: int) -> Socket:
        """Returns an open WebSocket to the endpoint of `call`, trying until the deadline."""
        wait_s, tried = _BACKOFF_S, list(call.avoided)
        while call.left_s > 0:
            endpoint = call.endpoint or choose(call.route, self.endpoints, tried)
            if self._leaves(call, endpoint, tried):
                break
            pause_s = endpoint.breaker.admits_in_s()
            if pause_s == 0:
                tried.append(endpoint)
                token, _ = await self._credentials(call)
                call.count += 1
                self.counts["attempts"] += 1
                probe = endpoint.breaker.begin()
                address = (endpoint.url + url).replace("http", "ws", 1)
                try:
                    socket = await self._opened().connect(
                        address, {**self._headers(token), **headers}, min(_CONNECT_S, max(0.001, call.left_s)), max_bytes
                    )
                except NotSent as error:
                    endpoint.breaker.failed()
                    call.last = Unreachable, str(error)
                    pause_s = random.uniform(0, wait_s)
                else:
                    endpoint.breaker.succeeded(0.0)
                    call.answered_by = endpoint
                    return socket
                finally:
                    endpoint.breaker.end(probe)
            if pause_s >= call.left_s:
                break
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, _BACKOFF_MAX_S)
        raise call.failure()


def error_of(reply: Reply) -> dict[str, Any]:
    """Returns the `error` object of a refusal in our own words, {} for any other body."""
    try:
        error = wire.decode(reply.body).get("error")
    except ValueError:
        return {}
    return error if isinstance(error, dict) else {}


def retry_after_s(reply: Reply) -> float:
    """Returns what Retry-After asks for, 0 for a date or nonsense: then our own backoff decides."""
    try:
        wanted = float(reply.headers.get("Retry-After") or reply.headers.get("retry-after") or "0")
    except ValueError:
        return 0.0
    return wanted if wanted > 0 else 0.0


def judge(call: Call, reply: Reply) -> Again | None:
    """What a status means where a service has no words of its own: None is a good reply. Raises what is final."""
    status = reply.status
    if 200 <= status < 300:
        return None
    error = error_of(reply)
    code, text = str(error.get("code")), str(error.get("message") or f"HTTP status {status}")
    if status in (429, 503):
        return Again(Overloaded, text, retry_after_s(reply))
    if status in wire.WRECKED:
        return Again(Unknown, text, retry_after_s(reply))
    if status == 409 and code in ("None", "busy", "session_busy"):
        return Again(Overloaded, text, _BUSY_S * random.uniform(0.5, 1.5), times=_BUSY_TIMES)
    if status == 410 or (status == 404 and code in ("None", "sandbox_not_found")):
        raise call.lost(text, error.get("caused_by_program") is True, error.get("began") is True)
    remedy = error.get("remedy")
    refusal = CodeRefused if code == "code_refused" else RequestRefused
    raise refusal(code, text, remedy if isinstance(remedy, str) else None)
