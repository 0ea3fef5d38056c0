"""The loop inside a jailed child: one session's fixed functions, its live Python namespace, its bash and its files.

It reads one request at a time from its socket and answers it, in the frames of frames.py.
Nothing here is trusted by the server: whatever the program does to this process, it can only spoil its own session.
The zygote imports this module, so it must stay light: every page it touches is paid again by every child.
"""

import _ast
import _signal  # without the enums of `signal`
import contextlib
import importlib
import io
import json
import linecache
import os
import resource
import socket
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .archive import unpack
from .frames import BRANCH, CALL, EXEC, FRAME, OPEN, READ, READY, REPLY, TEXT_MAX, UNPACK, WRITE
from .shell import DEFAULT_SIGNALS, Shell

BASH_MAX_BYTES = 128 << 10  # it reads them one by one
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without importing ast


class ProgramTimeout(BaseException):
    """Raised by the alarm inside the program; not an Exception, so that `except Exception` lets it pass."""


Head = dict[str, Any]


def send(sock: socket.socket, kind: bytes, head: bytes, blob: bytes = b"") -> None:
    """Writes one frame."""
    sock.sendall(FRAME.pack(kind, len(head), len(blob)) + head + blob)


# made once, here: json's own functions would make them anew, which costs a child's first operation 0.1 ms
_decode = json.JSONDecoder().raw_decode
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


_NOWHERE: Any = _Nowhere()


class Locked(Protocol):
    """What a lock can do for its child, where it can: jail.Namespaced."""

    def copy(self) -> int: ...
    def settle(self) -> None: ...
    def confine(self, place: str) -> None: ...


class Child:
    """One session. Every operation takes a request's head and raw bytes and returns the reply's."""

    def __init__(self, sock: socket.socket, lock: Locked | None, stem: bool) -> None:
        self._sock = sock
        self._lock, self._stem = lock, stem
        self._descriptors: list[int] = []  # that came with the request
        self._home = os.getcwd()  # noqa: PTH109  (cheaper, and wanted as a string)
        self._pid = os.getpid()
        self._buffer = bytearray()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._main: types.ModuleType | None = None
        self._runs = 0
        self._armed = False
        self._groups: list[int] = []
        self._shell: Shell | None = None

    def rehearse(self) -> None:
        """Runs a program of nothing: the pages that every first program touches are then this child's before one waits."""
        self._exec({"code": "print(end='')", "language": "python", "timeout_s": 1.0}, b"")
        self._main, self._runs = None, 0
        linecache.cache.clear()

    def serve(self) -> None:
        """Answers until the server closes the socket."""
        operations: dict[bytes, Callable[[Head, bytes], tuple[bytes, bytes]]] = {
            CALL: self._call,
            OPEN: self._open,
            EXEC: self._exec,
            WRITE: self._write,
            READ: self._read,
            UNPACK: self._unpack,
        }
        while True:
            kind, length, blob_length = FRAME.unpack(self._receive(FRAME.size))
            head = _decode(self._receive(length).decode())[0]
            if kind == BRANCH:
                self._branch()
                continue
            send(self._sock, REPLY, *operations[kind](head, self._receive(blob_length)))

    def _receive(self, size: int) -> bytes:
        buffer = self._buffer
        while len(buffer) < size:
            if not self._stem:
                data = self._sock.recv(1 << 16)
            else:
                data, descriptors, _, _ = socket.recv_fds(self._sock, 1 << 16, 3)
                self._descriptors += descriptors
            if not data:
                os._exit(0)
            buffer += data
        data = bytes(buffer[:size])
        del buffer[:size]
        return data

    def _run(self, timeout_s: float, work: Callable[[], Head], state: Head) -> bytes:
        """Runs the program under the alarm and returns the reply, whichever way it ended, with `state` in it."""
        try:
            try:
                _signal.signal(_signal.SIGALRM, self._ring)
                self._armed = True
                _signal.setitimer(_signal.ITIMER_REAL, timeout_s)
                # encoded here, so that a value which JSON cannot hold is the program's own error
                return _encode({**state, "outcome": "ok", "error": None, **work()}).encode()
            finally:
                self._armed = False
                _signal.setitimer(_signal.ITIMER_REAL, 0)
                if os.getpid() != self._pid:  # the program forked and let the copy run on: it must not answer too
                    _flush()
                    os._exit(state.get("exit_code") or 0)
        except ProgramTimeout:
            outcome, error = "program_timeout", f"stopped after {timeout_s:g} s"
        except MemoryError as problem:
            outcome, error = "program_oom", _describe(problem)
        except BaseException as problem:
            outcome, error = "program_error", _describe(problem)
        return _encode({**state, "outcome": outcome, "error": error}).encode()

    def _ring(self, *_: object) -> None:
        if self._armed:
            raise ProgramTimeout

    def _branch(self) -> None:
        """Copies this process. The original answers on its own line, the copy on the one that came with the request."""
        assert self._lock is not None  # the server asks no other
        own, self._descriptors = self._descriptors, []
        dice = sys.modules.get("random")
        drawn = dice.getstate() if dice else None  # a fork draws it anew
        try:
            pid = self._lock.copy()
        except OSError as error:
            for descriptor in own:
                os.close(descriptor)
            send(self._sock, REPLY, _encode({"outcome": "program_error", "error": _describe(error)}).encode())
            return
        if pid:
            self._groups.append(-pid)
            for descriptor in own:
                os.close(descriptor)
            for group in self._groups:
                _reap(group)
            send(self._sock, REPLY, b'{"outcome":"ok","error":null}')
            return
        for descriptor, number in zip(own, (3, 1, 2), strict=True):
            os.dup2(descriptor, number, inheritable=number != 3)
            os.close(descriptor)
        if dice:
            dice.setstate(drawn)
        self._pid, self._groups, self._shell = os.getpid(), [], None
        self._buffer.clear()
        self._sock.sendall(b"\0")  # the kernel tells the server who sent it
        if self._sock.recv(1) != b"\1":  # it has not been adopted
            os._exit(1)
        self._lock.settle()
        send(self._sock, READY, b"{}")

    def _open(self, head: Head, _: bytes) -> tuple[bytes, bytes]:
        def work() -> Head:
            self._functions = dict(sys.modules[head["functions"]].session_functions(head["options"]))
            return {}

        return self._quietly(head["timeout_s"], work, {}), b""

    def _call(self, head: Head, _: bytes) -> tuple[bytes, bytes]:
        function = self._functions.get(head["name"])
        if function is None:
            known = ", ".join(sorted(self._functions)) or "none"
            error = f"no function named {head['name']!r}; this session has: {known}"
            return _encode({"outcome": "denied", "value": None, "error": error}).encode(), b""
        work = lambda: {"value": function(**head["arguments"])}  # noqa: E731
        return self._quietly(head["timeout_s"], work, {"value": None}), b""

    def _quietly(self, timeout_s: float, work: Callable[[], Head], state: Head) -> bytes:
        """Runs a fixed function: what it prints goes nowhere, for nobody reads the pipes and they would fill."""
        kept = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = _NOWHERE
        try:
            return self._run(timeout_s, work, state)
        finally:
            sys.stdout, sys.stderr = kept

    def _exec(self, head: Head, blob: bytes) -> tuple[bytes, bytes]:
        self._runs += 1
        for group in self._groups:
            _reap(group)
        if head.get("once"):
            self._prepare_once(head, blob)
        run = self._command if "command" in head else self._bash if head["language"] == "bash" else self._python
        state: Head = {"exit_code": None, "value": None}
        reply = self._run(head["timeout_s"], lambda: run(head, state), state)
        _flush()
        return reply, b""

    def _prepare_once(self, head: Head, blob: bytes) -> None:
        """Gives a stateless run its standard input and its own, lower limits."""
        path = Path(self._home, "..", "tmp", "stdin")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        view = memoryview(blob)
        while view:
            view = view[os.write(file, view) :]
        os.lseek(file, 0, os.SEEK_SET)
        os.dup2(file, 0)
        os.close(file)
        sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]  # stays: a lower one would kill, as nobody but a program should here
        cpu_s = int(head["timeout_s"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s if most == resource.RLIM_INFINITY else min(cpu_s, most), most))
        if head.get("memory_bytes"):
            _limit_address(head["memory_bytes"])

    def _python(self, head: Head, state: Head) -> Head:
        if self._main is None:
            self._main = types.ModuleType("__main__")
            if head.get("grade"):
                sys.path.remove("")  # what is graded must not be imported in place of the library
                self._main.__dict__["run_submission"] = self._run_submission
            sys.modules["__main__"] = self._main  # pickle and multiprocessing look names up there
        name, code, space = f"<exec {self._runs}>", head["code"], self._main.__dict__
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)  # so that tracebacks show the line
        try:
            tree = compile(code, name, "exec", _ONLY_AST)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
            exec(compile(tree, name, "exec"), space)  # noqa: S102  (what this child is for)
            if last is not None:
                value = eval(compile(_ast.Expression(last.value), name, "eval"), space)  # noqa: S307
                state["value"] = None if value is None or head.get("once") else repr(value)[:TEXT_MAX]
            if head.get("grade"):
                reward: Any = space.get("reward")
                finite = isinstance(reward, (int, float)) and reward - reward == 0
                state["reward"] = reward + 0 if finite else repr(reward)[:TEXT_MAX]
            if head.get("once"):
                _finish()
            state["exit_code"] = 0
        except SystemExit as end:
            state["exit_code"] = end.code if isinstance(end.code, int) else int(end.code is not None)
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
        except ProgramTimeout:
            raise
        except BaseException as error:
            state["exit_code"] = 1
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next  # our own frame is no part of the program
            traceback.print_exception(type(error), error, trace)
            raise
        return _ended(state)

    def _run_submission(self, words: list[str], stdin: str = "", timeout_s: float = 5.0) -> Any:
        """Runs a command of what is graded, in its directory, out of reach of the grader; as subprocess.run returns it.

        Raises subprocess.TimeoutExpired. What it started in the background ends with the grader.
        """
        assert self._lock is not None  # graders are namespaced
        lock, place = self._lock, f"{self._home}/submission"
        os.makedirs(place, exist_ok=True)  # noqa: PTH103
        return importlib.import_module("subprocess").run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            cwd=place,
            env={**os.environ, "HOME": place, "TMPDIR": place},
            preexec_fn=lambda: lock.confine(place),
            check=False,
        )

    def _bash(self, head: Head, state: Head) -> Head:
        script = os.fsencode(head["code"])
        if len(script) >= BASH_MAX_BYTES or b"\0" in script:
            return {"outcome": "program_error", "error": f"bash code must be below {BASH_MAX_BYTES} bytes, without NUL"}
        if self._shell is None or not self._shell.alive():
            self._shell = Shell()
        shell, self._shell = self._shell, None
        try:
            code, there = shell.run(script)
        except ProgramTimeout:
            _end_group(shell.pid)
            raise
        if there:
            self._shell = shell
        else:
            self._groups.append(shell.pid)
        state["exit_code"] = code if code >= 0 else 128 - code
        return _ended(state)

    def _command(self, head: Head, state: Head) -> Head:
        """Runs a program of another language, or its compiler."""
        if head.get("address_bytes"):
            _limit_address(head["address_bytes"])
        pid = 0
        try:
            words = head["command"]
            more = {"LD_LIBRARY_PATH": head["libraries"]} if head.get("libraries") else {}
            pid = os.posix_spawn(words[0], words, {**os.environ, **more}, setpgroup=0, setsigdef=DEFAULT_SIGNALS)
            self._groups.append(pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ProgramTimeout:
            if pid:
                _end_group(pid)
            raise
        state["exit_code"] = code if code >= 0 else 128 - code
        return _ended(state)

    def _write(self, head: Head, blob: bytes) -> tuple[bytes, bytes]:
        def work() -> Head:
            path = Path(self._home, head["path"])  # the program may have gone elsewhere
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(blob)
            return {}

        return self._run(head["timeout_s"], work, {}), b""

    def _unpack(self, head: Head, blob: bytes) -> tuple[bytes, bytes]:
        def work() -> Head:
            return {"value": unpack(blob, f"{self._home}/{head['path']}")}

        return self._run(head["timeout_s"], work, {}), b""

    def _read(self, head: Head, _: bytes) -> tuple[bytes, bytes]:
        found = []

        def work() -> Head:
            path = Path(self._home, head["path"])
            size = path.stat().st_size
            if size > head["limit"]:
                raise ValueError(f"wanted at most {head['limit']} bytes, {head['path']} has {size}")
            # no waiting for the other end of a pipe that the program left in place of a file
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                found.append(file.read(head["limit"]))
            return {}

        return self._run(head["timeout_s"], work, {}), found[0] if found else b""


def _limit_address(size_bytes: int) -> None:
    """Sets how much address space each process from here on may have, as far as that may be set."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = size_bytes if most == resource.RLIM_INFINITY else min(most, size_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, wanted))


def _ended(state: Head) -> Head:
    code = state["exit_code"]
    return {**state, "outcome": "program_error", "error": f"exit code {code}"} if code else state


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by the program
            stream.flush()


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:TEXT_MAX]
    except BaseException:  # the program's own __str__ raised
        return type(error).__name__


def _finish() -> None:
    """Waits for threads and runs exit handlers, as the end of an ordinary run would."""
    threading, atexit = (sys.modules.get(name) for name in ("threading", "atexit"))
    if threading:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    if atexit:
        atexit._run_exitfuncs()


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, _signal.SIGKILL)


def _end_group(pid: int) -> None:
    """Ends a process that leads a group, and its group."""
    _kill(-pid)
    _kill(pid)
    os.waitpid(pid, 0)


def _reap(group: int) -> None:
    """Collects what an earlier shell left behind and has since ended; the program's own children stay its own."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def main(sock: socket.socket, lock: Locked | None, stem: bool) -> None:
    """Takes over a freshly locked child: descriptors 1 and 2 are its pipes, `sock` its line to the server.

    `stem`: it may be asked to copy itself.
    """
    sys.argv = [""]
    session = Child(sock, lock, stem)
    session.rehearse()
    send(sock, READY, b"{}")
    session.serve()
