"""A run that trains adapters on a checkpoint: resumed, evaluated, exported merged and alone, and taken up again."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent import train
from jaxagent.__main__ import main as command
from jaxagent.chat.family import template_of
from jaxagent.chat.plain import tokenizer_files
from jaxagent.models import hf, peft
from jaxagent.models.adapters import is_adapter, merged
from jaxagent.models.transformer import Decoder, DecoderConfig, params_of
from jaxagent.parts import policy_shape, start_weights
from jaxagent.progress import Progress

BASE = str(Path(__file__).parents[1] / "configs" / "base.py")
SMALL = (
    *(
        "env.name=maze",
        "env.options.rooms=6",
        "env.options.distance=(1,2)",
        "agent.max_turns=3",
        "agent.max_tokens=80",
        "sampling.max_tokens=4",
    ),
    *("engine.slots=4", "engine.slot_tokens=80", "engine.chunk=80", "engine.append_rows=2", "engine.append_tokens=(8,)"),
    *("learner.batch_rows=2", "learner.row_tokens=128", "feed.prompts=2", "feed.rollouts=2", "mesh.data=1"),
    *("warmup.steps=2", "warmup.batch=4", "warmup.demos=8", "train.steps=2", "checkpoint.every=1", "checkpoint.keep=9"),
    *("evaluate.every=0", "evaluate.final_tasks=2", "evaluate.ablate=False", "optimizer.lr=0.01"),
)
LORA = ("lora.rank=2", "lora.alpha=8.0", "lora.targets=self_attn.*,down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint that speaks the plain template."""
    path = tmp_path_factory.mktemp("checkpoint")
    sizes = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_width": 8, "ffn_width": 24}
    config = DecoderConfig(vocab_size=template_of("").vocab_size, qk_norm=True, rope_theta=100.0, **sizes)
    hf.save(Decoder(config, nnx.Rngs(0)), path)
    for name, text in tokenizer_files().items():
        (path / name).write_text(text)
    (path / "generation_config.json").write_text('{"top_k": 20, "repetition_penalty": 1.1, "eos_token_id": 1}')  # of its own
    return path


def configured(start: Path, *overrides: str) -> ConfigDict:
    config, faults = configs.load(BASE, [*SMALL, f"init_from={start}", *overrides])
    assert faults == []
    return config


def run(config: ConfigDict, workdir: Path) -> str:
    said = io.StringIO()
    assert train.main(config, workdir, Progress(said)) == 0
    return said.getvalue()


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("run")
    assert "0.01M parameters, 0.00M of them trained, on" in run(configured(base, *LORA), workdir)
    return workdir


def exported(workdir: Path, to: Path, *arguments: str) -> Path:
    assert command(["export", f"--workdir={workdir}", f"--to={to}", *arguments]) == 0
    return to


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))


def test_the_adapters_of_a_run_are_exported_alone_and_the_base_is_what_it_was(whole: Path, base: Path, tmp_path: Path) -> None:
    adapted = peft.load(exported(whole, tmp_path / "adapter", "--adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert adapted.config == policy_shape(configs.read(whole / "config.json"))[1]
    params = params_of(adapted)[1]
    assert all(np.any(w) for name, w in params["blocks"].items() if is_adapter(name))
    plain = {name: w for name, w in params["blocks"].items() if not is_adapter(name)}
    assert_equal({**params, "blocks": plain}, params_of(hf.load(base))[1])


def test_a_merged_export_is_a_plain_checkpoint_of_the_same_policy(whole: Path, tmp_path: Path) -> None:
    adapted = peft.load(exported(whole, tmp_path / "adapter", "--adapter"))
    whole_policy = hf.load(exported(whole, tmp_path / "merged"))
    assert whole_policy.config.lora is None
    assert (tmp_path / "merged" / "tokenizer_config.json").is_file()
    said = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert said.pop("eos_token_id") == list(policy_shape(configs.read(whole / "config.json"))[0].stop)
    assert said == {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
    }
    tokens = tiny.tokens(tiny.config(), 2, 9)
    np.testing.assert_allclose(whole_policy(tokens), adapted(tokens), atol=1e-5)
    assert np.abs(hf.load(peft.base_of(tmp_path / "adapter"))(tokens) - adapted(tokens)).max() > 1e-3


def test_a_resumed_run_equals_the_one_that_was_never_stopped(whole: Path, base: Path, tmp_path: Path) -> None:
    for step in (1, 3):
        stopped = tmp_path / f"stopped{step}"
        shutil.copytree(whole, stopped)
        for later in range(step + 1, 5):
            shutil.rmtree(stopped / "checkpoints" / str(later))
        for file in ("eval.json", "report.html"):
            (stopped / file).unlink()
        assert f"resumed at step {step}" in run(configured(base, *LORA), stopped)
        again, once = (exported(path, tmp_path / f"{path.name}-{step}", "--adapter") for path in (stopped, whole))
        assert (again / "adapter_model.safetensors").read_bytes() == (once / "adapter_model.safetensors").read_bytes()
        assert (stopped / "eval.json").read_text() == (whole / "eval.json").read_text()


def test_a_base_that_was_exchanged_is_noticed(
    whole: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir, other = tmp_path / "run", tmp_path / "base"
    shutil.copytree(whole, workdir)
    shutil.copytree(base, other)
    config = configs.read(workdir / "config.json").unlock()
    config.init_from = str(other)
    configs.save(config, workdir / "config.json")
    exported(workdir, tmp_path / "same")
    policy = hf.load(base)
    policy.norm[...] = policy.norm[...] * 1.001
    hf.save(policy, other)
    capsys.readouterr()
    assert command(["export", f"--workdir={workdir}", f"--to={tmp_path / 'x'}"]) == 2
    assert "the checkpoint was trained over other frozen weights" in capsys.readouterr().err


def test_evaluating_and_generating_with_adapters(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["eval", f"--workdir={whole}", "--json"]) == 0
    told, own = json.loads(capsys.readouterr().out), json.loads((whole / "eval.json").read_text())["after"]
    assert told["settings"].pop("policy")["step"] == own["settings"].pop("policy")["step"]
    assert told == own and told["settings"]["split"] == "test"
    texts = []
    for kind in ([], ["--adapter"]):
        to = exported(whole, tmp_path / f"as{len(kind)}", *kind)
        capsys.readouterr()
        assert command(["generate", f"--checkpoint={to}", "--prompt=37AB", "--max-tokens=6", "--temperature=0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_adapters_are_a_place_to_start_from(whole: Path, base: Path, tmp_path: Path) -> None:
    start = exported(whole, tmp_path / "adapter", "--adapter")
    mesh = tiny.mesh()
    adapted = peft.load(start)
    for overrides, want in ((LORA, params_of(adapted)[1]), ((), merged(params_of(adapted)[1], adapted.config))):
        config = configured(start, *overrides)
        decoder = policy_shape(config)[1]
        assert bool(decoder.lora) == bool(overrides)
        got = start_weights(config, decoder, mesh)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), got, want)
    fresh = configured(base, *LORA)
    decoder = policy_shape(fresh)[1]
    assert not np.any(start_weights(fresh, decoder, mesh)["blocks"]["q_lora_b"])
    with pytest.raises(
        ValueError, match=r"rank 2, alpha 8\.0 and targets q,k,v,o,down, the config's lora has 4, 8\.0 and q,k,v,o"
    ):
        policy_shape(configured(start, *LORA, "lora.rank=4"))


def test_a_frozen_base_in_bfloat16_is_read_in_bfloat16_and_its_adapters_are_not(base: Path) -> None:
    config = configured(base, *LORA, "learner.frozen_dtype=bfloat16")
    params = start_weights(config, policy_shape(config)[1], tiny.mesh())
    for name, weight in params["blocks"].items():
        assert weight.dtype == ("float32" if is_adapter(name) else "bfloat16"), name
    config = configured(base, "learner.freeze=embed", "learner.frozen_dtype=bfloat16")
    assert start_weights(config, policy_shape(config)[1], tiny.mesh())["norm"].dtype == "float32"


def test_an_export_of_adapters_alone_is_refused_where_there_is_more_or_less(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for change, told in (
        (("lora", "rank", 0), "this run has no adapters (lora.rank is 0)"),
        (("learner", "train_only", "norm"), "this run trained norm too (learner.train_only)"),
    ):
        config = configs.read(whole / "config.json").unlock()
        config[change[0]][change[1]] = change[2]
        configs.save(config, tmp_path / "config.json")
        assert command(["export", f"--workdir={tmp_path}", f"--to={tmp_path / 'x'}", "--adapter"]) == 2
        assert told in capsys.readouterr().err


def test_a_checkpoint_holds_adapters_and_no_base(whole: Path) -> None:
    saved = json.loads((whole / "checkpoints" / "4" / "params" / "_METADATA").read_text())["tree_metadata"]
    names = {".".join(key["key"] for key in entry["key_metadata"]) for entry in saved.values()}
    assert names == {f"blocks.{name}_lora_{factor}" for name in ("q", "k", "v", "o", "down") for factor in "ab"}
