"""The door as a server: HTTP in front of sessions, in the dialects of OpenAI and Anthropic. No JAX: a sampler stands behind it.

    GET  /v1/models  /v1/models/NAME  /health
    POST /v1/chat/completions  /v1/completions  /v1/responses  /v1/messages

Answers stream as they are sampled where `stream` is true. A fault has the shape of its dialect and a code that says what it is.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import signal
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web

from jaxagent.door import anthropic_messages, chat_completions, responses
from jaxagent.door.ask import Answer, Ask, Event, Refused
from jaxagent.door.session import Asked, Rules, Session, Slots, ended_from_outside
from jaxagent.types import Message

LOOPBACK = ("127.0.0.1", "localhost", "::1")
RESPONSES = 1000  # answers of /v1/responses of a session that `previous_response_id` finds


@dataclass(frozen=True)
class ServeLimits:
    """What a server takes on at once, and how long a request may take."""

    requests: int = 64
    body_bytes: int = 8 << 20
    deadline_s: float = 600.0


@dataclass(frozen=True)
class Dialect:
    """One endpoint. Args: read: a body and the session to a request. shape: what writes its answers."""

    read: Callable[[Any, Session], Ask]
    shape: type[chat_completions.Completions] | type[responses.Responses] | type[anthropic_messages.AnthropicMessages]
    error: Callable[[Refused], dict[str, Any]]


class Server:
    """Serves sessions, each to who knows its token."""

    def __init__(self, slots: Slots, model: str, limits: ServeLimits, *, any_model: bool = False, origin: bool = False):
        """Args: any_model: programs may name the model as they like. origin: whether pages of a browser may ask."""
        self.slots, self.model, self.limits, self.any_model, self.origin = slots, model, limits, any_model, origin
        self.sessions: dict[str, Session] = {}
        self.open: Session | None = None  # of who brings no token
        self._busy = 0
        app = web.Application(client_max_size=limits.body_bytes, middlewares=[self._guard])
        chat, claude = chat_completions, anthropic_messages
        dialects = {
            "/v1/chat/completions": Dialect(lambda raw, _: chat.read_chat(raw), chat.Completions, chat.error),
            "/v1/completions": Dialect(self._read_completion, chat.Completions, chat.error),
            "/v1/responses": Dialect(self._read_response, responses.Responses, chat.error),
            "/v1/messages": Dialect(lambda raw, _: claude.read_messages(raw), claude.AnthropicMessages, claude.error),
        }
        for path, dialect in dialects.items():
            app.router.add_post(path, partial(self._answer, dialect))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listens; returns the server's address."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        found = self._runner.addresses[0]
        return f"http://{f'[{found[0]}]' if ':' in found[0] else found[0]}:{found[1]}"

    async def stop(self) -> None:
        """Ends all sessions and listens no more."""
        for session in [*self.sessions.values(), *([self.open] if self.open else [])]:
            session.close()
        await self._runner.cleanup()

    # ------------------------------------------------------------------ who asks

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        error = anthropic_messages.error if request.path == "/v1/messages" else chat_completions.error
        try:
            return await handler(request)
        except Refused as refused:
            found = refused
        except web.HTTPRequestEntityTooLarge:
            found = Refused(f"the body has more than {self.limits.body_bytes} bytes", status=413, code="too_large")
        except web.HTTPException as fault:
            found = Refused(f"{request.method} {request.path}: {fault.reason}", status=fault.status, code="unknown_url")
        except TimeoutError:
            found = Refused(f"no answer within {self.limits.deadline_s:g} s", status=504, code="timeout")
        except (RuntimeError, asyncio.CancelledError) as fault:
            if ended_from_outside(fault):
                raise
            found = Refused(f"nothing is sampled: {fault}", status=503, code="unavailable")
        return web.json_response(error(found), status=found.status)

    def _session(self, request: web.Request) -> Session:
        """Whose request it is. Raises Refused."""
        if not self.origin and "Origin" in request.headers:
            raise Refused("pages of a browser may not ask here", status=403, code="origin")
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        found = [session for token, session in self.sessions.items() if hmac.compare_digest(token.encode(), given.encode())]
        if found:
            return found[0]
        if self.open is None:
            raise Refused("wanted Authorization: Bearer with this server's token", status=401, code="invalid_api_key")
        if request.host.rpartition(":")[0].strip("[]") not in LOOPBACK and request.host not in LOOPBACK:
            raise Refused(f"this server has no token and answers to loopback alone, not to {request.host}", status=403)
        return self.open

    # ------------------------------------------------------------------ what is asked

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "jaxagent"}
        if name := request.match_info.get("name"):
            self._want_model(name)
            return web.json_response(model)
        return web.json_response({"object": "list", "data": [model]})

    def _want_model(self, name: Any) -> None:
        if not self.any_model and name != self.model:
            raise Refused(f"the model here is {self.model!r}, not {name!r}", status=404, param="model", code="model_not_found")

    def _read_completion(self, raw: Any, session: Session) -> Ask:
        return chat_completions.read_completion(raw, self.slots.template.raw)

    def _read_response(self, raw: Any, session: Session) -> Ask:
        before: tuple[Message, ...] = ()
        if isinstance(raw, dict) and (name := raw.get("previous_response_id")):
            if str(name) not in session.responses:
                text = f"previous_response_id {name!r} is not known here"
                raise Refused(text, status=404, param="previous_response_id", code="not_found")
            before = session.responses[str(name)]
        return responses.read_response(raw, before)

    # ------------------------------------------------------------------ answers

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        if self._busy >= self.limits.requests:
            text = f"{self.limits.requests} requests are being answered already"
            raise Refused(text, status=429, code="rate_limit_exceeded")
        self._busy += 1
        try:
            async with asyncio.timeout(self.limits.deadline_s) as limit:
                body = await request.read()
            with session.asked(request.path, body) as asked:
                async with asyncio.timeout_at(limit.when()):
                    return await self._answer_to(dialect, request, session, body, asked)
        finally:
            self._busy -= 1

    async def _answer_to(
        self, dialect: Dialect, request: web.Request, session: Session, body: bytes, asked: Asked
    ) -> web.StreamResponse:
        try:
            raw = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused("the body is not JSON") from None
        ask = dialect.read(raw, session)
        self._want_model(raw.get("model"))
        name = secrets.token_hex(12)
        shape = dialect.shape(ask, name, self.model if not self.any_model else str(raw.get("model")), self.slots.pieces)
        if ask.stream:
            return await self._stream(dialect, request, session, ask, asked, shape)
        answers = await session.complete(ask)
        session.answered(asked)
        self._keep(session, ask, answers, shape)
        return web.json_response(shape.whole(answers), headers=_notes(answers[0]))

    async def _stream(
        self, dialect: Dialect, request: web.Request, session: Session, ask: Ask, asked: Asked, shape: Any
    ) -> web.StreamResponse:
        """Events as they become certain. A request that is refused is refused before any."""
        news: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        work = asyncio.ensure_future(session.complete(ask, lambda i, text: news.put_nowait((i, text))))
        work.add_done_callback(lambda _: news.put_nowait(None))
        reply: web.StreamResponse | None = None
        try:
            first = await news.get()
            if first is None:
                await work  # raises what it was refused with
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await reply.prepare(request)
            await _send(reply, shape.begin())
            while first is not None:
                await _send(reply, shape.more(*first))
                first = await news.get()
            answers = await work
            session.answered(asked)
            self._keep(session, ask, answers, shape)
            await _send(reply, shape.end(answers))
        except (Refused, TimeoutError, RuntimeError, asyncio.CancelledError) as fault:
            if ended_from_outside(fault) and reply is not None and request.transport is not None:
                request.transport.close()  # half a stream must not look like a whole one
            if reply is None or ended_from_outside(fault):
                raise
            told = fault if isinstance(fault, Refused) else Refused(f"nothing more is sampled: {fault}", status=503)
            session.faulted(asked, fault)
            await _send(reply, [Event(dialect.error(told), "error")])
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if shape.ends:
            await reply.write(f"data: {shape.ends}\n\n".encode())
        await reply.write_eof()
        return reply

    def _keep(self, session: Session, ask: Ask, answers: Sequence[Answer], shape: Any) -> None:
        """Keeps an answer of /v1/responses with what it answers, for `previous_response_id`."""
        if isinstance(shape, responses.Responses):
            session.responses[str(shape.head["id"])] = (*ask.messages[ask.own :], answers[0].message)
            while len(session.responses) > RESPONSES:
                del session.responses[next(iter(session.responses))]


def _notes(answer: Answer) -> dict[str, str]:
    """What no dialect has a field for: that turns were encoded anew, and what was wrong with a turn that could not be read."""
    unread = {"X-Unread": quote(answer.message.error[:500])} if answer.message.error else {}
    return {"X-Retokenised": "true", **unread} if answer.retokenised else unread


async def _send(reply: web.StreamResponse, events: Any) -> None:
    for event in events:
        head = f"event: {event.name}\n" if event.name else ""
        await reply.write(f"{head}data: {json.dumps(event.data, ensure_ascii=False)}\n\n".encode())


def token_in(path: str) -> str:
    """The bearer token in a file, made (mode 0600) where it is missing. Raises ValueError where others could know it."""
    file = Path(path)
    try:
        if not file.exists():
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                opened.write(secrets.token_hex(32) + "\n")
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"--token-file={path}: others may read it; chmod 600 it")
        token = file.read_text().strip()
    except OSError as error:
        raise ValueError(f"--token-file={path}: {error.strerror}") from None
    if len(token) < 16:
        raise ValueError(f"--token-file={path}: a token of at least 16 characters is wanted; remove the file to have one made")
    return token


@dataclass(frozen=True)
class Address:
    """Where a server listens and who may ask: without a token file, programs of this machine."""

    host: str = "127.0.0.1"
    port: int = 8000
    token_file: str = ""


def run(slots: Slots, rules: Rules, model: str, limits: ServeLimits, at: Address) -> int:
    """Serves until SIGINT or SIGTERM. Raises ValueError for an address that strangers could use."""
    if at.host not in LOOPBACK and not at.token_file:
        raise ValueError(f"--host={at.host} is not loopback: give --token-file, and TLS by a proxy in front")
    token = token_in(at.token_file) if at.token_file else ""
    try:
        asyncio.run(_serve(slots, rules, model, limits, (at, token)))
    except OSError as error:
        raise ValueError(f"--host={at.host} --port={at.port}: {error.strerror or error}") from None
    return 0


async def _serve(slots: Slots, rules: Rules, model: str, limits: ServeLimits, door: tuple[Address, str]) -> None:
    server, (at, token), ended = Server(slots, model, limits), door, asyncio.Event()
    session = Session(f"serve.{secrets.token_hex(4)}", slots, rules)
    if token:
        server.sessions[token] = session
    else:
        server.open = session
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        url = await server.start(at.host, at.port)
        print(json.dumps({"ready": True, "url": f"{url}/v1", "model": model, "token_file": at.token_file or None}), flush=True)
        await ended.wait()
    finally:
        await server.stop()
