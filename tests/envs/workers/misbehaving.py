"""An adapter for tests: it counts, and does what workers must survive when it is told so."""

import gc
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


class World:
    def __init__(self, greeting="go"):
        self.greeting, self.count = greeting, 0
        self.children = []

    def reset(self, task, seed):
        self.task, self.seed, self.count = task, seed, 0
        return {"text": f"{self.greeting} {task['id']} {seed} {id(self)}"}

    def step(self, action):
        self.count += 1
        if action == "die":
            print("I am leaving", file=sys.stderr, flush=True)
            os._exit(3)
        if action == "hang":
            time.sleep(600)
        if action == "garbage":
            line = next(x for x in gc.get_objects() if isinstance(x, socket.socket) and x.fileno() >= 0)
            line.sendall(b"hello\n")
        if action == "another":
            line = next(x for x in gc.get_objects() if isinstance(x, socket.socket) and x.fileno() >= 0)
            line.sendall(b'{"id": 99, "said": {}}\n')
        if action == "raise":
            raise KeyError("lost")
        if action == "shout":
            print("x" * (5 << 20), flush=True)
            return {"text": str(os.fstat(1).st_size)}
        if action == "no json":
            return {"text": b"bytes"}
        if action == "unknown":
            return {"txet": "no"}
        if action == "print":
            print("noise on standard output", flush=True)
            os.write(1, b"{}\n")
        if action == "read":
            return {"text": repr(sys.stdin.read())}
        if action == "spawn":
            self.children.append(subprocess.Popen(["sleep", "600"]))
            return {"text": str(self.children[-1].pid)}
        if action == "pid":
            return {"text": str(os.getpid())}
        if action == "where":
            return {"text": str(Path.cwd())}
        if action == "variables":
            return {"text": " ".join(sorted(os.environ))}
        if action == "swell":
            return {"text": str(len(bytearray(4 << 30)))}
        if action == "broken":
            return {"text": "", "broken": "the sky fell"}
        return {"text": f"{action} {self.count}", "reward": 0.5, "done": action == "end", "reason": "counted"}

    def oracle(self):
        return ["one", "end"]

    def close(self):
        self.task = None


def make(**options):
    return World(**options)
