"""The worker: serves the worlds of one adapter, in any Python, with the standard library and what the adapter imports.

    python -P program.py ADAPTER.py OPTIONS_AS_JSON ADDRESS_MB         standard input is a socket

The adapter's `make(**options)` gives a world with `reset(task, seed)`, `step(action)` and `close()`, none of them a coroutine.
`reset` may be called as often as one likes: a world is kept for many episodes, because starting it can take seconds. Where it
knows how its task is done, `oracle()` gives the actions from where it stands.

One JSON object per line in either direction. First of all comes {"ready": true}; then for each request

    {"id": 7, "call": "reset", "slot": 0, "task": {...}, "seed": 3}    {"id": 8, "call": "step", "slot": 0, "action": "wait"}

one answer, {"id": 7, "said": ...} or {"id": 7, "error": "KeyError: ..."}. What `reset` and `step` say is a dict:

    text      the observation
    reward    the increment for the action just taken            reason   why
    done      the episode is over                                answered  ... by the policy's answer
    state     what the world looks like, for anchor-state credit
    agent     who acts next                                      rewards  increments of the others, by agent
    invalid   the action could not be taken; the world has not moved
    broken    what is wrong with the world itself: such an episode is never learnt from
    parts     of the reward, by name                             checks   scores by name that nothing is trained on

The program ends with its parent, and takes along whatever its worlds have started.
"""

import contextlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

WORDS = {"text", "reward", "reason", "done", "answered", "state", "agent", "rewards", "invalid", "broken", "parts", "checks"}


class Server:
    """Worlds by their slot. One whose call raised is thrown away: nobody knows what state it is in."""

    def __init__(self, adapter: Any, options: dict[str, Any]):
        self.adapter, self.options, self.worlds = adapter, options, dict[int, Any]()

    def answer(self, request: dict[str, Any]) -> str:
        slot = request.get("slot", 0)
        try:
            return json.dumps({"id": request["id"], "said": self.call(slot, request)})
        except Exception as error:  # also of an adapter that says what is no JSON
            traceback.print_exc()
            self.leave(slot)
            return json.dumps({"id": request["id"], "error": f"{type(error).__name__}: {error}"})

    def call(self, slot: int, request: dict[str, Any]) -> Any:
        name = request["call"]
        if slot not in self.worlds:
            if name != "reset":
                raise RuntimeError(f"{name} before reset in slot {slot}")
            self.worlds[slot] = self.adapter.make(**self.options)
        world = self.worlds[slot]
        if name == "oracle":
            return world.oracle()
        said = world.reset(request["task"], request["seed"]) if name == "reset" else world.step(request["action"])
        if unknown := set(said) - WORDS:
            raise RuntimeError(f"the adapter says {', '.join(sorted(unknown))}; known are {', '.join(sorted(WORDS))}")
        return said

    def leave(self, slot: int) -> None:
        if slot in self.worlds:
            with contextlib.suppress(Exception):
                self.worlds.pop(slot).close()

    def close(self) -> None:
        for slot in list(self.worlds):
            self.leave(slot)


def load(path: str) -> Any:
    """The adapter's module, by its path: its folder must not stand in the way of libraries of the same name."""
    spec = importlib.util.spec_from_file_location("adapter", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["adapter"] = module
    spec.loader.exec_module(module)
    return module


def watch(parent: int) -> None:
    """Ends a worker whose parent died while it was in a call that does not return."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(5.0)
    os.killpg(0, signal.SIGKILL)


def limit(address_mb: int) -> None:
    """Bounds the address space of this process and of those that it starts; 0 leaves it without a bound."""
    if address_mb:
        with contextlib.suppress(ValueError, OSError):  # a lower bound than this is set already, or there are none here
            resource.setrlimit(resource.RLIMIT_AS, (address_mb << 20, address_mb << 20))


def main() -> None:
    limit(int(sys.argv[3]))
    line = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a library that reads standard input must not take a request
    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()
    server = Server(load(sys.argv[1]), json.loads(sys.argv[2]))
    with line, line.makefile("rb") as requests:
        line.sendall(b'{"ready": true}\n')
        for request in requests:
            line.sendall(server.answer(json.loads(request)).encode() + b"\n")
        server.close()
    os.killpg(0, signal.SIGKILL)  # what its worlds have left running, and itself


if __name__ == "__main__":
    main()
