"""What the sandbox costs: `python benchmarks/sandbox.py` starts a server, loads it, and prints one JSON object.

`figures` is what is asked of the sandbox beside what was found; the rest is where that comes from, and more. Absolute
figures depend on the machine and on its neighbours, whose load stands beside them: on a quiet one it takes about three
minutes. Ratios are to a cold, unisolated `python -c` that was measured in turns with ours. Latencies are those of a
caller among `concurrency` others (the number in a name), or of calls that come at their own pace (`at half load`).
CPU is counted for the client's process and for the server with all that it forks, dead children included; the machine's
adds the kernel's own threads, and whatever else runs.

`--soak=N` makes N calls of every kind instead and counts descriptors, processes, mounts, namespaces and cgroups around it.
"""

import argparse
import asyncio
import contextlib
import heapq
import json
import math
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from sandbox_client import EmbeddedServer, SandboxClient, wire  # noqa: E402  (found beside this file, installed or not)
from sandbox_client.groups import Limits  # noqa: E402
from sandbox_client.pool import Pool  # noqa: E402
from sandbox_client.sessions import execute  # noqa: E402

FUNCTIONS = """
def session_functions(options):
    table = {str(number): number * number for number in range(100)}
    def look_up(key: str) -> dict:
        return {"key": key, "value": table[key]}
    return {"look_up": look_up}
"""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PLAIN, NUMPY = "print(1)", "import numpy\nprint(numpy.arange(9).sum())"
Work = Callable[[int], Awaitable[None]]
ASKED = (  # what it is called, where it stands in the results, at least or at most, how much
    ("isolated runs per second / cold, unisolated ones", "ratios.isolated / cold", ">=", 2.0),
    ("a fresh isolated run with numpy / a cold one, p50", "ratios.isolated numpy / cold numpy, one at a time", "<=", 0.1),
    ("a run through the pool at half load, p50 ms", "pool at half load.p50_ms", "<=", 2.0),
    ("a run through the pool at half load, p99 ms", "pool at half load.p99_ms", "<=", 10.0),
    ("added by pool, HTTP and client at half load, p50 ms", "run_code at half load.added_p50_ms", "<=", 2.0),
    ("added by pool, HTTP and client at half load, p99 ms", "run_code at half load.added_p99_ms", "<=", 10.0),
    ("HTTP end to end at 80 % load, p99 ms", "run_code at 80 % load.p99_ms", "<=", 25.0),
    ("one of 64 idle children, its share of pages, MB", "idle child.pss_mb", "<=", 2.0),
    ("one of 64 idle children, what its cgroup counts, MB", "idle child.charged_mb", "<=", 2.0),
    ("a session branched off, alone, p50 ms", "branch_1.p50_ms", "<=", 10.0),
    ("a session branched off, 16 at once, each, p50 ms", "branch_16.p50_ms", "<=", 10.0),
    ("function calls in live sessions per second", "call_32.per_s", ">=", 2000.0),
    ("programs in live sessions per second", "exec_in_session_32.per_s", ">=", 2000.0),
)


def family(pid: int) -> dict[int, list[str]]:
    """Returns `pid` and every process below it, with the fields of its stat after the name."""
    rows: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            rows[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    wanted = {pid}
    for _ in range(6):
        wanted |= {child for child, row in rows.items() if int(row[1]) in wanted}
    return {member: rows[member] for member in wanted if member in rows}


def server_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of `pid` and everything below it, with those that its dead descendants used."""
    return sum(sum(map(int, row[11:15])) for row in family(pid).values()) * TICK_S


def machine_cpu_s() -> float:
    """Returns the CPU seconds that the whole machine was busy: kernel workers, neighbours, other guests of its host."""
    user, nice, system, _, _, irq, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + stolen) * TICK_S


def quantiles(latencies: list[float]) -> dict[str, float]:
    latencies.sort()
    count = len(latencies)
    return {"p50_ms": round(latencies[count // 2] * 1e3, 3), "p99_ms": round(latencies[int(count * 0.99)] * 1e3, 3)}


async def measure(pid: int, count: int, concurrency: int, work: Work, settle_s: float = 0.2) -> dict[str, float]:
    """Runs `work` `count` times by `concurrency` workers. Returns rates, CPU milliseconds per run and latencies."""
    latencies: list[float] = []
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            start = time.perf_counter()
            await work(number)
            latencies.append(time.perf_counter() - start)

    machine, server, client, start = machine_cpu_s(), server_cpu_s(pid), time.process_time(), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    wall_s, client = time.perf_counter() - start, time.process_time() - client
    await asyncio.sleep(settle_s)  # what is being torn down is counted too
    server, machine = server_cpu_s(pid) - server, machine_cpu_s() - machine
    return {
        "per_s": round(count / wall_s, 1),
        "client_cpu_ms": round(client / count * 1e3, 4),
        "server_cpu_ms": round(server / count * 1e3, 4),
        "cpu_ms": round((client + server) / count * 1e3, 4),
        "machine_cpu_ms": round(machine / count * 1e3, 4),
        **quantiles(latencies),
    }


def queued(rate_per_s: float, cpu_s: float, cores: int, calls: int = 200_000) -> dict[str, float]:
    """Returns the latencies of a queue M/D/c: `cores` of them, calls that come at random, each one core's for `cpu_s`.

    First come first served, nothing of a call after its answer, no cost of a switch: what a tail is to be compared with, where
    all that a call costs lies before its answer. A call waits for the core that is free first (Kiefer and Wolfowitz 1955).
    """
    dice, now, latencies = random.Random(0), 0.0, []
    free_at = [0.0] * cores
    for _ in range(calls):
        now += dice.expovariate(rate_per_s)
        done = max(now, heapq.heappop(free_at)) + cpu_s
        heapq.heappush(free_at, done)
        latencies.append(done - now)
    return {f"queue_{name}": value for name, value in quantiles(latencies).items()}


async def paced(pid: int, rate_per_s: float, count: int, work: Callable[[int], Awaitable[float]]) -> dict[str, float]:
    """Makes `count` calls that come at random at `rate_per_s`, waiting for none. Returns their latencies and their CPU.

    `work` returns the seconds that the program itself took; what comes on top is `added`. A latency begins when its call is
    due, whether or not this process has come to it by then. `busy` is the share of the machine's cores that anything uses,
    `queue` what a queue with that much work for each call, of client and server, would give.
    """
    latencies: list[float] = []
    added: list[float] = []

    async def one(number: int, due: float) -> None:
        own_s = await work(number)
        latencies.append(time.perf_counter() - due)
        added.append(latencies[-1] - own_s)

    dice, tasks, cores = random.Random(0), [], os.cpu_count() or 1
    used, machine, start = server_cpu_s(pid) + time.process_time(), machine_cpu_s(), time.perf_counter()
    due = start
    for number in range(count):
        due += dice.expovariate(rate_per_s)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number, due)))
    await asyncio.gather(*tasks)
    machine, wall_s = machine_cpu_s() - machine, time.perf_counter() - start
    await asyncio.sleep(0.2)  # what is being torn down is counted too
    cpu_s = (server_cpu_s(pid) + time.process_time() - used) / count
    more = {f"added_{name}": value for name, value in quantiles(added).items()}
    more |= {"cpu_ms": round(cpu_s * 1e3, 3), "busy": round(machine / wall_s / cores, 3)}
    if cpu_s * rate_per_s < cores:
        more |= queued(rate_per_s, cpu_s, cores)
    return {"offered_per_s": round(rate_per_s, 1), **quantiles(latencies), **more}


async def spawn(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait():
        raise RuntimeError(f"{words[0]} ended with {process.returncode}")


def others() -> dict[str, list[str]]:
    """Returns the commands that a program is run by elsewhere, as far as they are installed here."""
    python = [sys.executable, "-c"]
    places = [place for place in ("/usr", "/bin", "/lib", "/lib64", sys.prefix, sys.base_prefix) if Path(place).exists()]
    found = {"cold": python}
    if bwrap := shutil.which("bwrap"):
        binds = [word for place in places for word in ("--ro-bind", place, place)]
        found["bubblewrap"] = [bwrap, "--unshare-all", "--die-with-parent", *binds, "--dev", "/dev", "--tmpfs", "/box", *python]
    if nsjail := shutil.which("nsjail"):
        binds = [word for place in places for word in ("-R", place)]
        found["nsjail"] = [nsjail, "-Mo", "-Q", "--rlimit_as", "hard", *binds, "-R", "/dev/urandom", "--", *python]
    return found


async def compare(pid: int, client: SandboxClient, scale: float) -> dict[str, Any]:
    """Returns fresh runs, ours and others', in turns; and ours as a ratio to the cold interpreter."""
    rows: dict[str, list[float]] = {}
    cores = os.cpu_count() or 1

    async def ours(code: str) -> None:
        result = await client.run_code(code)
        if result.outcome != "ok":
            raise RuntimeError(f"{result.outcome}: {result.error}")

    programs = {"": PLAIN, "_numpy": NUMPY}
    for _ in range(3):  # in turns, so that a neighbour's load falls on all
        for suffix, code in programs.items():
            for name, words in others().items():
                if suffix and name != "cold":
                    continue
                count = max(4, int((16 if suffix else 60) * scale))
                row = await measure(pid, count, 2 * cores, lambda _, words=words, code=code: spawn(*words, code), 0.0)  # type: ignore[misc]
                rows.setdefault(f"{name}{suffix}", []).append(row["per_s"])
            row = await measure(pid, int(200 * scale), 2 * cores, lambda _, code=code: ours(code), 0.0)  # type: ignore[misc]
            rows.setdefault(f"isolated{suffix}", []).append(row["per_s"])
    best = {name: max(values) for name, values in rows.items()}
    ratios = {f"{name} / cold": round(best[name] / best["cold"], 2) for name in best if "numpy" not in name and name != "cold"}
    ratios["isolated numpy / cold numpy"] = round(best["isolated_numpy"] / best["cold_numpy"], 2)
    alone: dict[str, float] = {}
    for suffix, code in programs.items():
        cold = await measure(pid, max(5, int(10 * scale)), 1, lambda _, code=code: spawn(sys.executable, "-c", code), 0.0)  # type: ignore[misc]
        isolated = await measure(pid, int(100 * scale), 1, lambda _, code=code: ours(code), 0.0)  # type: ignore[misc]
        alone[f"cold{suffix}_p50_ms"], alone[f"isolated{suffix}_p50_ms"] = cold["p50_ms"], isolated["p50_ms"]
    together = "isolated numpy / cold numpy, one at a time"
    ratios[together] = round(alone["isolated_numpy_p50_ms"] / alone["cold_numpy_p50_ms"], 3)
    return {"fresh_per_s": best, "all_turns_per_s": rows, "ratios": ratios, "one_at_a_time": alone}


async def through_pool(level: str, scale: float) -> dict[str, Any]:
    """Returns what a run takes from the wish for a child to the end of its program, without HTTP, and what waiting costs."""
    cores = os.cpu_count() or 1
    uid = 64002 if os.geteuid() == 0 else None
    pool = Pool(level, (), uid, Limits(), max(16, 4 * cores))
    if problem := await pool.start():
        raise RuntimeError(f"wanted a pool at {level}: {problem}")

    async def run(number: int) -> float:
        child = await pool.take()
        head = {"code": f"print({number})", "language": "python", "timeout_s": 10.0, "once": True}
        reply = await execute(child, head, wire.RUN_OUTPUT_BYTES, pool.limits.memory_bytes)
        child.kill("closed")
        if reply["stdout"] != f"{number}\n":
            raise RuntimeError(f"{number}: {reply}")
        return 0.0

    async def alone(number: int) -> None:
        await run(number)

    (pid,) = pool.process_ids()
    await measure(pid, 100, 2 * cores, alone)
    full = await measure(pid, int(1_000 * scale), 2 * cores, alone)
    rows = {f"pool_{2 * cores}": full, "pool at half load": await paced(pid, full["per_s"] / 2, int(3_000 * scale), run)}
    await pool.close()
    for name, imports in (("idle child", ()), ("idle child with numpy", ("numpy",))):
        many = Pool(level, (), uid, Limits(), 64, imports)
        await many.start()
        await asyncio.sleep(2.0)
        rows[name] = idle_memory(many.process_ids()[0])
        await many.close()
    return rows


async def ask(http: aiohttp.ClientSession, server: EmbeddedServer, path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {server.token}"}
    async with http.post(server.url + path, json=body, headers=headers) as reply:
        words = await reply.json(content_type=None)
        if reply.status != 200:
            raise RuntimeError(f"{path}: {words}")
        return words


async def counted(server: EmbeddedServer) -> dict[str, float]:
    """Returns what the server says in /metrics, by name without `sandbox_`, labels included."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.token}"}) as http:
        text = await (await http.get(f"{server.url}/metrics")).text()
    rows = (line.removeprefix("sandbox_").rpartition(" ") for line in text.splitlines())
    return {name: float(value) for name, _, value in rows}


async def branches(server: EmbeddedServer, scale: float) -> dict[str, Any]:
    """Returns the milliseconds per session branched off a live one, one and 16 at a time."""
    async with aiohttp.ClientSession() as http:
        stem = await ask(http, server, "/v1/sessions", {"key": "stem", "branching": True})
        path = f"/v1/sessions/{stem['session']}"
        prefix = {"seq": 1, "code": "import json\nkept = list(range(10000))", "language": "python", "timeout_s": 5}
        await ask(http, server, f"{path}/exec", prefix)
        seq, result = 1, {}
        for together in (1, 16):
            times = []
            for _ in range(max(3, int(30 * scale / together))):
                seq += 1
                keys = [f"branch-{seq}-{number}" for number in range(together)]
                start = time.perf_counter()
                reply = await ask(http, server, f"{path}/branch", {"seq": seq, "keys": keys})
                times.append((time.perf_counter() - start) / together)
                for branch in reply["sessions"]:
                    headers = {"Authorization": f"Bearer {branch['token']}"}
                    await (await http.delete(f"{server.url}/v1/sessions/{branch['session']}", headers=headers)).read()
            result[f"branch_{together}"] = quantiles(times)
    return result


def cgroups(members: Iterable[int]) -> list[Path]:
    """Returns the groups that bear the number of one of these processes, as a supervisor's does, and those in them."""
    wanted = {f"sandbox-{member}" for member in members}
    bases = [Path(place, name) for place, names, _ in os.walk("/sys/fs/cgroup") for name in names if name in wanted]
    return [group for base in bases for group in (base, *(entry for entry in base.iterdir() if entry.is_dir()))]


def idle_memory(pid: int) -> dict[str, float]:
    """Returns the memory of one waiting child in MB: its share of pages, and what its cgroup counts, kernel included."""
    rows = family(pid)
    parents = {int(row[1]) for row in rows.values()}
    leaves = [member for member in rows if member not in parents and int(rows[member][1]) != pid]
    shares = []
    for leaf in leaves:
        with contextlib.suppress(OSError, StopIteration):
            text = Path(f"/proc/{leaf}/smaps_rollup").read_text()
            shares.append(int(next(line.split()[1] for line in text.splitlines() if line.startswith("Pss:"))) * 1024 / 1e6)
    charged = []
    for group in cgroups(rows):
        files = [group / name for name in ("memory.usage_in_bytes", "memory.current")]
        if group.name.isdigit() and (group / "cgroup.procs").read_text().strip():
            charged += [int(file.read_text()) / 1e6 for file in files if file.exists()]
    mean = lambda values: round(sum(values) / len(values), 2) if values else float("nan")  # noqa: E731
    return {"children": len(shares), "pss_mb": mean(shares), "charged_mb": mean(charged)}


async def runs(server: EmbeddedServer, client: SandboxClient, scale: float) -> dict[str, Any]:
    """Returns runs of their own: as many as can be made, one at a time, and such as come at their own pace."""
    pid = json.loads(server.ready_line)["pid"]

    async def run_code(number: int) -> None:
        await client.run_code(f"print({number})")

    async def timed(number: int) -> float:
        return (await client.run_code(f"print({number})")).elapsed_s

    async def nothing(_: int) -> float:
        await client.ready()
        return 0.0

    await measure(pid, int(100 * scale), 16, run_code)
    turns = [await measure(pid, int(1_000 * scale), 16, run_code) for _ in range(3)]
    results = {"run_code_16": sorted(turns, key=lambda row: row["per_s"])[1]}
    results["run_code_1"] = await measure(pid, int(500 * scale), 1, run_code)
    most = results["run_code_16"]["per_s"]
    for name, share in (("at half load", 0.5), ("at 80 % load", 0.8)):
        # beside it the same requests with no program: what HTTP and the machine's neighbours cost by themselves
        results[f"nothing {name}"] = await paced(pid, most * share, int(1_000 * scale), nothing)
        before = await counted(server)
        row = await paced(pid, most * share, int(3_000 * scale), timed)
        spent = {key: value - before.get(key, 0.0) for key, value in (await counted(server)).items()}
        row["cold_share"] = round(spent["cold_takes_total"] / max(1.0, spent["takes_total"]), 3)
        for part in ("queue", "set_up", "run_code"):
            row[f"{part}_ms"] = round(spent[f'seconds_sum{{operation="{part}"}}'] / spent["takes_total"] * 1e3, 3)
        results[f"run_code {name}"] = row
    return results


async def load(server: EmbeddedServer, scale: float) -> dict[str, Any]:
    """Returns every measurement that the server's level allows."""
    pid = json.loads(server.ready_line)["pid"]
    results: dict[str, Any] = {}
    async with SandboxClient(server.url, server.token) as client:
        sessions = [await client.open_session(f"call-{number}", "functions") for number in range(32)]

        async def call(number: int) -> None:
            await sessions[number % 32].call("look_up", {"key": str(number % 100)})

        async def open_and_close(number: int) -> None:
            await (await client.open_session(f"open-{number}", "functions")).close()

        async def episode(number: int) -> None:
            session = await client.open_session(f"episode-{number}", "functions")
            for turn in range(4):
                await session.call("look_up", {"key": str(turn)})
            await session.close()

        async def execute(number: int) -> None:
            await sessions[number % 32].exec(f"print({number})")

        await measure(pid, int(640 * scale), 32, call)
        results["call_32"] = await measure(pid, int(20_000 * scale), 32, call)
        results["call_1"] = await measure(pid, int(3_000 * scale), 1, call)
        results["session_16"] = await measure(pid, int(1_500 * scale), 16, open_and_close)
        results["session_1"] = await measure(pid, int(500 * scale), 1, open_and_close)
        results["episode_of_4_calls_32"] = await measure(pid, int(1_500 * scale), 32, episode)
        if (await client.ready()).code:
            results["exec_in_session_32"] = await measure(pid, int(5_000 * scale), 32, execute)
            results |= await runs(server, client, scale)
            results |= await compare(pid, client, scale)
            results |= await branches(server, scale)
            results |= await through_pool(server.level, scale)
    return results


async def only_runs(server: EmbeddedServer, scale: float) -> dict[str, Any]:
    async with SandboxClient(server.url, server.token) as client:
        return await runs(server, client, scale)


def judged(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns each figure that is asked for with what was asked, what was found and whether that is enough."""
    table = {}
    for name, place, relation, limit in ASKED:
        row, _, key = place.partition(".")
        found = results.get(row, {}).get(key, float("nan"))
        if not math.isnan(found):  # a level may not have it
            met = found >= limit if relation == ">=" else found <= limit
            table[name] = {"asked": f"{relation} {limit:g}", "found": found, "met": met}
    return table


def belongings(pid: int) -> dict[str, int]:
    """Returns what the server and all below it hold of the machine, and what this client does."""
    members = family(pid)
    own = {"client_descriptors": len(list(Path("/proc/self/fd").iterdir())), "client_tasks": len(asyncio.all_tasks())}
    held = {"processes": len(members), **own, "threads": 0, "descriptors": 0, "mounts": 0, "namespaces": 0, "cgroups": 0}
    seen = set()
    for member in members:
        with contextlib.suppress(OSError):
            held["descriptors"] += len(list(Path(f"/proc/{member}/fd").iterdir()))
            held["threads"] += len(list(Path(f"/proc/{member}/task").iterdir()))
            held["mounts"] += len(Path(f"/proc/{member}/mounts").read_text().splitlines())
            seen |= {str(entry.readlink()) for entry in Path(f"/proc/{member}/ns").iterdir()}
    held["namespaces"] = len(seen)
    held["cgroups"] = len(cgroups(members))
    return held


async def soak(server: EmbeddedServer, calls: int) -> dict[str, Any]:
    """Makes `calls` calls of every kind, a thousand sessions open at once among them. Returns what is held around them."""
    pid = json.loads(server.ready_line)["pid"]

    async with SandboxClient(server.url, server.token, timeout_s=120) as client:

        async def rest() -> dict[str, int]:
            """Waits until unused connections are closed and the number of processes has stood still, then counts."""
            await asyncio.sleep(2 * wire.CLIENT_KEEP_ALIVE_S + 1)
            last: dict[str, int] = {}
            for _ in range(100):
                now = belongings(pid)
                said = await counted(server)  # what only the server can count
                now |= {name: int(said[name]) for name in ("tasks", "sessions", "children_ordered_dead") if name in said}
                if now == last:
                    return now
                last = now
                await asyncio.sleep(0.1)
            return last

        async def mixed(number: int) -> None:
            kind = number % 20
            if kind < 8:
                wanted, code = "ok", f"print({number})"
            elif kind == 8:
                wanted, code = "ok", "import os\nif os.fork() == 0:\n    os.setsid()\n    os.execvp('sleep', ['sleep', '60'])"
            elif kind == 9:
                wanted, code = "program_error", "import os; open('a', 'w').write('x' * 100000); os._exit(7)"
            elif kind == 10:
                wanted, code = "ok", "print('x' * 2_000_000)"
            elif kind == 11:
                async with await client.open_session(f"soak-{number}") as session:
                    await session.exec("kept = 1")
                    await session.exec("cd /; echo a > /box/tmp/b; sleep 60 &", "bash")
                    if (await session.exec("kept")).value != "1":
                        raise RuntimeError("a session has lost its state")
                return
            else:
                session = live[number // 20 % len(live)]
                value = await (session.call("look_up", {"key": "9"}) if kind < 16 else session.exec(f"{number} * 2"))
                if value.value != ({"key": "9", "value": 81} if kind < 16 else str(number * 2)):
                    raise RuntimeError(f"a live session answered {value}")
                return
            result = await client.run_code(code)
            if result.outcome != wanted:
                raise RuntimeError(f"wanted {wanted}, got {result}")

        async def at_once(count: int) -> dict[str, float]:
            start = time.perf_counter()
            sessions = await asyncio.gather(*(client.open_session(f"many-{number}") for number in range(count)))
            opened_s = time.perf_counter() - start
            await asyncio.gather(*(session.exec(f"mine = {number}") for number, session in enumerate(sessions)))
            values = await asyncio.gather(*(session.exec("mine") for session in sessions))
            if [value.value for value in values] != [str(number) for number in range(count)]:
                raise RuntimeError("sessions have mixed up their state")
            used_s = time.perf_counter() - start - opened_s
            await asyncio.gather(*(session.close() for session in sessions))
            return {"sessions": count, "opened_s": round(opened_s, 2), "two_execs_each_s": round(used_s, 2)}

        live = [await client.open_session(f"live-{number}", "functions") for number in range(32)]
        await measure(pid, 200, 16, mixed)
        many = await at_once(min(1_000, calls))
        before = await rest()
        row = await measure(pid, calls, 16, mixed)
        again = await at_once(min(1_000, calls))
        after = await rest()
    return {"calls": calls, "before": before, "after": after, "at_once": [many, again], **row}


def main() -> None:
    """Prints the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual number of runs")
    parser.add_argument("--soak", type=int, default=0, help="make so many calls and count what they leave behind")
    parser.add_argument("--only", choices=("run_code",), help="only runs of their own, in a minute of CPU")
    parser.add_argument("--warm", type=int, default=None, help="children that wait, if not the server's usual number")
    parser.add_argument("--min-isolation", default="L2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        Path(place, "functions.py").write_text(FUNCTIONS)
        sys.path.insert(0, place)
        load_before = os.getloadavg()[0]
        flags = ["--max-sessions=1100", "--queue=4000"] if options.soak else ["--imports=numpy", "--queue=1000"]
        flags += [f"--warm={options.warm}"] if options.warm else []
        start = time.perf_counter()
        server = EmbeddedServer(functions=("functions",), min_isolation=options.min_isolation, options=flags)
        with server:
            started_s = time.perf_counter() - start
            pid = json.loads(server.ready_line)["pid"]
            start_cpu_s = server_cpu_s(pid)
            work = only_runs if options.only else load
            results = asyncio.run(soak(server, options.soak) if options.soak else work(server, options.scale))
            stop = time.perf_counter()
        report = {
            "level": server.level,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
            "start": {"wall_s": round(started_s, 3), "cpu_s": round(start_cpu_s, 3)},
            "stop_s": round(time.perf_counter() - stop, 3),
            "took_s": round(time.perf_counter() - start, 1),
            **({} if options.soak else {"figures": judged(results)}),
            **results,
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
