"""Machines that are not here: their chips, the programs of a run compiled for them, and how fast these could be at best."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from jaxagent.compiled import Collective
from jaxagent.engine.cache import cache_of
from jaxagent.engine.controls import ControlSizes, new_controls
from jaxagent.engine.engine import EngineOptions, used_lengths
from jaxagent.engine.publish import takes_experts_output_first
from jaxagent.engine.steps import make_steps, new_rows
from jaxagent.models.attention_choice import paged_attention
from jaxagent.models.transformer import Decoder, DecoderConfig, Params, logical_axes
from jaxagent.sharding import DeviceMesh


@dataclass(frozen=True)
class Chip:
    """What JAX counts as one device. Rates are the makers' data sheets; memory is what XLA says that a program may use."""

    tflops: float  # bfloat16, dense
    memory_gb: float  # GiB
    memory_gbps: float  # 1e9 bytes a second
    link_gbps: float  # to its neighbours, all links of a chip and both ways together: 1e9 bytes a second
    gpu: str = ""  # as its driver calls it


CHIPS = {
    "v5e": Chip(197, 15.75, 819, 200),
    "v5p": Chip(459, 95.74, 2765, 600),
    "v6e": Chip(918, 31.25, 1640, 448),
    "tpu7x": Chip(1153.5, 94.75, 3690, 600),  # a device is half a chip
    "H100": Chip(989, 80e9 / 2**30, 3350, 900, "NVIDIA H100 80GB HBM3"),
    "H200": Chip(989, 141e9 / 2**30, 4800, 900, "NVIDIA H200"),
}


def chip_of(device: jax.Device, topology: str, count: int) -> tuple[Chip | None, str, int]:
    """Its data sheet, its name, and the bytes that programs may use of it."""
    if topology:
        name = topology.partition(":")[0]
        return CHIPS[name], name, int(CHIPS[name].memory_gb * 2**30)
    kind = str(device.device_kind)
    known = next((name for name in CHIPS if name.lower() in kind.lower().replace(" lite", "e").replace(" ", "")), "")
    stats = device.memory_stats() or {}
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // count  # virtual CPU devices share the machine's memory
    limit = int(stats.get("bytes_limit", 0)) or (int(CHIPS[known].memory_gb * 2**30) if known else here)
    return CHIPS.get(known), known or kind, limit


# Read when the compiler is loaded: there is no TPU here to be asked, and none to be used; others may compile meanwhile.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


# What XLA asks of a GPU that it compiles for, by the makers' data sheets; the same of H100 and H200 but for their memory.
_HOPPER = """
gpu_device_info {{
  name: "{chip.gpu}"
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 52428800
  memory_bandwidth: {chip.memory_gbps:.0f}000000000
  device_memory_size: {memory_bytes:.0f}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.gpu}"
"""


def devices_of(name: str) -> list[jax.Device]:
    """The devices of a topology such as v5e:16x16 or H200:8, which can be compiled for and not run on.

    Raises ValueError where the name is none, or the compiler is not installed.
    """
    generation, _, size = name.partition(":")
    if generation not in CHIPS:
        raise ValueError(f"--topology={name!r}: chips are {', '.join(CHIPS)}, as in v5e:4x4, v5p:4x4x4, v6e:16x16 or H200:8")
    if CHIPS[generation].gpu:
        return _gpus(name, CHIPS[generation], size)
    for key, value in _ALONE.items():
        os.environ.setdefault(key, value)
    try:
        return list(topologies.get_topology_desc(name, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology={name!r}: {str(error).splitlines()[0]}") from None
    except RuntimeError:  # as JAX says that there is no libtpu
        raise ValueError(
            f"--topology={name!r} is compiled by libtpu, which the extra `tpu` installs: pip install 'jaxagent[tpu]'"
        ) from None


def one_host(name: str, chips: int) -> DeviceMesh:
    """A replica of so many chips as a topology of its own, from the first on of the 2 x 2 of a host: of a larger one the TPU's
    compiler takes no part, since it numbers chips from 0.
    """
    generation, _, size = name.partition(":")
    host = "x".join(("2", "2", "1")[: size.count("x") + 1])
    return DeviceMesh.build(data=1, tensor=chips, devices=devices_of(f"{generation}:{host}")[:chips])


def _gpus(name: str, chip: Chip, size: str) -> list[jax.Device]:
    """Args: size: of hosts and the GPUs of each, as in 2x8, or of one host's GPUs."""
    hosts, _, each = size.rpartition("x")
    if not each.isdigit() or not (hosts or "1").isdigit():
        raise ValueError(f"--topology={name!r}: GPUs are those of a host, as in H200:8, or of several, as in H200:2x8")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # which asks the driver, and there need not be one
    target = _HOPPER.format(chip=chip, memory_bytes=chip.memory_gb * 2**30)
    try:
        shape = f"1x{hosts or 1}x{each}"
        return list(topologies.get_topology_desc(name, platform="cuda", target_config=target, topology=shape).devices)
    except NotImplementedError:  # as JAX says that there is no plug-in
        raise ValueError(
            f"--topology={name!r} is compiled by JAX's plug-in for CUDA, which the extra `gpu` installs: "
            "pip install 'jaxagent[gpu]'"
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology={name!r}: {str(error).splitlines()[0]}") from None


@contextmanager
def uncached() -> Iterator[None]:
    """Programs for devices that are not here can be put into the cache of compiled programs but not be read from it."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def kernels_for(mesh: DeviceMesh) -> AbstractContextManager[Any]:
    """While programs are lowered: a kernel for GPUs asks what it is lowered for, and there need not be one here."""
    return jax.sharding.use_abstract_mesh(mesh.mesh.abstract_mesh) if mesh.platform == "gpu" else nullcontext()


# ---------------------------------------------------------------------- an engine's programs


class EngineShapes:
    """What an engine holds on its replica, as shapes with placements, and its programs lowered on these."""

    def __init__(self, config: DecoderConfig, options: EngineOptions, mesh: DeviceMesh, trained: Params):
        """Args: trained: the learner's weights, for their types; mesh: one replica, only its tensor axis is cut."""
        self.config, self.options, self.mesh, self.trained = config, options, mesh, trained
        form = paged_attention(config.attention, mesh) if options.pages else None
        self.steps: Any = make_steps(
            config,
            dtype=jnp.dtype(options.dtype),
            chunk=options.chunk,
            decode_tokens=options.decode_tokens,
            mesh=mesh,
            record_routing=options.record_routing,
            top_logprobs=options.top_logprobs,
            pages=form,
        )
        self.whole_keys = bool(config.kv_heads % mesh.size["tensor"])
        axes = logical_axes(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
        self.given = jax.tree.map(self._shape, trained, axes)
        layers = {name: a[1:] for name, a in axes["blocks"].items()}
        weights = self.steps.publish.shapes(trained)
        each = {name: self._laid(name, layers.get(name, ()), len(w.shape)) for name, w in weights["blocks"][0].items()}
        named = {**{name: axes[name] for name in weights}, "blocks": (each,) * config.layers}
        self.weights = jax.tree.map(self._shape, weights, named)
        o = options
        cache = jax.eval_shape(lambda: cache_of(config, o, form))
        self.cache = jax.tree.map(lambda x: self._shape(x, (None, "kv_heads")), cache)
        self.plain = jax.eval_shape(lambda: new_rows(o.slots, o.stop_tokens))
        sizes = ControlSizes(**{name: getattr(o, name) for name in ControlSizes.__annotations__})
        self.rows = jax.tree.map(self._shape, self.plain | jax.eval_shape(lambda: new_controls(o.slots, sizes)))

    @property
    def part_bytes(self) -> int:
        """The most that a device gets at once of weights that come part by part: a layer, or a weight that is in none."""
        singles = [size_bytes(w) for name, w in self.given.items() if name != "blocks"]
        return max(size_bytes(self.given["blocks"]) // self.config.layers, *singles)

    def _laid(self, name: str, axes: tuple[str | None, ...], rank: int) -> tuple[str | None, ...]:
        """The names of a weight's dimensions in the sampler's copy."""
        if name in ("gate", "up") and takes_experts_output_first(self.config, self.mesh):
            return axes[0], axes[2], axes[1]
        if len(axes) == rank or self.mesh.platform != "tpu":
            return axes
        # Too few key heads to be cut are too few as rows of a matrix, whose number does not show it.
        heads = "kv_heads" if "kv_heads" in axes else "heads"
        return None if heads == "kv_heads" and self.whole_keys else heads, "embed"

    def _shape(self, x: Any, axes: tuple[str | None, ...] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.mesh.sharding(axes, x.shape))

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """publish of a layer, append of the longest length, decode and verify of all slots with all their positions."""
        return {name: self.lower_one(name) for name in self.arguments()}

    def lower_one(self, name: str) -> jax.stages.Lowered:
        """One of them."""
        with kernels_for(self.mesh):
            program = self.steps.publish.layer if name == "publish" else getattr(self.steps, name)
            lowered: jax.stages.Lowered = program.lower(*self.arguments()[name])
            return lowered

    def shallow(self, layers: int) -> EngineShapes:
        """The same with fewer layers, all alike: its programs hold every layer by itself, and are compiled sooner.

        Raises ValueError where layers differ.
        """
        if any(self.config.sliding) and not all(self.config.sliding):
            raise ValueError("layers of two kinds cannot be counted from a few of them: compile all")
        cut = lambda x: jax.ShapeDtypeStruct((layers, *x.shape[1:]), x.dtype)  # noqa: E731
        trained = {**self.trained, "blocks": jax.tree.map(cut, self.trained["blocks"])}
        config = replace(self.config, layers=layers, sliding=self.config.sliding[:layers])
        return EngineShapes(config, self.options, self.mesh, trained)

    def arguments(self) -> dict[str, tuple[Any, ...]]:
        """What the engine calls its largest programs with."""
        o = self.options
        slot_R, token_RA = np.zeros(o.append_rows, np.int32), np.zeros((o.append_rows, o.append_tokens[-1]), np.int32)
        armed = {name: np.zeros(x.shape, x.dtype) for name, x in self.plain.items()}
        armed |= {"mask": np.zeros(o.slots, bool), "controlled": np.zeros(o.slots, bool)}
        used = 0 if o.pages else used_lengths(o.chunk, o.slot_tokens)[-1]
        whole = (None, 0) if o.exact else (np.zeros(o.slots, np.int32), used)
        # As the engine calls it: what scores fed tokens is there only where requests may ask for it.
        score = (slot_R, np.zeros(o.append_rows, np.float32)) if o.prompt_logprobs else None
        table = np.zeros((o.slots, o.slot_tokens // o.chunk), np.int32) if o.pages else None
        state = self.weights, self.cache, self.rows, armed, None
        found: dict[str, tuple[Any, ...]] = {
            "publish": (self.given["blocks"], np.int32(0)),
            "append": (self.weights, self.cache, slot_R, token_RA, slot_R, slot_R, score, table),
            "decode": (*state, *whole, table),
        }
        if o.draft_tokens:
            found["verify"] = (*state, whole[0], np.zeros((o.slots, o.draft_tokens), np.int32))
        return found


# ---------------------------------------------------------------------- how large, how fast


def size_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays or shapes with placements."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def active_weights(config: DecoderConfig, params: Params) -> float:
    """Weights that multiply a token: a forward pass is 2 FLOP for each, with two backward ones and one again 8."""
    blocks = sum(leaf.size for leaf in jax.tree.leaves(params["blocks"]))
    experts = sum(params["blocks"][name].size for name in ("gate", "up", "down")) if config.experts else 0
    idle = experts * (1 - config.experts_per_token / config.experts) if config.experts else 0
    return blocks - idle + config.vocab_size * config.width


def roofline_s(chip: Chip, *, flop: float = 0.0, moved_bytes: float = 0.0, linked_bytes: float = 0.0) -> dict[str, float]:
    """Seconds that a chip's arithmetic, memory and links need at least, each alone; the program needs the longest of them."""
    return {
        "compute_s": flop / (chip.tflops * 1e12),
        "memory_s": moved_bytes / (chip.memory_gbps * 1e9),
        "links_s": linked_bytes / (chip.link_gbps * 1e9),
    }


def linked_bytes(found: Iterable[Collective]) -> float:
    """Bytes that a chip sends or receives in a program's collectives, loops included: an all-reduce passes everything twice."""
    return sum((2 if one.kind == "all-reduce" else 1) * one.size_bytes * one.runs for one in found)


def by_place(found: list[Collective]) -> tuple[list[Collective], list[Collective], list[Collective]]:
    """Those of the loop over layers forward, backward, and those outside of it."""
    backward = [one for one in found if "transpose(jvp(layers))" in one.loop]
    forward = [one for one in found if "layers" in one.loop and one not in backward]
    return forward, backward, [one for one in found if "layers" not in one.loop]
