"""Low-rank adapters at work: which linear maps are to carry one, fresh factors, and the merge into the weights.

lora.py says what an adapter is, transformer.py computes with it, peft.py reads and writes the files.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
from flax import nnx

from jaxagent.models.family import ATTENTION, MLP
from jaxagent.models.lora import LoraSpec
from jaxagent.models.transformer import LINEARS, MLP_LINEARS, Decoder, DecoderConfig, Params, input_dimensions, params_of

# What checkpoints call our linear maps within a layer, which patterns may name too.
CHECKPOINT_NAMES = {ours: theirs.removesuffix(".weight") for theirs, ours, _ in ATTENTION + MLP if ours in LINEARS}
ALL = "all-linear"
LORA_A, LORA_B = "_lora_a", "_lora_b"


def lora_spec(rank: int = 0, alpha: float = 16.0, targets: str = ALL, *, experts: bool = False) -> LoraSpec | None:
    """The adapters that a config asks for; None where `rank` is 0.

    Args:
        targets: globs, separated by commas, on our names (`q`, `blocks.q`), on those of checkpoints (`q_proj`,
            `self_attn.*`), or `all-linear`.
        experts: whether the feed-forward is a mixture: `all-linear` is attention's then, as in PEFT.
    """
    if rank < 0:
        raise ValueError(f"lora.rank must be at least 0, which is off, got {rank}")
    if not alpha > 0:
        raise ValueError(f"lora.alpha must be positive, got {alpha}")
    chosen = linears(targets, experts)
    return LoraSpec(rank, alpha, chosen) if rank else None


def linears(targets: str, experts: bool = False) -> tuple[str, ...]:
    """The names of LINEARS that comma-separated globs match, in the order of LINEARS."""
    chosen: set[str] = set()
    for pattern in patterns(targets):
        found = set(LINEARS) - (set(MLP_LINEARS) if experts else set())
        if pattern != ALL:
            found = {name for name in LINEARS if any(fnmatchcase(known, pattern) for known in _names(name))}
        if not found:
            there = ", ".join(f"{name} ({CHECKPOINT_NAMES[name]})" for name in LINEARS)
            raise ValueError(f"lora.targets = {targets!r}: {pattern!r} matches no linear map; there are {there}, or {ALL!r}")
        chosen |= found
    if not chosen:
        raise ValueError(f"lora.targets must name at least one linear map, got {targets!r}; {ALL!r} names all")
    return tuple(name for name in LINEARS if name in chosen)


def patterns(text: str) -> list[str]:
    """The globs of a comma-separated text."""
    return [pattern for part in text.split(",") if (pattern := part.strip())]


def _names(linear: str) -> tuple[str, ...]:
    theirs = CHECKPOINT_NAMES[linear]
    return linear, f"blocks.{linear}", theirs, theirs.rpartition(".")[2]


def unadapted(config: DecoderConfig) -> DecoderConfig:
    """The decoder that `merged` weights are of."""
    return replace(config, lora=None)


def fresh_adapters(config: DecoderConfig, seed: int) -> Params:
    """The factors of a policy that is about to be adapted, by their names in `blocks`: nothing is changed by them yet."""

    def drawn() -> Params:
        blocks = params_of(Decoder(config, nnx.Rngs(seed)))[1]["blocks"]
        return {name: factor for name, factor in blocks.items() if is_adapter(name)}

    return jax.jit(drawn)()  # what is not returned is not drawn


def is_adapter(name: str) -> bool:
    """Whether a weight, by its name or dotted path, is a factor of an adapter."""
    return name.endswith((LORA_A, LORA_B))


def merged(params: Params, config: DecoderConfig) -> Params:
    """W + (alpha / rank) A B in float32 for every target, and no factors (Hu et al. 2021, section 4.1)."""
    if config.lora is None:
        return params
    blocks = {name: w for name, w in params["blocks"].items() if not is_adapter(name)}
    for name in config.lora.targets:
        w, a, b = (params["blocks"][name + factor].astype(jnp.float32) for factor in ("", LORA_A, LORA_B))
        right = LINEARS[name].partition("->")[0].partition(",")[2]
        inputs, outputs = right[: input_dimensions(name)], right[input_dimensions(name) :]
        # The accelerators' default precision would round the factors.
        product = jnp.einsum(f"L{inputs}r,Lr{outputs}->L{right}", a, b, precision=jax.lax.Precision.HIGHEST)
        blocks[name] = w + config.lora.scale * product
    return {**params, "blocks": blocks}


def adapters_off(params: Params) -> Params:
    """The same tree with every B at zero: weights that compute what the base does, by the same program."""
    blocks = params["blocks"].items()
    zeros = {n: jnp.zeros(w.shape, w.dtype, device=w.sharding) for n, w in blocks if n.endswith(LORA_B)}
    return {**params, "blocks": {**params["blocks"], **zeros}}
