"""Log-probs and entropies of given tokens without ever holding [tokens, vocabulary]: chunked, with its own backward pass."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxagent.models.attention import dot, soft_cap


def _chunks(x: Array, chunk: int) -> Array:
    """[T, ...] as [T / chunk, chunk, ...], padded with zeros."""
    short = -x.shape[0] % chunk
    return jnp.pad(x, ((0, short), *((0, 0),) * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def token_logprobs(
    hidden_TD: Float[Array, "T D"],
    table_VD: Float[Array, "V D"],
    target_T: Int[Array, "T"],
    temperature: float,
    chunk: int,
    softcap: float = 0.0,
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """log p(target) and the entropy of p = softmax(soft_cap(hidden @ table.T) / temperature), in nats and float32.

    Logits exist for `chunk` tokens at a time, forward and backward; only the log-sum-exp and the entropy are kept.
    """
    return _forward(hidden_TD, table_VD, target_T, temperature, chunk, softcap)[0]


def _forward(
    hidden: Array, table: Array, target: Array, temperature: float, chunk: int, softcap: float
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    def one(args: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        h, t = args
        z = soft_cap(dot("TD,VD->TV", h, table), softcap) / temperature
        lse = jax.nn.logsumexp(z, axis=-1)
        p = jnp.exp(z - lse[:, None])
        return jnp.take_along_axis(z, t[:, None], 1)[:, 0] - lse, lse - jnp.sum(p * z, -1), lse

    parts = jax.lax.map(one, (_chunks(hidden, chunk), _chunks(target, chunk)))
    logprob, entropy, lse = (part.reshape(-1)[: target.shape[0]] for part in parts)
    return (logprob, entropy), (hidden, table, target, lse, entropy)


def _backward(
    temperature: float, chunk: int, softcap: float, saved: tuple[Array, ...], cts: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    hidden, table, target, lse, entropy = saved
    columns = [_chunks(x, chunk) for x in (hidden, target, lse, entropy, *cts)]

    def one(d_table: Array, args: list[Array]) -> tuple[Array, Array]:
        h, t, lse, entropy, d_logprob, d_entropy = args
        capped = soft_cap(dot("TD,VD->TV", h, table), softcap)
        log_p = capped / temperature - lse[:, None]
        p = jnp.exp(log_p)
        # d log p(t) / dz = onehot(t) - p;  dH / dz = -p (log p + H)
        d_z = -p * (d_logprob[:, None] + d_entropy[:, None] * (log_p + entropy[:, None]))
        d_z = d_z.at[jnp.arange(chunk), t].add(d_logprob) / temperature
        d_z = d_z * (1 - jnp.square(capped / softcap)) if softcap else d_z
        return d_table + dot("TV,TD->VD", d_z, h), dot("TV,VD->TD", d_z, table).astype(hidden.dtype)

    d_table, d_hidden = jax.lax.scan(one, jnp.zeros(table.shape, jnp.float32), columns)
    return d_hidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]], d_table.astype(table.dtype), None


token_logprobs.defvjp(_forward, _backward)
