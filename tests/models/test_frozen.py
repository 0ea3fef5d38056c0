"""Which weights are trained, by pattern; and the number by which frozen ones are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxagent.models.frozen import digest, join, split, trained_names
from jaxagent.models.transformer import logical_axes

BASE = ("blocks.attn_norm", "blocks.gate", "blocks.mlp_norm", "blocks.q", "embed", "norm")
ADAPTERS = ("blocks.q_lora_a", "blocks.q_lora_b")


@pytest.mark.parametrize(
    ("names", "train_only", "freeze", "trained"),
    [
        (BASE, "", "", BASE),
        (BASE, "*norm", "", ("blocks.attn_norm", "blocks.mlp_norm", "norm")),
        (BASE, "blocks.*", "blocks.*_norm", ("blocks.gate", "blocks.q")),
        (BASE, "", "embed, norm", BASE[:4]),
        ((*BASE, *ADAPTERS), "", "", ADAPTERS),
        ((*BASE, *ADAPTERS), "blocks.*_norm", "", ("blocks.attn_norm", "blocks.mlp_norm", *ADAPTERS)),
        ((*BASE, *ADAPTERS), "", "*_lora_a", ADAPTERS[1:]),
    ],
)
def test_patterns_choose(names: tuple[str, ...], train_only: str, freeze: str, trained: tuple[str, ...]) -> None:
    assert trained_names(names, train_only, freeze) == set(trained)


@pytest.mark.parametrize(
    ("names", "train_only", "freeze", "told"),
    [
        (
            BASE,
            "*_nrom",
            "",
            r"learner\.train_only = '\*_nrom': '\*_nrom' matches none of the weights it could: blocks\.attn_norm, ",
        ),
        (BASE, "", "embed,hed", r"learner\.freeze = 'embed,hed': 'hed' matches none"),
        (BASE, "", "*", r"learner\.freeze = '\*' leaves nothing to train"),
        (BASE, "embed", "norm", r"learner\.freeze = 'norm': 'norm' matches none of the weights it could: embed"),
        ((*BASE, *ADAPTERS), "", "embed", r"'embed' matches none of the weights it could: blocks\.q_lora_a, blocks\.q_lora_b"),
        ((*BASE, *ADAPTERS), "*_lora_a", "", r"learner\.train_only = '\*_lora_a': '\*_lora_a' matches none"),
    ],
)
def test_a_pattern_that_changes_nothing_is_told(names: tuple[str, ...], train_only: str, freeze: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        trained_names(names, train_only, freeze)


def test_the_two_parts_are_the_whole() -> None:
    params = tiny.params(tiny.config())
    trained, frozen = split(params, {"embed", "blocks.q"})
    assert (trained.keys(), trained["blocks"].keys()) == ({"embed", "blocks"}, {"q"})
    assert "embed" not in frozen and "q" not in frozen["blocks"]
    again = join(trained, frozen)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    everything, nothing = split(params, frozenset(["norm", "embed", *(f"blocks.{name}" for name in params["blocks"])]))
    assert nothing == {}
    assert jax.tree.structure(everything) == jax.tree.structure(params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_digest_changes_with_any_weight_and_any_place_but_not_with_the_mesh(dtype: jnp.dtype) -> None:
    policy = tiny.policy(tiny.config())
    params = jax.tree.map(lambda w: w.astype(dtype), tiny.params(policy.config))
    number = jax.jit(digest)(params)
    mesh = tiny.mesh(2, 2, 2)
    assert jax.jit(digest)(jax.device_put(params, mesh.shardings(logical_axes(policy), params))) == number
    q = params["blocks"]["q"]
    changed = (q.at[1, 2, 3, 4].multiply(1.01), q[::-1], q.at[0, :2].set(q[0, 1::-1]), q[:, :, :, ::-1])
    for other in changed:
        assert jax.jit(digest)({**params, "blocks": {**params["blocks"], "q": other}}) != number
