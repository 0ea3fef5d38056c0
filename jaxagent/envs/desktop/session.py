"""An episode at a desktop, whatever guest it is at, and the guests that episodes take turns at."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxagent.envs.desktop.actions import RULES, NoAction, read
from jaxagent.envs.desktop.evaluation import Files, evaluate, set_up
from jaxagent.envs.desktop.guest import Guest, GuestFault
from jaxagent.envs.desktop.local import Desk
from jaxagent.envs.desktop.screen import Row, rows_of, told
from jaxagent.envs.env import Step, Task
from jaxagent.envs.workers.places import Places
from jaxagent.types import Message

_MOST_ROWS = 150
_START_S = 600.0  # for a guest to be there again after it was restored


@dataclass(frozen=True)
class Ways:
    """How episodes are played.

    Args:
        max_steps: turns after which what is left on the guest is scored; `done` and `fail` have it scored before.
        pause_s: between an action and the look at what it did.
        timeout_s: of one request.
        rules: are told at the beginning.
        screenshots: a folder that pictures of the screen are kept in, one for each turn; empty takes none.
    """

    max_steps: int
    pause_s: float
    timeout_s: float
    rules: bool = True
    screenshots: str = ""

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"env.options.max_steps must be at least 1, got {self.max_steps}")
        if self.timeout_s <= 0 or self.pause_s < 0:
            raise ValueError("env.options.timeout_s must be positive, and pause_s not less than 0")


class Place(Protocol):
    """Where a guest can be had, one episode at a time."""

    async def fresh(self, timeout_s: float) -> Guest:
        """The guest as it is before any task. Raises GuestFault."""
        ...

    def close(self) -> None: ...


class Elsewhere:
    """A guest that somebody else started, restored by a command of theirs, such as one that reverts a snapshot."""

    def __init__(self, url: str, restore: Sequence[str]):
        self.url, self.restore = url, restore

    async def fresh(self, timeout_s: float) -> Guest:
        if self.restore:
            await self._restored()
        guest = Guest(self.url, timeout_s)
        try:
            await guest.wait_until_there(_START_S if self.restore else timeout_s)
        except BaseException:
            await guest.close()
            raise
        return guest

    async def _restored(self) -> None:
        program = await asyncio.create_subprocess_exec(
            *self.restore, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(_START_S):
                said, _ = await program.communicate()
        except TimeoutError:
            raise GuestFault(f"{self.url}: {shlex.join(self.restore)} has not ended within {_START_S:g} s") from None
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
        if program.returncode:
            words = said.decode(errors="replace").strip()[-200:]
            raise GuestFault(f"{self.url}: {shlex.join(self.restore)} ended with status {program.returncode}: {words}")

    def close(self) -> None:
        pass


class Own:
    """A desktop of ours, started when it is first wanted and anew where it was lost."""

    def __init__(self, programs: Sequence[str]):
        self.programs = programs
        self.desk: Desk | None = None

    async def fresh(self, timeout_s: float) -> Guest:
        if self.desk is None or self.desk.lost:
            self.close()
            self.desk = Desk(self.programs)
        guest = Guest(await asyncio.to_thread(self.desk.start), timeout_s)
        try:
            await guest.set_up("restore")
        except BaseException:
            await guest.close()
            self.close()  # whatever state it is in: the next episode finds another
            raise
        return guest

    def close(self) -> None:
        desk, self.desk = self.desk, None
        if desk is not None:
            desk.close()


Guests = Places[Place]


class DesktopEpisode:
    """One episode at a guest."""

    def __init__(self, name: str, guests: Guests, files: Files, ways: Ways):
        self.name, self.guests, self.files, self.ways = name, guests, files, ways
        self.place: Place | None = None
        self.guest: Guest | None = None
        self.rows: list[Row] = []
        self.seen, self.taken = "", 0

    async def reset(self, task: Task, seed: int) -> Step:
        self.task = task
        self.place = await self.guests.take()
        self.guest = await self.place.fresh(self.ways.timeout_s)
        await set_up(self.guest, task.get("config") or [], self.files)
        await self._look()
        rules = f"{RULES}\n\n" if self.ways.rules else ""
        return Step([Message("user", f"{rules}The task: {task['instruction']}\n{self.seen}")], state=self.seen)

    async def step(self, action: Message) -> Step:
        guest = self._there()
        self.taken += 1
        fault = action.error or ("there are no tools here: write the action as text" if action.calls else "")
        said = ""
        try:
            if fault:
                raise NoAction(fault)
            done = read(action.content, self.rows)
        except NoAction as error:
            said = f"error: {error}"
        else:
            if done.name in ("done", "fail"):
                return await self._score(done.name == "fail", answered=True)
            if done.calls and (ran := await guest.run(done.command)).returncode:
                raise GuestFault(f"{guest.url}: pyautogui ended with status {ran.returncode}: {ran.error.strip()[-200:]}")
            await asyncio.sleep(self.ways.pause_s)
            await self._look()
        if self.taken >= self.ways.max_steps:
            return await self._score(False, answered=False)
        return Step([Message("user", f"{said}\n{self.seen}" if said else self.seen)], reason=said, state=self.seen)

    async def close(self) -> None:
        guest, self.guest = self.guest, None
        place, self.place = self.place, None
        try:
            if guest is not None:
                await guest.close()
        finally:
            if place is not None:
                self.guests.give_back(place)

    def _there(self) -> Guest:
        if self.guest is None:
            raise GuestFault(f"{self.name}: this episode has not begun, or is closed")
        return self.guest

    async def _look(self) -> None:
        guest = self._there()
        try:
            self.rows = rows_of(await guest.tree())[:_MOST_ROWS]
        except ValueError as error:
            raise GuestFault(f"{guest.url}/accessibility: {error}") from None
        self.seen = told(self.rows)
        if self.ways.screenshots:
            folder = Path(self.ways.screenshots) / re.sub(r"[^\w.-]+", "_", self.name)
            picture = await guest.screenshot()
            await asyncio.to_thread(_keep, folder, f"{self.taken:03}.png", picture)

    async def _score(self, failed: bool, answered: bool) -> Step:
        score, why = await evaluate(self._there(), self.task, self.files, failed)
        return Step(reward=score, reason=why, terminated=True, answered=answered)


def _keep(folder: Path, name: str, content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
