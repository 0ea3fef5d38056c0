"""The engine's door: `await engine.generate(request)`. One thread owns the device, any asyncio loop may wait.

The thread repeats: take what arrived, admit, prefill or fork, send a decode call, read the one before (with drafts: read it),
answer the turns that ended. No more is prefilled at once than the rows that decode should wait for; the rest goes before later
calls. Liveness is the device's: a row that stopped in a call not read yet is frozen in the next, so nothing is guessed. What is
done to a slot meanwhile is queued behind the call. What a trajectory has cached is kept until `release`, in its slot or in host
memory; with `recompute` it is computed again under new weights.
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

from jaxagent.engine.answers import ended, fail, resolve, tell
from jaxagent.engine.arming import Arming
from jaxagent.engine.cache import Cache, cache_of
from jaxagent.engine.control_table import ControlTable, wants_controls
from jaxagent.engine.controls import ControlSizes, Rows, new_controls
from jaxagent.engine.flight import SOON, Flight, Pace, most_prefilled
from jaxagent.engine.memory import PageMemory, SlotMemory
from jaxagent.engine.options import EngineOptions, EngineStats, used_lengths
from jaxagent.engine.pages import PageTable
from jaxagent.engine.prefill import Prefill
from jaxagent.engine.programs import Call, compiled_here, prepare
from jaxagent.engine.publish import Incoming
from jaxagent.engine.slots import AWAY, Row, SlotTable
from jaxagent.engine.speculation import Speculation
from jaxagent.engine.steps import make_steps, new_rows
from jaxagent.engine.stops import end_of, sample_of
from jaxagent.models.attention_choice import paged_attention
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
        pages = PageTable(o.slots, o.slot_tokens, o.chunk, o.pages) if o.pages else None
        form = paged_attention(config.attention, mesh) if o.pages else None
        self.table = SlotTable(o.slots, o.slot_tokens, o.fork_min_tokens, pages, o.decode_tokens)
        dtype = jnp.dtype(o.dtype)
        self._steps = make_steps(
            config,
            dtype=dtype,
            chunk=o.chunk,
            decode_tokens=o.decode_tokens,
            mesh=mesh,
            record_routing=o.record_routing,
            top_logprobs=o.top_logprobs,
            pages=form,
        )
        self._lengths = used_lengths(o.chunk, o.slot_tokens)
        self.widths = sorted({-(-o.slots // parts) for parts in (1, 4)})
        # On a CPU others run too, and wall time counts their turns, most of all in long calls.
        clock = time.process_time if mesh.platform == "cpu" else time.perf_counter
        self.speculation = Speculation(o.draft_tokens, o.decode_tokens, self.widths, 2 * o.slots * o.slot_tokens, clock)
        cache = mesh.place(cache_of(config, o, form), (None, "kv_heads"))
        self._memory = PageMemory(self._steps, cache, o, pages) if pages else SlotMemory(self._steps, cache, o)
        sizes = ControlSizes(**{name: getattr(o, name) for name in ControlSizes.__annotations__})
        self.controls = ControlTable(sizes, config.vocab_size, mesh, vocabulary)
        plain = new_rows(o.slots, o.stop_tokens)
        self._rows = mesh.place({**plain, **new_controls(o.slots, sizes)})
        self._arming = Arming(plain, mesh)
        self._prefill = Prefill(self.table, self._steps, self._memory, self.controls, self._arming)
        skeleton = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
        self._shardings = mesh.shardings(logical_axes(skeleton), params_of(skeleton)[1])
        self._mesh = mesh
        self._params: Params | None = None
        self._version = 0
        self._vocab_size = config.vocab_size
        self._stats = EngineStats()
        self.pace = Pace(False if o.draft_tokens else o.overlap)  # drafts go by what was read
        self._flight: Flight | None = None  # sent and not read
        self._idle_since: float | None = None  # when it had nothing to decode any more
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._compiled = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the door

    async def generate(self, request: SampleRequest) -> Sample:
        """Feeds the request's tokens and samples one turn. Raises ValueError for a request that cannot be served."""
        if fault := self._fault(request):
            raise ValueError(f"trajectory {request.trajectory!r}: {fault}")
        if request.sampling.constraint is not None:
            await asyncio.to_thread(self.controls.compile, request)  # may take a second, the first time
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sample] = loop.create_future()
        self._hand_in(lambda: self._accept(request, (loop, future)))
        return await future

    def _fault(self, request: SampleRequest) -> str:
        """What is wrong with a request by itself, or an empty string."""
        if len(request.stop) > self.options.stop_tokens:
            return f"at most {self.options.stop_tokens} stop ids (EngineOptions.stop_tokens), got {request.stop}"
        if strange := [token for token in request.tokens if not 0 <= token < self._vocab_size]:
            return f"token {strange[0]} is not in a vocabulary of {self._vocab_size}"
        return self.controls.fault(request.sampling)

    def release(self, trajectory: str) -> None:
        """Frees the slot of a trajectory; unknown names are fine, so that a caller may always release."""
        self._hand_in(lambda: self._release(trajectory))

    def publish(self, params: Params, version: int) -> None:
        """Copies the learner's weights into the sampler's layout, between two calls; returns when they are in."""
        self.run(lambda: self._publish(params, version))

    def begin_publish(self) -> Incoming:
        """Lets the old weights go, so that the new ones have their place; by its own thread, or while that is held."""
        self._params = None
        return Incoming(self._steps.publish)

    def end_publish(self, incoming: Incoming, version: int) -> None:
        """Goes on with the weights that have come in."""
        self._params = jax.block_until_ready(incoming.whole())
        self._version = version
        if self.options.recompute:
            self.table.forget()
            for row in self.table.begun:  # what they had may take more than one call to compute
                self._arming.freeze(row.slot)

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
        """Has the engine's thread do `work`, between two calls of the device: none is under way meanwhile."""
        done: Future[None] = Future()

        def guarded() -> None:
            try:
                self._read_flight()
                work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._hand_in(guarded)
        return done

    def _hand_in(self, work: Callable[[], None]) -> None:
        """Has the engine's thread do `work` soon, which may be while a call is under way."""
        with self._wake:
            if self._closed:
                raise ended("the engine is closed", self._failure)
            self._inbox.append(work)
            self._wake.notify()

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
        deadline = time.monotonic() + self._patience()
        self.table.admit()  # who waited for others to have their pages first
        while True:
            with self._wake:
                if self._closed:
                    return False
                if not self._inbox:
                    left = None if not self.table.sampling else deadline - time.monotonic()
                    if left is not None and not self._flight:
                        left = min(QUIET_S, left)
                    if left is not None and (left <= 0 or not self._may_grow() or not self._wake.wait(left)):
                        return True
                    if left is None:
                        self._flight = None  # nobody is left in it
                        self._idle_since = self._idle_since or time.monotonic()
                        self._wake.wait(self._until_room())
                        deadline = time.monotonic() + self._patience()
                work, self._inbox = self._inbox, deque()
            for item in work:
                item()
            began = time.monotonic()  # what was posted, such as new weights, is no work of a call
            self.table.admit()
            self._make_room()
            if self.table.sampling:
                self._idle_since = None
            now = time.monotonic()
            self.pace.worked(now - began)
            if self.table.sampling and now > deadline:
                return True  # a stream of small requests must not keep the turns in progress waiting

    def _patience(self) -> float:
        """How long it may wait for company: at no cost while the device is busy, else for a share of a call."""
        return (SOON if self._flight else self.options.linger) * self.pace.call_s

    def _may_grow(self) -> bool:
        """Whether it may wait for company: there is room, and somebody to decode whom the call under way does not end."""
        return self.table.sampling < self.options.slots and any(self._left(row) > 0 for row in self.table.rows.values())

    def _until_room(self) -> float | None:
        """Seconds until a slot may be taken from a trajectory whose tool is slow; None where nobody waits for one."""
        stuck = self.table.pages is not None and not self.table.sampling  # else who waits for pages might wait for ever
        after_s = 0.0 if stuck else self.options.offload_after_s
        row = self.table.idle_longest() if after_s or stuck else None
        return max(0.0, row.idle_since + after_s - time.monotonic()) if row else None

    def _make_room(self) -> None:
        """Moves trajectories whose tools are slow to host memory, for those that wait for a slot."""
        while self._until_room() == 0.0:
            row = self.table.idle_longest()
            assert row is not None
            self._save(row)
            self.table.vacate(row)
            self.table.admit()

    def _save(self, row: Row) -> None:
        """Moves what a row has in the cache to host memory; a turn in progress is frozen."""
        if row.stash is None and row.filled and not row.source:
            row.stash = self._memory.save(row)
            self._stats.offloaded += row.filled
        if row.request and row.tokens:
            self._arming.freeze(row.slot)

    def _tick(self) -> None:
        self._make_room()  # first: whom it lets in may take what was ample before
        if not self.table.ample():  # who gives up its pages must have been read
            self._read_flight()
        began = time.monotonic()
        for row in self.table.fit():
            self._save(row)
        budget = most_prefilled(self.options.slots, self.options.decode_tokens, len(self._going_on()))
        begun = self._prefill.run(self._params, self.options, budget, self._stats)
        # A turn that goes on has its controls on the device, as they have become.
        self._control([row for row in begun if row.request and wants_controls(row.request.sampling) and not row.tokens])
        if self.options.draft_tokens:
            self._speculate()
            return
        before, flight = self._flight, self._send(self._going_on(), None, began)
        self.pace.worked(time.monotonic() - began)
        if before:
            self._collect(before)
        self._flight = flight
        if not self.pace.ahead:
            self._read_flight()

    def _speculate(self) -> None:
        """Decodes a segment of some rows and verifies drafts of the others; each call is read before the next is sent."""
        jax.block_until_ready(self._memory.cache)  # what calls take is measured
        for rows, drafts in self.speculation.calls(self._going_on()):
            if flight := self._send(rows, drafts, time.monotonic()):
                self._collect(flight)

    def _going_on(self) -> list[Row]:
        """The rows that may sample another token."""
        return [row for row in self.table.by_slot if row and row.fed and self._left(row) > 0]

    def _left(self, row: Row) -> int:
        """How many tokens a row may sample behind those that are read or under way."""
        return row.request.sampling.max_tokens - len(row.tokens) - row.ahead if row.request else 0

    def _send(self, rows: list[Row], drafts: np.ndarray | None, began: float) -> Flight | None:
        """Sends a call that decodes rows, or verifies their drafts, if there are any."""
        if not rows:
            return None
        slot_W, used = self._active(rows)
        state = self._params, self._memory.cache, self._rows, self._arming.take(), self.controls.grammars
        if drafts is None:
            out = self._steps.decode(*state, slot_W, used, self._memory.table)
        else:
            assert slot_W is not None  # drafts are for neither exact mode nor pages
            draft_WK = np.full((len(slot_W), drafts.shape[1]), -1, np.int32)
            draft_WK[: len(rows)] = drafts
            out = self._steps.verify(*state, slot_W, draft_WK)
        self._memory.cache, self._rows, tokens, logprobs, routing, top = out
        for part in jax.tree.leaves((tokens, logprobs, routing)):
            part.copy_to_host_async()
        for row in rows:
            row.ahead += tokens.shape[1]
        self._stats.decode_calls += 1
        self._stats.row_steps += tokens.size
        self._stats.compiled += compiled_here() - self._compiled
        self._compiled = compiled_here()
        places = list(range(len(rows))) if slot_W is not None else [row.slot for row in rows]
        turns = [(row, row.request) for row in rows if row.request]
        return Flight(turns, places, self._version, began, tokens, logprobs, routing, top, drafts)

    def _read_flight(self) -> None:
        """Reads what is under way, if anything is."""
        if self._flight:
            self._collect(self._flight)
            self._flight = None
        jax.block_until_ready(self._rows)  # also a call in which nobody was left

    def _active(self, rows: list[Row]) -> tuple[np.ndarray | None, int]:
        """The slots to step and the positions that they use, both of compiled sizes; all of both in exact mode."""
        if self.options.exact:
            return None, 0
        width = next(width for width in self.widths if width >= len(rows))
        slot_W = np.full(width, self.options.slots, np.int32)  # beyond the last slot: nobody
        slot_W[: len(rows)] = [row.slot for row in rows]
        if self.table.pages:  # each row's own are read
            return slot_W, 0
        held = max(row.known + len(row.tokens) + row.ahead - 1 for row in rows)
        return slot_W, next(length for length in self._lengths if length >= held)

    def _control(self, begun: list[Row]) -> None:
        """Writes the controls of new turns that have some."""
        width = self.options.append_rows
        for i in range(0, len(begun), width):
            slot_R, controls = self.controls.controls(begun[i : i + width], width, self.table.in_progress())
            self._rows = self._steps.settle(self._rows, slot_R, controls)

    def _collect(self, flight: Flight) -> None:
        """Reads a call's tokens, hands them to the rows, each row's at its place, and answers the turns that ended."""
        tokens_WN, logprobs_WN = np.asarray(flight.tokens), np.asarray(flight.logprobs)
        routing_WN = None if flight.routing is None else np.asarray(flight.routing)
        began = time.monotonic()
        self._stats.busy_s += self.pace.read(flight.sent, began)
        turns, count_W = flight.going_on(), (tokens_WN >= 0).sum(axis=1)
        self.controls.keep_top(turns, flight.top, count_W)
        if flight.drafts is not None:
            self._stats.verify(flight.drafts, tokens_WN)
        answers: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future, Sample]]] = {}
        counts, tokens, logprobs = (x.tolist() for x in (count_W, tokens_WN, logprobs_WN))
        for row, at in turns:
            assert row.request is not None
            n = counts[at]
            row.ahead -= tokens_WN.shape[1]
            row.sampled(tokens[at][:n], logprobs[at][:n], flight.version, None if routing_WN is None else routing_WN[at, :n])
            self._stats.sampled += n
            end = end_of(row.tokens, len(row.tokens) - n, row.request, self.controls.pieces)
            if row.request.hear:
                tell(row.ticket[0], row.request.hear, row.tokens[:end])
            if end is not None or len(row.tokens) == row.request.sampling.max_tokens:
                if row.request.sampling.stop_strings:  # the device knows nothing of them: it is told to stop
                    self._arming.freeze(row.slot)
                self._stats.turns += 1
                self._stats.sampled -= 0 if end is None else len(row.tokens) - end
                loop, future = row.ticket
                answers.setdefault(loop, []).append((future, sample_of(row, end)))
                self.table.end(row, began)
        for loop, batch in answers.items():
            tell(loop, resolve, batch)
        self.pace.worked(time.monotonic() - began)
        self.pace.ended(len(turns), sum(map(len, answers.values())))

    # ------------------------------------------------------------------ what callers post

    def _accept(self, request: SampleRequest, ticket: tuple[asyncio.AbstractEventLoop, asyncio.Future]) -> None:
        queued = (waiting for waiting, _ in self.table.waiting)
        fault = self.table.check(request) or self.controls.shortage(request, itertools.chain(self.table.in_progress(), queued))
        if self._params is None:
            fault = "the engine has no weights, none yet or a publish that failed: publish some before sampling"
        if fault:
            loop, future = ticket
            tell(loop, fail, future, ValueError(fault))
        else:
            self.table.enqueue(request, ticket)

    def _release(self, trajectory: str) -> None:
        row = self.table.rows.get(trajectory)
        if row and row.request and row.slot != AWAY:
            self._arming.freeze(row.slot)
        ticket = self.table.release(trajectory)
        if ticket:
            loop, future = ticket
            tell(loop, future.cancel)

    def _publish(self, params: Params, version: int) -> None:
        here = jax.device_put(params, self._shardings)
        incoming = self.begin_publish()
        incoming.add(here)
        self.end_publish(incoming, version)

    def _warm_up(self) -> None:
        prepare(self._calls())
        self.controls.warm_up()
        jax.block_until_ready(self._memory.cache)
        self._compiled = compiled_here()

    def _calls(self) -> Iterator[Call]:
        """One call of every program that there will be, which changes nothing that counts."""
        o, rows = self.options, self.options.append_rows

        def hold(cache: Cache | None = None, rows: Rows | None = None) -> None:
            self._memory.cache, self._rows = cache or self._memory.cache, rows or self._rows

        def decode(width: int | None, used: int) -> tuple[object, ...]:
            slot_W = None if width is None else np.full(width, o.slots, np.int32)
            state = self._params, self._memory.cache, self._rows, self._arming.nothing, self.controls.grammars
            return *state, slot_W, used, self._memory.table

        def verify(width: int) -> tuple[object, ...]:
            return *decode(width, 0)[:-2], np.full((width, o.draft_tokens), -1, np.int32)

        yield from self._prefill.calls(self._params, o)
        yield from self._memory.calls()
        settle = lambda: (self._rows, *self.controls.controls([], rows, []))  # noqa: E731
        yield Call(self._steps.settle, settle, lambda out: hold(rows=out))
        lengths = [0] if o.pages else self._lengths
        for width, used in [(None, 0)] if o.exact else itertools.product(self.widths, lengths):
            yield Call(self._steps.decode, partial(decode, width, used), lambda out: hold(*out[:2]))
        for width in self.widths if o.draft_tokens else ():
            yield Call(self._steps.verify, partial(verify, width), lambda out: hold(*out[:2]))

    def _abandon(self) -> None:
        """After the loop ended: nobody may wait for an answer that will not come."""
        with self._wake:
            self._closed = True
            work, self._inbox = self._inbox, deque()
        self._flight = None
        if self._failure is None:
            jax.block_until_ready(self._rows)  # nothing may be under way when the process ends
        for item in work:
            item()
        tickets = [row.ticket for row in self.table.rows.values() if row.request]
        for loop, future in [*tickets, *(ticket for _, ticket in self.table.waiting)]:
            tell(loop, fail, future, ended("the engine was closed before the turn ended", self._failure))
