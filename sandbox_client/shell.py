"""The one bash of a session: it keeps its directory, variables and functions from one program to the next.

It runs each program as one `eval` of its own, and tells the exit status on a pipe that programs do not inherit. When it
ends, by `exit` or by a signal, the next program finds a new one.
"""

import _signal
import os

_COMMANDS, _STATUS = 198, 199  # numbers that programs leave alone
_LOOP = f"""while IFS= read -r -d '' -u {_COMMANDS} __program; do
eval "$__program" {_COMMANDS}<&- {_STATUS}>&-
printf '%s\\n' $? >&{_STATUS}
done"""
# Python ignores these two signals, others must not
DEFAULT_SIGNALS = (_signal.SIGPIPE, _signal.SIGXFSZ)


class Shell:
    """A running bash, in its own process group."""

    def __init__(self) -> None:
        commands, self._commands = os.pipe()
        self._status, status = os.pipe()
        moves = [(os.POSIX_SPAWN_DUP2, commands, _COMMANDS), (os.POSIX_SPAWN_DUP2, status, _STATUS)]
        words = ["bash", "--norc", "--noprofile", "-c", _LOOP, "bash"]
        self.pid = os.posix_spawn("/bin/bash", words, os.environ, file_actions=moves, setpgroup=0, setsigdef=DEFAULT_SIGNALS)
        os.close(commands)
        os.close(status)

    def run(self, script: bytes) -> tuple[int, bool]:
        """Returns the exit code of `script`, as waitpid counts, and whether the shell is still there."""
        told = b""
        try:
            view = memoryview(script + b"\0")
            while view:
                view = view[os.write(self._commands, view) :]
            while not told.endswith(b"\n"):
                data = os.read(self._status, 64)
                if not data:
                    raise BrokenPipeError
                told += data
            return int(told), True
        except BrokenPipeError:  # it has ended, before it had read all or after
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), False

    def alive(self) -> bool:
        """Returns whether it still waits for programs."""
        return os.waitpid(self.pid, os.WNOHANG)[0] == 0

    def __del__(self) -> None:
        os.close(self._commands)
        os.close(self._status)
