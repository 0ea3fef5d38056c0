"""What a request may ask beyond temperature, top-k and top-p, as arrays on the device: its controls.

They live beside the rows of the engine and are written by a program of their own, for the rows that have some and only when
their turn begins. A row without controls carries a flag that is false, and where no row has any nothing of this is computed.
A row's scores depend on its own controls only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Rows = dict[str, Array]
HostRows = dict[str, np.ndarray]

NOTHING = -1  # no token, no state, no symbol


class Grammars(NamedTuple):
    """The automata of all constraints in use, one after another. A token is a row of symbols: bytes, or one control token.

    Memory: a state takes V / 8 bytes of mask and 4 bytes for each symbol, 19 KB + 1 KB at V = 152K.
    """

    mask_GW: Array  # uint32, bit i of word w: whether token 32 w + i may be drawn in a state
    next_GA: Array  # int32, the state after a symbol
    symbol_VM: Array  # int16, the symbols of every token, NOTHING behind the last


@dataclass(frozen=True)
class ControlSizes:
    """How much of what a row may have, as `EngineOptions` says; all shapes of its controls."""

    slot_tokens: int
    bias_entries: int
    stop_sequences: int
    stop_sequence_tokens: int
    constraint_states: int = 0
    top_logprobs: int = 0
    prompt_logprobs: bool = False


def new_controls(slots: int, sizes: ControlSizes) -> Rows:
    """The controls of rows that have none."""
    floats = {"min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    return {
        "controlled": jnp.zeros(slots, bool),
        **{name: jnp.full(slots, value, jnp.float32) for name, value in floats.items()},
        "bias_id": jnp.full((slots, sizes.bias_entries), jnp.iinfo(jnp.int32).max, jnp.int32),  # beyond V: dropped
        "bias": jnp.zeros((slots, sizes.bias_entries), jnp.float32),
        "began": jnp.zeros(slots, jnp.int32),  # position of the turn's first sampled token
        "history": jnp.zeros((slots, sizes.slot_tokens), jnp.int32),  # the row's own tokens, by position
        "pattern": jnp.full((slots, sizes.stop_sequences, sizes.stop_sequence_tokens), NOTHING, jnp.int32),  # right-aligned
        "recent": jnp.full((slots, sizes.stop_sequence_tokens), NOTHING, jnp.int32),  # the turn's last tokens
        "state": jnp.full(slots, NOTHING, jnp.int32),  # of the constraint's automaton
        "top": jnp.zeros(slots, bool),  # asks for the likeliest tokens
    }


def settle(rows: Rows, slot_R: Int[Array, "R"], controls: Rows | HostRows) -> Rows:
    """Rows with the controls of slots slot[i]; a slot beyond the last is dropped."""
    return {**rows, **{name: rows[name].at[slot_R].set(value, mode="drop") for name, value in controls.items()}}


def effective_temperature(temperature_C: Float[Array, "C"]) -> Float[Array, "C"]:
    """What logits are divided by: 1 for a greedy row."""
    return jnp.where(temperature_C <= 0, 1.0, temperature_C)


def adjust(z_CV: Float[Array, "C V"], rows: Rows, grammars: Grammars | None) -> Float[Array, "C V"]:
    """Bias, penalties and the constraint's mask, on logits / temperature. Rows without controls stay bit for bit."""
    on = rows["controlled"]
    slot = jnp.arange(z_CV.shape[0])[:, None]
    scale = 1.0 / effective_temperature(rows["temperature"])
    z = z_CV.at[slot, rows["bias_id"]].add(rows["bias"] * scale[:, None], mode="drop")
    penalised = (rows["repetition"] != 1) | (rows["presence"] != 0) | (rows["frequency"] != 0)
    z = jax.lax.cond(jnp.any(on & penalised), lambda z: _penalise(z, rows, scale), lambda z: z, z)
    if grammars is not None:
        constrained = on & (rows["state"] >= 0)
        z = jax.lax.cond(jnp.any(constrained), lambda z: _forbid(z, rows["state"], grammars), lambda z: z, z)
    return jnp.where(on[:, None], z, z_CV)


def _penalise(z_CV: Array, rows: Rows, scale_C: Array) -> Array:
    """Keskar et al. 2019 (CTRL) eq. 1 over all tokens of the row; presence and frequency over those sampled in this turn.

    Dividing by the temperature first changes nothing but rounding: the one keeps signs and the others are scaled with it.
    """
    slots, vocab = z_CV.shape
    slot, token_CS = jnp.arange(slots)[:, None], rows["history"]
    at = jnp.arange(token_CS.shape[1])
    held = at <= rows["pos"][:, None]
    own = held & (at >= rows["began"][:, None])
    score = jnp.take_along_axis(z_CV, token_CS, 1)
    factor = rows["repetition"][:, None]
    # A token that stands there several times is written several times with the same value.
    z = z_CV.at[slot, jnp.where(held, token_CS, vocab)].set(jnp.where(score > 0, score / factor, score * factor), mode="drop")
    count = jnp.zeros_like(z).at[slot, jnp.where(own, token_CS, vocab)].add(1.0, mode="drop")
    taken = rows["presence"][:, None] * (count > 0) + rows["frequency"][:, None] * count
    return z - taken * scale_C[:, None]


def _forbid(z_CV: Array, state_C: Array, grammars: Grammars) -> Array:
    words = grammars.mask_GW[jnp.maximum(state_C, 0)]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(z_CV.shape[0], -1)[:, : z_CV.shape[1]] > 0
    return jnp.where(allowed | (state_C < 0)[:, None], z_CV, -jnp.inf)


def drop_unlikely(z_CV: Float[Array, "C V"], rows: Rows) -> Float[Array, "C V"]:
    """Min-p (Nguyen et al. 2024): what is less likely than min_p times the likeliest goes to -inf."""
    floor = jnp.log(jnp.where(rows["controlled"], rows["min_p"], 0.0))
    return jnp.where(z_CV - z_CV.max(-1, keepdims=True) >= floor[:, None], z_CV, -jnp.inf)


def follow(rows: Rows, token_C: Int[Array, "C"], grammars: Grammars | None) -> tuple[Rows, Array]:
    """The controls after a drawn token, and which live rows have just completed a stop sequence.

    A row's position is still that of the token before.
    """
    on = rows["controlled"] & rows["live"]
    slots, length = rows["history"].shape
    at = jnp.where(on, rows["pos"] + 1, length)  # beyond the end: dropped
    history = rows["history"].at[jnp.arange(slots), at].set(token_C, mode="drop")

    def move(recent: Array, state: Array) -> tuple[Array, Array, Array]:
        recent = jnp.where(on[:, None], jnp.concatenate([recent[:, 1:], token_C[:, None]], 1), recent)
        same = (rows["pattern"] == recent[:, None]) | (rows["pattern"] == NOTHING)
        done = jnp.any(jnp.all(same, -1) & (rows["pattern"][:, :, -1] != NOTHING), -1)
        if grammars is not None:
            state = jnp.where(on & (state >= 0), _after(jnp.maximum(state, 0), token_C, grammars), state)
        return recent, state, done & on

    def stay(recent: Array, state: Array) -> tuple[Array, Array, Array]:
        return recent, state, jnp.zeros_like(on)

    recent, state, done = jax.lax.cond(jnp.any(on), move, stay, rows["recent"], rows["state"])
    return {**rows, "history": history, "recent": recent, "state": state}, done


def _after(state_C: Array, token_C: Array, grammars: Grammars) -> Array:
    """The automaton's state after the symbols of a token."""
    symbol_CM = grammars.symbol_VM[token_C].astype(jnp.int32)
    for i in range(symbol_CM.shape[1]):
        symbol = symbol_CM[:, i]
        state_C = jnp.where(symbol >= 0, grammars.next_GA[state_C, jnp.maximum(symbol, 0)], state_C)
    return state_C
