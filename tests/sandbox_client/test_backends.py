"""What is peculiar to each service: credentials that stay where they belong, losses that are told apart, late replies."""

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import World, play, until_true, world
from aiohttp import web
from services import agent_sandbox, e2b, openenv, prime, swe_rex
from services.machine import Machine, serving

from sandbox_client import (
    InfrastructureError,
    Outcome,
    Overloaded,
    ProtocolError,
    RequestRefused,
    SandboxClient,
    SessionLost,
    Unknown,
)
from sandbox_client.backends.agent_sandbox import AgentSandbox
from sandbox_client.backends.connect import envelope, read_stream
from sandbox_client.backends.mcp import Mcp
from sandbox_client.backends.openenv import OpenEnv
from sandbox_client.backends.prime import Prime
from sandbox_client.backends.sandbox_fusion import SandboxFusion, parse_run
from sandbox_client.backends.swe_rex import SweRex


def ask(name: str, questions: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), world(name) as made:
            await questions(made)

    asyncio.run(run())


# ====================================================================== all of them


@pytest.mark.parametrize(
    ("name", "path"),
    [("sandbox_fusion", "/run_code"), ("e2b", "/process.Process/Start"), ("agent_sandbox", "/execute")],
)
def test_a_program_whose_reply_is_lost_may_have_run_and_is_not_run_again(name: str, path: str) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), world(name, cut=path) as made:
            code = "open('ran', 'a')"
            with pytest.raises(Unknown) as error:
                await made.run(code)
            assert (error.value.attempts, error.value.may_have_executed) == (1, True)
            assert made.machine is not None and made.machine.executions[code] == 1

    asyncio.run(run())


@pytest.mark.parametrize("name", ["e2b", "agent_sandbox", "swe_rex"])
def test_a_replayable_session_can_be_reset_branched_and_begun_again_from_a_snapshot(name: str) -> None:
    async def questions(world: World) -> None:
        session = await world.client.open_session("stem", replayable=True)
        await session.write_file("log", b"one\n")
        await session.exec("echo two >> log", "bash")
        branches = await session.branch(["left", "right"])
        if not world.can.snapshot:  # a fake's machine is one directory: what is replayed in it is there twice
            assert [branch.key for branch in branches] == ["left", "right"]
        for branch in branches:
            await branch.exec("true", "bash")
            await branch.close()
        before = session.id
        await session.reset()
        assert (await session.exec("echo again", "bash")).stdout == "again\n"
        assert session.id != before or name == "agent_sandbox"
        await session.close()

    ask(name, questions)


@pytest.mark.parametrize("name", ["e2b", "agent_sandbox", "prime"])
def test_a_sandbox_that_is_gone_is_a_lost_session_and_not_an_outcome(name: str) -> None:
    async def questions(world: World) -> None:
        assert world.session is not None
        if name == "e2b":
            world.fake.sandboxes.clear()
        elif name == "prime":
            world.fake.live = False
        else:
            world.fake.claims.clear()
        for question in (world.session.exec("echo 1", "bash"), world.session.read_file("a")):
            with pytest.raises(SessionLost):
                await question

    ask(name, questions)


# ====================================================================== SandboxFusion


def test_a_failure_of_the_sandbox_itself_is_not_the_program_s() -> None:
    with pytest.raises(ValueError, match="the sandbox itself failed"):
        parse_run({"status": "SandboxError", "message": "no runner"}, 1)
    with pytest.raises(ValueError, match="run status 'Error'"):
        parse_run({"status": "Failed", "message": "", "run_result": {"status": "Error"}}, 1)


def test_a_program_that_does_not_compile_and_one_that_is_late_are_told_apart() -> None:
    compiled = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": "no ;", "execution_time": 0.1}
    found = parse_run({"status": "Failed", "message": "", "compile_result": compiled, "run_result": None}, 1)
    assert (found.outcome, found.stderr) == (Outcome.PROGRAM_ERROR, "no ;")
    late = {"status": "TimeLimitExceeded", "execution_time": 1.0, "stdout": "early", "stderr": ""}
    assert parse_run({"status": "Failed", "message": "", "run_result": late}, 1).outcome is Outcome.PROGRAM_TIMEOUT


@pytest.mark.parametrize("field", ["status", "execution_time", "stdout"])
def test_a_result_against_the_schema_is_a_protocol_error(field: str) -> None:
    result: dict[str, Any] = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": "", "execution_time": 0.1}
    result[field] = {"not": "it"}

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"status": "Success", "message": "", "run_result": result})

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/run_code", answer)])
        async with serving(app) as url, SandboxClient(url, backend=SandboxFusion()) as client:
            with pytest.raises(ProtocolError, match=field):
                await client.run_code("1")

    asyncio.run(run())


# ====================================================================== E2B


def test_the_key_of_the_control_service_never_reaches_a_sandbox() -> None:
    async def questions(world: World) -> None:
        assert world.session is not None
        await world.session.exec("echo 1", "bash")
        await world.session.write_file("a", b"")
        await world.session.snapshot()
        await world.session.close()
        inside = [headers for path, headers in world.fake.seen if not path.startswith("/sandboxes")]
        assert len(inside) == 2
        assert all(e2b.KEY not in headers.values() and headers["X-Access-Token"] == e2b.TOKEN for headers in inside)
        assert not world.fake.sandboxes

    ask("e2b", questions)


def test_a_process_whose_stream_was_given_up_is_killed() -> None:
    async def questions(world: World) -> None:
        assert world.session is not None
        call = asyncio.create_task(world.session.exec("sleep 30", "bash"))
        await until_true(lambda: bool(world.machine and world.machine.running))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until_true(lambda: len(world.fake.kills) == 1)
        late = await world.session.exec("sleep 30", "bash", timeout_s=0.2)
        assert late.outcome is Outcome.PROGRAM_TIMEOUT
        await until_true(lambda: len(world.fake.kills) == 2)

    ask("e2b", questions)


def test_a_kernel_past_its_time_is_begun_anew() -> None:
    async def questions(world: World) -> None:
        assert world.session is not None
        await world.session.exec("x = 1")
        assert (await world.session.exec("await_forever", timeout_s=0.2)).stdout == "early\n"
        assert (await world.session.exec("x")).outcome is Outcome.PROGRAM_ERROR

    ask("e2b-interpreter", questions)


def test_a_stream_that_is_cut_or_goes_on_after_its_end_is_not_believed() -> None:
    whole = envelope({"event": {"start": {"pid": 1}}}) + bytes([2, 0, 0, 0, 2]) + b"{}"
    assert read_stream(whole) == ([{"event": {"start": {"pid": 1}}}], {})
    assert read_stream(whole[:-4])[1] is None
    with pytest.raises(ValueError, match="after the end"):
        read_stream(whole + b"x")
    with pytest.raises(ValueError, match="not compressed"):
        read_stream(bytes([1, 0, 0, 0, 1]) + b"x")


# ====================================================================== OpenEnv


def test_a_step_s_reward_and_a_refused_action_come_as_they_are() -> None:
    async def questions(world: World) -> None:
        assert world.session is not None
        first = await world.session.call("step", {"code": "print(1)"})
        assert (first.value["reward"], first.value["observation"]["stdout"]) == (1.0, "1\n")
        assert (await world.session.call("step", {"code": "1"})).value["reward"] == 2.0
        refused = await world.session.call("step", {"wrong": 1})
        assert refused.outcome is Outcome.PROGRAM_ERROR and "VALIDATION_ERROR" in str(refused.error)
        assert (await world.session.call("state", {})).value == {"step_count": 2}
        await world.session.reset()
        assert (await world.session.call("state", {})).value == {"step_count": 0}

    ask("openenv", questions)


def test_after_a_reply_that_did_not_come_the_socket_is_dropped_for_a_late_one_would_answer_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sandbox_client.wire.CLIENT_MARGIN_S", 0.1)

    async def questions(world: World) -> None:
        assert world.session is not None
        with pytest.raises(Unknown) as error:
            await world.session.call("step", {"code": "hang"}, timeout_s=0.1)
        assert error.value.may_have_executed
        with pytest.raises(SessionLost):
            await world.session.call("step", {"code": "1"})
        other = await world.client.open_session("other")
        hanging = asyncio.create_task(other.call("step", {"code": "hang"}))
        await asyncio.sleep(0.05)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        with pytest.raises(SessionLost):
            await other.call("state", {})

    ask("openenv", questions)


def test_an_environment_that_raises_is_nobody_s_reward() -> None:
    async def questions(world: World) -> None:
        assert world.session is not None
        for question in (world.session.call("step", {"code": "boom"}), world.session.exec("boom")):
            with pytest.raises(Unknown, match="disk full"):
                await question
        assert (await world.session.exec("print(1)")).stdout == "1\n"  # the socket was answered, and is kept

    ask("openenv", questions)


def test_a_server_with_all_its_environments_taken_is_overloaded() -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as place:
            app = openenv.app(Machine(Path(place)), capacity=1)
            async with serving(app) as url, SandboxClient(url, backend=OpenEnv()) as client:
                first = await client.open_session("a")
                with pytest.raises(Overloaded) as error:
                    await client.open_session("b")
                assert not error.value.may_have_executed
                await first.close()

    asyncio.run(run())


# ====================================================================== agent-sandbox


def test_a_claim_is_made_once_waited_for_and_given_back() -> None:
    async def questions(world: World) -> None:
        (name,) = world.fake.claims
        assert name.startswith("rollout-") and world.fake.looks == 2
        assert world.session is not None
        await world.session.close()
        assert not world.fake.claims

    ask("agent_sandbox", questions)


@pytest.mark.parametrize(("reason", "kind"), [("PodFailed", RequestRefused), ("SandboxNotReady", Overloaded)])
def test_a_claim_that_never_becomes_ready_says_whether_waiting_would_help(reason: str, kind: type[Exception]) -> None:
    class Never(agent_sandbox.Fake):
        async def look(self, request: web.Request) -> web.Response:
            condition = {"type": "Ready", "status": "False", "reason": reason, "message": "no"}
            return web.json_response({"status": {"conditions": [condition]}})

    async def run() -> None:
        with tempfile.TemporaryDirectory() as place:
            async with serving(Never(Machine(Path(place))).app()) as url:
                backend = AgentSandbox("python-pool", agent_sandbox.NAMESPACE, url, agent_sandbox.KUBERNETES_TOKEN)
                async with SandboxClient(url, timeout_s=0.5, backend=backend) as client:
                    with pytest.raises(kind):
                        await client.open_session("key")

    asyncio.run(run())


def test_a_failure_of_the_runtime_with_exit_code_1_is_not_the_program_s() -> None:
    async def questions(world: World) -> None:
        assert world.session is not None
        code = "import sys; sys.stderr.write('Failed to execute command: fork'); sys.exit(1)"
        with pytest.raises(Unknown):
            await world.session.exec(code)

    ask("agent_sandbox", questions)


# ====================================================================== SWE-ReX


def test_a_class_that_a_server_names_is_never_imported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "hostile_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(place))

    async def execute(_: web.Request) -> web.Response:
        told = {"message": "boo", "class_path": "hostile_module.Error", "traceback": "", "extra_info": {}}
        return web.json_response({"swerexception": told}, status=511)

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/execute", execute)])
        async with serving(app) as url, SandboxClient(url, "k", backend=SweRex()) as client:
            with pytest.raises(RequestRefused, match="boo"):
                await client.open_session("key")
        assert "hostile_module" not in sys.modules

    asyncio.run(run())


def test_a_named_shell_keeps_its_variables() -> None:
    async def questions(world: World) -> None:
        assert world.session is not None
        await world.session.call("bash", {"command": "x=5"})
        found = await world.session.call("bash", {"command": "echo $x"})
        assert (found.outcome, found.value["output"].strip()) == (Outcome.OK, "5")
        assert (await world.session.call("bash", {"command": "false"})).outcome is Outcome.PROGRAM_ERROR
        await world.session.close()

    ask("swe_rex", questions)


def test_a_wrong_key_is_refused_at_once() -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as place:
            app = swe_rex.app(Machine(Path(place)))
            async with serving(app) as url, SandboxClient(url, "wrong", backend=SweRex()) as client:
                with pytest.raises(RequestRefused):
                    await client.open_session("key")

    asyncio.run(run())


# ====================================================================== Prime


def test_a_token_of_a_sandbox_that_has_run_out_is_fetched_again() -> None:
    async def questions(world: World) -> None:
        assert world.session is not None
        world.fake.tokens += 1  # the one that the session holds is refused from now on
        assert (await world.session.exec("echo 1", "bash")).stdout == "1\n"
        assert world.fake.tokens == 3

    ask("prime", questions)


def test_a_start_whose_reply_is_lost_attaches_to_the_first_one_s_process() -> None:
    class Cutting(prime.Fake):
        cuts = 2

        async def start(self, request: web.Request) -> web.StreamResponse:
            if self.cuts:
                self.cuts -= 1
                response = await super().start(request)
                assert request.transport is not None
                request.transport.abort()
                return response
            return await super().start(request)

    async def run() -> None:
        with tempfile.TemporaryDirectory() as place:
            machine = Machine(Path(place))
            async with serving(Cutting(machine).app()) as url, SandboxClient(url, prime.KEY, backend=Prime()) as client:
                session = await client.open_session("key")
                await session.exec("echo x >> log", "bash")
                assert (await session.exec("cat log", "bash")).stdout == "x\n"
                assert machine.executions["echo x >> log"] == 1

    asyncio.run(run())


# ====================================================================== MCP


def test_a_tool_s_result_its_failure_and_its_absence() -> None:
    async def questions(world: World) -> None:
        assert world.session is not None
        for _ in range(2):  # as JSON and as an event stream
            added = await world.session.call("add", {"a": 1, "b": 2})
            assert (added.outcome, added.value) == (Outcome.OK, {"total": 3})
        failed = await world.session.call("fail", {})
        assert (failed.outcome, failed.error) == (Outcome.PROGRAM_ERROR, "it broke")
        missing = await world.session.call("missing", {})
        assert missing.outcome is Outcome.DENIED and "there are python, add, fail" in str(missing.error)
        await world.session.close()
        with pytest.raises(SessionLost):
            await world.session.call("add", {"a": 1, "b": 2})

    ask("mcp", questions)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{"jsonrpc":"2.0","id":"another","result":{}}', ProtocolError),
        ('{"jsonrpc":"2.0"}', ProtocolError),
        ("[1]", ProtocolError),
        ('{"jsonrpc":"2.0","id":ID,"result":{"protocolVersion":3}}', ProtocolError),
        ('{"jsonrpc":"2.0","id":ID,"error":{"code":-32602,"message":"no"}}', RequestRefused),
    ],
)
def test_a_reply_to_another_request_or_against_the_schema_is_not_believed(body: str, kind: type[Exception]) -> None:
    async def answer(request: web.Request) -> web.Response:
        head = await request.json()
        return web.Response(text=body.replace("ID", f'"{head["id"]}"'), content_type="application/json")

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/mcp", answer)])
        async with serving(app) as url, SandboxClient(f"{url}/mcp", backend=Mcp()) as client:
            with pytest.raises(kind):
                await client.open_session("key")

    asyncio.run(run())


# ====================================================================== our own


def test_our_own_sessions_branch_and_reset_where_the_server_can(request: pytest.FixtureRequest) -> None:
    async def questions(world: World) -> None:
        session = await world.client.open_session("stem", branching=True)
        await session.exec("x = [1]")
        try:
            left, right = await session.branch(["stem-left", "stem-right"])
        except RequestRefused as refusal:
            pytest.skip(f"this server does not branch: {refusal}")
        await left.exec("x.append(2)")
        assert [(await one.exec("x")).value for one in (session, left, right)] == ["[1]", "[1, 2]", "[1]"]
        identity = session.id
        await session.reset()
        assert session.id == identity and (await session.exec("x")).outcome is Outcome.PROGRAM_ERROR
        for one in (session, left, right):
            await one.close()

    play("v1", request, questions)


def test_no_infrastructure_failure_is_ever_a_result() -> None:
    assert not issubclass(InfrastructureError, RequestRefused)
    assert "outcome" not in vars(InfrastructureError("x"))
