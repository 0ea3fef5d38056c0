"""Which back end attends: in training by device, mesh and model, said in a sentence, overridable; over pages by device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxagent.models.attention import Attend, AttentionSpec, packed
from jaxagent.models.attention_blocked import Blocked, Kernel
from jaxagent.models.attention_context import over_mesh
from jaxagent.models.attention_cudnn import Cudnn
from jaxagent.models.attention_paged import Paged, PagedReference
from jaxagent.models.attention_splash import Splash
from jaxagent.models.attention_triton import PagedGpu
from jaxagent.sharding import DeviceMesh

NAMES = ("auto", "xla", "splash", "cudnn", "context")
SQUARE_TOKENS = 4096  # up to which a row's scores are held at once: in f32, 64 MiB a head


@dataclass(frozen=True)
class Facts:
    """What the choice depends on besides the mesh."""

    spec: AttentionSpec
    head_width: int
    row_tokens: int
    dtype: str
    platform: str  # cpu, gpu, tpu
    capability: float = 0.0  # of an NVIDIA GPU

    @classmethod
    def of(cls, spec: AttentionSpec, head_width: int, row_tokens: int, dtype: str, mesh: DeviceMesh) -> Facts:
        device = mesh.mesh.devices.flat[0]
        capability = str(getattr(device, "compute_capability", ""))  # "9.0"; on AMD another kind of name
        number = float(capability) if capability.replace(".", "").isdigit() else 0.0
        return cls(spec, head_width, row_tokens, dtype, device.platform, number)


@dataclass(frozen=True)
class Choice:
    """A back end by name, why it is this one, and what makes it of the segments of packed rows."""

    name: str
    reason: str
    attend: Callable[[Int[Array, "B T"]], Attend]

    @property
    def note(self) -> str:
        return f"attention {self.name}: {self.reason}"


def choose(name: str, facts: Facts, mesh: DeviceMesh) -> Choice:
    """The back end of this name, or for "auto" the best that can work.

    Raises ValueError for a name that is unknown or cannot work here, with the reason and what can.
    """
    if name not in NAMES:
        raise ValueError(f"learner.attention={name!r} is not a back end of attention; there are {', '.join(NAMES)}")
    shards, spec = mesh.size["context"], facts.spec
    if facts.row_tokens % shards:
        raise ValueError(f"learner.row_tokens={facts.row_tokens} must be a multiple of mesh.context={shards}")
    able = [other for other in NAMES[1:] if not _fault(other, facts, shards)]
    best = next(other for other in ("context", "splash", "cudnn", "xla") if other in able)
    if name != "auto" and (fault := _fault(name, facts, shards)):
        raise ValueError(f"learner.attention={name}: {fault}; here {' or '.join(able)} can, and auto takes {best}")
    chosen = best if name == "auto" else name
    asked = "" if name == "auto" else "as asked, "
    kernel: Kernel
    if chosen == "xla" and facts.row_tokens <= SQUARE_TOKENS:
        return Choice(chosen, f"{asked}{_why_xla(facts)} with all scores of a row at once", lambda s: packed(s, spec))
    if chosen == "cudnn":
        kernel, reason = Cudnn(spec), "the GPU's kernels, each segment of a packed row by itself"
    elif facts.platform == "tpu" and chosen != "xla":
        kernel, reason = Splash(spec), "the TPU's splash kernels, which visit only blocks where a segment meets itself"
    else:
        kernel, reason = Blocked(spec), f"{_why_xla(facts)} in blocks of keys that a segment meets"
    if shards > 1:
        reason = f"rows cut in {shards}, keys gathered, {reason}"
    return Choice(chosen, asked + reason, over_mesh(kernel, mesh))


def _why_xla(facts: Facts) -> str:
    if facts.platform == "gpu" and (fault := _fault("cudnn", facts, 1)):
        return f"XLA ({fault})"
    return f"XLA on {facts.platform}"


def _fault(name: str, facts: Facts, shards: int) -> str:
    """Why a back end cannot work here; empty where it can."""
    if name == "context":
        return "" if shards > 1 else "mesh.context=1 cuts no rows"
    if name == "splash" and facts.platform != "tpu":
        return f"its kernels are for TPUs and this is a {facts.platform}"
    if name == "cudnn":
        if facts.platform != "gpu" or not facts.capability:
            return f"it needs an NVIDIA GPU and this is a {facts.platform}"
        if jnp.dtype(facts.dtype) not in (jnp.bfloat16, jnp.float16):
            return f"cuDNN takes bfloat16 or float16, learner.dtype is {facts.dtype}"
        if facts.spec.softcap:
            return f"cuDNN has no soft cap on scores, this model has {facts.spec.softcap}"
        widest = 256 if facts.capability >= 9 else 128
        if facts.head_width % 8 or facts.head_width > widest:
            return f"cuDNN takes head widths up to {widest} in steps of 8 here, this model has {facts.head_width}"
    return f"mesh.context={shards} cuts rows" if shards > 1 and name in ("splash", "cudnn") else ""


def paged_attention(spec: AttentionSpec, mesh: DeviceMesh) -> Paged | PagedGpu | PagedReference:
    """The form of pages for the devices of a replica."""
    if mesh.platform == "gpu":
        return PagedGpu(spec, mesh)
    return Paged(spec, mesh) if mesh.platform == "tpu" else PagedReference(spec)
