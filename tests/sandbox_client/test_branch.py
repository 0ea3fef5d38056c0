"""Branches: a live session copied, so that several go on from one prefix, apart from each other and as locked as it was."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from conftest import Start, raw
from launching import IS_ROOT, PATIENCE_S, Running, descendants

Ask = Callable[..., Awaitable[dict[str, Any]]]


class Stem:
    """A session opened to be branched, and what its branches are asked."""

    def __init__(self, running: Running, key: str) -> None:
        self.running, self.key, self.seq = running, key, 0
        self.path = ""

    async def open(self) -> "Stem":
        if not self.running.ready["code"]:
            pytest.skip(f"no jail here: {self.running.ready['reason']}")
        status, reply, _ = await raw(self.running, "POST", "/v1/sessions", {"key": self.key, "branching": True})
        assert status == 200, reply
        self.path = f"/v1/sessions/{reply['session']}"
        return self

    async def exec(self, code: str, path: str = "", language: str = "python", timeout_s: float = 8.0) -> dict[str, Any]:
        self.seq += 1
        body = {"seq": self.seq, "code": code, "language": language, "timeout_s": timeout_s}
        status, reply, _ = await raw(self.running, "POST", f"{path or self.path}/exec", body)
        return {"status": status, **reply}

    async def branch(self, count: int, path: str = "") -> list[str]:
        self.seq += 1
        body = {"seq": self.seq, "keys": [f"{self.key}-{self.seq}-{number}" for number in range(count)]}
        replies = [await raw(self.running, "POST", f"{path or self.path}/branch", body) for _ in range(2)]
        assert replies[0][0] == 200, replies
        assert replies[0][1] == replies[1][1]  # asked twice, branched once
        return [f"/v1/sessions/{session['session']}" for session in replies[0][1]["sessions"]]

    async def close(self, *paths: str) -> None:
        for path in paths or (self.path,):
            assert (await raw(self.running, "DELETE", path))[0] == 200


def test_branches_go_on_from_the_prefix_each_for_itself(jailed: Running) -> None:
    async def grow() -> None:
        stem = await Stem(jailed, f"prefix-{jailed.ready['pid']}").open()
        prefix = "import os, random\nrandom.seed(3)\nkept = [1]\nopen('a', 'w').write('A')\nos.makedirs('d/e')\n"
        prefix += "os.chmod('d', 0o750)\nos.symlink('a', 'link')\nos.mkfifo('pipe')\n"
        prefix += "holes = open('holes', 'wb'); holes.truncate(60 << 20); holes.close()"
        assert (await stem.exec(prefix))["outcome"] == "ok"
        branches = await stem.branch(4)
        look = "kept.append({0})\nopen('a', 'a').write('{0}')\n"
        look += "(kept, open('link').read(), oct(os.stat('d').st_mode), os.getpid(), sorted(os.listdir('d')), "
        look += "os.path.getsize('holes'))"
        for number, path in enumerate(branches):
            reply = await stem.exec(look.format(number), path)
            assert reply["value"] == f"([1, {number}], 'A{number}', '0o40750', 1, ['e'], {60 << 20})", reply
        drawn = [(await stem.exec("random.random()", path))["value"] for path in (stem.path, *branches)]
        assert len(set(drawn)) == 1
        assert (await stem.exec("kept, open('a').read()"))["value"] == "([1], 'A')"
        again = await stem.branch(1, branches[2])
        assert (await stem.exec("kept, open('a').read()", again[0]))["value"] == "([1, 2], 'A2')"
        assert (await stem.exec("cat a; id -u", branches[1], "bash"))["stdout"] == "A11000\n"
        await stem.close()
        assert (await stem.exec("kept"))["status"] == 410
        assert (await stem.exec("kept", branches[3]))["value"] == "[1, 3]"  # it outlives the session it came from
        await stem.close(branches[2])
        assert (await stem.exec("kept", again[0]))["value"] == "[1, 2]"
        await stem.close(*branches, *again)

    asyncio.run(grow())


_FACTS = """
import ctypes, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
reached = []
data = ctypes.create_string_buffer(24)
libc.capget(struct.pack("=Ii", 0x20080522, 0), data)
if any(data.raw):
    reached.append("capabilities")
if libc.prctl(39, 0, 0, 0, 0) != 1:
    reached.append("new privileges")
for pid in range(2, 400):
    try:
        os.kill(pid, 0)
        reached.append(f"process {pid}")
    except OSError:
        pass
x86 = os.uname().machine == "x86_64"
for flags in (0x10000000, 0x20000000, 0x00020000, 0x40000000, 0x10020000, 0x70020000):
    pid = libc.syscall(56 if x86 else 220, flags | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid > 0:
        reached.append(f"clone {flags:x}")
        os.waitpid(pid, 0)
if libc.mount(b"none", b"/box", b"tmpfs", 0, None) == 0 or libc.umount2(b"/box", 2) == 0:
    reached.append("mounts")
", ".join(reached)
"""


def test_a_branch_is_locked_as_its_stem_and_out_of_its_siblings_reach(jailed: Running) -> None:
    async def attack() -> None:
        stem = await Stem(jailed, f"lock-{jailed.ready['pid']}").open()
        await stem.exec("import os")
        first, second = await stem.branch(2)
        assert (await stem.exec(_FACTS, first))["value"] == "''"
        await stem.exec("sleep 600 &", second, "bash")
        wait = "import socket\nline = socket.socket(socket.AF_UNIX)\nline.bind('\\0meet')\nline.listen()"
        assert (await stem.exec(wait, second))["outcome"] == "ok"
        meet = "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0meet')"
        assert (await stem.exec(meet, first))["error"].startswith("PermissionError")
        find = "[n for _, _, names in os.walk('/box') for n in names if n == 'of-the-second']"
        await stem.exec("open('of-the-second', 'w').close()", second)
        assert (await stem.exec(find, first))["value"] == "[]"
        assert (await stem.exec(find, second))["value"] != "[]"
        bomb = "count = 0\nwhile count < 200:\n    try:\n        pid = os.fork()\n    except OSError: break\n"
        bomb += "    if pid == 0:\n        import time; time.sleep(600)\n    count += 1\ncount"
        assert 0 < int((await stem.exec(bomb, first))["value"]) < 64
        reply = await stem.exec("sleep 0.01 & wait $!; echo 7", second, "bash")
        assert reply["stdout"] == "7\n", reply
        await stem.close(first, second, stem.path)

    asyncio.run(attack())


def test_what_ends_one_branch_ends_no_other_and_nothing_is_left(jailed: Running) -> None:
    async def end() -> None:
        stem = await Stem(jailed, f"end-{jailed.ready['pid']}").open()
        pid = jailed.ready["pid"]
        first, second, third = await stem.branch(3)
        reply = await stem.exec("import os; os._exit(3)", first)
        assert (reply["outcome"], reply["session_lost"], reply["exit_code"]) == ("program_error", True, None)
        late = await stem.exec(
            "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: time.sleep(1)",
            second,
            timeout_s=0.2,
        )
        assert (late["outcome"], late["session_lost"]) == ("program_timeout", True)
        assert (await stem.exec("6 * 7", third))["value"] == "42"
        await stem.branch(1)
        assert (await stem.exec("import os; os._exit(0)"))["session_lost"] is True  # the stem takes its copies with it
        deadline = time.monotonic() + PATIENCE_S
        while (await stem.exec("1", third))["status"] == 200:
            assert time.monotonic() < deadline
        while (await _gauge(jailed, "children_ordered_dead")) or len(descendants(pid)) > 40:
            assert time.monotonic() < deadline, (await _gauge(jailed, "children_ordered_dead"), descendants(pid))

    asyncio.run(end())


async def _gauge(running: Running, name: str) -> float:
    text = (await raw(running, "GET", "/metrics"))[1]["text"].decode()
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"sandbox_{name} ")))


def test_what_cannot_be_branched_says_so(server: Running, start: Start) -> None:
    async def refuse(running: Running, options: dict[str, Any], body: dict[str, Any]) -> tuple[int, str]:
        _, opened, _ = await raw(running, "POST", "/v1/sessions", {"key": f"no-{time.monotonic_ns()}", **options})
        path = f"/v1/sessions/{opened['session']}"
        status, reply, _ = await raw(running, "POST", f"{path}/branch", {"seq": 1, **body})
        await raw(running, "DELETE", path)
        return status, reply["error"]["code"]

    async def all_refusals() -> None:
        await raw(server, "POST", "/v1/sessions", {"key": "taken"})
        stem = {"branching": True}
        assert await refuse(server, {}, {"keys": ["a"]}) == (422, "not_branching")
        for keys, told in (([], 400), (["a", 1], 400), ("a", 400), (["a", "a"], 409), (["taken"], 409), (["b"] * 65, 409)):
            assert (await refuse(server, stem, {"keys": keys}))[0] == told
        assert await refuse(server, stem, {"keys": [f"k{n}" for n in range(65)]}) == (422, "too_many_branches")
        functions = start("--functions=counting", "--code=off")
        assert await refuse(functions, stem, {"keys": ["a"]}) == (422, "not_branching")
        flags = ("--min-isolation=L1", "--code=auto", "--functions=counting")
        unnamed = start(*flags, user="ordinary", lock="no namespaces")
        assert await refuse(unnamed, stem, {"keys": ["a"]}) == (422, "not_branching")

    asyncio.run(all_refusals())


@pytest.mark.skipif(not IS_ROOT, reason="a memory cgroup is root's to make")
def test_a_branch_has_a_memory_of_its_own(start: Start) -> None:
    running = start("--functions=counting", "--code=auto", "--memory-mb=80", user="root")
    if running.ready["level"] != "L3":
        pytest.skip(f"no memory cgroup here: {running.ready['level']}")

    async def fill() -> None:
        stem = await Stem(running, "memory").open()
        first, second = await stem.branch(2)
        for path in (first, second):  # together more than one may have
            assert (await stem.exec("open('a', 'wb').write(bytes(50 << 20))", path))["value"] == str(50 << 20)
        reply = await stem.exec("open('b', 'wb').write(bytes(50 << 20))", first)
        assert (reply["outcome"], reply["error"]) == ("program_oom", "killed for using more than 80 MiB")
        assert (await stem.exec("1 + 1", second))["value"] == "2"
        await stem.close(first, second, stem.path)

    asyncio.run(fill())
