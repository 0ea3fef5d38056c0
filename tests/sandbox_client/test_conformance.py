"""One suite over every adapter: what a service can do it does rightly, what it cannot is a typed refusal.

After the list of behaviours that Inspect AI holds its sandboxes to: sizes, bytes that are no text, time limits, files,
directories, variables, order.
"""

import asyncio
import time
from typing import Any

import pytest
from adapters import ALL, World, play

from sandbox_client import InfrastructureError, Outcome, RequestRefused, Unsupported

pytestmark = pytest.mark.parametrize("name", ALL)
SIZES = (0, 64 << 10, 128_000, 180_000, 1 << 20)


def test_a_program_says_what_it_prints_and_how_it_ends(name: str, request: pytest.FixtureRequest) -> None:
    async def ask(world: World) -> None:
        result = await world.run("print('hé', 6 * 7)")
        assert (result.outcome, result.stdout.strip(), result.attempts) == (Outcome.OK, "hé 42", 1)
        failed = await world.run("raise KeyError('no')")
        assert failed.outcome is Outcome.PROGRAM_ERROR
        assert "KeyError" in failed.stderr + failed.stdout + (failed.error or "")
        if world.can.exit_code:
            assert result.exit_code in (0, None) and failed.exit_code in (1, None)
        if "bash" in world.can.languages:
            ended = await world.run("echo out; echo err >&2; exit 3", "bash")
            assert (ended.outcome, ended.exit_code) == (Outcome.PROGRAM_ERROR, 3)
            assert (ended.stdout, ended.stderr) == ("out\n", "err\n")

    play(name, request, ask)


def test_output_of_every_size_comes_back_whole_on_both_streams(name: str, request: pytest.FixtureRequest) -> None:
    async def ask(world: World) -> None:
        for size in (size for size in SIZES if size <= world.can.output_bytes):
            code = f"import sys; sys.stdout.write('o' * {size}); sys.stderr.write('e' * {size})"
            more: dict[str, Any] = {"max_output_bytes": 1 << 20} if name == "v1" else {}
            result = await world.run(code, timeout_s=20, **more)
            assert (result.outcome, result.dropped_bytes, len(result.stdout)) == (Outcome.OK, 0, size)
            assert len(result.stderr) == (size if world.can.stderr else 0)

    play(name, request, ask)


def test_what_is_asked_to_be_short_is_cut_in_its_middle_and_says_so(name: str, request: pytest.FixtureRequest) -> None:
    async def ask(world: World) -> None:
        if world.session is None:
            pytest.skip("a limit is asked for in sessions")
        result = await world.run("print('a' * 5000 + 'b' * 5000)", max_output_bytes=1000)
        assert result.outcome is Outcome.OK and result.output_truncated
        assert len(result.stdout) <= 1100 and result.dropped_bytes >= 8900
        assert result.stdout.startswith("aaa") and "b" in result.stdout

    play(name, request, ask)


def test_bytes_that_are_no_text_do_not_break_the_reply(name: str, request: pytest.FixtureRequest) -> None:
    async def ask(world: World) -> None:
        if name == "e2b-interpreter":
            pytest.skip("a kernel's streams carry text only")
        code = "import os; os.write(1, bytes(range(128, 256)) + b'end'); os.write(2, b'\\xff\\xfe')"
        result = await world.run(code)
        assert result.outcome is Outcome.OK and result.stdout.endswith("end")
        result.stdout.encode()

    play(name, request, ask)


def test_a_program_past_its_time_is_a_timeout_at_once_and_the_next_one_runs(name: str, request: pytest.FixtureRequest) -> None:
    async def ask(world: World) -> None:
        if not world.can.timeout:
            pytest.skip("the service knows no time limit: the call is Unknown at the client's own deadline")
        code, language = "echo early; sleep 30", "bash"
        if name == "e2b-interpreter":
            code, language = "await_forever", "python"
        start = time.monotonic()
        result = await world.run(code, language, timeout_s=0.5)
        assert result.outcome is Outcome.PROGRAM_TIMEOUT and time.monotonic() - start < 4
        if world.can.partial_output:
            assert result.stdout == "early\n"
        if not result.session_lost:
            assert (await world.run("print(1)")).stdout == "1\n"

    play(name, request, ask)


def test_files_keep_every_byte_under_every_name(name: str, request: pytest.FixtureRequest) -> None:
    async def ask(world: World) -> None:
        if not world.can.write_file or world.session is None:
            if world.session is not None:
                for refused in (world.session.write_file("a", b""), world.session.read_file("a")):
                    with pytest.raises(Unsupported):
                        await refused
            return
        session = world.session
        for path, content in (
            ("every.bin", bytes(range(256)) * 5),
            ("empty", b""),
            ("a/b/c.txt", b"line\r\nline\n"),
            ("späße/日 本.txt", "ünï".encode()),
            ("large", b"x" * (2 << 20)),
        ):
            await session.write_file(path, content)
            assert await session.read_file(path) == content
        await session.write_file("every.bin", b"over")
        assert await session.read_file("every.bin") == b"over"
        with pytest.raises(RequestRefused) as missing:
            await session.read_file("missing/file")
        assert missing.value.code == "no_such_file"
        assert (await session.exec("cat a/b/c.txt 'späße/日 本.txt'", "bash")).stdout.startswith("line\r\nline\nünï")
        await session.exec("printf made > by_program", "bash")
        assert await session.read_file("by_program") == b"made"

    play(name, request, ask)


def test_directory_and_variables_are_the_program_s_or_a_refusal(name: str, request: pytest.FixtureRequest) -> None:
    async def ask(world: World) -> None:
        if world.session is None or not world.can.exec:
            return
        session = world.session
        language = "bash" if "bash" in world.can.languages else "python"
        if world.can.write_file:
            await session.write_file("sub dir/x", b"")
        for what, more, code, wanted in (
            ("cwd", {"cwd": "sub dir"}, 'basename "$(pwd)"', "sub dir"),
            ("env", {"env": {"GREETING": "hé 'a' $b"}}, 'echo "$GREETING"', "hé 'a' $b"),
        ):
            if getattr(world.can, what):
                assert (await session.exec(code, language, **more)).stdout.strip() == wanted
            elif not (name == "e2b-interpreter" and what == "cwd"):
                with pytest.raises(Unsupported) as refusal:
                    await session.exec("1", language, **more)
                assert refusal.value.code == "unsupported" and what in str(refusal.value)

    play(name, request, ask)


def test_operations_of_a_session_run_in_the_order_asked_and_leave_what_they_leave(
    name: str, request: pytest.FixtureRequest
) -> None:
    async def ask(world: World) -> None:
        if world.session is None:
            return
        session = world.session
        if world.can.state == "names" and name in ("v1", "e2b-interpreter"):
            await session.exec("kept = [0]")
            await asyncio.gather(*(session.exec(f"kept.append({i})") for i in range(1, 8)))
            assert (await session.exec("print(kept)")).stdout == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
        if "bash" in world.can.languages:
            await asyncio.gather(*(session.exec(f"echo {i} >> log", "bash") for i in range(8)))
            assert (await session.exec("cat log", "bash")).stdout.split() == list("01234567")

    play(name, request, ask)


def test_a_stateless_program_gets_its_input_and_files_and_leaves_nothing(name: str, request: pytest.FixtureRequest) -> None:
    async def ask(world: World) -> None:
        client = world.client
        if not world.can.run_code:
            with pytest.raises(Unsupported):
                await client.run_code("1")
            return
        code = "import sys; open('out', 'w').write(sys.stdin.read() + open('in/ü').read()); open('kept', 'w')"
        result = await client.run_code(code, stdin="héllo ", files={"in/ü": b"file"}, fetch_files=("out", "nothing"))
        assert (result.outcome, result.files) == (Outcome.OK, {"out": "héllo file".encode()})
        again = await client.run_code("import os; print(os.path.exists('kept'))")
        assert again.stdout == "False\n"

    play(name, request, ask)


def test_what_a_service_cannot_do_is_refused_by_name_before_anything_is_sent(name: str, request: pytest.FixtureRequest) -> None:
    async def ask(world: World) -> None:
        before = world.client.metrics().get("client/attempts", 0)
        can = world.can
        refused = [] if can.run_code else [lambda: world.client.run_code("1")]
        if not can.sessions:
            refused.append(lambda: world.client.open_session("key"))
        elif world.session is not None:
            session = world.session
            refused += [] if can.call else [lambda: session.call("anything", {})]
            refused += [] if can.exec else [lambda: session.exec("1")]
            refused += [] if can.session_stdin else [lambda: session.exec("1", stdin="x")]
            refused += [lambda: session.exec("1", "cobol")]
            refused += [] if can.snapshot else [session.snapshot]
            refused += [] if can.grade else [lambda: session.grade("reward = 1")]
            refused += [] if can.imports else [lambda: world.client.open_session("key", imports="math")]
            refused += [] if can.tokens else [lambda: asyncio.to_thread(session.ticket)]
        else:
            refused += [lambda: world.client.run_code("1", "cobol")]
        for question in refused:
            with pytest.raises(Unsupported) as refusal:
                await question()
            assert refusal.value.backend in str(refusal.value)
            assert not isinstance(refusal.value, InfrastructureError)
        assert world.client.metrics().get("client/attempts", 0) == before

    play(name, request, ask)
