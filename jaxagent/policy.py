"""A trained policy outside training: exported as a Hugging Face checkpoint, or asked one question."""

from __future__ import annotations

import asyncio
from pathlib import Path

import jax
from flax import nnx
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent.chat.family import template_of
from jaxagent.chat.history import ChatOptions
from jaxagent.chat.plain import tokenizer_files
from jaxagent.checkpoint import Checkpoints
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.models import hf
from jaxagent.models.transformer import Decoder, logical_axes, params_of
from jaxagent.parts import policy_shape
from jaxagent.sharding import AXES, DeviceMesh
from jaxagent.types import Message, SampleRequest, Sampling, sampling_key


def export(workdir: str, to: str, dtype: str) -> int:
    """The command `jaxagent export`: the last checkpoint of a run, with its tokenizer, as transformers loads it."""
    config = configs.read(Path(workdir) / "config.json")
    decoder = policy_shape(config)[1]
    skeleton = nnx.eval_shape(lambda: Decoder(decoder, nnx.Rngs(0)))
    graph, shapes = params_of(skeleton)
    places = _place(config).shardings(logical_axes(skeleton), shapes)
    like = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)
    checkpoints = Checkpoints(Path(workdir) / "checkpoints", config.checkpoint.keep)
    try:
        step = checkpoints.latest()
        if step is None:
            raise ValueError(f"{workdir}: no checkpoint there yet")
        trained = checkpoints.trees(step, {"params": like})["params"]
    finally:
        checkpoints.close()
    hf.save(nnx.merge(graph, trained), to, dtype=dtype, tokenizer=config.init_from or None)
    if not config.init_from:
        for name, text in tokenizer_files().items():
            (Path(to) / name).write_text(text)
    print(f"step {step} of {workdir} is in {to}")
    return 0


def _place(config: ConfigDict) -> DeviceMesh:
    """One copy of the weights, cut as in the run where this machine has the devices for it, else on one device."""
    try:
        return DeviceMesh.build(**{**{axis: config.mesh[axis] for axis in AXES}, "data": 1})
    except ValueError:
        return DeviceMesh.build(data=1)


def generate(checkpoint: str, prompt: str, temperature: float, max_tokens: int) -> int:
    """The command `jaxagent generate`: prints one sampled turn of a checkpoint."""
    place = next(DeviceMesh.build().replicas())
    policy = hf.load(checkpoint, place)
    template = template_of(checkpoint, ChatOptions("keep"))  # one turn: nothing is said before it
    ids = template.prompt([Message("user", prompt)], ())
    length = -(-(len(ids) + max_tokens) // 128) * 128
    options = EngineOptions(slots=1, slot_tokens=length, decode_tokens=16, append_rows=1, append_tokens=(64,))
    engine = Engine(policy.config, options, place)
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    request = SampleRequest("prompt", tuple(ids), 0, sampling_key(0, prompt, 0), template.stop, sampling)
    try:
        engine.publish(params_of(policy)[1], version=0)
        sample = asyncio.run(engine.generate(request))
    finally:
        engine.close()
    print(template.text(sample.tokens))
    return 0
