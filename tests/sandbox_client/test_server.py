"""The command: what it refuses and why, how it starts and stops, and that it leaves nothing behind."""

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conftest import Start, ask, raw
from launching import IS_ROOT, PATIENCE_S, Running, command, descendants, environment, refused, serving
from marked import processes_with

from sandbox_client import CodeRefused, Outcome, RequestRefused, SandboxClient, Session, wire
from sandbox_client.groups import Limits
from sandbox_client.server import _arguments


def test_functions_only_refuses_code_with_reason_and_remedy_and_still_serves(start: Start) -> None:
    running = start("--functions=counting", "--code=auto", user="ordinary", lock="nothing")
    assert (running.ready["level"], running.ready["code"]) == ("L0", False)
    assert "namespaces are denied" in running.ready["reason"]

    async def serve(client: SandboxClient) -> None:
        ready = await client.ready()
        assert (ready.code, ready.functions) == (False, ("counting",))
        async with await client.open_session("functions", "counting", {"start": 1}) as session:
            assert (await session.call("add", {"amount": 2})).value == 3
            refusals = (session.exec("1"), session.write_file("a", b""), session.read_file("a"), client.run_code("1"))
            for attempt in refusals:
                with pytest.raises(CodeRefused) as refusal:
                    await attempt
                assert "wanted isolation L2 or better" in refusal.value.message
                assert "seccomp=unconfined" in (refusal.value.remedy or "")
            assert (await session.call("sleep", {"seconds": 9}, timeout_s=0.1)).outcome is Outcome.PROGRAM_TIMEOUT

    ask(running, serve)


def test_a_host_below_the_wanted_level_refuses_to_start_with_reason_and_remedy(place: Path) -> None:
    code, said = refused(place, user="ordinary", lock="nothing")
    assert code == 2
    assert said.startswith("sandbox-server: wanted isolation L2 or better; L3: ")
    assert "L2: namespaces are denied" in said
    assert "seccomp=unconfined" in said
    assert "--code=auto" in said


def test_without_a_memory_cgroup_to_write_level_three_is_refused_with_every_place_that_was_tried(place: Path) -> None:
    code, said = refused(place, "--min-isolation=L3", user="ordinary")
    assert code == 2
    assert said.startswith("sandbox-server: wanted isolation L3 or better; L3: no memory cgroup (")
    tried = said.partition("no memory cgroup (")[2]
    assert ("v2" in tried and "v1" in tried) or "Permission denied" in tried
    assert "start as root, which drops to an ordinary user; or delegate the memory controller" in said


def test_the_quotas_are_those_that_were_promised() -> None:
    cores, options, limits = os.cpu_count() or 1, _arguments([]), Limits()
    mib = 1 << 20
    assert (options.concurrency, options.queue) == (2 * cores, 32 * cores)
    assert (options.memory_mb, options.disk_mb, options.processes) == (512, 128, 64)
    assert (options.session_idle_s, options.session_life_s, options.min_isolation) == (600.0, 3600.0, "L2")
    assert (limits.memory_bytes, limits.disk_bytes, limits.inodes) == (512 * mib, 128 * mib, 4096)
    assert (limits.processes, limits.file_bytes) == (64, 64 * mib)
    runs = inspect.signature(SandboxClient.run_code).parameters, inspect.signature(Session.exec).parameters
    assert [parameters["timeout_s"].default for parameters in runs] == [10.0, 10.0]  # wall; a run's CPU is bounded by it
    assert (options.max_timeout_s, limits.cpu_s) == (600.0, 600)  # of a session's process, over its whole life
    kept, moved = (wire.EXEC_OUTPUT_BYTES, wire.RUN_OUTPUT_BYTES), (wire.REQUEST_MAX_BYTES, wire.FILE_MAX_BYTES)
    assert kept == (64 << 10, mib) and moved == (mib, 16 * mib)
    assert wire.CLIENT_KEEP_ALIVE_S < wire.SERVER_KEEP_ALIVE_S
    assert 0 < wire.KILL_MARGIN_S < wire.CLIENT_MARGIN_S


def test_an_operator_bounds_what_callers_may_ask_for_and_a_run_s_cpu_follows_its_time(place: Path) -> None:
    with serving(place, "--code=auto", "--max-timeout-s=3", "--warm=2", user="root" if IS_ROOT else "ordinary") as running:
        if not running.ready["code"]:
            pytest.skip(f"no jail here: {running.ready['reason']}")

        async def use(client: SandboxClient) -> None:
            with pytest.raises(RequestRefused, match="at most 3 "):
                await client.run_code("1", timeout_s=4)
            limits = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU))"
            assert (await client.run_code(limits, timeout_s=2)).stdout == "(3, 600)\n"
            async with await client.open_session("short") as session:
                with pytest.raises(RequestRefused, match="at most 3 "):
                    await session.exec("1", timeout_s=4)
                assert (await session.exec(limits, timeout_s=2)).stdout == "(600, 600)\n"

        ask(running, use)
        done = asyncio.run(raw(running, "POST", "/run_code", {"code": "print(1)", "language": "python"}))[1]
        assert done["run_result"]["stdout"] == "1\n"  # what names no limit of its own has none that is too long


def test_a_host_without_namespaces_gives_l1_when_it_is_asked_for(start: Start) -> None:
    flags = ("--min-isolation=L1", "--code=auto", "--functions=counting")
    running = start(*flags, user="ordinary", lock="no namespaces")
    if running.ready["level"] != "L1":
        pytest.skip(f"no Landlock here: {running.ready['reason']}")
    assert any("disk quota" in lack for lack in running.ready["missing"])

    async def use(client: SandboxClient) -> None:
        async with await client.open_session("first", "counting") as session:
            assert (await session.exec("open('a', 'w').write('b'); 2 * 21")).value == "42"
            assert (await session.exec("cat a; mkdir locked; chmod 000 locked", "bash")).stdout == "b"
            assert (await session.exec("open('../../../evil', 'w')")).error.startswith("PermissionError")
            assert (await session.exec("import socket; socket.socket()")).error.startswith("PermissionError")
            assert (await session.call("add", {})).value == 1
            late = await session.exec("sleep 60 & sleep 60", "bash", timeout_s=0.2)
            assert late.outcome is Outcome.PROGRAM_TIMEOUT
        async with await client.open_session("second") as session:
            assert (await session.exec("__import__('os').listdir()")).value == "[]"

    ask(running, use)


@pytest.mark.skipif(not IS_ROOT, reason="root alone is refused")
def test_root_and_open_addresses_never_run_code_unsandboxed(place: Path) -> None:
    code, said = refused(place, "--i-understand-unsandboxed")
    assert (code, "ordinary user on a loopback address" in said) == (2, True)
    code, said = refused(place, "--host=0.0.0.0")
    assert (code, "not loopback" in said) == (2, True)


def test_the_server_runs_fixed_functions_on_a_platform_without_linux_calls(place: Path) -> None:
    pretend = "import os, sys, runpy; sys.platform = 'darwin'; sys.modules['resource'] = sys.modules['ctypes'] = None; "
    pretend += "del os.geteuid, os.posix_spawn; "
    pretend += "runpy.run_module('sandbox_client.server', run_name='__main__')"
    words = [
        sys.executable,
        "-c",
        pretend,
        "--port=0",
        f"--token-file={place}/token",
        "--code=auto",
        "--functions=counting",
    ]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert "local isolation needs Linux" in ready["reason"]
    assert "Linux container" in ready["remedy"]
    running = Running(process, ready, (place / "token").read_text().strip())

    async def call(client: SandboxClient) -> Any:
        async with await client.open_session("mac", "counting") as session:
            return (await session.call("add", {"amount": 4})).value

    assert ask(running, call) == 4
    process.terminate()
    assert process.communicate(timeout=PATIENCE_S)[1] == ""


def test_a_port_in_use_is_one_clear_sentence_and_code_2(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = command(f"--port={port}", f"--token-file={place}/token", "--code=off")
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"sandbox-server: cannot listen on 127.0.0.1:{port} (Address already in use): stop what uses the port or give --port=0"
    ]


def test_the_token_is_made_private_kept_and_refused_when_others_could_read_it(place: Path) -> None:
    with serving(place, "--code=off") as running:
        assert stat.S_IMODE((place / "token").stat().st_mode) == 0o600
        assert len(running.token) == 64
        token = running.token
    with serving(place, "--code=off") as running:
        assert running.token == token
    (place / "token").chmod(0o644)
    code, said = refused(place, "--code=off")
    assert code == 2
    assert "mode 0600" in said


def test_a_functions_module_that_is_none_stops_the_start(place: Path) -> None:
    for module, word in (("no_such_module_here", "No module named"), ("json", "no function session_functions")):
        for mode in ("off", "auto"):
            code, said = refused(place, f"--functions={module}", f"--code={mode}")
            assert code == 2
            assert f"wanted functions module {module}" in said
            assert word in said


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _mounts() -> int:
    return len(Path("/proc/self/mounts").read_text().splitlines())


def _groups_of(family: list[int]) -> list[str]:
    """Returns the cgroups that bear the number of one of these processes, as the supervisor's does."""
    wanted = {f"sandbox-{member}" for member in family}
    return [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names if name in wanted]


def test_two_hundred_sessions_leave_nothing_behind(place: Path) -> None:
    mounts = _mounts()
    with serving(place, "--functions=counting", "--code=auto", "--warm=8", user="root" if IS_ROOT else "ordinary") as running:
        pid = running.ready["pid"]

        async def use(client: SandboxClient, number: int) -> None:
            async with await client.open_session(f"use-{number}", "counting") as session:
                if running.ready["code"]:
                    await session.exec("import os\nif os.fork() == 0:\n    import time; time.sleep(600)")
                await session.call("add", {})

        async def wave(client: SandboxClient) -> None:
            await asyncio.gather(*(use(client, number) for number in range(50)))

        ask(running, wave)
        deadline = time.monotonic() + PATIENCE_S
        while len(descendants(pid)) > 15:  # two zygotes, their supervisors and the children that wait
            assert time.monotonic() < deadline
        processes, descriptors = len(descendants(pid)), _descriptors(pid)
        for _ in range(3):
            ask(running, wave)
        while len(descendants(pid)) > processes or _descriptors(pid) > descriptors:
            assert time.monotonic() < deadline, (len(descendants(pid)), processes, _descriptors(pid), descriptors)
        family = descendants(pid)
        assert bool(_groups_of(family)) == (running.ready["level"] == "L3")
        os.kill(pid, 15)
        assert running.process.wait(PATIENCE_S) == 0
    assert not [member for member in family if Path(f"/proc/{member}").exists()]
    assert not _groups_of(family)
    assert _mounts() == mounts


def test_sigkill_of_the_server_takes_every_program_with_it(place: Path) -> None:
    user = "root" if IS_ROOT else "ordinary"
    with serving(place, "--code=auto", user=user) as running:
        if not running.ready["code"]:
            pytest.skip(f"no jail here: {running.ready['reason']}")
        mark = f"{time.monotonic_ns() % 10**9 + 10**6}.75"

        async def start_one(client: SandboxClient) -> None:
            session = await client.open_session("orphan")
            await session.exec(f"setsid sleep {mark} &", "bash")

        ask(running, start_one)

        deadline = time.monotonic() + PATIENCE_S
        while not processes_with(mark):
            assert time.monotonic() < deadline
        os.kill(running.ready["pid"], 9)
        while processes_with(mark):
            assert time.monotonic() < deadline, "a program has outlived its server"
        running.process.wait(PATIENCE_S)


def test_a_server_that_has_lost_its_zygote_ends_and_says_so(place: Path) -> None:
    with serving(place, "--code=auto", user="root" if IS_ROOT else "ordinary", code=3) as running:
        if not running.ready["code"]:
            pytest.skip(f"no jail here: {running.ready['reason']}")
        family = descendants(running.ready["pid"])
        zygote = next(pid for pid in family[1:] if len(descendants(pid)) > 4)
        for child in descendants(zygote):
            if len(descendants(child)) > 4:
                zygote = child  # below the supervisor
        os.kill(zygote, 9)
        running.process.wait(PATIENCE_S)
        assert "has died; start the server again" in (place / "log").read_text()
        deadline = time.monotonic() + PATIENCE_S
        while any(Path(f"/proc/{member}").exists() for member in family):
            assert time.monotonic() < deadline, "a program has outlived the zygote"


@pytest.mark.skipif(not IS_ROOT, reason="only root has something to drop")
def test_root_is_dropped_and_the_environment_of_the_children_scrubbed(start: Start) -> None:
    running = start("--functions=counting", "--code=auto", user="root")
    status = Path(f"/proc/{running.ready['pid']}/status").read_text()
    assert "Uid:\t64001\t64001\t64001\t64001" in status
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    for pid in descendants(running.ready["pid"]):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended already
            assert b"SERVER_SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()
    if running.ready["code"]:
        names = ask(running, lambda client: client.run_code("import os; print(*sorted(os.environ))")).stdout.split()
        assert "SERVER_SECRET" not in names
        assert set(names) <= {
            "PATH",
            "HOME",
            "TMPDIR",
            "LANG",
            "OMP_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "MALLOC_ARENA_MAX",
        }


def test_the_self_test_prints_a_table_and_judges() -> None:
    user = "root" if IS_ROOT else "ordinary"
    words = command("--self-test", user=user)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        assert "GOT THROUGH" not in done.stdout
        assert "fork bomb" in done.stdout
        assert done.stdout.count("stopped") >= 15
    else:
        assert "no level: programs are refused" in done.stdout


def test_off_loopback_a_certificate_or_a_proxy_is_wanted_and_a_token_file(place: Path) -> None:
    for flags in (("--host=0.0.0.0",), ("--host=0.0.0.0", "--tls-cert=a", "--tls-key=b"), ("--tls-cert=a",)):
        words = command("--port=0", "--code=off", *flags)
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--tls-key" in done.stderr
    code, said = refused(place, "--host=0.0.0.0", "--tls-cert=/nowhere", "--tls-key=/nowhere", "--code=off")
    assert (code, said) == (2, "sandbox-server: cannot read /nowhere: give a certificate and its key, both PEM")


def test_with_a_certificate_it_serves_https_off_loopback_too(place: Path) -> None:
    if not shutil.which("openssl"):
        pytest.skip("needs openssl to make a certificate")
    cert, key = place / "cert.pem", place / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    make += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(make, check=True, capture_output=True)
    with serving(place, "--host=0.0.0.0", f"--tls-cert={cert}", f"--tls-key={key}", "--code=auto") as running:
        assert running.url.startswith("https://0.0.0.0:")
        port = running.url.rpartition(":")[2]

        async def ask_securely() -> dict[str, Any]:
            trusted = ssl.create_default_context(cafile=str(cert))
            headers = {"Authorization": f"Bearer {running.token}"}
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"https://localhost:{port}/readyz", ssl=trusted, headers=headers) as reply,
            ):
                assert reply.status == 200
                answer: dict[str, Any] = await reply.json()
            with pytest.raises(aiohttp.ClientError):
                async with aiohttp.ClientSession() as http, http.get(f"http://localhost:{port}/healthz"):
                    pass
            return answer

        assert asyncio.run(ask_securely())["level"] == running.ready["level"]
