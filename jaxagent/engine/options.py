"""What an engine is made with, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EngineOptions:
    """Shapes and pacing of an engine. All shapes are fixed at construction, so nothing compiles after warm-up."""

    slots: int = 32  # C, trajectories resident at once
    slot_tokens: int = 1024  # S, longest trajectory
    decode_tokens: int = 16  # tokens per decode call
    append_rows: int = 8  # R, rows per prefill call
    append_tokens: tuple[int, ...] = (64,)  # A, prefill lengths that are compiled
    chunk: int = 128  # cache positions that attention reads at once; tokens of a page
    pages: int = 0  # that all slots share, one more than hold tokens, and take as they grow; 0: slot_tokens are a slot's own
    exact: bool = True  # no bit of a row depends on its neighbours; else only rows and positions in use are computed
    draft_tokens: int = 0  # most tokens that are guessed from a row's group and verified in one forward; 0: none
    fork_min_tokens: int = 32  # shorter prompts are prefilled again instead of copied
    stop_tokens: int = 4  # most stop ids of a request
    offload_after_s: float = 0.0  # a tool this slow loses its slot, if wanted, to host memory; 0: for want of pages only
    recompute: bool = False  # what is cached is computed again under published weights, instead of kept
    overlap: bool | None = None  # a decode call is sent before the last one's tokens are read; None: where that pays
    linger: float = 0.3  # longest wait for company, as a share of a decode call
    dtype: str = "float32"  # of the sampler's weights and cache
    record_routing: bool = False  # a mixture's experts are recorded for every token, so that training can take the same
    bias_entries: int = 16  # most entries of a request's logit_bias
    stop_sequences: int = 8  # most stop sequences of a request
    stop_sequence_tokens: int = 12  # most tokens of one
    top_logprobs: int = 0  # most likely tokens that a request may ask for beside the sampled one
    prompt_logprobs: bool = False  # whether a request may ask for the log-probs of what it feeds
    constraint_states: int = 0  # states of all constraints in use; each takes a bit per token: 19 KB for 152K tokens

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.slot_tokens % self.chunk:
            raise ValueError(f"engine.slot_tokens must be a multiple of engine.chunk, got {self.slot_tokens} and {self.chunk}")
        if self.recompute and self.record_routing:
            raise ValueError(
                "engine.recompute does not go with learner.replay_routing: a token would have two choices of experts"
            )
        if self.draft_tokens < 0:
            raise ValueError(f"engine.draft_tokens must not be negative, got {self.draft_tokens}")
        if self.draft_tokens and self.exact:
            raise ValueError(
                f"engine.draft_tokens={self.draft_tokens} needs engine.exact=False: the draws are the same, but the last bits "
                "of log-probs depend on which tokens share a forward"
            )
        if self.overlap and self.draft_tokens:
            raise ValueError("engine.overlap does not go with engine.draft_tokens: drafts go by what was read")
        if self.draft_tokens and self.pages:
            raise ValueError("engine.draft_tokens does not go with engine.pages: a draft is verified in slots")
        whole = self.slot_tokens // self.chunk
        if self.pages < 0 or 0 < self.pages <= whole:
            raise ValueError(
                f"engine.pages must be 0 or more than a slot's slot_tokens / chunk = {whole} (one page belongs to nobody), got "
                f"{self.pages}"
            )
        if self.offload_after_s < 0:
            raise ValueError(f"engine.offload_after_s must not be negative, got {self.offload_after_s}")
        if list(self.append_tokens) != sorted(set(self.append_tokens)) or min(self.append_tokens, default=0) < 1:
            raise ValueError(f"engine.append_tokens must be increasing lengths from 1 on, got {self.append_tokens}")


def used_lengths(chunk: int, slot_tokens: int) -> list[int]:
    """The lengths that are compiled for reading the positions in use: 1, 2, 4, 8 ... chunks, and a whole slot."""
    doubled = [chunk << n for n in range(slot_tokens.bit_length())]
    return [length for length in doubled if length < slot_tokens] + [slot_tokens]


@dataclass
class EngineStats:
    """Counters since the last `take_stats`. `row_steps` is decode steps times rows stepped; `sampled` the useful ones."""

    sampled: int = 0
    prefilled: int = 0
    forked: int = 0
    offloaded: int = 0
    turns: int = 0
    decode_calls: int = 0
    append_calls: int = 0
    row_steps: int = 0
    verified: int = 0  # drafts that were verified, of so many tokens, of which so many came true
    drafted: int = 0
    accepted: int = 0
    busy_s: float = 0.0
    compiled: int = 0  # programs compiled since warm-up: a turn waited for each

    def verify(self, draft_nK: np.ndarray, token_WN: np.ndarray) -> None:
        """Counts drafts, -1 behind their ends, whose tokens were verified."""
        self.verified += len(draft_nK)
        self.drafted += int((draft_nK >= 0).sum())
        self.accepted += int(((draft_nK >= 0) & (draft_nK == token_WN[: len(draft_nK), :-1])).sum())
