"""Adapters that we wrote, loaded by PEFT, and the reverse. Needs torch and peft: `pytest -m parity`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeded
import tiny
from flax import nnx

from jaxagent.models import hf, peft
from jaxagent.models.adapters import is_adapter, merged, unadapted
from jaxagent.models.lora import LoraSpec
from jaxagent.models.transformer import LINEARS, Decoder, params_of

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ALL = tuple(LINEARS)
GEMMA = {"plus_one_norms": True, "post_norms": True, "scaled_embed": True, "activation": "gelu_tanh", "attn_scale": 8**-0.5}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3, all": {"lora": LoraSpec(4, 6.0, ALL)},
    "qwen2, some": {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "lora": LoraSpec(3, 0.5, ("q", "v", "o", "down"))},
    "llama, attention": {
        "family": "llama",
        "qk_norm": False,
        "tied_head": False,
        "lora": LoraSpec(2, 4.0, ("q", "k", "v", "o")),
    },
    "gemma3": {"family": "gemma3_text", **GEMMA, "lora": LoraSpec(2, 2.0, ALL)},
    "qwen3_moe, attention": {
        "family": "qwen3_moe",
        "experts": 4,
        "experts_per_token": 2,
        "normalised_experts": True,
        "lora": LoraSpec(2, 2.0, ("q", "k", "v", "o")),
    },
}


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def policy(request: pytest.FixtureRequest) -> Decoder:
    """A policy whose adapters matter as much as its weights."""
    pytest.importorskip("peft", reason="make parity installs it")
    return tiny.policy(tiny.config(**request.param))


def graph_of(config: Any) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[0]


def base_of(policy: Decoder) -> Decoder:
    params = params_of(policy)[1]
    plain = {name: w for name, w in params["blocks"].items() if not is_adapter(name)}
    return nnx.merge(graph_of(unadapted(policy.config)), {**params, "blocks": plain})


def test_peft_puts_our_adapters_on_our_base_and_gives_our_logits(policy: Decoder, tmp_path: Path) -> None:
    import peft as theirs
    import torch
    import transformers

    config = policy.config
    hf.save(base_of(policy), tmp_path / "base")
    peft.save(policy, tmp_path / "adapter", base=tmp_path / "base")
    whole = nnx.merge(graph_of(unadapted(config)), merged(params_of(policy)[1], config))
    hf.save(whole, tmp_path / "merged")

    def load(path: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    tokens = seeded.token_rows(config.vocab_size, 2, 11, 1)
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        base = load(tmp_path / "base")
        without = base(ids, use_cache=False).logits.numpy()
        adapted = theirs.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        with_theirs = adapted(ids, use_cache=False).logits.numpy()
        in_one = load(tmp_path / "merged")(ids, use_cache=False).logits.numpy()
    ours = np.asarray(policy(tokens))
    size = max(1.0, float(np.abs(ours).max()))
    np.testing.assert_allclose(with_theirs, ours, atol=1e-4 * size)
    np.testing.assert_allclose(in_one, ours, atol=1e-4 * size)
    assert np.abs(without - ours).max() > 0.05


def test_adapters_that_peft_wrote_come_in_as_they_are(policy: Decoder, tmp_path: Path) -> None:
    import peft as theirs
    import torch
    import transformers

    config = policy.config
    lora = config.lora
    assert lora is not None
    hf.save(base_of(policy), tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    modules = "all-linear" if lora.targets == ALL else [f"{name}_proj" for name in lora.targets]
    made = theirs.LoraConfig(r=lora.rank, lora_alpha=6, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    adapted = theirs.get_peft_model(base, made).eval()
    adapted.save_pretrained(tmp_path / "adapter")

    again = peft.load(tmp_path / "adapter")
    assert again.config.lora == LoraSpec(lora.rank, 6.0, lora.targets)
    tokens = seeded.token_rows(config.vocab_size, 2, 11, 1)
    with torch.no_grad():
        want = adapted(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits.numpy()
    got = np.asarray(again(tokens))
    np.testing.assert_allclose(got, want, atol=1e-4 * max(1.0, float(np.abs(want).max())))
    assert np.abs(np.asarray(base_of(again)(tokens)) - got).max() > 0.05
