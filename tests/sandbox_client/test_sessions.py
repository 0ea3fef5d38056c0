"""Sessions: what lasts, in which order, how often, and until when."""

import asyncio
import json
import time
from typing import Any

import pytest
from conftest import Start, ask, raw
from launching import IS_ROOT, PATIENCE_S, Running

from sandbox_client import Outcome, RequestRefused, SandboxClient, SessionLost


def test_python_keeps_its_namespace_and_bash_the_directory(server: Running) -> None:
    async def remember(client: SandboxClient) -> None:
        async with await client.open_session("memory") as session:
            await session.exec("import math\nclass Point:\n    x = 3\nfor i in range(4): pass")
            assert (await session.exec("math.floor(Point().x * 1.5), i")).value == "(4, 3)"
            await session.exec("echo from bash > shared.txt", "bash")
            assert (await session.exec("open('shared.txt').read()")).value == r"'from bash\n'"
            await session.write_file("deep/er/module_of_mine.py", b"answer = 42")
            code = "import sys; sys.path.append('deep/er'); import module_of_mine, pickle; "
            assert (await session.exec(code + "pickle.loads(pickle.dumps(Point)).x + module_of_mine.answer")).value == "45"
            assert await session.read_file("shared.txt") == b"from bash\n"
            with pytest.raises(RequestRefused) as refusal:
                await session.read_file("absent")
            assert refusal.value.code == "no_such_file"

    ask(server, remember)


def test_a_timeout_leaves_the_state_and_says_so(server: Running) -> None:
    async def interrupt(client: SandboxClient) -> None:
        async with await client.open_session("patience", "counting", {"start": 5}) as session:
            await session.exec("kept = 7")
            for code, language in (("while True: pass", "python"), ("sleep 60", "bash")):
                late = await session.exec(code, language, timeout_s=0.2)
                assert (late.outcome, late.session_lost) == (Outcome.PROGRAM_TIMEOUT, False)
                assert 0.2 <= late.elapsed_s < 1.0
            slow = await session.call("sleep", {"seconds": 60}, timeout_s=0.2)
            assert (slow.outcome, slow.error) == (Outcome.PROGRAM_TIMEOUT, "stopped after 0.2 s")
            assert (await session.exec("kept")).value == "7"
            assert (await session.call("add", {})).value == 6

    ask(server, interrupt)


def test_a_program_that_ends_itself_between_two_operations_has_ended_its_session(server: Running) -> None:
    async def wait_for_it(client: SandboxClient) -> None:
        async with await client.open_session("later") as session:
            await session.exec("import os, threading; threading.Timer(0.05, os._exit, (3,)).start()")
            deadline = time.monotonic() + PATIENCE_S
            with pytest.raises(SessionLost) as lost:
                while time.monotonic() < deadline:
                    await session.exec("1")  # the one that meets the end is told of it, the next is refused
            assert lost.value.caused_by_program

    ask(server, wait_for_it)


def test_what_a_fixed_function_prints_never_blocks_it(start: Start) -> None:
    async def shout(client: SandboxClient) -> None:
        async with await client.open_session("shout", "counting") as session:
            for _ in range(4):
                assert (await session.call("shout", {"size": 1 << 18}, timeout_s=2)).outcome is Outcome.OK

    for code in ("auto", "off"):
        ask(start("--functions=counting", f"--code={code}", user="root" if IS_ROOT else "ordinary"), shout)


@pytest.mark.parametrize(
    ("name", "arguments", "outcome", "error"),
    [
        ("echo", {"value": {"deep": [1, 2.5, None, "ü"]}}, Outcome.OK, None),
        ("fail", {"text": "no row"}, Outcome.PROGRAM_ERROR, "LookupError: no row"),
        ("infinite", {}, Outcome.PROGRAM_ERROR, "ValueError: Out of range float values are not JSON compliant"),
        ("absent", {}, Outcome.DENIED, "no function named 'absent'; this session has: "),
        (
            "add",
            {"nonsense": 1},
            Outcome.PROGRAM_ERROR,
            "TypeError: session_functions.<locals>.add() got an unexpected",
        ),
    ],
)
@pytest.mark.parametrize("code", ["auto", "off"])
def test_a_fixed_function_answers_the_same_jailed_or_not(
    start: Start, code: str, name: str, arguments: dict[str, Any], outcome: Outcome, error: str | None
) -> None:
    running = start("--functions=counting", f"--code={code}", user="root" if IS_ROOT else "ordinary")

    async def call(client: SandboxClient) -> None:
        async with await client.open_session(f"call-{name}", "counting") as session:
            result = await session.call(name, arguments)
            assert result.outcome is outcome
            assert result.error is None if error is None else (result.error or "").startswith(error)
            assert result.value == (arguments["value"] if outcome is Outcome.OK else None)

    ask(running, call)


def test_a_repeated_seq_is_answered_from_memory_and_an_old_one_refused(server: Running) -> None:
    async def repeat() -> None:
        _, opened, _ = await raw(server, "POST", "/v1/sessions", {"key": "repeat", "functions": "counting"})
        path = f"/v1/sessions/{opened['session']}/call"
        head = {"name": "add", "arguments": {}, "timeout_s": 5}
        replies = [await raw(server, "POST", path, {"seq": 1, **head}) for _ in range(3)]
        assert [reply["value"] for _, reply, _ in replies] == [1, 1, 1]
        slow = {"seq": 2, "name": "sleep", "arguments": {"seconds": 0.2}, "timeout_s": 5}
        both = await asyncio.gather(*(raw(server, "POST", path, slow) for _ in range(4)))
        assert len({json.dumps(reply) for _, reply, _ in both}) == 1  # the later ones waited for the first
        for seq in range(3, 13):
            await raw(server, "POST", path, {"seq": seq, **head})
        status, reply, _ = await raw(server, "POST", path, {"seq": 3, **head})
        assert (status, reply["error"]["code"]) == (409, "stale_seq")
        assert (await raw(server, "POST", path, {"seq": 12, **head}))[1]["value"] == 11

    asyncio.run(repeat())


def test_operations_of_a_session_run_one_after_another(server: Running) -> None:
    async def race(client: SandboxClient) -> None:
        async with await client.open_session("race") as session:
            code = "import time\ntrace = globals().setdefault('trace', [])\n"
            code += "trace.append({0})\ntime.sleep(0.01)\ntrace.append({0})"
            await asyncio.gather(*(session.exec(code.format(number)) for number in range(12)))
            trace = json.loads((await session.exec("import json; print(json.dumps(trace))")).stdout)
            assert trace == [number for number in range(12) for _ in range(2)]

    ask(server, race)


def test_opening_is_idempotent_per_key_and_conflicts_are_refused(server: Running) -> None:
    async def open_twice(client: SandboxClient) -> None:
        first, second = await asyncio.gather(*(client.open_session("same", "counting", {"start": 1}) for _ in range(2)))
        assert first.id == second.id
        with pytest.raises(RequestRefused, match="other functions or options"):
            await client.open_session("same", "counting", {"start": 2})
        await first.close()
        await first.close()
        with pytest.raises(SessionLost) as lost:
            await second.call("add", {})
        assert not lost.value.caused_by_program
        async with await client.open_session("same", "counting", {"start": 2}) as third:
            assert third.id != first.id

    ask(server, open_twice)


def test_sixty_four_sessions_at_once_keep_apart(server: Running) -> None:
    async def one(client: SandboxClient, number: int) -> None:
        async with await client.open_session(f"many-{number}", "counting", {"start": number}) as session:
            await session.exec(f"mine = {number}")
            await session.write_file("mine", str(number).encode())
            assert (await session.call("add", {"amount": 1})).value == number + 1
            assert (await session.exec("mine, open('mine').read(), __import__('os').getpid()")).value is not None
            assert (await session.exec("cat mine", "bash")).stdout == str(number)

    async def all_of_them(client: SandboxClient) -> None:
        await asyncio.gather(*(one(client, number) for number in range(64)))

    ask(server, all_of_them)


def test_an_idle_session_expires_with_its_reason(start: Start) -> None:
    running = start("--functions=counting", "--code=off", "--session-idle-s=0.2", "--max-sessions=2")

    async def wait(client: SandboxClient) -> None:
        session = await client.open_session("idle", "counting")
        deadline = time.monotonic() + PATIENCE_S
        while (await client.ready()).sessions:
            assert time.monotonic() < deadline
        with pytest.raises(SessionLost, match=r"it was idle for 0\.2 s"):
            await session.call("add", {})

    ask(running, wait)


def test_beyond_the_cap_a_session_waits_for_room(start: Start) -> None:
    running = start("--functions=counting", "--code=off", "--session-idle-s=0.2", "--max-sessions=2")

    async def crowd() -> None:
        replies = [await raw(running, "POST", "/v1/sessions", {"key": f"crowd-{number}"}) for number in range(3)]
        assert [status for status, _, _ in replies] == [200, 200, 429]
        assert replies[2][1]["error"]["code"] == "overloaded"
        assert replies[2][2]["retry-after"] == "1"
        async with SandboxClient(running.url, running.token) as client:
            await (await client.open_session("crowd-3")).close()  # its retries outlive the others

    asyncio.run(crowd())


def test_more_programs_than_may_run_queue_and_then_are_refused(start: Start) -> None:
    running = start("--concurrency=1", "--queue=16", "--warm=1", user="root" if IS_ROOT else "ordinary")

    async def crowd() -> None:
        head = {"code": "import time; time.sleep(0.1)", "language": "python"}
        replies = await asyncio.gather(*(raw(running, "POST", "/run_code", head) for _ in range(20)))
        assert {status for status, _, _ in replies} == {200, 429}
        assert sum(status == 200 for status, _, _ in replies) == 17
        hasty = {"X-Deadline-Ms": "50"}
        late = await asyncio.gather(raw(running, "POST", "/run_code", head), raw(running, "POST", "/run_code", head, hasty))
        assert late[1][0] == 429  # it could not have started in time, so it was not started

    if not running.ready["code"]:
        pytest.skip("no jail here")
    asyncio.run(crowd())


def test_the_shell_of_a_session_is_one_and_ends_when_it_is_told_to(server: Running) -> None:
    async def speak(client: SandboxClient) -> None:
        async with await client.open_session("shell") as session:
            await session.exec('mkdir -p sub && cd sub; A=7; f() { echo "f $A $1"; }; set -- x', "bash")
            result = await session.exec('f "$(basename "$PWD")"; (exit 3)', "bash")
            assert (result.stdout, result.exit_code) == ("f 7 sub\n", 3)
            assert (await session.exec("import os; os.path.basename(os.getcwd())")).value == "'work'"
            for ending, code in (("exit 4", 4), ("kill -9 $$", 137), ("set -e; false", 1)):
                assert (await session.exec(ending, "bash")).exit_code == code
                assert (await session.exec('echo "${A-gone}" $(basename "$PWD")', "bash")).stdout == "gone work\n"
            pid = (await session.exec("B=1; echo $$", "bash")).stdout.strip()
            die = f"import os, signal; os.kill({pid}, 9); os.waitid(os.P_PID, {pid}, os.WEXITED | os.WNOWAIT).si_status"
            assert (await session.exec(die)).value == "9"  # it dies between two programs: the next is run by another
            assert (await session.exec("echo ${B-gone}", "bash")).stdout == "gone\n"
            assert (await session.exec("echo 'unclosed", "bash")).outcome is Outcome.PROGRAM_ERROR
            assert (await session.exec("cat <<E\nü\nE\necho \xff", "bash")).stdout == "ü\nÿ\n"
            big = await session.exec(f"x={'y' * 100_000}; echo ${{#x}}", "bash")
            assert big.stdout == "100000\n"

    ask(server, speak)


def test_a_reset_session_begins_anew_and_keeps_its_name_and_order(server: Running) -> None:
    async def reset() -> None:
        _, opened, _ = await raw(server, "POST", "/v1/sessions", {"key": "reset", "functions": "counting"})
        path = f"/v1/sessions/{opened['session']}"
        call = {"name": "add", "arguments": {}, "timeout_s": 5}
        code = {"code": "kept = 1\nopen('left', 'w').close()", "language": "python", "timeout_s": 5}
        assert (await raw(server, "POST", f"{path}/call", {"seq": 1, **call}))[1]["value"] == 1
        assert (await raw(server, "POST", f"{path}/exec", {"seq": 2, **code}))[1]["outcome"] == "ok"
        replies = [await raw(server, "POST", f"{path}/reset", {"seq": 3}) for _ in range(2)]  # the second from memory
        assert [status for status, _, _ in replies] == [200, 200]
        assert (await raw(server, "POST", f"{path}/call", {"seq": 4, **call}))[1]["value"] == 1
        look = {**code, "code": "'kept' in globals(), __import__('os').listdir()"}
        assert (await raw(server, "POST", f"{path}/exec", {"seq": 5, **look}))[1]["value"] == "(False, [])"
        assert (await raw(server, "POST", f"{path}/reset", {"seq": 4}))[1]["outcome"] == "ok"  # that seq was a call
        assert (await raw(server, "POST", f"{path}/reset", {"seq": 0}))[0] == 400

    asyncio.run(reset())


def test_a_sessions_own_token_opens_that_session_and_nothing_else(server: Running) -> None:
    async def knock() -> None:
        opened = [(await raw(server, "POST", "/v1/sessions", {"key": f"own-{number}"}))[1] for number in range(2)]
        paths = [f"/v1/sessions/{reply['session']}" for reply in opened]
        own = {"Authorization": f"Bearer {opened[0]['token']}"}
        code = {"seq": 1, "code": "1 + 1", "language": "python", "timeout_s": 5}
        assert (await raw(server, "POST", f"{paths[0]}/exec", code, own))[1]["value"] == "2"
        closed = [("POST", f"{paths[1]}/exec"), ("POST", "/v1/sessions"), ("GET", "/readyz"), ("POST", "/run_code")]
        for method, path in closed:
            assert (await raw(server, method, path, code, own))[0] == 401
        assert (await raw(server, "DELETE", paths[0], headers=own))[0] == 200
        status, reply, _ = await raw(server, "POST", f"{paths[0]}/exec", {**code, "seq": 2}, own)
        assert (status, reply["error"]["code"]) == (410, "session_lost")  # it may know what became of it
        await raw(server, "DELETE", paths[1])

    asyncio.run(knock())


def test_a_ticket_opens_one_session_and_nothing_else(server: Running) -> None:
    async def hand_over(client: SandboxClient) -> None:
        session = await client.open_session(f"own-{id(client)}")
        await session.exec("x = 20")
        ticket = session.ticket()
        assert ticket.token not in repr(ticket)
        other = (await client.open_session(f"other-{id(client)}")).ticket()
        async with SandboxClient(server.url, ticket.token) as worker:
            joined = worker.join(ticket)
            assert (await joined.exec("x + 1")).value == "21"
            await joined.write_file("a", b"1")
            for question in (
                lambda: worker.open_session("more"),
                lambda: worker.run_code("1"),
                lambda: worker.ready(),
                lambda: joined.grade("reward = 1"),
            ):
                with pytest.raises(RequestRefused) as refusal:
                    await question()
                assert refusal.value.code == "unauthorized"
            with pytest.raises(SessionLost, match="its token opens it no more"):
                await worker.join(other).exec("1")
            await joined.close()
            with pytest.raises(SessionLost):
                await joined.exec("x")
        with pytest.raises(ValueError, match="wanted a client of http"):
            SandboxClient("http://127.0.0.1:1").join(ticket)

    ask(server, hand_over)


def test_a_session_has_the_modules_that_it_asked_for_from_its_beginning_and_again_after_a_reset(start: Start) -> None:
    running = start("--imports=decimal", "--code=auto", user="root" if IS_ROOT else "ordinary")
    if not running.ready["code"]:
        pytest.skip(f"no jail here: {running.ready['reason']}")

    async def look(client: SandboxClient) -> None:
        assert (await client.ready()).imports == ("decimal",)
        loaded = "import sys; print('decimal' in sys.modules)"
        async with await client.open_session("with", imports="decimal") as session:
            assert (await session.exec(loaded)).stdout == "True\n"
            await session.reset()
            assert (await session.exec(loaded)).stdout == "True\n"
        async with await client.open_session("without") as session:
            assert (await session.exec(loaded)).stdout == "False\n"
        with pytest.raises(RequestRefused, match="registered: decimal"):
            await client.open_session("wrong", imports="fractions")

    ask(running, look)
