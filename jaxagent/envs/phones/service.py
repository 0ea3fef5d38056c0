"""A small phone behind AndroidWorld's protocol, over HTTP on this machine: nothing of it is a program of the policy's."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse
from typing import Any

from jaxagent.envs.phones.apps import Phone
from jaxagent.envs.phones.errands import TYPES, errand

FAMILY = "android_world"
_MOST_BYTES = 1 << 20  # of a request


class Service:
    """A phone, its suite, and the server that tells of them; from the start to `close`."""

    def __init__(self) -> None:
        self.phone, self.lock = Phone(), threading.Lock()
        self.instances, self.seed = 2, 42
        door = type("OneDoor", (Door,), {"service": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), door)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, name="phone", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, asked: str, about: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        """What is said to a request. Raises LookupError or ValueError for one that is none."""
        done = {"status": "success"}
        if asked == "GET /suite/reinitialize":
            if about.get("task_family", FAMILY) != FAMILY:
                raise ValueError(f"Invalid task family: {about['task_family']}")
            self.instances, self.seed = int(about.get("n_task_combinations", 2)), int(about.get("seed", 42))
        elif asked == "GET /suite/task_list":
            return {"task_list": list(TYPES)[: int(about["max_index"]) if 0 <= int(about["max_index"]) <= len(TYPES) else None]}
        elif asked == "GET /suite/task_length":
            return {"length": self.instances}
        elif asked == "POST /reset":
            self.phone.home()
        elif asked == "POST /execute_action":
            self.phone.act(body)
        elif asked == "GET /screenshot":
            return {"pixels": self.phone.pixels()}
        elif asked == "GET /ui_elements":
            return {"ui_elements": self.phone.elements()}
        elif asked.partition(" ")[2].startswith("/task/"):
            return self.task(asked, about)
        elif asked not in ("GET /health", "POST /close"):
            raise LookupError("Not Found")
        return done

    def task(self, asked: str, about: dict[str, str]) -> dict[str, Any]:
        number = int(about["task_idx"])
        if not 0 <= number < self.instances:
            raise IndexError(f"no instance {number}, there are {self.instances}")
        task = errand(about["task_type"], number, self.seed)
        if asked == "POST /task/initialize":
            self.phone.load(task.before)
        elif asked == "POST /task/tear_down":
            self.phone.load({})
        elif asked == "GET /task/score":
            return {"score": task.score(self.phone)}
        elif asked == "GET /task/goal":
            return {"goal": task.goal}
        else:
            raise LookupError("Not Found")
        return {"status": "success"}


class Door(http.server.BaseHTTPRequestHandler):
    """The HTTP of one service; requests are served one at a time."""

    service: Service
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: two would wait for each other's acknowledgement
    disable_nagle_algorithm = True

    def log_message(self, *ignored: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.serve("GET")

    def do_POST(self) -> None:
        self.serve("POST")

    def serve(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > _MOST_BYTES:
            self.close_connection = True
            self.say(413, {"detail": "Content Too Large"})
            return
        parts = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(length)
        try:
            with self.service.lock:
                said = self.service.answer(
                    f"{method} {parts.path}", dict(urllib.parse.parse_qsl(parts.query)), json.loads(body or b"{}")
                )
        except (LookupError, ValueError, TypeError) as error:
            self.say(404 if str(error) == "Not Found" else 500, {"detail": f"{type(error).__name__}: {error}"})
        else:
            self.say(200, said)

    def say(self, status: int, said: dict[str, Any]) -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
