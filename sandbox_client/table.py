"""The table of sessions by key and by identity, their expiry, and the memory of runs that need not be run again."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from .line import ChildDied
from .pools import Pools
from .sessions import JailedSession, LocalSession, Refused, Reply, Session, Spec, busy, lost, no_child, unknown_call

_KEPT_RUNS, _KEPT_RUN_BYTES = 256, 16 << 20
_KEPT_LOSSES = 4096
_KEPT_ENDED, _ENDED_KEPT_S = 1024, 10.0  # while a request that was given up may still be on its way
_LOST_KEPT_S = 30.0  # a lost session still answers a repeated request for so long


class Sessions:
    """The table of sessions, and the memory of those that are gone."""

    def __init__(self, pools: Pools | None, functions: Sequence[str], cap: int, idle_s: float, life_s: float) -> None:
        self._pools = pools
        self._functions = frozenset(functions)
        self._cap, self._idle_s, self._life_s = cap, idle_s, life_s
        self._live: dict[str, Session] = {}
        self._keys: dict[str, asyncio.Future[Session]] = {}
        self._losses: OrderedDict[str, tuple[Refused, str]] = OrderedDict()  # with the session's token

    def __len__(self) -> int:
        return len(self._live)

    async def open(self, key: str, spec: Spec) -> Session:
        """Returns the session of `key`, made now or earlier. Raises Refused."""
        if spec.functions is not None and spec.functions not in self._functions:
            known = ", ".join(sorted(self._functions)) or "none"
            raise Refused(422, "unknown_functions", f"no functions module {spec.functions!r}; the operator registered: {known}")
        known_sets = self._pools.imports if self._pools else []
        if spec.imports and spec.imports not in known_sets:
            known = " ".join(known_sets) or "none"
            raise Refused(422, "unknown_imports", f"no set of imports {spec.imports!r}; the operator registered: {known}")
        made = self._keys.get(key)
        if made and made.done() and made.result().lost:
            self.close(made.result().identity)
            made = None
        if made is None:
            if len(self._keys) >= self._cap:
                self.sweep(patience_s=0.0)
            if len(self._keys) >= self._cap:
                raise busy(f"{self._cap} sessions are open")
            session = await self._make(key, spec)
        else:
            session = await asyncio.shield(made)
        if session.spec != spec:
            raise Refused(409, "key_conflict", f"session {key!r} was opened with other functions or options")
        return session

    async def _make(self, key: str, spec: Spec) -> Session:
        made = self._keys[key] = asyncio.get_running_loop().create_future()
        session: Session | None = None
        try:
            identity = secrets.token_urlsafe(12)
            if self._pools:
                child = await self._pools.take(spec.imports, branching=spec.branching)
                session = JailedSession(identity, key, spec, child, self._pools.limits.memory_bytes)
            else:
                session = LocalSession(identity, key, spec)
            await session.open()
            self._live[identity] = session
            made.set_result(session)
            return session
        except ChildDied as death:
            raise no_child(death) from None
        finally:
            if not made.done():  # whoever waits for the same key tries again
                made.set_exception(busy("the session could not be opened by an earlier request"))
                made.exception()
                del self._keys[key]
                if session:
                    session.end(lost("it was never opened", by_program=False))

    async def branch(self, session: Session, keys: list[str]) -> Reply:
        """Makes a session per key that goes on from where `session` is. Raises Refused, with none of them left."""
        if not self._pools or self._pools.level < "L2" or not isinstance(session, JailedSession):
            raise Refused(422, "not_branching", "wanted isolation L2 or better, to copy a process into namespaces of its own")
        taken = [key for key in keys if key in self._keys]
        if taken or len(set(keys)) < len(keys):
            raise Refused(409, "key_conflict", f"wanted keys that no session has, each once, got {(taken or keys)[0]!r}")
        most = self._pools.limits.branches
        if session.branches + len(keys) > most:
            raise Refused(422, "too_many_branches", f"wanted at most {most} branches of a session at a time")
        if len(self._keys) + len(keys) > self._cap:
            raise busy(f"{self._cap} sessions are open")
        results = await asyncio.gather(*(session.branch(self._pools, key) for key in keys), return_exceptions=True)
        made = [result for result in results if isinstance(result, JailedSession)]
        for failure in results:
            if isinstance(failure, BaseException):
                for branch in made:
                    branch.end(lost("it was never opened", by_program=False))
                raise failure
        for branch in made:
            self._live[branch.identity] = branch
            self._keys[branch.key] = asyncio.get_running_loop().create_future()
            self._keys[branch.key].set_result(branch)
        words = [{"key": branch.key, "session": branch.identity, "token": branch.token} for branch in made]
        return {"sessions": words, "session_lost": False}

    def find(self, identity: str) -> Session:
        """Returns the live session. Raises Refused, with the reason where it is remembered."""
        session = self._live.get(identity)
        if session is None:
            loss, _ = self._losses.get(identity) or (lost("no such session: it expired long ago or never was", False), "")
            raise loss
        return session

    def token_of(self, identity: str) -> str:
        """Returns the token that opens this session only, "" for one that is not known."""
        session = self._live.get(identity)
        return session.token if session else self._losses[identity][1] if identity in self._losses else ""

    async def reset(self, session: Session) -> Reply:
        """Gives the session a fresh child, with nothing of the old one's. Raises Refused."""
        return await session.reset(self._pools)

    def close(self, identity: str, loss: Refused | None = None) -> None:
        """Ends a session and forgets its key. Unknown ones are closed already."""
        session = self._live.pop(identity, None)
        if session:
            del self._keys[session.key]
            session.end(loss or lost("the session was closed", by_program=False))
            gone = session.lost or lost("the session was closed", by_program=False)
            self._losses[identity] = gone, session.token
            while len(self._losses) > _KEPT_LOSSES:
                self._losses.popitem(last=False)

    def sweep(self, patience_s: float = _LOST_KEPT_S) -> None:
        """Drops sessions past their time, and after `patience_s` those whose program has ended them."""
        now = asyncio.get_running_loop().time()
        for session in list(self._live.values()):
            if session.lost:
                if session.idle and now - session.used >= patience_s:
                    self.close(session.identity)
            elif isinstance(session, JailedSession) and session.death and session.idle:
                self.close(session.identity, session.death)
            elif now - session.born > self._life_s:
                self.close(session.identity, lost(f"it was open for {self._life_s:g} s, the longest allowed", False))
            elif session.idle and now - session.used > self._idle_s:
                self.close(session.identity, lost(f"it was idle for {self._idle_s:g} s", by_program=False))


def _ended(key: str) -> Refused:
    return Refused(503, "cancelled", f"the run {key} was taken back a moment ago", retry_after_s=1)


class Runs:
    """Replies of stateless runs by the key that the client gave, so that a repeated request is not run again."""

    def __init__(self) -> None:
        self._replies: OrderedDict[str, asyncio.Future[bytes]] = OrderedDict()
        self._ended: OrderedDict[str, float] = OrderedDict()  # until when

    async def once(self, key: str | None, run: Callable[[], Awaitable[bytes]]) -> bytes:
        """Returns the reply of `run`, or of an earlier run under the same key. Raises Refused."""
        if key is None:
            return await run()
        if self._was_ended(key):
            raise _ended(key)
        known = self._replies.get(key)
        if known is None:
            known = self._replies[key] = asyncio.ensure_future(run())
            known.add_done_callback(lambda done: self._done(key, done))
        try:
            return await asyncio.shield(known)
        except asyncio.CancelledError:
            if known.cancelled() and self._was_ended(key):
                raise _ended(key) from None
            raise

    def fate(self, key: str) -> bytes | None:
        """Returns the reply of the run `key`, None while it waits or runs. Raises Refused for one that is not known."""
        known = self._replies.get(key)
        if known is None or known.cancelled():
            raise unknown_call(key)
        return known.result() if known.done() else None

    def end(self, key: str) -> str:
        """Ends the run `key`, or sees to it that it never begins, should its request still be on its way.

        Returns what is true of it now: cancelled or done.
        """
        known = self._replies.get(key)
        if known is not None and known.done():
            return "done"
        self._ended[key] = asyncio.get_running_loop().time() + _ENDED_KEPT_S
        while len(self._ended) > _KEPT_ENDED:
            self._ended.popitem(last=False)
        if known is not None:
            known.cancel()
        return "cancelled"

    def _was_ended(self, key: str) -> bool:
        return self._ended.get(key, 0.0) > asyncio.get_running_loop().time()

    def _done(self, key: str, done: "asyncio.Future[bytes]") -> None:
        if done.cancelled() or done.exception():
            self._replies.pop(key, None)  # it was refused or taken back, not run
        kept = [reply for reply in self._replies.items() if reply[1].done()]
        while len(kept) > _KEPT_RUNS or sum(len(reply.result()) for _, reply in kept) > _KEPT_RUN_BYTES:
            self._replies.pop(kept.pop(0)[0])
