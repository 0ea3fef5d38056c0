"""Low-rank adapters: chosen by pattern, nothing at first, and the same policy merged as apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxagent.models.adapters import adapters_off, fresh_adapters, is_adapter, linears, lora_spec, merged, unadapted
from jaxagent.models.lora import LoraSpec
from jaxagent.models.transformer import LINEARS, Decoder, DecoderConfig, params_of

ALL = tuple(LINEARS)
CONFIG = tiny.config(lora=LoraSpec(2, 3.0, ALL))
MIXTURE = {"experts": 4, "experts_per_token": 2}


def logits(config: DecoderConfig, params: Any, tokens: Any) -> jax.Array:
    graph = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[0]
    return jax.jit(lambda p: nnx.merge(graph, p)(tokens))(params)


# ---------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        ("all-linear", ALL),
        ("q_proj,v_proj", ("q", "v")),
        ("v_proj, q_proj,", ("q", "v")),
        ("[qv]", ("q", "v")),
        ("self_attn.*", ("q", "k", "v", "o")),
        ("mlp.*", ("gate", "up", "down")),
        ("blocks.o,down", ("o", "down")),
        ("*_proj", ALL),
        ("*.gate_proj", ("gate",)),
    ],
)
def test_linear_maps_are_named_by_our_names_and_by_those_of_checkpoints(targets: str, chosen: tuple[str, ...]) -> None:
    assert linears(targets) == chosen


def test_a_pattern_that_matches_nothing_is_told_with_what_there_is() -> None:
    with pytest.raises(ValueError) as told:
        linears("q_proj,w_proj")
    assert str(told.value).startswith(
        "lora.targets = 'q_proj,w_proj': 'w_proj' matches no linear map; there are q (self_attn.q_proj)"
    )
    assert "down (mlp.down_proj), or 'all-linear'" in str(told.value)
    with pytest.raises(ValueError, match="must name at least one linear map, got ' , '"):
        linears(" , ")


def test_what_a_config_asks_for() -> None:
    assert lora_spec(8, 4.0, "k_proj") == LoraSpec(8, 4.0, ("k",))
    assert lora_spec() is None
    with pytest.raises(ValueError, match=r"lora\.rank must be at least 0, which is off, got -1"):
        lora_spec(-1)
    with pytest.raises(ValueError, match=r"lora\.alpha must be positive, got 0"):
        lora_spec(1, 0.0)


def test_adapters_of_a_mixture_go_on_attention_and_on_nothing_else() -> None:
    assert linears("all-linear", experts=True) == ("q", "k", "v", "o")
    with pytest.raises(ValueError, match=r"lora\.targets: gate, down are the experts of a mixture here"):
        tiny.config(**MIXTURE, lora=LoraSpec(2, 1.0, ("q", "gate", "down")))


# ---------------------------------------------------------------------- what they compute

KINDS: dict[str, dict[str, Any]] = {
    "all": {"lora": LoraSpec(2, 3.0, ALL)},
    "some, biased": {"lora": LoraSpec(3, 1.0, ("q", "o", "up")), "qkv_bias": True, "o_bias": True, "kv_heads": 1},
    "gemma-like": {
        "lora": LoraSpec(2, 1.0, ALL),
        "plus_one_norms": True,
        "post_norms": True,
        "sliding": (True, False),
        "window": 3,
    },
    "mixture": {"lora": LoraSpec(2, 2.0, ("q", "k", "v", "o")), **MIXTURE},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_merged_weights_compute_what_weights_and_adapters_do(kind: dict[str, Any]) -> None:
    config = tiny.config(**kind)
    params, tokens = tiny.params(config), tiny.tokens(config, 2, 7)
    plain = unadapted(config)
    whole = merged(params, config)
    skeleton = params_of(nnx.eval_shape(lambda: Decoder(plain, nnx.Rngs(0))))[1]
    assert jax.tree.map(jnp.shape, whole) == jax.tree.map(jnp.shape, skeleton)
    want = logits(config, params, tokens)
    np.testing.assert_allclose(logits(plain, whole, tokens), want, atol=1e-5 * float(jnp.abs(want).max()))
    without = {**params, "blocks": {name: w for name, w in params["blocks"].items() if not is_adapter(name)}}
    assert np.abs(logits(plain, without, tokens) - want).max() > 0.01  # the adapters do something


def test_the_merge_of_one_number_by_hand() -> None:
    config = tiny.config(lora=LoraSpec(2, 3.0, ("q", "o")))
    params = tiny.params(config)
    w, a, b = (np.asarray(params["blocks"][name][1], np.float64) for name in ("o", "o_lora_a", "o_lora_b"))
    want = w[3, 5, 7] + 3.0 / 2 * (a[3, 5, 0] * b[0, 7] + a[3, 5, 1] * b[1, 7])
    assert merged(params, config)["blocks"]["o"][1, 3, 5, 7] == pytest.approx(want, rel=1e-6)


def test_a_merge_is_in_float32_whatever_the_base_is_kept_in() -> None:
    params = tiny.params(CONFIG)
    narrow = {n: w if is_adapter(n) else w.astype(jnp.bfloat16) for n, w in params["blocks"].items()}
    wide = {n: w if is_adapter(n) else w.astype(jnp.bfloat16).astype(jnp.float32) for n, w in params["blocks"].items()}
    got, want = (merged({**params, "blocks": blocks}, CONFIG)["blocks"] for blocks in (narrow, wide))
    for name in ALL:
        assert got[name].dtype == jnp.float32
        np.testing.assert_array_equal(got[name], want[name])


def test_with_b_at_zero_the_policy_is_its_base_bit_for_bit() -> None:
    params, tokens = tiny.params(CONFIG), tiny.tokens(CONFIG, 2, 7)
    off = adapters_off(params)
    base = {**params, "blocks": {name: w for name, w in params["blocks"].items() if not is_adapter(name)}}
    np.testing.assert_array_equal(logits(CONFIG, off, tokens), logits(unadapted(CONFIG), base, tokens))
    jax.tree.map(np.testing.assert_array_equal, merged(off, CONFIG), base)


def test_the_gradient_of_the_factors_is_that_through_the_merged_weights() -> None:
    tokens, ct = tiny.tokens(CONFIG, 2, 7), np.random.default_rng(1).standard_normal((2, 7, CONFIG.vocab_size), np.float32)
    params = tiny.params(CONFIG)
    apart = jax.jit(jax.grad(lambda p: jnp.mean(logits(CONFIG, p, tokens) * ct)))(params)["blocks"]
    through = jax.jit(jax.grad(lambda p: jnp.mean(logits(unadapted(CONFIG), merged(p, CONFIG), tokens) * ct)))(params)["blocks"]
    for name in (name for name in apart if is_adapter(name)):
        size = float(jnp.abs(through[name]).max())
        assert size > 1e-5
        np.testing.assert_allclose(apart[name], through[name], atol=2e-5 * size, err_msg=name)


def test_fresh_factors_change_nothing_and_depend_on_their_seed() -> None:
    one, other = (fresh_adapters(CONFIG, seed) for seed in (0, 1))
    shapes = params_of(nnx.eval_shape(lambda: Decoder(CONFIG, nnx.Rngs(0))))[1]["blocks"]
    assert {n: f.shape for n, f in one.items()} == {n: w.shape for n, w in shapes.items() if is_adapter(n)}
    for name, factor in one.items():
        assert np.any(factor != other[name]) == name.endswith("_a")
        assert np.any(factor) == name.endswith("_a")
    # Kaiming's bound for a uniform draw has this deviation: what PEFT draws A with.
    assert float(one["down_lora_a"].std()) == pytest.approx((3 * CONFIG.ffn_width) ** -0.5, rel=0.25)
