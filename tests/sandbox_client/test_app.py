"""The HTTP surface: SandboxFusion's words, who may ask, and what is said of a wrong request."""

import asyncio
import base64
from typing import Any

import pytest
from conftest import Start, ask, raw
from launching import PATIENCE_S, Running

from sandbox_client import RequestRefused, wire


def test_run_code_speaks_sandboxfusion(server: Running) -> None:
    async def speak() -> None:
        status, reply, _ = await raw(server, "POST", "/run_code", {"code": "print(1)", "language": "python"})
        assert (status, reply["status"], reply["compile_result"]) == (200, "Success", None)
        result = reply["run_result"]
        assert (result["status"], result["return_code"], result["stdout"]) == ("Finished", 0, "1\n")
        head = {
            "code": "sleep 9",
            "language": "bash",
            "run_timeout": 0.2,
            "files": {"a": base64.b64encode(b"x").decode()},
        }
        _, reply, _ = await raw(server, "POST", "/run_code", head)
        assert (reply["status"], reply["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
        _, reply, _ = await raw(server, "POST", "/run_code", {"code": "exit 2", "language": "bash"})
        assert (reply["status"], reply["run_result"]["return_code"]) == ("Failed", 2)
        status, reply, _ = await raw(server, "POST", "/run_code", {"code": "1", "language": "cobol"})
        assert (status, reply["error"]["code"]) == (422, "language_unknown")

    asyncio.run(speak())


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Authorization": ""}, 401, "unauthorized"),
        ({"Authorization": "Bearer wrong"}, 401, "unauthorized"),
        ({"Host": "evil.example"}, 403, "wrong_host"),
        ({"Origin": "http://evil.example"}, 403, "wrong_origin"),
    ],
)
def test_strangers_and_browsers_are_turned_away(start: Start, headers: dict[str, str], status: int, code: str) -> None:
    running = start("--functions=counting", "--code=off")
    got, reply, _ = asyncio.run(raw(running, "POST", "/v1/sessions", {"key": "stranger"}, headers))
    assert (got, reply["error"]["code"]) == (status, code)
    if status == 401:
        assert asyncio.run(raw(running, "GET", "/healthz", headers=headers))[0] == 200
        with pytest.raises(RequestRefused, match="Bearer"):
            ask(Running(running.process, running.ready, "wrong"), lambda client: client.ready())


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/sessions", b"{", 400),
        ("/v1/sessions", {"key": 5}, 400),
        ("/v1/sessions", {"key": "a", "functions": "os"}, 422),
        ("/v1/sessions/none/call", {"seq": 1, "name": "add", "arguments": {}, "timeout_s": 1}, 410),
        ("/v1/sessions/none/call", {"seq": 1, "name": "add", "arguments": [], "timeout_s": 1}, 400),
        ("/v1/sessions/none/call", {"seq": 1, "name": "add", "arguments": {}, "timeout_s": 1e9}, 400),
        ("/v1/sessions/none/call", b" " * (wire.REQUEST_MAX_BYTES + 1), 413),
        ("/v1/nonsense", {}, 404),
    ],
)
def test_a_wrong_request_is_named_and_harms_nothing(start: Start, path: str, body: Any, status: int) -> None:
    running = start("--functions=counting", "--code=off")
    got, reply, _ = asyncio.run(raw(running, "POST", path, body))
    assert got == status
    assert reply["error"]["message"]


def test_metrics_count_outcomes(server: Running) -> None:
    ask(server, lambda client: client.run_code("print(1)"))
    text = asyncio.run(raw(server, "GET", "/metrics"))[1]["text"].decode()
    assert 'sandbox_outcomes_total{operation="run_code",outcome="ok"}' in text
    assert 'sandbox_seconds_bucket{operation="run_code",le="+Inf"}' in text


def test_metrics_tell_of_level_children_and_where_the_time_went(server: Running) -> None:
    killed = 'sandbox_seconds_count{operation="kill"}'

    async def look() -> None:
        text = (await raw(server, "GET", "/metrics"))[1]["text"].decode()
        first = dict(line.rsplit(" ", 1) for line in text.splitlines())
        opened = (await raw(server, "POST", "/v1/sessions", {"key": "metrics"}))[1]
        body = {"seq": 1, "code": "1", "language": "python", "timeout_s": 5}
        reply = (await raw(server, "POST", f"/v1/sessions/{opened['session']}/exec", body))[1]
        assert reply["level"] == opened["level"] == server.ready["level"]
        await raw(server, "DELETE", f"/v1/sessions/{opened['session']}")
        text = (await raw(server, "GET", "/metrics"))[1]["text"].decode()
        before = dict(line.rsplit(" ", 1) for line in text.splitlines())  # sessions wait for children too
        await raw(server, "POST", "/run_code", {"code": "1", "language": "python"})
        async with asyncio.timeout(PATIENCE_S):
            while True:  # until both processes are dead
                text = (await raw(server, "GET", "/metrics"))[1]["text"].decode()
                lines = dict(line.rsplit(" ", 1) for line in text.splitlines())
                if float(lines.get(killed, 0)) >= float(first.get(killed, 0)) + 2:
                    break
                await asyncio.sleep(0.01)
        assert lines[f'sandbox_level{{level="{server.ready["level"]}"}}'] == "1"
        assert int(lines["sandbox_takes_total"]) >= int(lines["sandbox_cold_takes_total"])
        assert int(lines["sandbox_children"]) >= int(lines["sandbox_children_ordered_dead"])
        assert float(lines['sandbox_seconds_sum{operation="queue"}']) >= 0
        assert float(lines["sandbox_tasks"]) >= 1
        outside = "sandbox_killed_from_outside_total"
        assert lines[outside] == first[outside]  # what the server itself has ended counts for nothing there
        names = [f'sandbox_seconds_sum{{operation="{part}"}}' for part in ("total", "queue", "set_up", "run_code")]
        whole = [float(lines[name]) - float(before.get(name, 0)) for name in names]
        assert whole[0] >= sum(whole[1:]) - 1e-4  # each is rounded
        assert lines['sandbox_seconds_count{operation="total"}'] == lines['sandbox_seconds_count{operation="run_code"}']

    asyncio.run(look())
