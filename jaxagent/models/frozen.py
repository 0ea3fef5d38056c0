"""Which weights are trained: patterns over their names, a tree of weights in two parts, and what identifies the frozen one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, UInt32

from jaxagent.models.adapters import is_adapter, patterns
from jaxagent.models.transformer import Params


def trained_names(names: Iterable[str], train_only: str = "", freeze: str = "") -> frozenset[str]:
    """The dotted names, as `blocks.q`, of the weights that are trained.

    Those that `train_only` matches, without it all, and none that `freeze` matches. Where there are adapters they are trained,
    and of the base only what `train_only` matches.

    Args:
        train_only: comma-separated globs on dotted names.
        freeze: the same.

    Raises ValueError for a glob that changes nothing and where nothing is left to train.
    """
    every = sorted(names)
    adapters = [name for name in every if is_adapter(name)]
    base = [name for name in every if name not in adapters]
    chosen = {*adapters, *_matched("learner.train_only", train_only, base)} if train_only or adapters else set(every)
    chosen -= _matched("learner.freeze", freeze, sorted(chosen))
    if not chosen:
        raise ValueError(f"learner.freeze = {freeze!r} leaves nothing to train")
    return frozenset(chosen)


def _matched(key: str, globs: str, names: Collection[str]) -> set[str]:
    found: set[str] = set()
    for glob in patterns(globs):
        matches = {name for name in names if fnmatchcase(name, glob)}
        if not matches:
            raise ValueError(f"{key} = {globs!r}: {glob!r} matches none of the weights it could: {', '.join(names)}")
        found |= matches
    return found


def split(params: Params, trained: Collection[str]) -> tuple[Params, Params]:
    """The trained and the frozen part of a tree of weights, or of anything in its structure."""
    parts: tuple[Params, Params] = ({}, {})
    for name, leaf in flatten_dict(params, sep=".").items():
        parts[name not in trained][name] = leaf
    return unflatten_dict(parts[0], sep="."), unflatten_dict(parts[1], sep=".")


def join(trained: Params, frozen: Params) -> Params:
    """The whole tree from its two parts; undoes `split`."""
    return unflatten_dict({**flatten_dict(trained, sep="."), **flatten_dict(frozen, sep=".")}, sep=".")


def digest(params: Params) -> UInt32[Array, ""]:
    """A number that another tree of weights most likely does not have. Integers wrap around: any mesh gives the same."""
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(params):
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        for dimension in range(leaf.ndim):  # a weight counts by its place
            place = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, dimension)
            bits = bits * (2 * place + jnp.uint32(2654435769 + 14 * dimension))
        total = total * jnp.uint32(2246822519) + jnp.sum(bits, dtype=jnp.uint32)
    return total
