"""Hostile programs against the real server over HTTP, as root and as an ordinary user.

Where the machine gives no level these tests assert that programs are refused; they never pass by not trying.
"""

import ast
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, ask
from launching import IS_ROOT, ORDINARY_UID, PATIENCE_S, Running, descendants, environment
from marked import processes_with

from sandbox_client import CodeRefused, ExecResult, Outcome, RequestRefused, SandboxClient, SessionLost, cgroups, jail
from sandbox_client.attacks import Attack
from sandbox_client.groups import Limits
from sandbox_client.probe import ATTACKS, judged

pytestmark = pytest.mark.attack
OF_ONE_REPLY = [attack for attack in ATTACKS if attack.ends in ("value", "lost") and attack.name != "survivor"]


@contextlib.contextmanager
def bait(running: Running, place: Path) -> Iterator[dict[str, Any]]:
    """Sets out what the payloads look for, the server's own secrets among it."""
    secret = place / "secret"
    secret.write_text("world-readable, and still none of a program's business")
    secret.chmod(0o644)
    abstract = f"\0sandbox-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        limits = Limits()
        yield {
            "secret": str(secret),
            "place": str(place),
            "canary": environment()["SERVER_SECRET"],
            "tcp": tcp.getsockname()[1],
            "abstract": abstract,
            "pids": descendants(running.process.pid),
            "processes": limits.processes * (4 if running.ready["level"] == "L1" else 1),
            "memory_mb": limits.memory_bytes >> 20,
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
        }


async def strike(client: SandboxClient, attack: Attack, facts: dict[str, Any]) -> ExecResult:
    session = await client.open_session(f"attack-{time.monotonic_ns()}")
    async with session:
        code = f"import json\nP = json.loads({json.dumps(facts)!r})\n{attack.code}"
        return await session.exec(code, timeout_s=attack.timeout_s)


def refused_or(running: Running, questions: Callable[[SandboxClient], Awaitable[Any]]) -> Any:
    """Runs `questions`; on a machine without a level asserts instead that they are refused, with reason and remedy."""
    if running.ready["code"]:
        return ask(running, questions)
    with pytest.raises(CodeRefused) as refusal:
        ask(running, lambda client: client.run_code("print(1)"))
    assert refusal.value.message
    assert refusal.value.remedy
    return None


def level_of(user: str) -> str:
    """Returns the level that this machine has the means for, found out without our own locks."""
    if user == "landlocked":
        return "L1" if jail.landlock_abi() >= 6 else "L0"
    words = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "true"]
    if not shutil.which("unshare") or subprocess.run(words, capture_output=True, check=False).returncode:
        return "L0"
    if user == "ordinary":
        return "L2"
    try:
        cgroups.remove(cgroups.create(ORDINARY_UID))
    except cgroups.CgroupError:
        return "L2"
    return "L3"


def test_a_level_is_lost_only_where_the_machine_lacks_the_means(attacked: Running, request: pytest.FixtureRequest) -> None:
    """Otherwise a broken lock, found at the start, would show as programs refused and nothing below would fail."""
    assert attacked.ready["level"] == level_of(request.node.callspec.params["attacked"]), attacked.ready["reason"]


@pytest.mark.parametrize("attack", OF_ONE_REPLY, ids=lambda a: a.name)
def test_the_attack_is_stopped(attacked: Running, attack: Attack, place: Path) -> None:
    place.chmod(0o755)
    if attacked.ready["code"] and attack.level > attacked.ready["level"]:
        lacks = " ".join(attacked.ready["missing"])  # said, not hidden
        assert {"L3": "total memory", "L2": "disk quota"}[attack.level] in lacks
        return
    with bait(attacked, place) as facts:
        for secret in (facts["secret"], attacked.token_file):
            facts["secret"] = secret
            result = refused_or(attacked, lambda client: strike(client, attack, facts))
            if result is None:
                return
            assert judged(attack, dataclasses.asdict(result)) == "", result
            if attack.name != "host files":
                break


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.ends == "killed"], ids=lambda a: a.name)
def test_a_program_deaf_to_its_deadline_is_killed_within_a_second(attacked: Running, attack: Attack) -> None:
    start = time.monotonic()
    result = refused_or(attacked, lambda client: strike(client, attack, {}))
    if result:
        assert (result.outcome, result.session_lost) == (Outcome.PROGRAM_TIMEOUT, True)
        assert time.monotonic() - start < attack.timeout_s + 1.6


@pytest.mark.parametrize("language", ["python", "bash"])
def test_a_flood_of_output_is_cut_and_counted(attacked: Running, language: str) -> None:
    code = {"python": "import os\nwhile True: os.write(1, b'x' * 65536)", "bash": "yes"}[language]
    result = refused_or(attacked, lambda client: client.run_code(code, language, timeout_s=0.3))
    if result:
        assert result.outcome is Outcome.PROGRAM_TIMEOUT
        assert result.output_truncated
        assert len(result.stdout) < 1 << 21
        assert f"[... {result.dropped_bytes} bytes dropped ...]" in result.stdout


def test_the_next_session_finds_nothing_of_the_last(attacked: Running) -> None:
    attack = next(attack for attack in ATTACKS if attack.name == "leftovers")

    async def twice(client: SandboxClient) -> list[ExecResult]:
        return [await strike(client, attack, {}) for _ in range(12)]  # more than are warm: slots come round again

    for result in refused_or(attacked, twice) or ():
        assert (result.outcome, result.value) == (Outcome.OK, "''")


@pytest.mark.parametrize("how", ["setsid sleep {} & disown", "(trap '' TERM HUP INT; nohup sleep {} & ) ", "sleep {} &"])
def test_a_background_process_dies_with_its_session(besieged: Running, how: str) -> None:
    mark = f"{time.monotonic_ns() % 10**9 + 10**6}.25"

    async def leave_one(client: SandboxClient) -> int:
        async with await client.open_session(f"survivor-{mark}") as session:
            result = await session.exec(how.format(mark), "bash")
            assert result.outcome is Outcome.OK, result
            deadline = time.monotonic() + PATIENCE_S
            alive: list[int] = []
            while not alive and time.monotonic() < deadline:
                alive = processes_with(mark)
            return len(alive)

    alive = refused_or(besieged, leave_one)
    if alive is not None:
        assert alive >= 1  # or the test would prove nothing
        deadline = time.monotonic() + PATIENCE_S
        while processes_with(mark):
            assert time.monotonic() < deadline, "a background process has survived its session"


def test_neighbours_are_out_of_sight_and_reach(besieged: Running, place: Path) -> None:
    attack = next(attack for attack in ATTACKS if attack.name == "neighbours")

    async def side_by_side(client: SandboxClient) -> ExecResult:
        async with await client.open_session("victim") as victim:
            await victim.exec("sleep 30 &", "bash")
            with bait(besieged, place) as facts:  # every process of the server, the victim's among them
                result = await strike(client, attack, facts)
            assert (await victim.exec("1 + 1")).value == "2"
            return result

    result = refused_or(besieged, side_by_side)
    assert result is None or (result.error, result.value) == (None, "''")


def test_the_file_door_leads_nowhere_that_the_program_could_not_go(besieged: Running) -> None:
    async def climb(client: SandboxClient) -> None:
        async with await client.open_session("climber") as session:
            await session.exec("import os; os.symlink('/etc/shadow', 'link'); os.symlink('/usr', 'out')")
            for path in ("../../../../evil", "/usr/evil", "out/evil", "/etc/passwd"):
                with pytest.raises(RequestRefused):
                    await session.write_file(path, b"evil")
            for path in ("link", "/etc/shadow", besieged.token_file, f"../../../../..{besieged.token_file}", "/dev"):
                with pytest.raises(RequestRefused):
                    await session.read_file(path)

    refused_or(besieged, climb)


def test_a_link_swapped_under_the_file_door_leads_nowhere_else(besieged: Running, place: Path) -> None:
    place.chmod(0o755)
    (place / "name").write_text("the host's")
    (place / "name").chmod(0o644)

    async def race(client: SandboxClient) -> None:
        async with await client.open_session(f"racer-{time.monotonic_ns()}") as session:
            code = """
import os, threading, time
os.mkdir("real")
open("real/name", "w").write("mine")
os.symlink("real", "swap")
os.symlink(PLACE, "evil")
def swap():
    while True:
        for target in ("evil", "real"):
            os.symlink(target, "next")
            os.rename("next", "swap")
        time.sleep(0.0005)  # the same interpreter has to answer
threading.Thread(target=swap, daemon=True).start()"""
            await session.exec(f"PLACE = {str(place)!r}{code}")
            seen = set()
            for number in range(20):
                with contextlib.suppress(RequestRefused):
                    seen.add(await session.read_file("swap/name"))
                with contextlib.suppress(RequestRefused):
                    await session.write_file(f"swap/new-{number}", b"evil")
            assert seen == {b"mine"}
        assert [entry.name for entry in place.iterdir()] == ["name"]

    refused_or(besieged, race)


@pytest.mark.parametrize(
    "forgery",
    [
        "import os; os.write(3, b'nonsense of some length')",
        "import os, struct; os.write(3, struct.pack('!cII', b'r', 2, 0) + b'{}')",
        'import os, struct; t = b\'{"outcome":"ok","error":null,"exit_code":0,"value":NaN}\'; '
        "os.write(3, struct.pack('!cII', b'r', len(t), 0) + t)",
        "import os, struct; t = b'[' * 90000; os.write(3, struct.pack('!cII', b'r', len(t), 0) + t)",
        "import os, struct; os.write(3, struct.pack('!cII', b'r', 0xFFFFFFFF, 0xFFFFFFFF))",
        "import os; os.close(3)",
        "import os; os._exit(7)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.abort()",
    ],
)
def test_a_forged_or_broken_line_to_the_server_costs_only_the_forger(besieged: Running, forgery: str) -> None:
    async def forge(client: SandboxClient) -> None:
        async with await client.open_session("honest", "counting") as honest:
            async with await client.open_session(f"forger-{time.monotonic_ns()}") as forger:
                result = await forger.exec(forgery)
                assert result.outcome is Outcome.PROGRAM_ERROR  # the program's doing: it is not masked
                assert result.session_lost
                with pytest.raises(SessionLost) as lost:
                    await forger.exec("1")
                assert lost.value.caused_by_program
            assert (await honest.call("add", {"amount": 2})).outcome is Outcome.OK

    refused_or(besieged, forge)


def test_a_copy_of_the_program_does_not_answer_in_its_place(besieged: Running) -> None:
    async def fork(client: SandboxClient) -> None:
        async with await client.open_session("forker") as session:
            code = "import os, sys\npid = os.fork()\nprint('child' if pid == 0 else 'parent', flush=True)\n"
            code += "if pid == 0: sys.exit(5)"
            result = await session.exec(f"{code}\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])")
            assert (result.value, sorted(result.stdout.split())) == ("5", ["child", "parent"])
            assert (await session.exec("6 * 7")).value == "42"

    refused_or(besieged, fork)


def test_a_fork_bomb_leaves_the_neighbour_working(jailed: Running) -> None:
    async def bomb(client: SandboxClient) -> None:
        async with await client.open_session("calm") as calm, await client.open_session("bomber") as bomber:
            result = await bomber.exec(":(){ :|:& };:; while true; do sleep 1; done", "bash", timeout_s=0.5)
            assert result.outcome is not Outcome.OK
            assert (await calm.exec("print('calm')", "python")).stdout == "calm\n"

    refused_or(jailed, bomb)


def _setting(name: str, default: int) -> int:
    path = Path("/proc/sys", name)
    return int(path.read_text()) if path.exists() else default


_DOORS: dict[str, Callable[[], bool]] = {  # what some kernels close to every ordinary user
    "io_uring": lambda: _setting("kernel/io_uring_disabled", 2) == 0,
    "userfaultfd": lambda: Path("/proc/sys/vm/unprivileged_userfaultfd").exists(),
}


@contextlib.contextmanager
def _victim(secret: str) -> Iterator[int]:
    """A process of the ordinary user, with something in its environment."""
    words = ["setpriv", f"--reuid={ORDINARY_UID}", f"--regid={ORDINARY_UID}", "--clear-groups", "sleep", "600"]
    process = subprocess.Popen(words, env={"PATH": os.environ["PATH"], "SECRET": secret})
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_a_descriptor_that_was_left_open_would_be_found() -> None:
    """No server here leaves one, locked or not: so the payload is shown one by hand."""
    code = next(attack.code for attack in ATTACKS if attack.name == "inherited descriptors")
    body, last = ast.parse(code).body[:-1], ast.parse(code).body[-1]
    script = ast.unparse(ast.Module([*body, ast.parse(f"print({ast.unparse(last)})").body[0]], []))
    with open("/dev/null") as left, socket.socket() as line:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-c", script], pass_fds=(left.fileno(), line.fileno()), capture_output=True, text=True, check=True
        )
        assert f"{left.fileno()} 20000" in done.stdout


def test_the_payloads_do_get_through_where_nothing_is_locked(start: Start, place: Path) -> None:
    """Otherwise a payload that is itself broken would count as an attack stopped."""
    if not IS_ROOT:
        pytest.skip("needs root to make a host where every lock is denied to an ordinary user")
    place.chmod(0o755)
    running = start("--i-understand-unsandboxed", "--min-isolation=L3", user="ordinary", lock="nothing")
    assert (running.ready["level"], running.ready["code"]) == ("L0", True)
    harmless_here = (
        *("memory of one process", "host files", "network", "proc and sys", "privileges", "links out", "link races"),
        *("neighbours", "memory of others", "memfd execution", "keyrings", "devices", "tar bomb"),
        *("thread bomb", "limits of others", "ptrace", "server environment"),
        *(name for name, open_ in _DOORS.items() if open_()),
    )
    with bait(running, place) as facts, _victim(facts["canary"]) as victim:
        for attack in ATTACKS:
            if attack.name in harmless_here:  # to others: not the ones that fill disks, stop servers or set clocks
                if attack.name == "ptrace":  # who is traced is stopped
                    facts["pids"] = [victim]
                result = ask(running, lambda client, attack=attack: strike(client, attack, facts))
                assert result.value not in (None, "''"), f"{attack.name} reached nothing on an open host: {result}"


@pytest.mark.skipif(not IS_ROOT, reason="a memory cgroup is root's to make")
def test_a_session_killed_for_memory_is_called_so(start: Start) -> None:
    running = start("--functions=counting", "--code=auto", "--memory-mb=80", user="root")
    if running.ready["level"] != "L3":
        pytest.skip(f"no memory cgroup here: {running.ready['level']}")
    code = "for name in 'ab':\n    open(name, 'wb').write(bytes(60 << 20))"  # files count: they are held in memory
    result = ask(running, lambda client: client.run_code(code))
    assert (result.outcome, result.exit_code) == (Outcome.PROGRAM_OOM, -9)
    assert result.error == "killed for using more than 80 MiB"


def test_an_ordinary_user_with_a_cgroup_of_its_own_has_level_three(start: Start, delegated: str) -> None:
    running = start("--functions=counting", "--code=auto", user=delegated)
    assert running.ready["level"] == "L3", running.ready["reason"]
    code = "import os\nfor name in 'abcdefgh':\n    open(name, 'wb').write(bytes(15 << 20))"
    small = start("--code=auto", "--memory-mb=80", user=delegated)
    assert ask(small, lambda client: client.run_code(code)).outcome is Outcome.PROGRAM_OOM
