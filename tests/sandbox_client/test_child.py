"""Programs in the jail: what they print, how they end, what an ordinary one finds."""

import asyncio

import pytest
from conftest import Start, ask, raw
from launching import IS_ROOT, Running

from sandbox_client import Outcome, SandboxClient, wire


@pytest.mark.parametrize("size", [0, 1, 64 << 10, 180_000, 1 << 20])
def test_both_streams_at_once_arrive_whole_up_to_the_limit(server: Running, size: int) -> None:
    code = f"import sys\nsys.stdout.write('o' * {size})\nsys.stderr.write('e' * {size})"
    result = ask(server, lambda client: client.run_code(code))
    assert (result.outcome, result.dropped_bytes) == (Outcome.OK, 0)
    assert (result.stdout, result.stderr) == ("o" * size, "e" * size)


def test_what_a_child_did_while_it_waited_is_not_to_be_seen(server: Running) -> None:
    async def look(client: SandboxClient) -> None:
        async with await client.open_session("first look") as session:
            found = await session.exec("[name for name in globals() if not name.startswith('__')]")
            assert (found.value, found.stdout) == ("[]", "")
            assert 'File "<exec 2>"' in (await session.exec("1 / 0")).stderr

    ask(server, look)


def test_a_child_that_is_taken_is_replaced_before_the_next_is_wanted(start: Start) -> None:
    server = start("--code=auto", "--warm=2", user="root" if IS_ROOT else "ordinary")
    if not server.ready["code"]:
        pytest.skip(f"no jail here: {server.ready['reason']}")

    async def take(client: SandboxClient) -> None:
        before = await cold_takes()
        for _ in range(20):  # ten times as many as wait, each with time for another to be forked
            assert (await client.run_code("1")).outcome is Outcome.OK
            await asyncio.sleep(0.1)
        assert await cold_takes() - before <= 2  # a busy machine may be late

    async def cold_takes() -> int:
        text = (await raw(server, "GET", "/metrics"))[1]["text"].decode()
        return int(dict(line.rsplit(" ", 1) for line in text.splitlines())["sandbox_cold_takes_total"])

    ask(server, take)


def test_a_session_keeps_head_and_tail_and_counts_what_it_dropped(server: Running) -> None:
    async def print_much(client: SandboxClient) -> None:
        async with await client.open_session("much") as session:
            result = await session.exec("print('head' + 'x' * 1_000_000 + 'tail')")
            assert result.outcome is Outcome.OK
            assert result.stdout.startswith("headx")
            assert result.stdout.endswith("xtail\n")
            assert result.dropped_bytes == 1_000_009 - wire.EXEC_OUTPUT_BYTES
            small = await session.exec("print('y' * 100)", max_output_bytes=10)
            assert (small.stdout[:5], small.dropped_bytes) == ("yyyyy", 91)

    ask(server, print_much)


def test_output_that_is_not_text_arrives_with_replacements(server: Running) -> None:
    result = ask(server, lambda client: client.run_code("import os; os.write(1, b'a\\xff\\xfeb\\x00')"))
    assert result.stdout == "a\ufffd\ufffdb\x00"


def test_partial_output_of_a_killed_program_is_kept(server: Running) -> None:
    code = "print('before')\nimport signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\nwhile True: pass"
    result = ask(server, lambda client: client.run_code(code, timeout_s=0.2))
    assert (result.outcome, result.stdout) == (Outcome.PROGRAM_TIMEOUT, "before\n")


@pytest.mark.parametrize(
    ("code", "language", "outcome", "exit_code", "error"),
    [
        ("raise ValueError('no')", "python", Outcome.PROGRAM_ERROR, 1, "ValueError: no"),
        ("import sys; sys.exit(3)", "python", Outcome.PROGRAM_ERROR, 3, "exit code 3"),
        ("import sys; sys.exit()", "python", Outcome.OK, 0, None),
        ("def f(:", "python", Outcome.PROGRAM_ERROR, 1, "SyntaxError: invalid syntax (<exec 1>, line 1)"),
        ("x = 'a' * (1 << 30)", "python", Outcome.PROGRAM_OOM, 1, "MemoryError: "),
        ("def f(): f()\nf()", "python", Outcome.PROGRAM_ERROR, 1, "RecursionError: maximum recursion depth exceeded"),
        ("exit 4", "bash", Outcome.PROGRAM_ERROR, 4, "exit code 4"),
        ("kill -9 $$", "bash", Outcome.PROGRAM_ERROR, 137, "exit code 137"),
        ("true", "bash", Outcome.OK, 0, None),
    ],
)
def test_a_program_ends_in_its_own_way(
    server: Running, code: str, language: str, outcome: Outcome, exit_code: int, error: str | None
) -> None:
    async def run(client: SandboxClient) -> None:
        async with await client.open_session(f"end-{code}") as session:
            result = await session.exec(code, language)
            assert (result.outcome, result.exit_code, result.error) == (outcome, exit_code, error)
            assert not result.session_lost
            assert (await session.exec("1 + 1")).value == "2"

    ask(server, run)


@pytest.mark.parametrize(
    ("ending", "outcome", "exit_code", "error"),
    [
        ("os._exit(0)", Outcome.OK, 0, None),
        ("os._exit(7)", Outcome.PROGRAM_ERROR, 7, "exit code 7"),
        ("ctypes.string_at(0)", Outcome.PROGRAM_ERROR, -11, "signal 11"),
    ],
)
def test_a_stateless_run_may_end_its_own_process(
    server: Running, ending: str, outcome: Outcome, exit_code: int, error: str | None
) -> None:
    result = ask(server, lambda client: client.run_code(f"import ctypes, os\nprint('said')\n{ending}"))
    assert (result.outcome, result.exit_code, result.error) == (outcome, exit_code, error)
    assert result.stdout == "said\n"


def test_a_traceback_shows_the_programs_lines_and_none_of_ours(server: Running) -> None:
    result = ask(server, lambda client: client.run_code("def f():\n    return 1 / 0\nf()"))
    assert "    return 1 / 0\n" in result.stderr
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert "sandbox_client" not in result.stderr


def test_a_stateless_run_has_input_files_threads_and_exit_handlers(server: Running) -> None:
    code = """
import atexit, sys, threading, time
atexit.register(print, "exit handler")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print(input() + sys.stdin.read() + open("in/data.txt").read(), __name__)
open("out.bin", "wb").write(b"\\x00\\xff")
"""
    result = ask(
        server,
        lambda client: client.run_code(
            code, stdin="one\ntwo", files={"in/data.txt": b"three"}, fetch_files=("out.bin", "missing")
        ),
    )
    assert result.stdout == "onetwothree __main__\nthread\nexit handler\n"
    assert result.files == {"out.bin": b"\x00\xff"}


def test_ordinary_programs_find_what_they_need(server: Running) -> None:
    code = """
import asyncio, concurrent.futures, multiprocessing, os, sqlite3, subprocess, sys, tempfile, threading

async def double(number):
    await asyncio.sleep(0)
    return number * 2

def square(number):
    return number * number

async def gather():
    return await asyncio.gather(*map(double, range(3)))

results = [asyncio.run(gather())]
with multiprocessing.Pool(2) as pool:
    results.append(pool.map(square, range(3)))
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    results.append(list(pool.map(square, range(3))))
results.append(subprocess.run([sys.executable, "-c", "print(6)"], capture_output=True, text=True, check=True).stdout)
with tempfile.TemporaryDirectory() as place:
    base = sqlite3.connect(os.path.join(place, "base"))
    results.append(base.execute("select 7").fetchone())
    base.close()
print(results)
"""
    result = ask(server, lambda client: client.run_code(code))
    assert result.stdout == "[[0, 2, 4], [0, 1, 4], [0, 1, 4], '6\\n', (7,)]\n", result
