"""The vendors' own clients get on with our fakes and our server, where they are installed: so the fakes speak as they do."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import Running
from services import agent_sandbox, e2b, fusion
from services.machine import Machine, serving

from sandbox_client.backends.connect import read_process
from sandbox_client.transport import Reply


@pytest.mark.filterwarnings("default")
def test_sandbox_fusion_s_client_reads_the_fake_and_the_fields_that_our_server_adds() -> None:
    vendor = pytest.importorskip("sandbox_fusion", reason="sandbox-fusion is not installed")

    async def run() -> None:
        with tempfile.TemporaryDirectory() as place:
            async with serving(fusion.app(Machine(Path(place)))) as url:
                request = vendor.RunCodeRequest(code="print(1)", language="python", run_timeout=5)
                ran = await vendor.run_code_async(request, endpoint=url, max_attempts=1)
                assert (ran.status, ran.run_result.stdout) == (vendor.RunStatus.Success, "1\n")
                late = vendor.RunCodeRequest(code="sleep 9", language="bash", run_timeout=0.2)
                ran = await vendor.run_code_async(late, endpoint=url, max_attempts=1)
                assert ran.run_result.return_code is None and ran.run_result.status.value == "TimeLimitExceeded"

    asyncio.run(run())


@pytest.mark.filterwarnings("default")
def test_e2b_s_clients_run_programs_and_move_files_at_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = pytest.importorskip("e2b_code_interpreter", reason="e2b-code-interpreter is not installed")
    commands = pytest.importorskip("e2b")

    async def run() -> None:
        with tempfile.TemporaryDirectory() as place:
            fake = e2b.Fake(Machine(Path(place)))
            async with serving(fake.app()) as url:
                options = {"api_key": e2b.KEY, "api_url": url, "sandbox_url": url, "http_version": "1.1"}
                sandbox = await vendor.AsyncSandbox.create(**options)
                found = await sandbox.commands.run("echo out; echo err >&2")
                assert (found.stdout, found.stderr, found.exit_code) == ("out\n", "err\n", 0)
                with pytest.raises(commands.CommandExitException) as failed:
                    await sandbox.commands.run("exit 3")
                assert failed.value.exit_code == 3
                with pytest.raises(commands.TimeoutException):
                    await sandbox.commands.run("sleep 9", timeout=0.3)
                await sandbox.files.write("/home/user/späße", b"\x00\xff")
                assert await sandbox.files.read("/home/user/späße", format="bytes") == b"\x00\xff"
                assert (await sandbox.run_code("print(6 * 7)")).logs.stdout == ["42\n"]
                assert await sandbox.kill()

    asyncio.run(run())


@pytest.mark.filterwarnings("default")
def test_agent_sandbox_s_client_runs_commands_and_moves_files_through_the_fake_router() -> None:
    pytest.importorskip("k8s_agent_sandbox", reason="k8s-agent-sandbox is not installed")
    models = pytest.importorskip("k8s_agent_sandbox.models")
    connector = pytest.importorskip("k8s_agent_sandbox.connector")
    commands = pytest.importorskip("k8s_agent_sandbox.commands.command_executor")
    files = pytest.importorskip("k8s_agent_sandbox.files.filesystem")

    def talk(url: str) -> None:
        config = models.SandboxDirectConnectionConfig(api_url=url, server_port=8888)
        line = connector.SandboxConnector("warm-claim", agent_sandbox.NAMESPACE, config, None)
        runner = commands.CommandExecutor(line, None, "tests")
        assert runner.run("echo hé").stdout == "hé\n"
        assert runner.run("sleep 9", command_timeout=0.2).timed_out
        store = files.Filesystem(line, None, "tests")
        store.write("a/ü", b"\x00\xff")
        assert store.read("a/ü") == b"\x00\xff"
        line.close()

    async def run() -> None:
        with tempfile.TemporaryDirectory() as place:
            fake = agent_sandbox.Fake(Machine(Path(place)))
            fake.claims["claim"] = {}
            async with serving(fake.app()) as url:
                await asyncio.to_thread(talk, url)

    asyncio.run(run())


@pytest.mark.filterwarnings("default")
def test_prime_s_messages_are_the_ones_that_we_write_and_read() -> None:
    session = pytest.importorskip("prime_sandboxes.rpc_command_session", reason="prime-sandboxes is not installed")
    formats = pytest.importorskip("google.protobuf.json_format")
    started = session.COMMAND_SESSION_START_RPC_METHOD
    assert f"/{started.service_name}/{started.name}" == "/command_session.CommandSession/Start"
    spec = {"cmd": "bash", "args": ["-c", "echo 1"], "envs": {"A": "b"}, "cwd": "/root"}
    ours = {"command": spec, "stdin": False, "sessionUuid": "1-2"}
    theirs = session.build_command_session_start_request(
        command="echo 1", working_dir="/root", env={"A": "b"}, session_uuid="1-2"
    )
    parsed = formats.ParseDict(ours, started.input())
    assert parsed.command.envs == theirs.command.envs and parsed.session_uuid == theirs.session_uuid
    events: list[dict[str, Any]] = [
        {"event": {"start": {"pid": 4}}},
        {"event": {"data": {"stdout": "MQo="}}},
        {"event": {"data": {"stderr": "Mgo="}}},
        {"event": {"end": {"exitCode": 3}}},
    ]
    body = b""
    for event in events:
        text = formats.MessageToJson(formats.ParseDict(event, started.output())).encode()
        body += b"\0" + len(text).to_bytes(4, "big") + text
    found = read_process(Reply(200, {}, body + b"\2\0\0\0\2{}"))
    assert (found.pid, bytes(found.stdout), bytes(found.stderr), found.exit_code) == (4, b"1\n", b"2\n", 3)


@pytest.mark.filterwarnings("default")
def test_our_server_s_run_code_is_sandbox_fusion_s_to_its_own_models(server: Running) -> None:
    vendor = pytest.importorskip("sandbox_fusion", reason="sandbox-fusion is not installed")
    aiohttp = pytest.importorskip("aiohttp")

    async def run() -> None:
        head = vendor.RunCodeRequest(code="import sys; print(1); sys.exit(2)", language="python").dict()
        headers = {"Authorization": f"Bearer {server.token}"}
        async with aiohttp.ClientSession() as http, http.post(f"{server.url}/run_code", json=head, headers=headers) as reply:
            ran = vendor.RunCodeResponse(**await reply.json())
        assert (ran.status.value, ran.run_result.return_code, ran.run_result.stdout) == ("Failed", 2, "1\n")

    asyncio.run(run())
