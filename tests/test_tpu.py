"""The real TPU compiler takes the programs of a step and of the engine, and what it makes of them is as it should be.

No TPU is needed, only its compiler (libtpu, which the extra `tpu` installs); without it these tests are skipped.
`benchmarks/tpu.py` does the same with the shapes of real models.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from jaxagent.algos.table import TABLE
from jaxagent.compiled import Collective, collectives, moved_bytes
from jaxagent.engine.cache import new_cache
from jaxagent.engine.controls import ControlSizes, Grammars, new_controls
from jaxagent.engine.options import EngineOptions
from jaxagent.engine.steps import Steps, make_steps, new_rows
from jaxagent.learner import Learner, LearnerOptions
from jaxagent.models.transformer import Decoder, DecoderConfig, Params, logical_axes, params_of
from jaxagent.sharding import DeviceMesh
from jaxagent.topology import EngineShapes, size_bytes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='libtpu is not installed: pip install -e ".[tpu]" brings the compiler'
)

SIZES = {"vocab_size": 512, "width": 256, "layers": 3, "heads": 4, "kv_heads": 2, "head_width": 128, "ffn_width": 512}
SLIDING = {"sliding": (True, False, True), "window": 100, "local_rope_theta": 20.0, "post_norms": True}
MIXTURE = {"experts": 4, "experts_per_token": 2, "normalised_experts": True}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Callable[..., DeviceMesh]]:
    """Meshes over a described v5e of 2 x 2 chips.

    Programs for devices that are not here can be put into the cache of compiled programs but not be read from it.
    """
    # Read when libtpu is loaded, which would otherwise ask a metadata server what machine this is. It also lets one process
    # at a time have it, for the sake of a TPU's owner; here nothing but compiling is done, and others may compile as well.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_WORKER_HOSTNAMES="localhost")
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    yield lambda **axes: DeviceMesh.build(devices=devices, **axes)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def shapes(config: DecoderConfig) -> Params:
    return params_of(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[1]


def step(mesh: DeviceMesh, row_tokens: int = 256, **changes: Any) -> Learner:
    config = tiny.config(**{**SIZES, **changes})
    options = LearnerOptions(mesh.parts("rows"), row_tokens, 128, remat="full", dtype="bfloat16")
    return Learner(config, shapes(config), mesh, TABLE["grpo"], options)


def layer_loop(found: list[Collective], direction: str) -> list[Collective]:
    backward = [one for one in found if "transpose(jvp(layers))" in one.loop]
    return backward if direction == "backward" else [one for one in found if "layers" in one.loop and one not in backward]


def kinds(found: list[Collective]) -> list[str]:
    return [one.kind for one in found]


def test_a_step_with_sliding_layers_gathers_each_weight_once_per_layer(mesh: Callable[..., DeviceMesh]) -> None:
    learner = step(mesh(fsdp=2, tensor=2), **SLIDING)
    assert learner.attention.name == "splash"
    programs = {name: lowered.compile() for name, lowered in learner.lower().items()}
    text = programs["accumulate"].as_text()
    assert "tpu_custom_call" in text  # the kernels, as Mosaic compiled them
    found = collectives(text)
    for direction in ("forward", "backward"):
        gathers = [one for one in layer_loop(found, direction) if one.kind == "all-gather"]
        assert len(gathers) == 7, direction  # q k v o gate up down
        assert {array.split("[")[0] for one in gathers for array in one.arrays} == {"bf16"}
    tables = [array for one in found if one.kind == "all-gather" for array in one.arrays if array == "bf16[256,256]"]
    assert len(tables) == 1
    memory = programs["accumulate"].memory_analysis()
    weights = sum(leaf.size for leaf in jax.tree.leaves(shapes(learner.config)))
    assert memory.argument_size_in_bytes < 1.1 * 2 * 4 * weights / 4  # weights and sums, a quarter on each chip
    assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes  # the sums are added to in place


def test_a_step_over_cut_rows_gathers_keys_and_values_only(mesh: Callable[..., DeviceMesh]) -> None:
    learner = step(mesh(fsdp=2, context=2), row_tokens=768)
    assert learner.attention.name == "context"
    found = collectives(learner.lower()["accumulate"].compile().as_text())
    forward = layer_loop(found, "forward")
    gathered = [array.replace("[1,", "[") for one in forward if one.kind == "all-gather" for array in one.arrays]
    assert [array for array in gathered if "768" in array] == [
        "bf16[768,2,128]"
    ] * 2  # keys and values; their segments once, before the loop


def test_a_step_with_experts_compiles_and_moves_no_expert_to_another_shard(mesh: Callable[..., DeviceMesh]) -> None:
    found = collectives(step(mesh(fsdp=2, expert=2), **MIXTURE).lower()["accumulate"].compile().as_text())
    gathered = [array for one in found if one.kind == "all-gather" for array in one.arrays]
    of_experts = [array for array in gathered if array.endswith(("256,512]", "512,256]"))]
    assert of_experts
    assert not [array for array in gathered if "[4,256,512]" in array or "[4,512,256]" in array]


class Programs:
    """The engine's programs on a mesh that only `tensor` cuts, and the shapes of what they take."""

    SLOTS, LENGTH, STOPS = 8, 512, 2

    def __init__(self, config: DecoderConfig, mesh: DeviceMesh):
        self.mesh = mesh
        self.steps: Steps = make_steps(
            config, dtype=jnp.dtype("bfloat16"), chunk=128, decode_tokens=4, mesh=mesh, top_logprobs=2
        )
        axes = logical_axes(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
        self.trained = jax.tree.map(lambda x, a: self.shape(x, a), shapes(config), axes)
        options = EngineOptions(slots=self.SLOTS, slot_tokens=self.LENGTH, dtype="bfloat16")
        self.params = EngineShapes(config, options, mesh, shapes(config)).weights
        cache = jax.eval_shape(lambda: new_cache(config, self.SLOTS, self.LENGTH, jnp.bfloat16))
        self.cache = jax.tree.map(lambda x: self.shape(x, (None, "kv_heads")), cache)
        self.plain = new_rows(self.SLOTS, self.STOPS)
        sizes = ControlSizes(self.LENGTH, bias_entries=4, stop_sequences=2, stop_sequence_tokens=3)
        self.rows = jax.tree.map(self.shape, {**self.plain, **new_controls(self.SLOTS, sizes)})
        words = jnp.zeros((64, config.vocab_size // 32), jnp.uint32)
        grammars = Grammars(words, jnp.zeros((64, 300), jnp.int32), jnp.zeros((config.vocab_size, 16), jnp.int16))
        self.grammars = jax.tree.map(self.shape, grammars)

    def shape(self, x: Any, axes: tuple[str | None, ...] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.mesh.sharding(axes, x.shape))

    def compile(self) -> dict[str, Any]:
        slot, token = np.zeros(2, np.int32), np.zeros((2, 64), np.int32)
        marks = np.zeros(self.SLOTS, bool)
        armed = {name: np.zeros(x.shape, x.dtype) for name, x in self.plain.items()} | {"mask": marks, "controlled": marks}
        score = slot, np.zeros(2, np.float32)
        return {
            "publish": self.steps.publish.layer.lower(self.trained["blocks"], np.int32(0)).compile(),
            "append": self.steps.append.lower(self.params, self.cache, slot, token, slot, slot, score).compile(),
            "decode": self.steps.decode.lower(self.params, self.cache, self.rows, armed, self.grammars).compile(),
        }


@pytest.mark.parametrize("tensor", [2, 4], ids=["as many key heads as shards", "fewer"])
def test_the_engines_programs_compile_and_gather_no_weights(mesh: Callable[..., DeviceMesh], tensor: int) -> None:
    config = tiny.config(**SIZES)
    replica = next(mesh(tensor=tensor, data=4 // tensor).replicas())
    for name, program in Programs(config, replica).compile().items():
        found = collectives(program.as_text())
        assert set(kinds(found)) <= {"all-reduce", "all-gather", "collective-permute"}, name
        if name == "publish":  # a layer: read, cast, laid out and written
            keys = 2 * config.kv_heads // (1 if config.kv_heads % tensor else tensor)  # too few are whole on each chip
            layer = config.width * (config.head_width * (2 * config.heads // tensor + keys) + 3 * config.ffn_width // tensor)
            assert not found and program.memory_analysis().temp_size_in_bytes < 0.1 * layer
            assert 0.9 < moved_bytes(program.as_text()) / (6 * layer) < 1.3
        smallest_weight = config.width * config.kv_heads * config.head_width * 2  # of keys, in bf16
        assert all(one.size_bytes < smallest_weight for one in found if one.kind == "all-gather"), name
        if name != "publish":
            assert program.memory_analysis().alias_size_in_bytes > 0  # the cache is changed in place


@pytest.mark.parametrize("tensor", [1, 2, 4], ids=["one chip", "as many key heads as shards", "fewer"])
def test_over_pages_a_call_moves_little_more_than_it_must_and_copies_no_cache(
    mesh: Callable[..., DeviceMesh], tensor: int
) -> None:
    config = tiny.config(**SIZES)
    options = EngineOptions(
        slots=16, slot_tokens=2048, decode_tokens=4, append_tokens=(128,), pages=16 * 16 + 1, dtype="bfloat16", top_logprobs=0
    )
    engine = EngineShapes(config, options, next(mesh(tensor=tensor, data=4 // tensor).replicas()), shapes(config))
    weights, cache, none = size_bytes(engine.weights), size_bytes(engine.cache), np.zeros(8, np.int32)
    lowered = {**engine.lower(), "fork": engine.steps.fork.lower(engine.cache, none, none)}
    held = cache * (1 - 1 / options.pages)
    least = {"decode": 4 * (weights + held), "append": weights + held / 2, "fork": 2 * 8 * cache / options.pages}
    for name, must in least.items():
        program = lowered[name].compile()
        text, memory = program.as_text(), program.memory_analysis()
        moved = moved_bytes(text, trips=4)  # of the loop over tokens
        assert moved <= 1.3 * must, name
        assert moved >= (must / 2 if name == "append" else must), name  # whose last layer needs its keys and values only
        assert memory.temp_size_in_bytes <= 0.1 * cache, name
        assert memory.alias_size_in_bytes >= cache, name  # all of it is changed in place
        assert not [way for way in ("infeed", "outfeed", " send(", " recv(", "S(5)") if way in text], name
        gathered = [one for one in collectives(text) if one.kind == "all-gather"]
        assert all(one.size_bytes < cache / 100 for one in gathered), name
        assert ("tpu_custom_call" in text) == (name != "fork")


def test_decoding_copies_no_experts_though_a_chips_part_of_them_fills_no_register(mesh: Callable[..., DeviceMesh]) -> None:
    sizes = SIZES | {"width": 1024, "layers": 2, "ffn_width": 4 * 192}
    config = tiny.config(**sizes, experts=64, experts_per_token=2)
    options = EngineOptions(slots=8, slot_tokens=256, decode_tokens=4, append_tokens=(128,), pages=17, dtype="bfloat16")
    engine = EngineShapes(config, options, next(mesh(tensor=4).replicas()), shapes(config))
    memory = engine.lower_one("decode").compile().memory_analysis()
    assert memory.temp_size_in_bytes < size_bytes(engine.weights["blocks"][0]["gate"])
