"""Several engines as one sampler, each with a whole copy of the weights and at its own pace."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

import jax

from jaxagent.engine.engine import Engine, EngineStats
from jaxagent.models.transformer import Params
from jaxagent.types import Sample, SampleRequest

GAP_S = 0.01  # a pause of this length is one in which tools are waited for, not the moment between two calls


class Replicas:
    """Sends a trajectory to the least loaded engine and keeps it there. Implements `types.Sampler`.

    Group mates follow each other where their prompt is long enough to be forked. Which engine serves a trajectory does not
    change its tokens: they depend on its key and its own tokens only.
    """

    def __init__(self, engines: Sequence[Engine], spread: Callable[[Params], Iterable[Sequence[Params]]] | None = None):
        """Args: spread: makes of published weights, part by part, those of each engine, where they are other arrays."""
        self.engines, self._spread = list(engines), spread
        self._home: dict[str, tuple[int, str]] = {}  # of a trajectory: its engine, and its group where that is followed
        self._groups: dict[str, int] = {}
        self._mates: Counter[str] = Counter()  # of a group that is followed, those that are here
        self._load: Counter[int] = Counter()

    async def generate(self, request: SampleRequest) -> Sample:
        if request.trajectory not in self._home:
            self._settle(request)
        return await self.engines[self._home[request.trajectory][0]].generate(request)

    def _settle(self, request: SampleRequest) -> None:
        forks = len(request.tokens) >= self.engines[0].options.fork_min_tokens
        least = min(range(len(self.engines)), key=lambda i: self._load[i])
        group = request.group if forks else ""
        home = self._groups.setdefault(group, least) if group else least
        self._home[request.trajectory] = home, group
        self._load[home] += 1
        self._mates[group] += 1

    def release(self, trajectory: str) -> None:
        if trajectory not in self._home:
            return
        home, group = self._home.pop(trajectory)
        self._load[home] -= 1
        self.engines[home].release(trajectory)
        self._mates[group] -= 1
        if not self._mates[group]:
            del self._mates[group]
            self._groups.pop(group, None)

    def publish(self, params: Params, version: int) -> None:
        if not self._spread:
            for engine in self.engines:
                engine.publish(params, version)
            return
        with self.hold(every=True):  # programs of all the devices, which those of an engine must not cross
            incoming = [engine.begin_publish() for engine in self.engines]
            for each in self._spread(params):
                for one, own in zip(incoming, each, strict=True):
                    one.add(own)
                jax.block_until_ready([one.whole() for one in incoming])  # or parts would be put together far ahead
                del each, own  # before the next part comes
            for engine, one in zip(self.engines, incoming, strict=True):
                engine.end_publish(one, version)

    def idle(self) -> bool:
        """Whether no engine has had anything to decode for a while, so that the devices are free."""
        return all(engine.idle(GAP_S) for engine in self.engines)

    @contextmanager
    def hold(self, every: bool = False) -> Iterator[None]:
        """No engine of several devices calls them meanwhile, or none at all; turns in progress go on afterwards.

        Programs with collectives that two threads send to the same devices may come to each of them in another order, and
        would wait for each other for ever. An engine of one device has none, and is not held.
        """
        arrived, free = threading.Semaphore(0), threading.Event()

        def pause() -> None:
            arrived.release()
            free.wait()

        try:
            held = [engine.post(pause) for engine in self.engines if every or engine.devices > 1]
            for one in held:
                one.add_done_callback(lambda _: arrived.release())  # one that fails never pauses
            for _ in held:
                arrived.acquire()
            for one in held:
                if one.done():
                    one.result()  # raises what its call in flight has raised
            yield
        finally:
            free.set()

    def warm_up(self) -> None:
        """Compiles all programs, the engines side by side; returns when they are ready."""
        for future in [engine.warm_up() for engine in self.engines]:
            future.result()
        self.take_stats()

    def note_calls(self) -> None:
        """From now on it is noted when the engines decode."""
        for engine in self.engines:
            engine.pace.noted = []

    def take_calls(self) -> list[list[tuple[float, float]]]:
        """When calls of each engine began and ended since the last time, of the monotonic clock."""
        taken = []
        for noted in (engine.pace.noted or [] for engine in self.engines):
            taken.append(noted[:])
            del noted[: len(taken[-1])]  # the engine's thread may have added one meanwhile
        return taken

    def take_stats(self) -> EngineStats:
        """The sum of the engines' counters since the last call."""
        total = EngineStats()
        for engine in self.engines:
            stats = engine.take_stats()
            for field in fields(stats):
                setattr(total, field.name, getattr(total, field.name) + getattr(stats, field.name))
        return total

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
