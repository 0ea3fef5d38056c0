"""The engine's door: `await engine.generate(request)`. One thread owns the device, any asyncio loop may wait.

The thread repeats: take what arrived, admit, fork or prefill, decode a segment, answer the turns that ended. What a trajectory
has cached is kept until `release`, in its slot or in host memory; with `recompute` it is computed again under new weights.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxagent.engine.answers import fail, resolve, tell
from jaxagent.engine.cache import Cache, new_cache, read_slot
from jaxagent.engine.control_table import ControlTable, wants_controls
from jaxagent.engine.controls import ControlSizes, Rows, new_controls
from jaxagent.engine.options import EngineOptions, EngineStats, used_lengths
from jaxagent.engine.programs import Call, compiled_here, prepare
from jaxagent.engine.slots import AWAY, Row, SlotTable
from jaxagent.engine.speculation import Speculation
from jaxagent.engine.steps import make_steps, new_rows
from jaxagent.engine.stops import end_of, sample_of
from jaxagent.models.transformer import Decoder, DecoderConfig, Params, logical_axes, params_of
from jaxagent.sharding import DeviceMesh
from jaxagent.types import Sample, SampleRequest, Vocabulary

QUIET_S = 0.0005  # requests that arrive closer together than this are decoded together


class Engine:
    """Samples turns for many trajectories at once, on the weights last published. Implements `types.Sampler`.

    `mesh` is one replica: only its tensor axis may be larger than 1. `vocabulary` says what tokens mean, for stop strings and
    constraints; without one they are refused.
    """

    def __init__(self, config: DecoderConfig, options: EngineOptions, mesh: DeviceMesh, vocabulary: Vocabulary | None = None):
        self.options = o = options
        self.table = SlotTable(o.slots, o.slot_tokens, o.fork_min_tokens)
        dtype = jnp.dtype(o.dtype)
        self._steps = make_steps(
            config,
            dtype=dtype,
            chunk=o.chunk,
            decode_tokens=o.decode_tokens,
            mesh=mesh,
            record_routing=o.record_routing,
            top_logprobs=o.top_logprobs,
        )
        self._lengths = used_lengths(o.chunk, o.slot_tokens)
        self.widths = sorted({-(-o.slots // parts) for parts in (1, 4)})
        # On a CPU others run too, and wall time counts their turns, most of all in long calls.
        clock = time.process_time if mesh.platform == "cpu" else time.perf_counter
        self.speculation = Speculation(o.draft_tokens, o.decode_tokens, self.widths, 2 * o.slots * o.slot_tokens, clock)
        self._cache = mesh.place(new_cache(config, o.slots, o.slot_tokens, dtype), (None, "kv_heads"))
        sizes = ControlSizes(**{name: getattr(o, name) for name in ControlSizes.__annotations__})
        self.controls = ControlTable(sizes, config.vocab_size, mesh, vocabulary)
        plain = new_rows(o.slots, o.stop_tokens)
        self._rows = mesh.place({**plain, **new_controls(o.slots, sizes)})
        self._arming = {name: np.zeros(old.shape, old.dtype) for name, old in plain.items()}
        self._arming |= {"controlled": np.zeros(o.slots, bool), "mask": np.zeros(o.slots, bool)}
        skeleton = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
        self._shardings = mesh.shardings(logical_axes(skeleton), params_of(skeleton)[1])
        self._mesh = mesh
        self._params: Params | None = None
        self._version = 0
        self._vocab_size = config.vocab_size
        self._stats = EngineStats()
        self._segment_s = 0.01
        self._idle_since: float | None = None  # when it had nothing to decode any more
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._compiled = 0
        self._armed = self._no_arming()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the door

    async def generate(self, request: SampleRequest) -> Sample:
        """Feeds the request's tokens and samples one turn. Raises ValueError for a request that cannot be served."""
        if len(request.stop) > self.options.stop_tokens:
            raise ValueError(f"at most {self.options.stop_tokens} stop ids (EngineOptions.stop_tokens), got {request.stop}")
        if strange := [token for token in request.tokens if not 0 <= token < self._vocab_size]:
            raise ValueError(
                f"trajectory {request.trajectory!r}: token {strange[0]} is not in a vocabulary of {self._vocab_size}"
            )
        if fault := self.controls.fault(request.sampling):
            raise ValueError(f"trajectory {request.trajectory!r}: {fault}")
        if request.sampling.constraint is not None:
            await asyncio.to_thread(self.controls.compile, request)  # may take a second, the first time
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sample] = loop.create_future()
        self.post(lambda: self._accept(request, (loop, future)))
        return await future

    def release(self, trajectory: str) -> None:
        """Frees the slot of a trajectory; unknown names are fine, so that a caller may always release."""
        self.post(lambda: self._release(trajectory))

    def publish(self, params: Params, version: int) -> None:
        """Copies the learner's weights into the sampler's layout, between two calls; returns when they are in."""
        self.run(lambda: self._publish(params, version))

    def warm_up(self) -> Future[None]:
        """Compiles every program, side by side; needs published weights."""
        return self.post(self._warm_up)

    def take_stats(self) -> EngineStats:
        """The counters since the last call."""
        stats, self._stats = self._stats, EngineStats()
        return stats

    def close(self) -> None:
        """Stops the thread; turns in progress fail with a RuntimeError that says so."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def idle(self, least_s: float) -> bool:
        """Whether there has been nothing to decode for so long: all trajectories wait for their tools."""
        since = self._idle_since
        return since is not None and time.monotonic() - since >= least_s

    @property
    def devices(self) -> int:
        """How many devices hold this replica."""
        return self._mesh.mesh.size

    def run(self, work: Callable[[], None]) -> None:
        """Runs `work` in the engine's thread and waits for it."""
        self.post(work).result()

    def post(self, work: Callable[[], None]) -> Future[None]:
        """Has the engine's thread do `work`, between two calls of the device."""
        done: Future[None] = Future()

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._wake:
            if self._closed:
                raise self._end("the engine is closed")
            self._inbox.append(guarded)
            self._wake.notify()
        return done

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._gather():
                self._tick()
        except BaseException as error:
            self._failure = error
        finally:
            self._abandon()

    def _gather(self) -> bool:
        """Takes what has arrived; waits while there is nothing to do, and a little for company. False when closed."""
        deadline = time.monotonic() + self.options.linger * self._segment_s
        while True:
            with self._wake:
                if self._closed:
                    return False
                if not self._inbox:
                    full = self.table.sampling == self.options.slots
                    quiet = None if not self.table.sampling else min(QUIET_S, deadline - time.monotonic())
                    if full or (quiet is not None and (quiet <= 0 or not self._wake.wait(quiet))):
                        return True
                    if quiet is None:
                        self._idle_since = self._idle_since or time.monotonic()
                        self._wake.wait(self._until_room())
                        deadline = time.monotonic() + self.options.linger * self._segment_s
                work, self._inbox = self._inbox, deque()
            for item in work:
                item()
            self.table.admit()
            self._make_room()
            if self.table.sampling:
                self._idle_since = None
            if self.table.sampling and time.monotonic() > deadline:
                return True  # a stream of small requests must not keep the turns in progress waiting

    def _until_room(self) -> float | None:
        """Seconds until a slot may be taken from a trajectory whose tool is slow; None where nobody waits for one."""
        row = self.table.idle_longest() if self.options.offload_after_s else None
        return max(0.0, row.idle_since + self.options.offload_after_s - time.monotonic()) if row else None

    def _make_room(self) -> None:
        """Moves trajectories whose tools are slow to host memory, for those that wait for a slot."""
        while self._until_room() == 0.0:
            row = self.table.idle_longest()
            assert row is not None
            if row.cached:
                row.stash = jax.device_get(self._steps.stash(self._cache, row.slot, self._copied_length(row.cached)))
            self._stats.offloaded += row.cached
            self.table.vacate(row)
            self.table.admit()

    def _tick(self) -> None:
        began = time.monotonic()
        self._make_room()
        self._prefill()
        if self.options.draft_tokens:
            jax.block_until_ready(self._cache)  # what calls take is measured
        rows = [row for row in self.table.by_slot if row and row.request]
        for some, drafts in self.speculation.calls(rows):
            self._call(some, drafts)
        self._segment_s = time.monotonic() - began
        self._stats.busy_s += self._segment_s
        self._stats.compiled += compiled_here() - self._compiled
        self._compiled = compiled_here()

    def _call(self, rows: list[Row], drafts: np.ndarray | None) -> None:
        """Decodes a segment of some rows, or verifies their drafts, and hands them their tokens."""
        slot_W, used = self._active(rows)
        state = self._params, self._cache, self._rows, self._armed, self.controls.grammars
        if drafts is None:
            out = self._steps.decode(*state, slot_W, used)
        else:
            assert slot_W is not None  # drafts and exact mode exclude each other
            draft_WK = np.full((len(slot_W), drafts.shape[1]), -1, np.int32)
            draft_WK[: len(rows)] = drafts
            out = self._steps.verify(*state, slot_W, draft_WK)
        self._cache, self._rows, tokens, logprobs, routing, top = out
        self._armed = self._no_arming()
        tokens_WN, logprobs_WN = np.asarray(tokens), np.asarray(logprobs)
        at = list(range(len(rows))) if slot_W is not None else [row.slot for row in rows]
        self.controls.keep_top(rows, at, top, (tokens_WN >= 0).sum(axis=1))
        self._collect(rows, at, tokens_WN, logprobs_WN, None if routing is None else np.asarray(routing))
        self._stats.decode_calls += 1
        self._stats.row_steps += tokens_WN.size
        if drafts is not None:
            self._stats.verified += len(rows)
            self._stats.drafted += int((drafts >= 0).sum())
            self._stats.accepted += int(((drafts >= 0) & (drafts == tokens_WN[: len(rows), :-1])).sum())

    def _active(self, rows: list[Row]) -> tuple[np.ndarray | None, int]:
        """The slots to step and the positions that they use, both of compiled sizes; all of both in exact mode."""
        if self.options.exact:
            return None, 0
        width = next(width for width in self.widths if width >= len(rows))
        slot_W = np.full(width, self.options.slots, np.int32)  # beyond the last slot: nobody
        slot_W[: len(rows)] = [row.slot for row in rows]
        held = max((row.known + len(row.tokens) - 1 for row in rows), default=0)
        return slot_W, next(length for length in self._lengths if length >= held)

    def _prefill(self) -> None:
        """Puts the fed tokens of new turns, but the pending ones, into the cache, and arms their rows."""
        for row in self.table.take_returned():
            if row.stash is not None:
                self._cache, row.stash = self._steps.restore(self._cache, row.slot, row.stash), None
        begun = self.table.take_begun()
        rows = self.options.append_rows
        for bucket, work in self.table.chunks(self.options.append_tokens, rows):
            self._append(bucket, work)
        forks = [row for row in begun if row.source]
        for i in range(0, len(forks), rows):
            self._fork(forks[i : i + rows])
        for row in begun:
            self._arm(row)
        self._control([row for row in begun if self._armed["controlled"][row.slot]])

    def _control(self, begun: list[Row]) -> None:
        """Writes the controls of new turns that have some."""
        width = self.options.append_rows
        for i in range(0, len(begun), width):
            slot_R, controls = self.controls.controls(begun[i : i + width], width, self._in_progress())
            self._rows = self._steps.settle(self._rows, slot_R, controls)

    def _in_progress(self) -> Iterator[SampleRequest]:
        return (row.request for row in self.table.rows.values() if row.request)

    def _append(self, bucket: int, work: list[tuple[Row, list[int]]]) -> None:
        rows = self.options.append_rows
        slot_R, start_R, count_R = np.zeros((3, rows), np.int32)
        token_RA = np.zeros((rows, bucket), np.int32)
        for i, (row, tokens) in enumerate(work):
            slot_R[i], start_R[i], count_R[i] = row.slot, row.cached, len(tokens)
            token_RA[i, : len(tokens)] = tokens
        score = self.controls.score(work, rows)
        appended = self._steps.append(self._params, self._cache, slot_R, token_RA, start_R, count_R, score)
        self._cache, routing, logprobs = appended
        if score is not None and score[1].any():
            self.controls.keep_fed(work, np.asarray(logprobs))
        if routing is not None:
            routing_RA = np.asarray(routing)
            for i, (row, tokens) in enumerate(work):
                row.routing.append(routing_RA[i, : len(tokens)])
                if not row.turns_done:
                    row.prompt_routing.append(row.routing[-1])
        self._stats.append_calls += 1
        self._stats.prefilled += int(count_R.sum())

    def _fork(self, forks: list[Row]) -> None:
        src_R = np.zeros(self.options.append_rows, np.int32)
        dst_R = np.full(self.options.append_rows, self.options.slots, np.int32)  # beyond the last slot: dropped
        longest = 0
        for i, row in enumerate(forks):
            assert row.source is not None
            src_R[i], dst_R[i] = row.source.slot, row.slot
            longest = max(longest, row.cached)
            self._stats.forked += row.cached
            row.routing = list(row.source.prompt_routing)
            row.source = None
        self._cache = self._steps.fork(self._cache, src_R, dst_R, self._copied_length(longest))

    def _copied_length(self, used: int) -> int:
        """The static length that is copied of a slot: a power of two of chunks, so that few programs exist."""
        length = self.options.chunk
        while length < used:
            length *= 2
        return min(length, self.options.slot_tokens)

    def _arm(self, row: Row) -> None:
        request = row.request
        assert request is not None
        state = {
            "mask": True,
            "token": row.pending,
            "pos": row.known - 1,
            "live": True,
            "left": request.sampling.max_tokens,
            "key": request.key,
            "temperature": request.sampling.temperature,
            "top_k": request.sampling.top_k,
            "top_p": request.sampling.top_p,
            "controlled": wants_controls(request.sampling),
        }
        for name, value in state.items():
            self._armed[name][row.slot] = value
        self._armed["stop"][row.slot] = -1
        self._armed["stop"][row.slot, : len(request.stop)] = request.stop

    def _no_arming(self) -> dict[str, np.ndarray]:
        return {name: np.zeros_like(value) for name, value in self._arming.items()}

    def _collect(
        self, rows: list[Row], places: list[int], tokens_WN: np.ndarray, logprobs_WN: np.ndarray, routing_WN: np.ndarray | None
    ) -> None:
        """Hands the emitted tokens, each row's at its place, to the rows, and answers the turns that ended."""
        answers: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future, Sample]]] = {}
        counts, tokens, logprobs = (x.tolist() for x in ((tokens_WN >= 0).sum(axis=1), tokens_WN, logprobs_WN))
        for row, at in zip(rows, places, strict=True):
            assert row.request is not None
            n = counts[at]
            row.tokens += tokens[at][:n]
            row.logprobs += logprobs[at][:n]
            row.versions += [self._version] * n
            if routing_WN is not None:
                row.routing.append(routing_WN[at, :n])
            self._stats.sampled += n
            end = end_of(row.tokens, len(row.tokens) - n, row.request, self.controls.pieces)
            if row.request.hear:
                tell(row.ticket[0], row.request.hear, row.tokens[:end])
            if end is not None or len(row.tokens) == row.request.sampling.max_tokens:
                if row.request.sampling.stop_strings:  # the device knows nothing of them: it is told to stop
                    self._freeze(row)
                loop, future = row.ticket
                answers.setdefault(loop, []).append((future, self._finish(row, end)))
        for loop, batch in answers.items():
            tell(loop, resolve, batch)

    def _freeze(self, row: Row) -> None:
        self._armed["mask"][row.slot], self._armed["live"][row.slot] = True, False
        # Zeros would be read as greedy and as a nucleus, and all rows would pay for these.
        self._armed["temperature"][row.slot] = self._armed["top_p"][row.slot] = 1.0

    def _finish(self, row: Row, end: int | None) -> Sample:
        self._stats.sampled -= 0 if end is None else len(row.tokens) - end
        self._stats.turns += 1
        sample = sample_of(row, end)
        self.table.end(row, time.monotonic())
        return sample

    # ------------------------------------------------------------------ what callers post

    def _accept(self, request: SampleRequest, ticket: tuple[asyncio.AbstractEventLoop, asyncio.Future]) -> None:
        queued = (waiting for waiting, _ in self.table.waiting)
        fault = self.table.check(request) or self.controls.shortage(request, itertools.chain(self._in_progress(), queued))
        if self._params is None:
            fault = "the engine has no weights yet: publish some before sampling"
        if fault:
            loop, future = ticket
            tell(loop, fail, future, ValueError(fault))
        else:
            self.table.enqueue(request, ticket)

    def _release(self, trajectory: str) -> None:
        row = self.table.rows.get(trajectory)
        if row and row.request and row.slot != AWAY:
            self._freeze(row)
        ticket = self.table.release(trajectory)
        if ticket:
            loop, future = ticket
            tell(loop, future.cancel)

    def _publish(self, params: Params, version: int) -> None:
        here = jax.device_put(params, self._shardings)
        self._params = jax.block_until_ready(self._steps.publish(here))
        self._version = version
        if self.options.recompute:
            self.table.forget()

    def _warm_up(self) -> None:
        prepare(self._calls())
        self.controls.warm_up()
        jax.block_until_ready(self._cache)
        self._compiled = compiled_here()

    def _calls(self) -> Iterator[Call]:
        """One call of every program that there will be, which changes nothing that counts."""
        o, rows = self.options, self.options.append_rows
        none, nowhere = np.zeros(rows, np.int32), np.full(rows, o.slots, np.int32)

        def hold(cache: Cache | None = None, rows: Rows | None = None) -> None:
            self._cache, self._rows = cache or self._cache, rows or self._rows

        def append(bucket: int) -> tuple[object, ...]:
            token_RA = np.zeros((rows, bucket), np.int32)
            return self._params, self._cache, none, token_RA, none, none, self.controls.score([], rows)

        def decode(width: int | None, used: int) -> tuple[object, ...]:
            slot_W = None if width is None else np.full(width, o.slots, np.int32)
            return self._params, self._cache, self._rows, self._armed, self.controls.grammars, slot_W, used

        def verify(width: int) -> tuple[object, ...]:
            return *decode(width, 0)[:-1], np.full((width, o.draft_tokens), -1, np.int32)

        def restore(length: int) -> tuple[object, ...]:
            stash = jax.eval_shape(partial(read_slot, used=length), self._cache, none[0])
            return self._cache, o.slots, jax.tree.map(lambda part: np.zeros(part.shape, part.dtype), stash)

        for bucket in o.append_tokens:
            yield Call(self._steps.append, partial(append, bucket), lambda out: hold(out[0]))
        length = 0
        while length < o.slot_tokens:
            length = self._copied_length(length + 1)
            if o.fork_min_tokens <= o.slot_tokens:
                yield Call(self._steps.fork, lambda length=length: (self._cache, none, nowhere, length), hold)
            if o.offload_after_s:
                yield Call(self._steps.stash, lambda length=length: (self._cache, 0, length), lambda out: None)
                yield Call(self._steps.restore, partial(restore, length), hold)
        settle = lambda: (self._rows, *self.controls.controls([], rows, []))  # noqa: E731
        yield Call(self._steps.settle, settle, lambda out: hold(rows=out))
        for width, used in [(None, 0)] if o.exact else itertools.product(self.widths, self._lengths):
            yield Call(self._steps.decode, partial(decode, width, used), lambda out: hold(*out[:2]))
        for width in self.widths if o.draft_tokens else ():
            yield Call(self._steps.verify, partial(verify, width), lambda out: hold(*out[:2]))

    def _abandon(self) -> None:
        """After the loop ended: nobody may wait for an answer that will not come."""
        with self._wake:
            self._closed = True
            work, self._inbox = self._inbox, deque()
        for item in work:
            item()
        tickets = [row.ticket for row in self.table.rows.values() if row.request]
        for loop, future in [*tickets, *(ticket for _, ticket in self.table.waiting)]:
            tell(loop, fail, future, self._end("the engine was closed before the turn ended"))

    def _end(self, closed: str) -> RuntimeError:
        """Why nothing is sampled any more: `closed`, or what stopped the thread."""
        if self._failure is None:
            return RuntimeError(closed)
        error = RuntimeError(f"the engine stopped: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error
