"""The fault model, row by row, against a server that fails by script; and all of it at once, by drawn schedules."""

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from faults import WORDS, FaultServer
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_client import (
    AiohttpTransport,
    CallResult,
    ExecResult,
    InfrastructureError,
    Outcome,
    Overloaded,
    ProtocolError,
    SandboxClient,
    SessionLost,
    Unknown,
    Unreachable,
)

Question = Callable[[SandboxClient], Awaitable[Any]]


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of tenths of a second."""
    monkeypatch.setattr("sandbox_client.wire.CLIENT_MARGIN_S", 0.4)
    monkeypatch.setattr("sandbox_client.wire.ASK_AGAIN_S", 0.1)


def against(server: FaultServer, question: Question, **options: Any) -> Any:
    async def run() -> Any:
        token = options.pop("token", "token")
        async with server.serving() as url, SandboxClient(url, token, timeout_s=2.0, **options) as client:
            return await question(client)

    return asyncio.run(run())


async def call(client: SandboxClient, key: str = "key", timeout_s: float = 10.0, **options: Any) -> CallResult:
    return await (await client.open_session(key, **options)).call("add", {}, timeout_s=timeout_s)


# ====================================================================== connections


def test_a_name_that_nobody_knows_is_unreachable() -> None:
    async def ask() -> None:
        async with SandboxClient("http://sandbox.invalid:1", "t", timeout_s=0.3) as client:
            with pytest.raises(Unreachable) as error:
                await client.ready()
            assert not error.value.may_have_executed

    asyncio.run(ask())


@pytest.mark.parametrize("word", ["slam", "reset", "lose"])
@pytest.mark.parametrize("announces", [True, False])
def test_an_end_before_any_byte_is_repeated_only_for_a_key_that_is_remembered(word: str, announces: bool) -> None:
    server = FaultServer(["honest", word], announces_memory=announces)

    async def ask(client: SandboxClient) -> Any:
        await client.run_code("1")  # from which the client learns what the server announces
        try:
            return await client.run_code("2")
        except InfrastructureError as error:
            return error

    second = against(server, ask)
    assert max(server.executions.values()) == 1
    if announces:
        assert isinstance(second, ExecResult)
    else:
        assert isinstance(second, Unknown) and second.may_have_executed


def test_an_idle_connection_is_closed_by_the_client_before_the_server_does() -> None:
    async def ask(client: SandboxClient) -> None:
        await call(client)
        async with asyncio.timeout(3.0):
            await server.gone.wait()  # the server would have waited longer
        assert (await call(client)).attempts == 1

    server = FaultServer(keep_alive_s=0.8)
    against(server, ask)
    assert max(server.executions.values()) == 1


def test_a_small_limit_of_open_files_bounds_the_connections_and_thousands_of_calls_pass(place: Path) -> None:
    program = place / "many.py"
    program.write_text(
        "import asyncio, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "sys.path[:0] = sys.argv[1].split(':')\n"
        "from faults import FaultServer\n"
        "from sandbox_client import SandboxClient\n"
        "async def main():\n"
        "    server = FaultServer()\n"
        "    async with server.serving() as url, SandboxClient(url, 't', max_connections=100) as client:\n"
        "        await client.run_code('0')\n"
        "        await asyncio.gather(*(client.run_code('1') for _ in range(3000)))\n"
        "    print(len(server.executions), max(server.executions.values()), server.accepted <= 100)\n"
        "    async with SandboxClient('http://127.0.0.1:1', 't', max_connections=100_000) as client:\n"
        "        print(client._caller.endpoints[0].window.most < 256)\n"
        "asyncio.run(main())\n"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, program, f"{here}:{here.parents[1]}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "3001 1 True\nTrue\n", done.stderr
    assert "only 256 files may be open" in done.stderr


# ====================================================================== replies that do not come, or not well


@pytest.mark.parametrize("word", ["stall", "stall_mid"])
def test_a_reply_that_is_late_is_asked_for_again_and_answered_from_memory(word: str, brief: None) -> None:
    server = FaultServer([word])
    result = against(server, lambda client: call(client, timeout_s=0.1))
    assert (result.value, result.attempts) == (1, 2)
    assert server.executions == {"key/1": 1}


@pytest.mark.parametrize("code", ["500", "502", "504", "524"])
@pytest.mark.parametrize(("announces", "pure", "attempts"), [(True, "", 2), (False, "", 0), (False, "tool", 2)])
def test_a_wreck_s_status_is_repeated_where_nothing_can_run_twice(code: str, announces: bool, pure: str, attempts: int) -> None:
    server = FaultServer(["honest", code], announces_memory=announces)

    async def ask(client: SandboxClient) -> Any:
        await client.run_code("1")
        return await client.run_code("2", pure=pure)

    if attempts:
        assert against(server, ask).attempts == attempts
    else:
        with pytest.raises(Unknown):
            against(server, ask)


def test_a_busy_session_is_asked_four_times_more_and_then_it_is_overload() -> None:
    assert against(FaultServer(["409"]), call).attempts == 2
    server = FaultServer(["409"] * 9)
    with pytest.raises(Overloaded) as error:
        against(server, call)
    assert error.value.attempts == 5 and not error.value.may_have_executed


def test_a_token_that_has_run_out_is_fetched_once_for_all_who_wait() -> None:
    server, fetched = FaultServer(token="T1"), []

    async def fetch() -> str:
        await asyncio.sleep(0.01)
        fetched.append(1)
        return f"t{len(fetched)}"

    async def ask(client: SandboxClient) -> None:
        await client.run_code("0")
        server.token = "T2"
        results = await asyncio.gather(*(client.run_code(str(i)) for i in range(20)))
        assert {result.outcome for result in results} == {Outcome.OK}

    against(server, ask, token=fetch)
    assert len(fetched) == 2
    assert set(server.executions.values()) == {1}


def test_a_token_that_cannot_be_fetched_is_an_infrastructure_failure_that_sent_nothing() -> None:
    async def fetch() -> str:
        raise KeyError("vault")

    with pytest.raises(Unreachable, match="no token: KeyError") as error:
        against(FaultServer(), lambda client: client.run_code("1"), token=fetch)
    assert not error.value.may_have_executed


@pytest.mark.parametrize("word", ["bomb", "huge", "deep", "twice", "brotli", "swapped"])
def test_a_reply_that_cannot_be_trusted_ends_the_call_and_its_connection(word: str) -> None:
    server = FaultServer([word])

    async def ask(client: SandboxClient) -> None:
        with pytest.raises(ProtocolError) as error:
            await call(client)
        assert error.value.may_have_executed
        assert (await call(client, "other")).value == 2

    against(server, ask)
    assert set(server.executions.values()) == {1}


def test_an_honest_reply_may_be_compressed() -> None:
    server = FaultServer(["packed", "deflated"])
    assert [against(server, call).value for _ in range(2)] == [1, 1]


def test_a_server_that_has_echoed_a_call_must_go_on_doing_so() -> None:
    async def ask(client: SandboxClient) -> None:
        session = await client.open_session("key")
        assert (await session.call("add", {})).value == 1
        with pytest.raises(ProtocolError, match="without X-Call-Id"):
            await session.call("add", {})

    against(FaultServer(["echo", "honest"]), ask)


def test_new_connections_are_made_at_a_bounded_rate() -> None:
    async def ask(client: SandboxClient) -> None:
        await asyncio.gather(*(client.run_code(str(i)) for i in range(12)))

    server = FaultServer(["slow:0.3"] * 12)
    against(server, ask, make_transport=lambda most: AiohttpTransport(most, connects_per_s=50.0))
    assert server.accepted == 12
    assert server.accepted_at[-1] - server.accepted_at[0] >= (12 - 5 - 1) / 50.0 - 0.02


def test_the_server_is_told_how_much_time_is_left() -> None:
    server = FaultServer(["429:0.05", "honest"])
    against(server, lambda client: call(client, timeout_s=1.0))
    opening, first, second = server.deadlines_ms
    assert opening <= 2000 and 5950 <= second + 50 <= first + 1 <= 6001


# ====================================================================== sessions


def test_a_replayable_session_that_is_lost_is_built_anew_and_goes_on() -> None:
    server = FaultServer(["honest", "honest", "404"])

    async def ask(client: SandboxClient) -> Any:
        session = await client.open_session("key", replayable=True)
        results = [await session.call("echo", {"n": n}) for n in range(3)]
        return [result.outcome for result in results], session.rebuilt

    # the fault server's values count executions: a replayed step differs, so a true replay is asked of a scripted one
    values = iter([1, 2, 1, 2, 3])
    server.execute = lambda key, remembered=True: next(values)  # type: ignore[method-assign]
    assert against(server, ask) == ([Outcome.OK] * 3, 1)
    assert server.opened == ["key", "key~1"]


def test_a_replay_that_gives_something_else_is_no_replay() -> None:
    server = FaultServer(["honest", "410"])

    async def ask(client: SandboxClient) -> Any:
        session = await client.open_session("key", replayable=True)
        await session.call("add", {})
        await session.call("add", {})

    with pytest.raises(SessionLost, match="step 1 of the replay"):
        against(server, ask)


def test_a_session_that_nobody_declared_replayable_stays_lost() -> None:
    server = FaultServer(["honest", "410"])

    async def ask(client: SandboxClient) -> None:
        session = await client.open_session("key")
        await session.call("add", {})
        with pytest.raises(SessionLost):
            await session.call("add", {})

    against(server, ask)
    assert server.opened == ["key"]


# ====================================================================== many endpoints


def test_one_endpoint_down_moves_its_share_and_no_more() -> None:
    async def ask() -> None:
        servers = [FaultServer() for _ in range(3)]
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(server.serving()) for server in servers]
            client = await stack.enter_async_context(SandboxClient(urls, "t", timeout_s=2.0))
            for i in range(60):
                await call(client, f"before/{i}")
            shares = [len(server.opened) for server in servers]
            assert min(shares) > 8
            homes = {key: n for n, server in enumerate(servers) for key in server.opened}
        ports = [int(url.rpartition(":")[2]) for url in urls]
        async with contextlib.AsyncExitStack() as stack:
            left = [FaultServer(), FaultServer()]
            for server, port in zip(left, ports[1:], strict=True):
                await stack.enter_async_context(server.serving(port))
            client = await stack.enter_async_context(SandboxClient(urls, "t", timeout_s=2.0))
            for i in range(60):
                await call(client, f"before/{i}")
            for n, server in enumerate(left, 1):
                assert all(homes[key] in (0, n) for key in server.opened)

    asyncio.run(ask())


def test_a_slow_endpoint_is_passed_over_and_a_late_pure_call_is_hedged_within_two_per_cent() -> None:
    async def ask() -> None:
        quick, slow = FaultServer(), FaultServer()
        async with quick.serving() as one, slow.serving() as two, SandboxClient([one, two], "t") as client:
            for i in range(60):
                await client.run_code(str(i), pure="tool")
            slow.script = ["slow:0.2"] * 1000  # from now on 50 times slower
            start = time.monotonic()
            for i in range(300):
                await client.run_code(str(i), pure="tool")
            seconds = time.monotonic() - start
            hedges = client.metrics().get("client/hedges", 0)
            assert 1 <= hedges <= 0.02 * 361
            assert seconds < 0.2 * 150 / 2  # half of the calls prefer the slow one
            assert len(slow.script) > 900
            assert client._caller.endpoints[1].window.in_flight == 0

    asyncio.run(ask())


def test_all_endpoints_down_is_said_loudly_and_scored_by_nobody(brief: None) -> None:
    async def ask(client: SandboxClient) -> None:
        start = time.monotonic()
        results = await asyncio.gather(*(client.run_code(str(i), timeout_s=0.2) for i in range(50)), return_exceptions=True)
        assert time.monotonic() - start < 1.6
        assert {type(result) for result in results} <= {Unknown, Unreachable, Overloaded}
        assert client._caller.endpoints[0].breaker.state != "closed"
        server.script.clear()
        assert (await client.run_code("again", timeout_s=3.0)).outcome is Outcome.OK

    server = FaultServer(["slam"] * 10_000)
    against(server, ask)
    assert server.accepted < 60  # the breaker keeps the rest away


def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(0, 10**9, 86_400))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    assert against(FaultServer(["429:0.01", "500", "lose"]), call).attempts == 4


# ====================================================================== cancellation


class CancelledAt:
    """Awaits `work`, cancelling its task when it waits for the n-th time."""

    def __init__(self, work: Any, n: int) -> None:
        self.work, self.n, self.count = work, n, 0

    def __await__(self) -> Generator[Any, None, Any]:
        steps, thrown = self.work.__await__(), None
        while True:
            try:
                waited_for = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count == self.n:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                thrown = None
                yield waited_for
            except asyncio.CancelledError as cancellation:
                thrown = cancellation


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(3.0):
        while not true():  # noqa: ASYNC110 (descriptors send no events)
            await asyncio.sleep(0.001)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0


@pytest.mark.parametrize("kind", ["session", "run", "pure", "queue"])
def test_a_call_cancelled_at_any_of_its_waits_leaves_no_task_no_descriptor_and_no_turn_taken(kind: str) -> None:
    async def once(url: str, n: int) -> bool:
        """Returns whether the call waited for the n-th time."""
        async with SandboxClient(url, "token", timeout_s=2.0, max_connections=1 if kind == "queue" else 4) as client:
            if kind == "pure":
                await client.run_code("0", pure="x")
                client._caller.hedges = type(client._caller.hedges)(share=1.0, least=0)
                client._caller.hedges.answered(0.0)

            async def work() -> Any:
                if kind == "session":
                    return await call(client)
                if kind == "queue":
                    first = asyncio.ensure_future(client.run_code("1"))
                    try:
                        return await client.run_code("2")
                    finally:
                        await asyncio.gather(first, return_exceptions=True)
                return await client.run_code("1", pure="x" * (kind == "pure"))

            point = CancelledAt(work(), n)

            async def run() -> Any:
                return await point

            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.create_task(run())
            caller = client._caller
            assert caller.in_flight == 0
            assert [endpoint.window.in_flight for endpoint in caller.endpoints] == [0]
            assert (await client.run_code("after")).outcome is Outcome.OK
        return point.count >= n

    async def every() -> int:
        server = FaultServer()
        async with server.serving() as url:
            await once(url, 10_000)
            for _ in range(20):
                await asyncio.sleep(0)  # the server's ends of closed connections
            tasks, files, n = len(asyncio.all_tasks()), open_files(), 0
            going = True
            while going:
                n += 1
                going = await once(url, n)
                await until(lambda: len(asyncio.all_tasks()) <= tasks and open_files() <= files)
            assert max(server.executions.values()) == 1 or kind == "pure"
        return n

    assert asyncio.run(every()) >= 3


def test_a_client_that_is_closed_while_calls_wait_for_their_turn_ends_them_all() -> None:
    async def ask() -> None:
        server = FaultServer(["stall"] * 9)
        async with server.serving() as url:
            client = SandboxClient(url, "t", max_connections=1)
            calls = [asyncio.ensure_future(client.run_code(str(i), pure="x" * (i % 2))) for i in range(5)]
            await until(lambda: bool(server.executions))
            await client.close()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(result).__name__ for result in results} == {"Cancelled"}

    asyncio.run(ask())


# ====================================================================== all at once

SCHEDULES = st.lists(st.lists(st.sampled_from(WORDS), max_size=4), min_size=4, max_size=8)


@settings(max_examples=int(os.environ.get("FAULT_EXAMPLES", "12")), deadline=None, derandomize=True)
@given(SCHEDULES, st.booleans())
def test_under_any_schedule_nothing_runs_twice_all_end_in_time_and_no_fault_becomes_an_outcome(
    schedules: list[Sequence[str]], announces: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sandbox_client.wire.CLIENT_MARGIN_S", 0.4)
        patch.setattr("sandbox_client.wire.ASK_AGAIN_S", 0.1)
        asyncio.run(_play(schedules, announces))


def _waited_s() -> float:
    """How long this thread, which is client and server, has waited for a core that others had."""
    told = Path("/proc/thread-self/schedstat")
    return int(told.read_text().split()[1]) / 1e9 if told.exists() else 0.0


async def _play(schedules: list[Sequence[str]], announces: bool) -> None:
    scripts = {}
    for number, words in enumerate(schedules):
        scripts[f"session-{number}"] = scripts[f"program-{number}"] = scripts[f"pure-{number}"] = list(words)
    server = FaultServer(announces_memory=announces, scripts=scripts)
    budget_s = 0.1 + 0.4 + 1.0

    async def timed(work: Awaitable[Any], before_s: float = 0.0) -> Any:
        start, waited_s = time.monotonic(), _waited_s()
        try:
            return await work
        except InfrastructureError as error:
            return error
        finally:
            assert time.monotonic() - start - (_waited_s() - waited_s) < budget_s + before_s

    async def in_session(client: SandboxClient, number: int) -> list[Any]:
        session = await timed(client.open_session(f"session-{number}"), 1.0)
        if isinstance(session, InfrastructureError):
            return [session]
        return [await timed(session.call("add", {}, timeout_s=0.1)) for _ in range(2)]

    async with server.serving() as url, SandboxClient(url, "t", timeout_s=0.5) as client:
        numbers = range(len(schedules))
        sessions = asyncio.gather(*(in_session(client, n) for n in numbers))
        runs = asyncio.gather(*(timed(client.run_code(f"program-{n}", timeout_s=0.1)) for n in numbers))
        pure = asyncio.gather(*(timed(client.run_code(f"pure-{n}", timeout_s=0.1, pure="tool")) for n in numbers))
        results = [*itertools.chain(*await sessions), *await runs, *await pure]
        assert client._caller.in_flight == 0
    known = set(range(1, 1 + sum(server.executions.values())))
    for result in results:
        if isinstance(result, InfrastructureError):
            assert result.attempts >= 0 and type(result.may_have_executed) is bool
        else:  # an outcome exists only where a program really ran, and says what that one said
            value = result.value if isinstance(result, CallResult) else int(result.stdout)
            assert result.outcome is Outcome.OK and value in known
    once = [count for key, count in server.executions.items() if not server.codes[key].startswith("pure-")]
    assert max(once, default=1) == 1
    finished = [result for result in results if not isinstance(result, InfrastructureError)]
    assert len(finished) <= sum(server.executions.values())
