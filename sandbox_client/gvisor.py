"""Level L4, a kernel of its own for every program: whether the gVisor of this machine would stop the attacks.

The server makes no such level itself. Each program would need a gVisor of its own, started in half a second where a child
here takes milliseconds, and memory, processes and files counted from outside. So L4 is asked of an engine (agent-sandbox
with gVisor, E2B's microVMs), and who asks this server for it is told what was found: the payloads that need no bait are run
in `runsc do`, as an ordinary user under the same filter of system calls as a child's.
"""

import asyncio
import json
import platform
import shutil
import sys

from . import seccomp
from .attacks import USE, Attack
from .attacks_reach import REACH
from .groups import Limits

REMEDY = (
    "give sandbox.url the address of an engine that runs programs in gVisor or a microVM (launch/agent-sandbox.yaml, an "
    "E2B-compatible service)"
)
_FLAGS = ("--rootless", "--platform=ptrace", "--network=none", "--ignore-cgroups", "do")
_TIMEOUT_S = 20.0
_AT_ONCE = 2
PAYLOADS = [
    *(attack for attack in REACH if attack.ends == "value" and 'P["' not in attack.code),
    *(attack for attack in USE if attack.name in ("fork bomb", "thread bomb", "limits raised")),
]

# it becomes nobody, loads the filter, runs the payload and prints what that reached
_LOCKED = """
import ast, ctypes, fcntl, json, os, resource, stat, struct, sys, threading, time  # while they can be read
code, filter_, P = json.load(sys.stdin)
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.closerange(3, 64)
os.chdir("/tmp")
libc = ctypes.CDLL(None, use_errno=True)
for kind, value in ((resource.RLIMIT_NPROC, P["processes"]), (resource.RLIMIT_NOFILE, 256), (resource.RLIMIT_MEMLOCK, 0)):
    resource.setrlimit(kind, (value, value))
os.setgroups([])
for capability in range(41):
    libc.prctl(24, capability, 0, 0, 0)
os.setgid(65534)
os.setuid(65534)
libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))
data = bytes.fromhex(filter_)
held = ctypes.create_string_buffer(data, len(data))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, struct.pack("HP", len(data) // 8, ctypes.addressof(held)), 0, 0):
    sys.exit("no filter of system calls: errno " + str(ctypes.get_errno()))
tree = ast.parse(code)
last, space = tree.body.pop(), {"P": P}
exec(compile(tree, "payload", "exec"), space)
print("reached:", eval(compile(ast.Expression(last.value), "payload", "eval"), space))
"""


async def reached(runsc: str, attack: Attack) -> str:
    """Returns "" when `attack` was stopped in a gVisor of its own, otherwise what it reached or why it was not made."""
    code = seccomp.build_filter(platform.machine(), sockets=True, own_groups=True).hex()
    try:
        process = await asyncio.create_subprocess_exec(
            *(runsc, *_FLAGS, sys.executable, "-I", "-S", "-c", _LOCKED),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:  # built for another machine, or half of a download
        return f"not made: {error}"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            out, err = await process.communicate(json.dumps([attack.code, code, {"processes": Limits().processes}]).encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"no answer within {_TIMEOUT_S:g} s"
    word, found, what = out.decode(errors="replace").partition("reached:")
    if found:
        return what.strip()
    lines = (err.decode(errors="replace").strip() or word.strip() or "no output").splitlines()
    return f"not made: {lines[-1]}"


async def refusal() -> str:
    """Returns why this server does not give L4: what is missing here, or what got through."""
    runsc = shutil.which("runsc")
    if runsc is None:
        return "no runsc (gVisor) on the PATH"
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(attack: Attack) -> str:
        async with turns:
            return await reached(runsc, attack)

    results = zip(PAYLOADS, await asyncio.gather(*map(one, PAYLOADS)), strict=True)
    through = [f"{attack.name} ({what})" for attack, what in results if what]
    if through:
        return f"in {runsc} attacks got through: {'; '.join(through)}"
    return f"{runsc} stops the {len(PAYLOADS)} payloads that were run in it, but this server starts no gVisor per program"
