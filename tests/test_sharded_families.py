"""Every family over eight devices: the gradient of one device, and no collective that need not be."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from jaxagent.algos.table import TABLE
from jaxagent.compiled import Collective, collectives
from jaxagent.data.pack import Batch
from jaxagent.learner import Learner, LearnerOptions
from jaxagent.models.rope import RopeScaling
from jaxagent.models.transformer import DecoderConfig
from jaxagent.sharding import DeviceMesh

# Eight parts of everything, but of the two key heads: of these there are fewer than a tensor axis may be long.
SIZES = {"vocab_size": 64, "width": 32, "layers": 3, "heads": 8, "kv_heads": 2, "head_width": 8, "ffn_width": 32}
GEMMA = {
    "activation": "gelu_tanh",
    "plus_one_norms": True,
    "post_norms": True,
    "scaled_embed": True,
    "sliding": (True, False, True),
    "window": 5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen3": {"tied_head": False},
    "qwen3_moe": {"experts": 8, "experts_per_token": 2, "normalised_experts": True, "tied_head": False},
    "llama": {"qk_norm": False, "rope_scaling": RopeScaling("llama3", 8.0, 16), "tied_head": False},
    "gemma2": {**GEMMA, "qk_norm": False, "attn_softcap": 2.0, "logit_softcap": 3.0},
    "gemma3": {**GEMMA, "local_rope_theta": 20.0, "attn_scale": 0.1},
    "mistral": {"qk_norm": False, "sliding": (True, True, True), "window": 5, "tied_head": False},
}
MESHES = {
    "fsdp": {"data": 1, "fsdp": 8},
    "all three": {"data": 2, "fsdp": 2, "tensor": 2},
    "tensor": {"data": 1, "tensor": 8},
    "expert": {"data": 1, "expert": 8},
    "expert, fsdp, tensor": {"data": 1, "expert": 2, "fsdp": 2, "tensor": 2},
    "context, fsdp, tensor": {"data": 1, "context": 2, "fsdp": 2, "tensor": 2},
}
# Every family on the mesh of all three axes, and every mesh at least once.
PAIRS = [
    *((family, "all three") for family in FAMILIES),
    *(("qwen2", "fsdp"), ("gemma2", "tensor"), ("gemma3", "context, fsdp, tensor")),
    *(("qwen3_moe", "expert"), ("qwen3_moe", "expert, fsdp, tensor")),
]
WEIGHTS_OF_A_LAYER = 7  # q k v o gate up down
OPTIONS = LearnerOptions(batch_rows=8, row_tokens=16, head_chunk=8)


def learner(family: str, mesh: dict[str, int], **options: Any) -> Learner:
    config = decoder(family)
    changed = LearnerOptions(**{**vars(OPTIONS), **options})
    return Learner(config, tiny.params(config), DeviceMesh.build(**mesh), TABLE["grpo"], changed)


def decoder(family: str) -> DecoderConfig:
    return tiny.config(**{**SIZES, **FAMILIES[family]})


def batch(config: DecoderConfig) -> Batch:
    """Rows of two segments and padding."""
    rng, empty = np.random.default_rng(0), Batch.empty(OPTIONS.batch_rows, OPTIONS.row_tokens)
    lengths = [(7, 6), (3, 13), (16, 0), (5, 5)] * 2
    for row, (first, second) in enumerate(lengths):
        used = first + second
        empty.tokens[row, :used] = rng.integers(0, config.vocab_size, used)
        empty.segment[row, :used] = np.repeat([1, 2], [first, second])
        empty.position[row, :used] = [*range(first), *range(second)]
        empty.mask[row, 1:used] = empty.position[row, 1:used] > 0
        for name in ("logprob", "old_logprob"):
            getattr(empty, name)[row, :used] = -4.0
        empty.advantage[row, :used] = rng.standard_normal(used)
        empty.weight[row, :used] = empty.share[row, :used] = 1.0 / used
    return empty


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("family", "mesh"), PAIRS)
def test_eight_devices_give_the_gradient_of_one(family: str, mesh: str, on_one_device: dict[str, Any]) -> None:
    if family not in on_one_device:
        on_one_device[family] = accumulated(learner(family, {"data": 1}))
    eight = learner(family, MESHES[mesh])
    assert len(eight.params["embed"].sharding.device_set) == 8
    want, got = on_one_device[family], accumulated(eight)
    for path, gradient in jax.tree_util.tree_leaves_with_path(want["grads"]):
        scale = np.abs(gradient).max()
        assert scale > 0, path
        np.testing.assert_allclose(at(got["grads"], path), gradient, atol=2e-5 * scale + 1e-7, rtol=1e-4, err_msg=str(path))
    for name, total in want["sums"].items():
        np.testing.assert_allclose(got["sums"][name], total, rtol=1e-4, atol=1e-5, err_msg=name)


def accumulated(trainer: Learner) -> dict[str, Any]:
    trainer.accumulate(batch(trainer.config))
    return jax.device_get(trainer._acc)


def at(tree: Any, path: tuple[Any, ...]) -> np.ndarray:
    for entry in path:
        tree = tree[entry.key]
    return tree


# ---------------------------------------------------------------------- what the compiled step moves


def moved(family: str, mesh: str, **options: Any) -> list[Collective]:
    return collectives(learner(family, MESHES[mesh], **options).lower()["accumulate"].compile().as_text())


def of_kind(found: list[Collective], kind: str) -> list[Collective]:
    return [one for one in found if one.kind == kind]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_layer_gathers_each_weight_once_forward_and_once_backward(remat: str) -> None:
    found = moved("qwen2", "all three", remat=remat)
    forward = [one for one in found if "jvp(layers)" in one.loop and "transpose" not in one.loop]
    backward = [one for one in found if "transpose(jvp(layers))" in one.loop]
    assert len(of_kind(forward, "all-gather")) == len(of_kind(backward, "all-gather")) == WEIGHTS_OF_A_LAYER
    assert len(of_kind(forward, "all-reduce")) == 2  # the outputs of attention and feed-forward, over tensor
    assert {one.kind for one in forward + backward} == {"all-gather", "all-reduce"}  # XLA on CPU has no reduce-scatter here


@pytest.mark.parametrize("family", ["qwen2", "qwen3"], ids=["tied", "untied"])
def test_nothing_gathers_all_layers_or_the_vocabulary_twice(family: str) -> None:
    config = decoder(family)
    gathered = [array for one in of_kind(moved(family, "all three"), "all-gather") for array in one.arrays]
    table = f"f32[{config.vocab_size // 2},{config.width}]"  # the half that a shard of `tensor` holds
    assert gathered.count(table) == 1
    sizes = [array.rstrip("]").partition("[")[2] for array in gathered]
    assert max(math.prod(map(int, size.split(","))) for size in sizes) <= config.vocab_size // 2 * config.width
    assert not [size for size in sizes if size.startswith(f"{config.layers},")]  # a stack's own first dimension


# ---------------------------------------------------------------------- what cannot be cut is refused


def test_a_row_that_the_mesh_cannot_cut_is_refused_with_axis_and_length() -> None:
    with pytest.raises(ValueError, match=r"row_tokens=15 must be a multiple of mesh.context.*2"):
        learner("qwen3", MESHES["context, fsdp, tensor"], row_tokens=15)


@pytest.mark.parametrize(
    ("changes", "mesh", "told"),
    [
        ({"vocab_size": 63}, "tensor", r"embed: dimension 'vocab' of 63 cannot be cut by mesh tensor=8"),
        ({"width": 20}, "fsdp", r"blocks\.\w+: dimension 'embed' of 20 cannot be cut by mesh fsdp=8"),
        ({"ffn_width": 36}, "tensor", r"dimension 'ffn' of 36 cannot be cut by mesh tensor=8"),
        ({"experts": 6, "experts_per_token": 2}, "expert", r"dimension 'experts' of 6 cannot be cut by mesh expert=8"),
        ({"heads": 12, "kv_heads": 12}, "tensor", r"dimension '(kv_)?heads' of 12 cannot be cut by mesh tensor=8"),
    ],
)
def test_a_size_that_the_mesh_cannot_cut_is_refused_with_its_name(changes: dict[str, Any], mesh: str, told: str) -> None:
    config = tiny.config(**{**SIZES, **changes})
    with pytest.raises(ValueError, match=told):
        Learner(config, tiny.params(config), DeviceMesh.build(**MESHES[mesh]), TABLE["grpo"], OPTIONS)
