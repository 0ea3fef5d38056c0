"""The command `sandbox-server`: who may connect, how it listens, how it drops root, serves and ends.

Which level is enough and whether code runs at all is decided in decision.py.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import json
import os
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
from .app import App
from .decision import StartError, choose, is_loopback, self_test, user_id
from .groups import Limits
from .pools import Pools
from .sessions import Gate
from .table import Sessions

if sys.platform == "linux":
    from . import jail

_SWEEP_S = 1.0
_TOKEN_BYTES = 32
_KEPT_VARIABLES = {
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR"),
    *("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV", "CARGO_HOME", "RUSTUP_HOME"),
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sandbox-server", description=__doc__)
    cores = os.cpu_count() or 1
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to bind; other than loopback only with TLS or --behind-proxy")
    add("--tls-cert", default=None, help="certificate chain, PEM: serve https")
    add("--tls-key", default=None, help="its private key")
    add("--port", type=int, default=8080, help="0 takes a free one and prints it")
    add("--token-file", default=None, help="holds the bearer token; made, mode 0600, when it is missing")
    add("--functions", default="", help="comma-separated modules that export session_functions(options)")
    add(
        "--imports",
        action="append",
        default=[],
        help="modules, comma-separated, imported before a program that uses them starts",
    )
    add("--code", choices=("require", "auto", "off"), default="require", help="auto: without a jail, functions only")
    add("--min-isolation", choices=("L1", "L2", "L3", "L4"), default="L2", help="the least level at which code may run")
    add("--i-understand-unsandboxed", action="store_true", help="run code with no isolation at all, as this user")
    add("--behind-proxy", action="store_true", help="allow another address than loopback: a proxy brings TLS")
    add("--uid", type=int, default=64001, help="what root becomes; programs get the next one, graders the one after")
    add("--max-sessions", type=int, default=1024)
    add("--concurrency", type=int, default=2 * cores, help="programs that run at once; calls are not counted")
    add("--queue", type=int, default=32 * cores, help="programs that wait behind them; more are refused")
    add("--warm", type=int, default=max(64, 8 * cores), help="locked children that wait for a session")
    add("--graders", type=int, default=1, help="locked graders that wait; 0 is no grading")
    limits = Limits()
    add("--memory-mb", type=int, default=limits.memory_bytes >> 20, help="of a process; at L3 of a whole session")
    add("--disk-mb", type=int, default=limits.disk_bytes >> 20, help="of a session's files, which are held in memory")
    add("--processes", type=int, default=limits.processes, help="of a session, threads included")
    add("--max-timeout-s", type=float, default=wire.MAX_TIMEOUT_S, help="the longest that a request may ask for")
    add("--session-idle-s", type=float, default=600.0)
    add("--session-life-s", type=float, default=3600.0)
    add("--parent", type=int, default=0, help=argparse.SUPPRESS)  # an embedding process: end with it
    add("--self-test", action="store_true", help="attack this machine at its best level, print a table, exit")
    return parser.parse_args(argv)


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
        open_to_others = os.name == "posix" and (found.st_uid != user_id() or stat.S_IMODE(found.st_mode) & 0o077)
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


def _want_privacy(options: argparse.Namespace) -> None:
    """Raises StartError where the token would cross a network that others can read."""
    if bool(options.tls_cert) != bool(options.tls_key):
        raise StartError("wanted both --tls-cert and --tls-key, got one: give the other too")
    private = options.tls_cert or options.behind_proxy
    if not is_loopback(options.host) and not (private and options.token_file):
        raise StartError(
            f"{options.host} is not loopback: give --token-file and either --tls-cert with --tls-key or, "
            "with TLS in the proxy, --behind-proxy"
        )


def _hosts(options: argparse.Namespace, port: int) -> frozenset[bytes] | None:
    """Returns the Host headers served; None, where the names are a proxy's or the certificate's, is any."""
    if options.behind_proxy or (options.tls_cert and not is_loopback(options.host)):
        return None
    return frozenset(f"{name}:{port}".encode() for name in ("localhost", "127.0.0.1", "[::1]", options.host))


async def _serve(options: argparse.Namespace) -> int:
    _want_privacy(options)
    functions = tuple(filter(None, options.functions.split(",")))
    with contextlib.closing(_bind(options.host, options.port)) as listener:
        port = listener.getsockname()[1]
        token_file = Path(options.token_file or Path(tempfile.gettempdir(), f"sandbox-server-{port}.token"))
        token = _read_token(token_file)
        pools, policy = await choose(options, functions)
        try:
            if not pools:
                for name in functions:
                    _import(name)
            table = Sessions(pools, functions, options.max_sessions, options.session_idle_s, options.session_life_s)
            gate = Gate(options.concurrency, options.queue, options.max_timeout_s)
            if pools:
                pools.give_way_to(gate.busy)
                gate.on_leave = pools.poke
            server = _uvicorn(App(token, _hosts(options, port), policy, pools, table, gate), options)
            host = f"[{options.host}]" if ":" in options.host else options.host
            server.ready_line = json.dumps(
                {
                    "ready": True,
                    "url": f"{'https' if options.tls_cert else 'http'}://{host}:{port}",
                    "level": policy.level,
                    "missing": policy.missing,
                    "code": policy.code,
                    "reason": policy.reason,
                    "remedy": policy.remedy,
                    "token_file": str(token_file),
                    "pid": os.getpid(),
                }
            )
            return await _run(server, listener, pools, table, options)
        finally:
            if pools:
                await pools.close()


def _import(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise StartError(f"wanted functions module {name}: {error}") from None
    if not callable(getattr(module, "session_functions", None)):
        raise StartError(f"wanted functions module {name}: it has no function session_functions(options)")


def _uvicorn(app: App, options: argparse.Namespace) -> _Server:
    """Returns the server with everything imported: after root is dropped the interpreter may be out of reach."""
    for path in filter(None, (options.tls_cert, options.tls_key)):
        if not os.access(path, os.R_OK):
            raise StartError(f"cannot read {path}: give a certificate and its key, both PEM")
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
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )
    config.load()
    return _Server(config)


async def _run(
    server: _Server, listener: socket.socket, pools: Pools | None, table: Sessions, options: argparse.Namespace
) -> int:
    if user_id() == 0:
        _drop_root(options.uid)
    if sys.platform == "linux":
        jail.no_new_privileges()
    stop = asyncio.get_running_loop().create_future()
    if options.parent:
        _end_with_parent(options.parent, stop)
    if pools:
        pools.on_death(lambda: _settle(stop))

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
    if pools and pools.dead:
        print("sandbox-server: the process that forks the programs has died; start the server again", file=sys.stderr)
        return 3
    return 0


def _scrub(options: argparse.Namespace) -> None:
    """Starts this command once more without the environment's secrets, which a process that runs programs has no need of.

    What was in memory at the start stays readable there, so clearing os.environ is not enough. With --code=off fixed
    functions run here and nothing else does: they keep what they were given.
    """
    if sys.platform == "linux" and options.code != "off" and os.environ.keys() - _KEPT_VARIABLES:
        kept = {name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES}
        os.execve(sys.executable, sys.orig_argv, kept)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code: 2 could not start, 3 lost its children."""
    options = _arguments(argv)
    if argv is None:
        _scrub(options)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    if sys.platform == "linux":
        jail.raise_file_limit()
    try:
        code = asyncio.run(self_test(options) if options.self_test else _serve(options))
    except StartError as error:
        print(f"sandbox-server: {error}", file=sys.stderr)
        return 2
    if any(thread.name.startswith("functions") for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code)  # a fixed function that never returns would keep its thread, and the thread this process
    return code


if __name__ == "__main__":
    sys.exit(main())
