"""What requests ask beyond temperature, top-k and top-p, on the host: whether it can be had, and the arrays that say it.

Constraints are compiled against the vocabulary and laid into the device's tables in blocks of states; an automaton stays
there until its blocks are needed for another and no turn in progress uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxagent.engine.constraints import Automaton, Compiler
from jaxagent.engine.controls import ControlSizes, Grammars, HostRows, new_controls
from jaxagent.engine.slots import Row
from jaxagent.sharding import DeviceMesh
from jaxagent.types import Constraint, SampleRequest, Sampling, Vocabulary

BLOCK = 64  # states that are written at once

Key = tuple[Constraint | None, tuple[int, ...]]  # a constraint and the stop tokens behind it


class ControlTable:
    """The controls of one engine's rows and the automata of its constraints."""

    def __init__(self, sizes: ControlSizes, vocab_size: int, mesh: DeviceMesh, vocabulary: Vocabulary | None = None):
        self.sizes, self.vocab_size, self._mesh = sizes, vocab_size, mesh
        self.pieces: Sequence[bytes] = vocabulary.pieces if vocabulary else ()
        self.compiler: Compiler | None = None
        self.grammars: Grammars | None = None
        self._blocks = -(-sizes.constraint_states // BLOCK)
        self._free = list(range(self._blocks))
        self._sound = Sampling()  # settings that were found without a fault
        self._resident: dict[Key, tuple[Automaton, list[int]]] = {}  # with their blocks, the longest unused first
        self._none = {name: np.asarray(value[0]) for name, value in new_controls(1, sizes).items() if name != "controlled"}
        if vocabulary and self._blocks:
            self.compiler = Compiler(vocabulary, vocab_size, self._blocks * BLOCK)
            pieces, rows = self.compiler.pieces, self._blocks * BLOCK
            masks = jnp.zeros((rows, -(-vocab_size // 32)), jnp.uint32)
            tables = Grammars(masks, jnp.zeros((rows, pieces.symbols), jnp.int32), jnp.asarray(pieces.symbol_VM))
            self.grammars = mesh.place(tables)

    # ------------------------------------------------------------------ before a turn

    def fault(self, sampling: Sampling) -> str:
        """What is wrong with a request's settings, or an empty string."""
        if sampling is self._sound:  # turns of a run share their settings
            return ""
        fault = next(self._faults(sampling), "")
        self._sound = self._sound if fault else sampling
        return fault

    def _faults(self, s: Sampling) -> Iterator[str]:
        if not s.temperature >= 0:
            yield f"temperature must be at least 0, got {s.temperature}"
        if not 0 < s.top_p <= 1:
            yield f"top_p must be above 0 and at most 1, got {s.top_p}"
        if s.top_k < 0:
            yield f"top_k must be at least 0, got {s.top_k}"
        if not 0 <= s.min_p <= 1:
            yield f"min_p must be between 0 and 1, got {s.min_p}"
        if not 0 < s.repetition_penalty < math.inf:
            yield f"repetition_penalty must be positive, got {s.repetition_penalty}"
        if not math.isfinite(s.presence_penalty + s.frequency_penalty):
            yield f"presence_penalty and frequency_penalty must be finite, got {s.presence_penalty}, {s.frequency_penalty}"
        if len(s.logit_bias) > self.sizes.bias_entries:
            yield f"at most {self.sizes.bias_entries} entries of logit_bias (engine.bias_entries), got {len(s.logit_bias)}"
        if any(not bias < math.inf for _, bias in s.logit_bias):
            yield f"a logit_bias must be a number below infinity, got {s.logit_bias}"
        if len({token for token, _ in s.logit_bias}) < len(s.logit_bias):
            yield f"logit_bias names a token twice: {s.logit_bias}"
        if len(s.stop_sequences) > self.sizes.stop_sequences:
            yield f"at most {self.sizes.stop_sequences} stop_sequences (engine.stop_sequences), got {len(s.stop_sequences)}"
        if any(not 0 < len(sequence) <= self.sizes.stop_sequence_tokens for sequence in s.stop_sequences):
            longest = self.sizes.stop_sequence_tokens
            yield f"a stop sequence has 1 to {longest} tokens (engine.stop_sequence_tokens), got {s.stop_sequences}"
        named = [*(token for token, _ in s.logit_bias), *(token for sequence in s.stop_sequences for token in sequence)]
        if strange := [token for token in named if not 0 <= token < self.vocab_size]:
            yield f"logit_bias or stop_sequences name token {strange[0]}, not in a vocabulary of {self.vocab_size}"
        if s.stop_strings and not self.pieces:
            yield "stop_strings need an engine that was given a vocabulary"
        if not 0 <= s.top_logprobs <= self.sizes.top_logprobs:
            yield f"at most {self.sizes.top_logprobs} top_logprobs (engine.top_logprobs), got {s.top_logprobs}"
        if s.prompt_logprobs and not self.sizes.prompt_logprobs:
            yield "prompt_logprobs are off in this engine (engine.prompt_logprobs)"
        if "" in s.stop_strings:
            yield "an empty stop string would end every turn"
        if s.constraint is not None and self.compiler is None:
            yield "a constraint needs an engine with a vocabulary and engine.constraint_states above 0"

    def compile(self, request: SampleRequest) -> Automaton | None:
        """The automaton of a request's constraint, quickly if it was asked for before. Raises ValueError."""
        if request.sampling.constraint is None or self.compiler is None:
            return None
        return self.compiler.compile(request.sampling.constraint, request.stop)

    def shortage(self, request: SampleRequest, others: Iterable[SampleRequest]) -> str:
        """Why a request's constraint does not fit beside those of the other turns, or an empty string."""
        if request.sampling.constraint is None:
            return ""
        needed = {_key(one): self.compile(one) for one in (request, *others) if one.sampling.constraint is not None}
        blocks = sum(_blocks_of(automaton) for automaton in needed.values() if automaton is not None)
        if blocks <= self._blocks:
            return ""
        return (
            f"the constraints of all turns in progress need {blocks * BLOCK} states, engine.constraint_states is "
            f"{self._blocks * BLOCK}"
        )

    # ------------------------------------------------------------------ when turns begin

    def controls(self, begun: Sequence[Row], width: int, using: Iterable[SampleRequest]) -> tuple[np.ndarray, HostRows]:
        """The slots and controls of at most `width` rows; the rest of the arrays names a slot that does not exist.

        Args:
            using: the requests in progress, whose automata must stay where they are.
        """
        slot_R = np.full(width, np.iinfo(np.int32).max, np.int32)
        controls = {name: np.repeat(value[None], width, 0) for name, value in self._none.items()}
        kept = {_key(request) for request in using}
        for i, row in enumerate(begun):
            assert row.request is not None
            slot_R[i] = row.slot
            self._write({name: array[i : i + 1] for name, array in controls.items()}, row, row.request.sampling)
            if row.request.sampling.constraint is not None:
                controls["state"][i] = self._settle(row.request, kept)
        return slot_R, controls

    def _write(self, one: HostRows, row: Row, s: Sampling) -> None:
        one["min_p"][0], one["repetition"][0] = s.min_p, s.repetition_penalty
        one["presence"][0], one["frequency"][0] = s.presence_penalty, s.frequency_penalty
        for i, (token, bias) in enumerate(s.logit_bias):
            one["bias_id"][0, i], one["bias"][0, i] = token, bias
        for i, sequence in enumerate(s.stop_sequences):
            one["pattern"][0, i, -len(sequence) :] = sequence
        one["began"][0], one["top"][0] = row.known, s.top_logprobs > 0
        one["history"][0, : row.known] = row.held

    def score(self, work: Sequence[tuple[Row, list[int]]], width: int) -> tuple[np.ndarray, np.ndarray] | None:
        """What `append` needs for the log-probs of fed tokens: what follows each row's, and the temperature, 0 for none."""
        if not self.sizes.prompt_logprobs:
            return None
        next_R, temperature_R = np.zeros(width, np.int32), np.zeros(width, np.float32)
        for i, (row, tokens) in enumerate(work):
            next_R[i] = row.backlog[len(tokens)] if len(row.backlog) > len(tokens) else row.pending
            if row.request and row.request.sampling.prompt_logprobs:
                temperature_R[i] = row.request.sampling.temperature or 1.0
        return next_R, temperature_R

    def keep_fed(self, work: Sequence[tuple[Row, list[int]]], logprob_RA: np.ndarray) -> None:
        """Hands a call's log-probs to the rows: those of the tokens that this turn fed, each once.

        Under new weights a call may hold what earlier turns fed and sampled, and what this one has been told of before.
        """
        for i, (row, tokens) in enumerate(work):
            assert row.request is not None
            first = row.cached + 1  # position of the token that the call's first log-prob is of
            known = row.request.start + len(row.fed_logprobs)
            end = min(row.request.start + len(row.request.tokens), first + len(tokens))
            row.fed_logprobs += logprob_RA[i, max(known - first, 0) : max(end - first, 0)].tolist()

    def keep_top(self, turns: Sequence[tuple[Row, int]], top: tuple[Array, Array] | None, count_W: np.ndarray) -> None:
        """Hands a call's likeliest tokens, each row's at its place, to who asked for them; if none did they are not fetched.

        Args:
            count_W: how many tokens each place was given.
        """
        asking = [(row, at) for row, at in turns if row.request and row.request.sampling.top_logprobs]
        if top is not None and asking:
            token_WNn, logprob_WNn = np.asarray(top[0]), np.asarray(top[1])
            for row, at in asking:
                row.top.append((token_WNn[at, : count_W[at]], logprob_WNn[at, : count_W[at]]))

    # ------------------------------------------------------------------ automata on the device

    def warm_up(self) -> None:
        """Compiles what writes automata, unless some have been written."""
        if self.grammars is not None and not self._resident:
            nothing = Automaton(np.zeros((0, self.grammars.next_GA.shape[1]), np.int32), np.zeros((0, 0), np.uint32), 0)
            self._copy(nothing, [0])

    def _settle(self, request: SampleRequest, kept: set[Key]) -> int:
        """Brings a constraint's automaton onto the device, if it is not there; returns where it begins, as counted there."""
        automaton, blocks = self._resident.pop(_key(request), (None, []))
        if automaton is None:
            automaton = self.compile(request)
            assert automaton is not None
            count = _blocks_of(automaton)
            for old in [old for old in self._resident if old not in kept]:  # the longest unused first
                if len(self._free) >= count:
                    break
                self._free += self._resident.pop(old)[1]
            blocks, self._free = self._free[:count], self._free[count:]
            self._copy(automaton, blocks)
        self._resident[_key(request)] = automaton, blocks
        return blocks[automaton.start // BLOCK] * BLOCK + automaton.start % BLOCK

    def _copy(self, automaton: Automaton, blocks: Sequence[int]) -> None:
        assert self.grammars is not None
        place = np.repeat(np.asarray(blocks, np.int32) * BLOCK, BLOCK) + np.tile(np.arange(BLOCK, dtype=np.int32), len(blocks))
        after = np.where(automaton.next_GA >= 0, place[automaton.next_GA], 0)  # masks forbid what leads nowhere
        for i, block in enumerate(blocks):
            part = slice(i * BLOCK, (i + 1) * BLOCK)
            mask = np.zeros((BLOCK, self.grammars.mask_GW.shape[1]), np.uint32)
            table = np.zeros((BLOCK, self.grammars.next_GA.shape[1]), np.int32)
            if rows := len(after[part]):
                mask[:rows], table[:rows] = automaton.mask_GW[part], after[part]
            self.grammars = _put(self.grammars, np.int32(block * BLOCK), mask, table)


def wants_controls(s: Sampling) -> bool:
    """Whether a turn needs more of the device than temperature, top-k and top-p."""
    penalised = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
    return bool(penalised or s.min_p > 0 or s.logit_bias or s.stop_sequences or s.top_logprobs or s.constraint is not None)


def _key(request: SampleRequest) -> Key:
    return request.sampling.constraint, request.stop


def _blocks_of(automaton: Automaton) -> int:
    return -(-automaton.states // BLOCK)


@partial(jax.jit, donate_argnums=0)
def _put(grammars: Grammars, at: Array, mask_BW: Array, next_BA: Array) -> Grammars:
    update = jax.lax.dynamic_update_slice_in_dim
    masks, table = update(grammars.mask_GW, mask_BW, at, 0), update(grammars.next_GA, next_BA, at, 0)
    return Grammars(masks, table, grammars.symbol_VM)
