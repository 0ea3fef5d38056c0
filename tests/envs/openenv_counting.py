"""An OpenEnv server of openenv-core: three words, and the third is paid. It prints its port, and runs where that library is."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    text: str = ""


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self.count = 0
        return Heard(text=f"count 0, seed {seed}", done=False, reward=0.0)

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        self.count += 1
        return Heard(text=f"count {self.count}, {action.message}", done=self.count == 3, reward=float(self.count == 3))

    @property
    def state(self) -> State:
        return State(step_count=self.count)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as door:
        print(door.getsockname()[1], flush=True)
        app = create_fastapi_app(Counting, Say, Heard, max_concurrent_envs=4)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[door])
