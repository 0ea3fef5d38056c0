"""Log-probs and entropies of given tokens without ever holding [tokens, vocabulary]: chunked, with its own backward pass.

Over a mesh every device works through its own tokens and its own range of the vocabulary: the table is gathered once over
the axes that cut its width, and its gradient is summed over all chunks before it is reduced, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxagent.models.attention import dot, soft_cap
from jaxagent.sharding import RULES, DeviceMesh


@dataclass(frozen=True)
class _Head:
    """What is fixed while tracing."""

    temperature: float
    chunk: int
    softcap: float
    mesh: DeviceMesh | None  # None where there is one device

    def logits(self, hidden: Array, table: Array) -> Array:
        return soft_cap(dot("TD,VD->TV", hidden, table), self.softcap)

    def whole_width(self, table: Array) -> Array:
        return jax.lax.all_gather(table, RULES["embed"], axis=1, tiled=True) if self.mesh else table

    def own_range(self, target: Array, table: Array) -> Array:
        """Tokens counted from the first that this device's part of the table holds."""
        return target - jax.lax.axis_index(RULES["vocab"]) * table.shape[0] if self.mesh else target


def token_logprobs(
    hidden_BTD: Float[Array, "B T D"],
    table_VD: Float[Array, "V D"],
    target_BT: Int[Array, "B T"],
    temperature: float,
    chunk: int,
    softcap: float = 0.0,
    mesh: DeviceMesh | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(target) and the entropy of p = softmax(soft_cap(hidden @ table.T) / temperature), in nats and float32.

    Logits exist for `chunk` tokens of a device at a time, forward and backward; their greatest, their sum and the entropy are
    kept.

    Args:
        mesh: over which rows, length, vocabulary and width are cut by the table of sharding.py; None is one device.
    """
    several = mesh if mesh and mesh.mesh.size > 1 else None
    return _token_logprobs(hidden_BTD, table_VD, target_BT, _Head(temperature, chunk, softcap, several))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_logprobs(hidden: Array, table: Array, target: Array, head: _Head) -> tuple[Array, Array]:
    return _forward(hidden, table, target, head)[0]


_TOKENS, _TABLE = ("rows", "length"), ("vocab", "embed")
_HIDDEN = (*_TOKENS, None)


def _forward(hidden: Array, table: Array, target: Array, head: _Head) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    f = partial(_forward_part, head=head)
    if head.mesh:
        f = head.mesh.per_device(f, (_HIDDEN, _TABLE, _TOKENS), (_TOKENS,) * 4)
    logprob, entropy, top, log_total = f(hidden, table, target)
    return (logprob, entropy), (hidden, table, target, entropy, top, log_total)


def _backward(head: _Head, saved: tuple[Array, ...], cts: tuple[Array, Array]) -> tuple[Array, Array, None]:
    f = partial(_backward_part, head=head)
    if head.mesh:
        f = head.mesh.per_device(f, (_HIDDEN, _TABLE, *(_TOKENS,) * 6), (_HIDDEN, _TABLE))
    return *f(*saved, *cts), None


_token_logprobs.defvjp(_forward, _backward)


def _chunks(x: Array, chunk: int) -> Array:
    """[B, T, ...] as [B T / chunk, chunk, ...], padded with zeros; fewer tokens than a chunk are one chunk."""
    x = x.reshape(-1, *x.shape[2:])
    chunk = min(chunk, x.shape[0])
    short = -x.shape[0] % chunk
    return jnp.pad(x, ((0, short), *((0, 0),) * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])


def _unchunked(x: Array, shape: tuple[int, ...]) -> Array:
    tokens = shape[0] * shape[1]
    return x.reshape(-1, *x.shape[2:])[:tokens].reshape(shape)


def _forward_part(hidden: Array, table: Array, target: Array, head: _Head) -> tuple[Array, ...]:
    """log p and entropy of one device's tokens, their greatest logit, and the log of the sum of exp(logit - greatest).

    Over this device's range of the vocabulary first, then over all ranges. Logits are counted from the greatest: next to a
    sum of their size, the small differences that make an entropy would be lost.
    """
    table = head.whole_width(table)

    def one(args: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
        h, t = args
        z = head.logits(h, table) / head.temperature
        top = z.max(-1)
        below = z - top[:, None]
        weight = jnp.exp(below)
        logit = jnp.take_along_axis(z, t[:, None], 1, mode="fill", fill_value=0.0)[:, 0]
        return logit, top, weight.sum(-1), jnp.sum(weight * below, -1)

    own = head.own_range(target, table)
    own = jnp.where((own >= 0) & (own < table.shape[0]), own, table.shape[0])
    parts = jax.lax.map(one, (_chunks(hidden, head.chunk), _chunks(own, head.chunk)))
    logit, top, total, moment = (_unchunked(part, target.shape) for part in parts)
    if head.mesh:
        axis, own_top = RULES["vocab"], top
        top = jax.lax.pmax(own_top, axis)
        shift = own_top - top
        logit, total, moment = jax.lax.psum((logit, total * jnp.exp(shift), (moment + total * shift) * jnp.exp(shift)), axis)
    log_total = jnp.log(total)
    return logit - top - log_total, log_total - moment / total, top, log_total


def _backward_part(hidden: Array, table: Array, target: Array, *columns: Array, head: _Head) -> tuple[Array, Array]:
    wide = head.whole_width(table)
    own = head.own_range(target, table)

    def one(d_table: Array, args: list[Array]) -> tuple[Array, Array]:
        h, t, entropy, top, log_total, d_logprob, d_entropy = (x if x.ndim > 1 else x[:, None] for x in args)
        capped = head.logits(h, wide)
        log_p = (capped / head.temperature - top) - log_total
        # d log p(t) / dz = onehot(t) - p;  dH / dz = -p (log p + H)
        d_z = -jnp.exp(log_p) * (d_logprob + d_entropy * (log_p + entropy))
        d_z = jnp.where(jnp.arange(wide.shape[0]) == t, d_z + d_logprob, d_z) / head.temperature
        d_z = d_z * (1 - jnp.square(capped / head.softcap)) if head.softcap else d_z
        d_z = d_z.astype(hidden.dtype)
        grown = dot("TD,TV->DV", h, d_z) if head.mesh else dot("TV,TD->VD", d_z, h)
        return d_table + grown, dot("TV,VD->TD", d_z, wide).astype(hidden.dtype)

    chunks = [_chunks(x, head.chunk) for x in (hidden, own, *columns)]
    # Over a mesh width comes first: then its parts lie apart in memory, and a TPU reduces and scatters them in one go.
    d_table, d_hidden = jax.lax.scan(one, jnp.zeros(wide.shape[:: -1 if head.mesh else 1], jnp.float32), chunks)
    d_hidden = _unchunked(d_hidden, hidden.shape)
    if head.mesh:
        d_hidden = jax.lax.psum(d_hidden, RULES["vocab"])
        d_table = jax.lax.psum_scatter(d_table, RULES["embed"], scatter_dimension=0, tiled=True)
        d_table = jax.lax.psum(d_table, "data").T
    return d_hidden, d_table.astype(table.dtype)
