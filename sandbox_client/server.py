"""The command `sandbox-server`: finds the best level that stops its own attacks, drops root, serves.

It is also the only module that decides: which level is enough, whether code runs at all, who may connect.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import ipaddress
import json
import os
import platform
import secrets
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from . import wire
from .app import App, Policy
from .groups import Limits
from .pool import Pool
from .probe import LADDER, MISSING, FatalError, Rung, climb, run_attacks
from .seccomp import AUDIT_ARCH
from .sessions import Gate, Sessions

if sys.platform == "linux":
    from . import jail

_SWEEP_S = 1.0
_FUNCTIONS_ONLY = ("any isolation: so programs are refused, and fixed functions run in the server",)
_TOKEN_BYTES = 32


class StartError(Exception):
    """One sentence: what was wanted, what was found, what to do."""


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else -1  # Windows has no such number, and no root


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sandbox-server", description=__doc__)
    cores = os.cpu_count() or 1
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to bind; loopback unless --behind-proxy")
    add("--port", type=int, default=8080, help="0 takes a free one and prints it")
    add("--token-file", default=None, help="holds the bearer token; made, mode 0600, when it is missing")
    add("--functions", default="", help="comma-separated modules that export session_functions(options)")
    add("--code", choices=("require", "auto", "off"), default="require", help="auto: without a jail, functions only")
    add("--min-isolation", choices=("L1", "L2", "L3"), default="L2", help="the least level at which code may run")
    add("--i-understand-unsandboxed", action="store_true", help="run code with no isolation at all, as this user")
    add("--behind-proxy", action="store_true", help="allow another address than loopback: a proxy brings TLS")
    add("--uid", type=int, default=64001, help="what root becomes; programs get the next one")
    add("--max-sessions", type=int, default=256)
    add("--concurrency", type=int, default=max(16, 4 * cores), help="programs that run at once; calls are not counted")
    add("--warm", type=int, default=max(8, 2 * cores), help="locked children that wait for a session")
    limits = Limits()
    add("--memory-mb", type=int, default=limits.memory_bytes >> 20, help="of a process; at L3 of a whole session")
    add("--disk-mb", type=int, default=limits.disk_bytes >> 20, help="of a session's files, which are held in memory")
    add("--processes", type=int, default=limits.processes, help="of a session, threads included")
    add("--session-idle-s", type=float, default=600.0)
    add("--session-life-s", type=float, default=3600.0)
    add("--parent", type=int, default=0, help=argparse.SUPPRESS)  # an embedding process: end with it
    add("--self-test", action="store_true", help="attack this machine at its best level, print a table, exit")
    return parser.parse_args(argv)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _bind(host: str, port: int) -> socket.socket:
    """Returns the listening socket. Raises StartError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with the protocol named, asyncio turns Nagle's delay off on every connection; unnamed, each reply takes 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if os.name == "posix":  # elsewhere it would share the port with whoever has it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host}:{port} ({error.strerror}): stop what uses the port or give --port=0"
        ) from None
    return listener


def _read_token(path: Path) -> str:
    """Returns the token in `path`, made when the file is missing. Raises StartError when others could know it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        found = path.stat()
        token = path.read_text().strip()
        open_to_others = os.name == "posix" and (found.st_uid != _user() or stat.S_IMODE(found.st_mode) & 0o077)
        if open_to_others or len(token) < _TOKEN_BYTES:
            raise StartError(
                f"wanted {path} to be this user's own, mode 0600, with at least {_TOKEN_BYTES} characters: remove it"
            ) from None
        return token
    except OSError as error:
        raise StartError(f"cannot write the token file {path} ({error.strerror}): give another --token-file") from None
    token = secrets.token_hex(_TOKEN_BYTES)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def _drop_root(uid: int) -> None:
    """Becomes `uid` for good."""
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    except OSError as error:
        raise StartError(f"root cannot become uid {uid} ({error.strerror}): start as an ordinary user") from None
    os.chdir("/")


def _levels(options: argparse.Namespace) -> list[str]:
    wanted = [level for level in LADDER if level >= options.min_isolation]
    if options.i_understand_unsandboxed:
        if not _is_loopback(options.host) or _user() == 0:
            raise StartError("--i-understand-unsandboxed is for an ordinary user on a loopback address only")
        wanted.append("L0")
    return wanted


def _limits(options: argparse.Namespace) -> Limits:
    sizes = {"memory_bytes": options.memory_mb << 20, "disk_bytes": options.disk_mb << 20}
    return Limits()._replace(**sizes, processes=options.processes)


def _unsupported() -> Rung | None:
    """Returns why no level can be had on this kind of machine, before anything is tried."""
    elsewhere = "run the server in a Linux container, or give the address of one that runs elsewhere"
    if sys.platform != "linux":
        return Rung("L1", f"local isolation needs Linux, this is {platform.system()}", elsewhere)
    if platform.machine() not in AUDIT_ARCH:
        return Rung("L1", f"no system-call table for {platform.machine()}, only for {', '.join(AUDIT_ARCH)}", elsewhere)
    return None


async def _choose(options: argparse.Namespace, functions: tuple[str, ...]) -> tuple[Pool | None, Policy]:
    """Returns the pool of the best level and what is thereby allowed. Raises StartError where that is not enough."""
    if options.code == "off":
        why = "this server was started with --code=off"
        return None, Policy("L0", _FUNCTIONS_ONLY, False, why, "start it with --code=require", functions)
    root = _user() == 0
    uid = options.uid + 1 if root else None  # programs can neither signal nor trace the server's own uid
    unsupported = _unsupported()
    levels = [] if unsupported else _levels(options)

    def make(level: str, limits: Limits, warm: int) -> Pool:
        return Pool(level, functions, uid, limits, warm)

    try:
        pool, _, rungs = await climb(make, levels, _limits(options), options.warm)
    except FatalError as error:
        raise StartError(str(error)) from None
    if pool:
        return pool, Policy(pool.level, MISSING[pool.level], True, None, None, functions)
    rungs = [unsupported] if unsupported else rungs
    reason = f"wanted isolation {options.min_isolation} or better; " + "; ".join(f"{r.level}: {r.reason}" for r in rungs)
    remedies = [rungs[-1].remedy] if rungs[-1].remedy else []
    if sys.platform == "linux" and not unsupported and options.min_isolation > "L1" and jail.landlock_abi() >= 6:
        remedies.append("accept less with --min-isolation=L1")
    remedy = "; or ".join(remedies) or "run the server on another machine"
    if options.code == "require":
        raise StartError(f"{reason}: {remedy}; or serve fixed functions only with --code=auto")
    return None, Policy("L0", _FUNCTIONS_ONLY, False, reason, remedy, functions)


class _Joining:
    """A transport that sends a reply's head and its body in one packet: a system call and a wake-up less, each way."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100"):
            self._head = data
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def close(self) -> None:
        if self._head:
            self._transport.write(self._head)
        self._transport.close()


class _Protocol(HttpToolsProtocol):
    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Joining(transport))  # type: ignore[arg-type]


class _Server(uvicorn.Server):
    """uvicorn, telling on standard output when it listens."""

    ready_line = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.ready_line, flush=True)
        sys.stdout = sys.stderr  # nobody reads the rest: what a fixed function prints must not fill the pipe


def _end_with_parent(parent: int, stop: "asyncio.Future[None]") -> None:
    """Ends this process when `parent` does: by the kernel's word where there is one, and when standard input closes."""
    if sys.platform == "linux":
        jail.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        raise StartError(f"the parent {parent} is gone")
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended anyway
            loop.call_soon_threadsafe(_settle, stop)

    threading.Thread(target=wait, daemon=True, name="parent").start()


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def _serve(options: argparse.Namespace) -> int:
    if not _is_loopback(options.host) and not (options.behind_proxy and options.token_file):
        raise StartError(f"{options.host} is not loopback: give --behind-proxy and --token-file, with TLS in the proxy")
    functions = tuple(filter(None, options.functions.split(",")))
    with contextlib.closing(_bind(options.host, options.port)) as listener:
        port = listener.getsockname()[1]
        token_file = Path(options.token_file or Path(tempfile.gettempdir(), f"sandbox-server-{port}.token"))
        token = _read_token(token_file)
        pool, policy = await _choose(options, functions)
        try:
            if not pool:
                for name in functions:
                    _import(name)
            table = Sessions(pool, functions, options.max_sessions, options.session_idle_s, options.session_life_s)
            gate = Gate(options.concurrency, 16 * options.concurrency)
            names = ("localhost", "127.0.0.1", "[::1]", options.host)
            hosts = None if options.behind_proxy else frozenset(f"{name}:{port}".encode() for name in names)
            server = _uvicorn(App(token, hosts, policy, pool, table, gate))
            host = f"[{options.host}]" if ":" in options.host else options.host
            server.ready_line = json.dumps(
                {
                    "ready": True,
                    "url": f"http://{host}:{port}",
                    "level": policy.level,
                    "missing": policy.missing,
                    "code": policy.code,
                    "reason": policy.reason,
                    "remedy": policy.remedy,
                    "token_file": str(token_file),
                    "pid": os.getpid(),
                }
            )
            return await _run(server, listener, pool, table, options)
        finally:
            if pool:
                await pool.close()


def _import(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise StartError(f"wanted functions module {name}: {error}") from None
    if not callable(getattr(module, "session_functions", None)):
        raise StartError(f"wanted functions module {name}: it has no function session_functions(options)")


def _uvicorn(app: App) -> _Server:
    """Returns the server with everything imported: after root is dropped the interpreter may be out of reach."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_keep_alive=wire.SERVER_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    config.load()
    return _Server(config)


async def _run(
    server: _Server, listener: socket.socket, pool: Pool | None, table: Sessions, options: argparse.Namespace
) -> int:
    if _user() == 0:
        _drop_root(options.uid)
    if sys.platform == "linux":
        jail.no_new_privileges()
    stop = asyncio.get_running_loop().create_future()
    if options.parent:
        _end_with_parent(options.parent, stop)
    if pool:
        pool.on_death = lambda: _settle(stop)

    async def sweep() -> None:
        while not stop.done():
            await asyncio.wait([stop], timeout=_SWEEP_S)
            table.sweep()
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn answers them itself, then raises them once more
    gc.collect()
    gc.freeze()  # what is loaded now stays: no collection need look at it again
    sweeping = asyncio.create_task(sweep())
    try:
        await server.serve([listener])
    finally:
        sweeping.cancel()
    if pool and pool.dead:
        print("sandbox-server: the process that forks the programs has died; start the server again", file=sys.stderr)
        return 3
    return 0


async def _self_test(options: argparse.Namespace) -> int:
    """Prints what each attack reached at this machine's best level, and why better levels cannot be had."""
    unsupported = _unsupported()
    uid = options.uid + 1 if _user() == 0 else None

    def make(level: str, limits: Limits, warm: int) -> Pool:
        return Pool(level, (), uid, limits, warm)

    pool, _, rungs = (None, [], [unsupported]) if unsupported else await climb(make, LADDER, _limits(options), 4)
    for rung in rungs:
        print(f"{rung.level}: not here: {rung.reason}" + (f" [{rung.remedy}]" if rung.remedy else ""))
    if pool is None:
        print("no level: programs are refused; fixed functions can be served with --code=auto")
        return 1
    results = await run_attacks(pool, make, starting=False)
    await pool.close()
    width = max(len(attack.name) for attack, _ in results)
    print(f"{pool.level}: {len(results)} attacks; lacks {'; '.join(MISSING[pool.level])}")
    for attack, reached in results:
        print(f"  {attack.name:<{width}}  {'GOT THROUGH: ' + reached if reached else 'stopped'}  ({attack.promise})")
    return int(any(reached for _, reached in results) or pool.level < options.min_isolation)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code: 2 could not start, 3 lost its children."""
    options = _arguments(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    if sys.platform == "linux":
        jail.raise_file_limit()
    try:
        code = asyncio.run(_self_test(options) if options.self_test else _serve(options))
    except StartError as error:
        print(f"sandbox-server: {error}", file=sys.stderr)
        return 2
    if any(thread.name.startswith("functions") for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code)  # a fixed function that never returns would keep its thread, and the thread this process
    return code


if __name__ == "__main__":
    sys.exit(main())
