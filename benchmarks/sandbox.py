"""What the sandbox costs: `python benchmarks/sandbox.py` starts a server, loads it, and prints one JSON object.

CPU is counted for the client's process and for the server with all that it forks, dead children included; the machine's
adds the kernel's own threads, and whatever else runs. Latencies are those of a caller among `concurrency` others (the
number in a name). Run it on an idle machine: under a neighbour's load the CPU rises too.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from sandbox_client import EmbeddedServer, SandboxClient  # noqa: E402  (found beside this file, installed or not)

FUNCTIONS = """
def session_functions(options):
    table = {str(number): number * number for number in range(100)}
    def look_up(key: str) -> dict:
        return {"key": key, "value": table[key]}
    return {"look_up": look_up}
"""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def server_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of `pid` and everything below it, with those that its dead descendants used."""
    total, wanted = 0.0, {pid}
    rows: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            rows[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    for _ in range(5):
        wanted |= {child for child, row in rows.items() if int(row[1]) in wanted}
    for member in wanted & rows.keys():
        total += sum(map(int, rows[member][11:15])) * TICK_S
    return total


def machine_cpu_s() -> float:
    """Returns the CPU seconds that the whole machine has been busy: kernel workers and neighbours too."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft) * TICK_S


async def measure(
    pid: int, count: int, concurrency: int, work: Callable[[int], Awaitable[None]], settle_s: float = 0.2
) -> dict[str, float]:
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
    latencies.sort()
    return {
        "per_s": round(count / wall_s, 1),
        "client_cpu_ms": round(client / count * 1e3, 4),
        "server_cpu_ms": round(server / count * 1e3, 4),
        "cpu_ms": round((client + server) / count * 1e3, 4),
        "machine_cpu_ms": round(machine / count * 1e3, 4),
        "p50_ms": round(latencies[count // 2] * 1e3, 3),
        "p99_ms": round(latencies[int(count * 0.99)] * 1e3, 3),
    }


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

        async def run_code(number: int) -> None:
            await client.run_code(f"print({number})")

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
            results["run_code_16"] = await measure(pid, int(1_500 * scale), 16, run_code)
            results["run_code_1"] = await measure(pid, int(500 * scale), 1, run_code)
    return results


def main() -> None:
    """Prints the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual number of runs")
    parser.add_argument("--min-isolation", default="L2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        Path(place, "functions.py").write_text(FUNCTIONS)
        sys.path.insert(0, place)
        load_before = os.getloadavg()[0]
        start = time.perf_counter()
        with EmbeddedServer(functions=("functions",), min_isolation=options.min_isolation) as server:
            started_s = time.perf_counter() - start
            pid = json.loads(server.ready_line)["pid"]
            start_cpu_s = server_cpu_s(pid)
            results = asyncio.run(load(server, options.scale))
            stop = time.perf_counter()
        report = {
            "level": server.level,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "load_before": load_before,
            "start": {"wall_s": round(started_s, 3), "cpu_s": round(start_cpu_s, 3)},
            "stop_s": round(time.perf_counter() - stop, 3),
            **results,
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
