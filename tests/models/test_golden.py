"""Logits and gradients equal those of transformers, which make_golden.py wrote down. No torch is needed here."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeded
from flax import nnx
from safetensors.numpy import load_file

from jaxagent.models import hf
from jaxagent.models.transformer import Decoder, params_of

GOLDEN = Path(__file__).with_name("golden.npz")
CASES = (
    *("qwen2_tied", "qwen2_untied", "qwen3_tied", "qwen3_untied", "qwen3_moe"),
    *("llama", "mistral", "gemma2", "gemma3"),
)


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    """Reads the arrays of one case."""
    with np.load(GOLDEN) as file:
        return {name.removeprefix(f"{request.param}/"): file[name] for name in file if name.startswith(f"{request.param}/")}


@pytest.fixture(scope="module")
def shapes(golden: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix("grad/"): array.shape for name, array in golden.items() if name.startswith("grad/")}


@pytest.fixture(scope="module")
def policy(
    golden: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory
) -> Decoder:
    path = tmp_path_factory.mktemp("checkpoint")
    seeded.write_checkpoint(path, json.loads(str(golden["config"])), seeded.tensors(shapes, int(golden["seed"])))
    return hf.load(path)


def test_logits_equal_those_of_transformers(policy: Decoder, golden: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(nnx.jit(policy)(golden["tokens"]), golden["logits"], rtol=1e-4, atol=1e-4)


def test_every_gradient_equals_that_of_transformers(
    policy: Decoder, golden: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    graph, params = params_of(policy)
    tokens = golden["tokens"]
    ct = seeded.cotangent(*golden["logits"].shape, seed=int(golden["seed"]))
    grads = jax.jit(jax.grad(lambda p: jnp.sum(nnx.merge(graph, p)(tokens) * ct)))(params)
    hf.save(nnx.merge(graph, grads), tmp_path)  # export knows how our layout maps to theirs
    ours = load_file(tmp_path / "model.safetensors")
    assert set(ours) == set(shapes)
    for name in shapes:
        wanted = golden[f"grad/{name}"]
        atol = max(2e-4, 3e-5 * np.abs(wanted).max())
        np.testing.assert_allclose(ours[name], wanted, rtol=1e-4, atol=atol, err_msg=name)
