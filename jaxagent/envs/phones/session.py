"""An episode at a phone, whatever server it is behind, and the servers that episodes take turns at."""

from __future__ import annotations

from dataclasses import dataclass

from jaxagent.envs.env import Step, Task
from jaxagent.envs.phones.remote import PhoneFault, Remote
from jaxagent.envs.phones.service import FAMILY, Service
from jaxagent.envs.phones.touch import RULES, NoAction, Row, read, rows_of, told
from jaxagent.envs.workers.places import Places
from jaxagent.types import Message

_HELD_OUT = ("demo", "valid", "test")


@dataclass(frozen=True)
class Suite:
    """Which tasks there are, and how they are played.

    Args:
        types: of tasks, in turn.
        instances: of every type; a tenth of them, at least one, is kept for each of demonstrations, validation and test.
        seed: of the instances.
        max_steps: turns of an episode, after which nothing is earned.
        timeout_s: of one request.
        rules: are told at the beginning.
    """

    types: tuple[str, ...]
    instances: int
    seed: int
    max_steps: int
    timeout_s: float
    rules: bool

    def __post_init__(self) -> None:
        if self.instances <= len(_HELD_OUT):
            raise ValueError(f"env.options.instances must be more than {len(_HELD_OUT)}, to be split, got {self.instances}")
        if self.max_steps < 1 or self.timeout_s <= 0:
            raise ValueError("env.options.max_steps and timeout_s must be positive")

    @property
    def shares(self) -> dict[str, range]:
        """The instances of every split."""
        tenth = max(1, self.instances // 10)
        first = self.instances - len(_HELD_OUT) * tenth
        held = {split: range(first + tenth * n, first + tenth * (n + 1)) for n, split in enumerate(_HELD_OUT)}
        return {"train": range(first), **held}

    @property
    def sizes(self) -> dict[str, int]:
        return {split: len(share) * len(self.types) for split, share in self.shares.items()}

    def task(self, world: str, split: str, index: int) -> Task:
        kind, number = self.types[index % len(self.types)], self.shares[split][index // len(self.types)]
        return {"id": f"{world}/{split}/{index}", "seed": number, "difficulty": kind, "task_type": kind, "task_idx": number}


class Place:
    """A server, and whether it has this run's tasks; one of ours is started when it is first wanted."""

    def __init__(self, url: str):
        self.url = url
        self.service: Service | None = None
        self.ready = False

    async def begin(self, suite: Suite) -> Remote:
        if not self.url:
            self.service = Service()
            self.url = self.service.url
        remote = Remote(self.url, suite.timeout_s)
        try:
            # A server that was started anew has a suite of two instances, of which ours has more.
            if not self.ready or await remote.instances(suite.types[0]) != suite.instances:
                self.ready = False
                await remote.make_suite(suite.instances, suite.seed, FAMILY)
                self.ready = True
        except BaseException:
            await remote.close()
            raise
        return remote

    def close(self) -> None:
        service, self.service = self.service, None
        if service is not None:
            service.close()
            self.url, self.ready = "", False


class PhoneEpisode:
    """One episode at one server."""

    def __init__(self, places: Places[Place], suite: Suite):
        self.places, self.suite = places, suite
        self.place: Place | None = None
        self.remote: Remote | None = None
        self.begun = False
        self.rows: list[Row] = []
        self.seen, self.taken = "", 0

    async def reset(self, task: Task, seed: int) -> Step:
        self.named = task["task_type"], task["task_idx"]
        self.place = place = await self.places.take()
        try:
            self.remote = await place.begin(self.suite)
            self.begun = True
            goal = await self.remote.begin(*self.named)
            await self._look()
        except PhoneFault:
            place.ready = False
            raise
        rules = f"{RULES}\n\n" if self.suite.rules else ""
        return Step([Message("user", f"{rules}The task: {goal}\n{self.seen}")], state=self.seen)

    async def step(self, action: Message) -> Step:
        try:
            return await self._play(action)
        except PhoneFault:
            if self.place is not None:
                self.place.ready = False
            raise

    async def _play(self, action: Message) -> Step:
        remote = self._there()
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
            if done["action_type"] == "status":
                score = await remote.score(*self.named)
                return Step(reward=score, reason=f"the phone's state scores {score:g}", terminated=True, answered=True)
            await remote.act(done)
            await self._look()
        if self.taken >= self.suite.max_steps:
            return Step(reason=f"not done within {self.suite.max_steps} turns", terminated=True)
        return Step([Message("user", f"{said}\n{self.seen}" if said else self.seen)], reason=said, state=self.seen)

    async def close(self) -> None:
        """Clears the task away, and gives the server back; one that cannot says so to who begins there next."""
        remote, self.remote = self.remote, None
        place, self.place = self.place, None
        try:
            if remote is not None:
                try:
                    if self.begun:
                        self.begun = False
                        await remote.end(*self.named)
                except PhoneFault:  # what the episode earned stands
                    if place is not None:
                        place.ready = False
                finally:
                    await remote.close()
        finally:
            if place is not None:
                self.places.give_back(place)

    def _there(self) -> Remote:
        if self.remote is None:
            raise PhoneFault("this episode has not begun, or is closed")
        return self.remote

    async def _look(self) -> None:
        self.rows = rows_of(await self._there().elements())
        self.seen = told(self.rows)
