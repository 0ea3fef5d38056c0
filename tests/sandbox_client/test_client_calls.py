"""A call and its server afterwards: whose reply it is, what became of it, and that what nobody waits for is ended."""

import asyncio
import dataclasses
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ask, raw
from launching import Running

from sandbox_client import AiohttpTransport, EmbeddedServer, Outcome, Program, Reply, Request, SandboxClient, Unknown, wire
from sandbox_client.calls import Call
from sandbox_client.endpoints import ranked
from sandbox_client.transport import ReplyLost


class Deaf(AiohttpTransport):
    """Loses the replies to as many POSTs below a path as it is told, after the server has begun them, and counts requests."""

    path, losses, after_s = "/", 0, 0.0
    seen: list[str]

    async def send(self, request: Request, url: str, headers: dict[str, str], timeout_s: float) -> Reply:
        self.seen.append(f"{request.method} {url.partition('//')[2].partition('/')[2].partition('/exec/')[0]}")
        if request.method == "POST" and self.losses and self.path in url:
            self.losses -= 1
            sending = asyncio.ensure_future(super().send(request, url, headers, timeout_s))
            await asyncio.wait([sending], timeout=self.after_s)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            raise ReplyLost("lost by the test")
        return await super().send(request, url, headers, timeout_s)


def deafly(running: Running, questions: Callable[[SandboxClient, Deaf], Awaitable[Any]]) -> Any:
    """Runs `questions` with a client whose transport is Deaf."""

    async def session() -> Any:
        made: list[Deaf] = []

        def make(most: int) -> Deaf:
            made.append(Deaf(most))
            made[0].seen = []
            return made[0]

        async with SandboxClient(running.url, running.token, make_transport=make) as client:
            await client.ready()  # from which it learns what the server announces
            return await questions(client, made[0])

    return asyncio.run(session())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/run_code", 200), ("GET", "/readyz", 200), ("POST", "/v1/sessions/no/exec", 410), ("GET", "/v1/exec/x", 404)],
)
def test_every_reply_names_the_call_that_it_answers(server: Running, method: str, path: str, status: int) -> None:
    body = {"code": "1", "language": "python"} if path == "/run_code" else {} if method == "POST" else None
    got, _, headers = asyncio.run(raw(server, method, path, body, {wire.CALL_ID: "abc.7"}))
    assert (got, headers["x-call-id"]) == (status, "abc.7")
    assert "x-call-id" not in asyncio.run(raw(server, method, path, body))[2]
    if status == 200:
        stranger = Running(server.process, server.ready, "not the token")
        assert asyncio.run(raw(stranger, method, path, body, {wire.CALL_ID: "abc.8"}))[2]["x-call-id"] == "abc.8"


def test_the_client_holds_the_server_to_naming_its_calls(server: Running) -> None:
    async def learn(client: SandboxClient) -> bool:
        await client.ready()
        return client._caller.endpoints[0].echoes and client._caller.endpoints[0].tells

    assert ask(server, learn)


def test_what_became_of_a_run_is_its_reply_or_that_it_goes_on_or_that_it_never_came(server: Running) -> None:
    async def tell() -> None:
        head = {"code": "import time; time.sleep(0.4); print('slept')", "language": "python", "key": "fate/of it"}
        fate = "/v1/exec/fate%2Fof%20it"
        assert (await raw(server, "GET", fate))[0] == 404
        running = asyncio.create_task(raw(server, "POST", "/run_code", head))
        await asyncio.sleep(0.1)
        assert (await raw(server, "GET", fate))[:2] == (202, {"state": "running"})
        _, reply, _ = await running
        assert reply["run_result"]["stdout"] == "slept\n"
        assert (await raw(server, "GET", fate))[:2] == (200, reply)
        assert (await raw(server, "DELETE", fate))[1] == {"state": "done"}
        assert (await raw(Running(server.process, server.ready, "not the token"), "GET", fate))[0] == 401

    asyncio.run(tell())


def test_a_run_that_is_taken_back_is_killed_and_frees_its_place(server: Running) -> None:
    async def end() -> None:
        head = {"code": "while True: pass", "language": "python", "run_timeout": 30, "key": "taken back"}
        running = asyncio.create_task(raw(server, "POST", "/run_code", head))
        await _until_programs_run(server, 1)
        start = time.monotonic()
        assert (await raw(server, "DELETE", "/v1/exec/taken%20back"))[1] == {"state": "cancelled"}
        status, reply, _ = await running
        assert time.monotonic() - start < 5
        assert (status, reply["error"]["code"]) == (503, "cancelled")
        assert (await raw(server, "GET", "/v1/exec/taken%20back"))[0] == 404
        assert (await raw(server, "DELETE", "/v1/exec/never came"))[1] == {"state": "cancelled"}
        status, reply, _ = await raw(server, "POST", "/run_code", {**head, "code": "1", "key": "never came"})
        assert (status, reply["error"]["code"]) == (503, "cancelled")
        await _until_programs_run(server, 0)

    asyncio.run(end())


def test_runs_that_are_taken_back_at_any_moment_leave_every_place_free(server: Running) -> None:
    async def end() -> None:
        def head(key: str) -> dict[str, Any]:
            return {"code": "import time; time.sleep(20)", "language": "python", "run_timeout": 30, "key": key}

        keys = [f"any-moment-{n}" for n in range(24)]
        runs = [asyncio.create_task(raw(server, "POST", "/run_code", head(key))) for key in keys]
        start = time.monotonic()
        for key in keys:
            await raw(server, "DELETE", f"/v1/exec/{key}")
            await asyncio.sleep(0.005)
        replies = await asyncio.gather(*runs)
        assert time.monotonic() - start < 10
        assert {(status, reply["error"]["code"]) for status, reply, _ in replies} == {(503, "cancelled")}
        await _until_programs_run(server, 0)

    asyncio.run(end())
    assert ask(server, lambda client: client.run_code("print(1)")).stdout == "1\n"


def test_an_operation_of_a_session_is_told_and_taken_back_only_before_it_begins(start: Any) -> None:
    running = start("--functions=counting", "--code=off")

    async def tell() -> None:
        _, opened, _ = await raw(running, "POST", "/v1/sessions", {"key": "told", "functions": "counting"})
        path = f"/v1/sessions/{opened['session']}"
        head = {"seq": 1, "name": "sleep", "arguments": {"seconds": 0.4}, "timeout_s": 5}
        first = asyncio.create_task(raw(running, "POST", f"{path}/call", head))
        await asyncio.sleep(0.1)
        add = {"name": "add", "arguments": {}, "timeout_s": 5}
        second = asyncio.create_task(raw(running, "POST", f"{path}/call", {"seq": 2, **add}))
        await asyncio.sleep(0.1)
        assert (await raw(running, "GET", f"{path}/exec/2"))[0] == 202
        assert (await raw(running, "DELETE", f"{path}/exec/1"))[1] == {"state": "running"}
        assert (await raw(running, "DELETE", f"{path}/exec/2"))[1] == {"state": "cancelled"}
        assert (await raw(running, "DELETE", f"{path}/exec/3"))[1] == {"state": "cancelled"}  # its request is on its way
        assert (await first)[1]["outcome"] == "ok"
        assert (await second)[1]["error"]["code"] == "cancelled"
        assert (await raw(running, "GET", f"{path}/exec/1"))[1] == (await first)[1]
        assert (await raw(running, "GET", f"{path}/exec/2"))[0] == 404
        assert (await raw(running, "POST", f"{path}/call", {"seq": 3, **add}))[1]["error"]["code"] == "cancelled"
        status, reply, _ = await raw(running, "POST", f"{path}/call", {"seq": 4, **add})
        assert (status, reply["value"]) == (200, 1)  # neither the second nor the third has counted
        assert (await raw(running, "GET", f"{path}/exec/x"))[0] == 400
        assert (await raw(running, "GET", f"{path}/exec/4", headers={"Authorization": f"Bearer {opened['token']}"}))[0] == 200

    asyncio.run(tell())


def test_a_reply_that_is_lost_is_asked_for_and_the_program_not_sent_again(server: Running) -> None:
    async def lose(client: SandboxClient, transport: Deaf) -> None:
        transport.path, transport.losses, transport.after_s = "/run_code", 1, 0.3
        result = await client.run_code("import time; time.sleep(0.6); print(5)")
        assert (result.outcome, result.stdout) == (Outcome.OK, "5\n")
        assert [seen for seen in transport.seen if "readyz" not in seen][:2] == ["POST run_code", "GET v1"]
        assert transport.seen.count("POST run_code") == 1 and transport.seen.count("GET v1") >= 2

    deafly(server, lose)


def test_a_request_that_never_came_is_sent_again_and_runs_once(start: Any) -> None:
    running = start("--functions=counting", "--code=off")

    async def lose(client: SandboxClient, transport: Deaf) -> None:
        session = await client.open_session("never came", "counting")
        assert (await session.call("add", {})).value == 1
        transport.path, transport.losses, transport.after_s = "/call", 1, 0.0
        assert (await session.call("add", {})).value == 2
        transport.losses, transport.after_s = 1, 1.0  # carried out, and its reply lost
        assert (await session.call("add", {})).value == 3
        assert (await session.call("add", {})).value == 4

    deafly(running, lose)


def test_a_call_that_is_cancelled_or_given_up_is_ended_at_the_server(server: Running) -> None:
    async def cancel(client: SandboxClient, transport: Deaf) -> None:
        call = asyncio.create_task(client.run_code("while True: pass", timeout_s=60.0))
        await _until_programs_run(server, 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await _until_programs_run(server, 0)
        assert "DELETE v1" in transport.seen

    deafly(server, cancel)

    async def give_up(client: SandboxClient, transport: Deaf) -> None:
        program = Program("while True: pass", timeout_s=60.0)
        transport.path, transport.losses, transport.after_s = "/run_code", 1, 0.3
        with pytest.raises(Unknown) as error:
            call = Call(client._caller, "run_code", 1.0)  # the caller's deadline is the short one, not the program's
            async with client._caller.running(call):
                await client.backend.run_code(call, program)
        assert error.value.may_have_executed
        await _until_programs_run(server, 0)

    deafly(server, give_up)


async def _until_programs_run(running: Running, count: int) -> None:
    """Waits until so many programs occupy places of the server's, for less than their own time limits."""
    for _ in range(500):
        if f"sandbox_programs_running {count}\n" in (await raw(running, "GET", "/metrics"))[1]["text"].decode():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not {count} programs within ten seconds")


class Uneven(AiohttpTransport):
    """Makes the program endless at one server."""

    endless_at = "nowhere"

    async def send(self, request: Request, url: str, headers: dict[str, str], timeout_s: float) -> Reply:
        if url.startswith(self.endless_at):
            request = dataclasses.replace(request, body=request.body.replace(b"print(1)", b"while 1: 0"))
        return await super().send(request, url, headers, timeout_s)


def test_a_hedge_s_loser_is_ended_at_its_server(place: Path) -> None:
    async def hedge(one: EmbeddedServer, two: EmbeddedServer) -> None:
        made: list[Uneven] = []

        def make(most: int) -> Uneven:
            made.append(Uneven(most))
            return made[0]

        async with SandboxClient([one.url, two.url], one.token, make_transport=make) as client:
            keys = [secrets.token_hex(8) for _ in range(40)]
            endpoints = client._caller.endpoints
            mine = [key for key in keys if ranked(key, endpoints)[0].url == one.url]
            for key in [next(key for key in keys if key not in mine), *mine[:2]]:  # both servers are known by now
                await client.run(Program("print(1)", pure=True, key=f"{key}"), "tool")
            made[0].endless_at = one.url
            client._caller.hedges.calls = 1000
            for _ in range(60):
                client._caller.hedges.answered(0.2)
            result = await client.run(Program("print(1)", pure=True, key=mine[2], timeout_s=60.0), "tool")
            assert (result.stdout, client.metrics()["client/hedges"]) == ("1\n", 1.0)
            await _until_programs_run(Running(None, {"url": one.url}, one.token), 0)  # type: ignore[arg-type]

    with (
        EmbeddedServer(code="auto", token_file=place / "token") as one,
        EmbeddedServer(code="auto", token_file=place / "token") as two,
    ):
        if not json.loads(one.ready_line)["code"]:
            pytest.skip("no jail here")
        asyncio.run(hedge(one, two))
