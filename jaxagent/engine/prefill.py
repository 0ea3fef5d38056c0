"""What turns were fed goes into the cache, some before every decode call; a row is armed when all of its own is there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxagent.engine.arming import Arming
from jaxagent.engine.cache import Cache
from jaxagent.engine.control_table import ControlTable
from jaxagent.engine.memory import PageMemory, SlotMemory
from jaxagent.engine.options import EngineOptions, EngineStats
from jaxagent.engine.programs import Call
from jaxagent.engine.slots import Row, SlotTable
from jaxagent.engine.steps import Steps
from jaxagent.models.transformer import Params


class Prefill:
    """Appends fed tokens but the pending ones, and forks prompts, with an engine's programs."""

    def __init__(self, table: SlotTable, steps: Steps, memory: SlotMemory | PageMemory, controls: ControlTable, arming: Arming):
        self._table, self._steps, self._memory, self._controls, self._arming = table, steps, memory, controls, arming

    def run(self, params: Params | None, options: EngineOptions, budget: float, stats: EngineStats) -> list[Row]:
        """Prefills so many tokens, those of the eldest turns first; returns the rows that are ready to be decoded, armed."""
        for row in self._table.take_returned():
            if row.stash is not None:
                self._memory.bring_back(row)
        for bucket, work in self._table.chunks(options.append_tokens, options.append_rows, budget):
            self._append(params, options.append_rows, bucket, work)
            stats.append_calls += 1
            stats.prefilled += sum(len(tokens) for _, tokens in work)
        begun = self._table.take_begun()
        forks = [row for row in begun if row.source]
        for i in range(0, len(forks), options.append_rows):
            self._fork(forks[i : i + options.append_rows])
        for row in begun:
            self._arming.arm(row)
        stats.forked += sum(row.cached for row in forks)
        return begun

    def _append(self, params: Params | None, rows: int, bucket: int, work: list[tuple[Row, list[int]]]) -> None:
        slot_R, start_R, count_R = np.zeros((3, rows), np.int32)
        token_RA = np.zeros((rows, bucket), np.int32)
        for i, (row, tokens) in enumerate(work):
            slot_R[i], start_R[i], count_R[i] = row.slot, row.cached, len(tokens)
            token_RA[i, : len(tokens)] = tokens
        score = self._controls.score(work, rows)
        given = params, self._memory.cache, slot_R, token_RA, start_R, count_R, score, self._memory.table
        self._memory.cache, routing, logprobs = self._steps.append(*given)
        if score is not None and score[1].any():
            self._controls.keep_fed(work, np.asarray(logprobs))
        if routing is not None:
            routing_RA = np.asarray(routing)
            for i, (row, tokens) in enumerate(work):
                row.routing.append(routing_RA[i, : len(tokens)])
                if not row.turns_done:
                    row.prompt_routing.append(row.routing[-1])

    def _fork(self, forks: list[Row]) -> None:
        self._memory.fork(forks)
        for row in forks:
            assert row.source is not None
            row.routing = list(row.source.prompt_routing)
            row.source, row.copies = None, []

    def calls(self, params: Params | None, options: EngineOptions) -> Iterator[Call]:
        """One call of every program of this class, which changes nothing that counts."""
        none = np.zeros(options.append_rows, np.int32)

        def append(bucket: int) -> tuple[object, ...]:
            token_RA, score = np.zeros((options.append_rows, bucket), np.int32), self._controls.score([], options.append_rows)
            return params, self._memory.cache, none, token_RA, none, none, score, self._memory.table

        def keep(out: tuple[Cache, object, object]) -> None:
            self._memory.cache = out[0]

        for bucket in options.append_tokens:
            yield Call(self._steps.append, lambda bucket=bucket: append(bucket), keep)
