"""XLA compiles the programs of a step and of the engine for GPUs that are not here, and makes of them what it should.

No GPU is needed, only JAX's plug-in for CUDA, which the extra `gpu` installs; without it these tests are skipped. What a
kernel computes is tested in tests/models/test_attention_triton.py.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from flax import nnx

from jaxagent.__main__ import main as command
from jaxagent.compiled import kernels
from jaxagent.engine.options import EngineOptions
from jaxagent.models.transformer import Decoder, params_of
from jaxagent.sharding import DeviceMesh
from jaxagent.topology import EngineShapes, devices_of, size_bytes, uncached

pytestmark = [
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")),
        reason="JAX's plug-in for CUDA is not installed: pip install -e '.[gpu]' brings the compiler",
    ),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
SMALL = Path(__file__).parents[1] / "configs" / "quickstart.py:runlocal"


@pytest.fixture(autouse=True)
def never_cached() -> Iterator[None]:
    with uncached():
        yield


def test_gpus_are_those_of_a_host_or_of_several() -> None:
    several = devices_of("H200:2x8")
    assert len(several) == 16 and {device.process_index for device in several} == {0, 1}
    assert several[0].platform == "gpu" and several[0].device_kind == "NVIDIA H200"
    with pytest.raises(ValueError, match="GPUs are those of a host, as in H200:8"):
        devices_of("H200:many")


def test_decoding_over_pages_changes_the_cache_in_place_and_reads_the_vocabulary_only_twice() -> None:
    config = tiny.config(vocab_size=4096, width=256, heads=4, kv_heads=2, head_width=64, ffn_width=512)
    options = EngineOptions(slots=64, slot_tokens=512, append_tokens=(64,), pages=257, dtype="bfloat16")
    trained = params_of(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[1]
    engine = EngineShapes(config, options, DeviceMesh.build(devices=devices_of("H100:1")), trained)
    programs = {name: lowered.compile() for name, lowered in engine.lower().items()}
    text, memory = programs["decode"].as_text(), programs["decode"].memory_analysis()
    kernel = "__gpu$xla.gpu.triton"
    assert text.count(kernel) == config.layers
    # Of the last layer keys and values are all that is wanted.
    assert programs["append"].as_text().count(kernel) == config.layers - 1
    assert memory.alias_size_in_bytes >= size_bytes(engine.cache)
    assert not [way for way in ("infeed", "outfeed", " send(", " recv(") if way in text]
    logits = f"f32[64,{config.vocab_size}]"
    loop = next(part for part in text.split("\n\n") if kernel in part)
    branches = [line.split(" conditional(")[0] for line in loop.splitlines() if " conditional(" in line]
    assert branches and not [given for given in branches if logits in given]
    assert kernels(text) / options.decode_tokens < 10 * config.layers + 40


def test_a_plan_for_gpus_is_by_the_compilers_word(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", f"--config={SMALL}", "--topology=H200:2", "--config.mesh.fsdp=2", "--config.model.layers=1", "--json"]
    assert command(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chip"] == "H200" and told["devices"] == 2
    gradient = told["compiled"]["programs"]["gradient"]
    assert gradient["linked_bytes"] > 0 and gradient["temporary_bytes"] > 1e4
    assert gradient["at_least"]["compute_s"] > 0
