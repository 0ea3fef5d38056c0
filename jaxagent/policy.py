"""A trained policy outside training: exported as a Hugging Face checkpoint, asked one question, or served to programs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent.chat.family import template_of
from jaxagent.chat.history import ChatOptions
from jaxagent.chat.plain import tokenizer_files
from jaxagent.checkpoint import Checkpoints
from jaxagent.door.session import Rules, Slots
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.learner import LearnerOptions, check_frozen, trained_of
from jaxagent.models import hf, peft
from jaxagent.models.adapters import is_adapter, merged, unadapted
from jaxagent.models.frozen import digest, join, split
from jaxagent.models.transformer import Decoder, DecoderConfig, Params, logical_axes, params_of
from jaxagent.parts import policy_shape, start_weights
from jaxagent.serve import Address, ServeLimits, run
from jaxagent.sharding import AXES, DeviceMesh
from jaxagent.types import Message, SampleRequest, Sampling, sampling_key


def export(workdir: str, to: str, dtype: str, adapter: bool = False) -> int:
    """The command `jaxagent export`: the last checkpoint of a run, with its tokenizer, as transformers loads it.

    Args:
        adapter: the adapters alone, as PEFT loads them; without it they are merged into the weights.
    """
    config = configs.read(Path(workdir) / "config.json")
    template, decoder = policy_shape(config)
    names = trained_of(decoder, LearnerOptions(**config.learner))
    if adapter:
        _check_adapter(config, decoder, names)
    base = peft.base_of(config.init_from) if config.init_from else ""
    step, params = last_weights(config, decoder, names, Path(workdir))
    if adapter:
        graph = params_of(nnx.eval_shape(lambda: Decoder(decoder, nnx.Rngs(0))))[0]
        peft.save(nnx.merge(graph, params), to, base=base, dtype=dtype)
        print(f"the adapters of step {step} ({configs.place_in(config, step)}) of {workdir} are in {to}")
        return 0
    graph = params_of(nnx.eval_shape(lambda: Decoder(unadapted(decoder), nnx.Rngs(0))))[0]
    hf.save(nnx.merge(graph, jax.jit(lambda w: merged(w, decoder))(params)), to, dtype=dtype, tokenizer=base or None)
    if not config.init_from:
        for name, text in tokenizer_files().items():
            (Path(to) / name).write_text(text)
    _say_how_to_generate(Path(to) / "generation_config.json", template.stop, config.sampling.temperature)
    print(f"step {step} ({configs.place_in(config, step)}) of {workdir} is in {to}")
    return 0


def _say_how_to_generate(path: Path, stop: Sequence[int], temperature: float) -> None:
    """Writes how the policy was trained: sampled from all tokens as they are, and these end its turns.

    Without it, programs of others take the likeliest token at any temperature, or one of the fifty likeliest, and go on
    behind a turn's end. What a base says of its own sampling (top_k, repetition_penalty) is not of this policy.
    """
    known = json.loads(path.read_text()) if path.is_file() else {}
    told = {name: known[name] for name in ("bos_token_id", "pad_token_id") if name in known}
    plain = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    path.write_text(json.dumps({**told, **plain, "eos_token_id": list(stop)}, indent=2) + "\n")


def _check_adapter(config: ConfigDict, decoder: DecoderConfig, names: frozenset[str]) -> None:
    """Raises ValueError where a run is more than adapters on a checkpoint."""
    if not decoder.lora:
        raise ValueError("--adapter: this run has no adapters (lora.rank is 0); leave it out for the whole policy")
    if not config.init_from:
        raise ValueError("--adapter: the base of this run is no checkpoint (init_from is empty); leave it out to merge")
    if others := sorted(name for name in names if not is_adapter(name)):
        raise ValueError(f"--adapter: this run trained {others[0]} too (learner.train_only); leave it out to merge")


def last_weights(config: ConfigDict, decoder: DecoderConfig, names: frozenset[str], workdir: Path) -> tuple[int, Params]:
    """The step of a run's last checkpoint and all its weights: the trained ones of it, the frozen ones of where it started."""
    skeleton, mesh = nnx.eval_shape(lambda: Decoder(decoder, nnx.Rngs(0))), _place(config)
    shapes = params_of(skeleton)[1]
    places = mesh.shardings(logical_axes(skeleton), shapes)
    like = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)
    trained, frozen = split(like, names)
    wanted: Params = {"params": trained}
    if frozen:
        start = split(start_weights(config, decoder, mesh), names)[1]
        frozen = jax.tree.map(lambda w, x: jax.device_put(w.astype(config.learner.frozen_dtype), x.sharding), start, frozen)
        wanted["frozen"] = {"digest": jax.ShapeDtypeStruct((), jnp.uint32, sharding=mesh.sharding())}
    checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep)
    try:
        step = checkpoints.latest()
        if step is None:
            raise ValueError(f"{workdir}: no checkpoint there yet")
        saved = checkpoints.trees(step, wanted)
    finally:
        checkpoints.close()
    if frozen:
        check_frozen(saved, {"frozen": {"digest": jax.jit(digest)(frozen)}})
    return step, join(saved["params"], frozen)


def _place(config: ConfigDict) -> DeviceMesh:
    """One copy of the weights, cut as in the run where this machine has the devices for it, else on one device."""
    try:
        return DeviceMesh.build(**{**{axis: config.mesh[axis] for axis in AXES}, "data": 1})
    except ValueError:
        return DeviceMesh.build(data=1)


def generate(checkpoint: str, prompt: str, temperature: float, max_tokens: int) -> int:
    """The command `jaxagent generate`: prints one sampled turn of a checkpoint, or of adapters on theirs."""
    place = next(DeviceMesh.build().replicas())
    policy = peft.load(checkpoint, place)
    template = template_of(peft.base_of(checkpoint), ChatOptions("keep"))  # one turn: nothing is said before it
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


@dataclass(frozen=True)
class Serving:
    """How much a server has room for, and how it computes."""

    slots: int = 8
    context: int = 4096
    top_logprobs: int = 5
    history: str = "keep"
    dtype: str = "float32"

    def engine(self) -> EngineOptions:
        """Shapes for answers in small pieces; only rows and positions in use are computed."""
        chunk = max(128, -(-self.context // 512) * 128)
        return EngineOptions(
            slots=self.slots,
            slot_tokens=-(-self.context // chunk) * chunk,
            decode_tokens=8,
            append_rows=min(4, self.slots),
            append_tokens=(32, 256),
            chunk=chunk,
            exact=False,
            dtype=self.dtype,
            top_logprobs=self.top_logprobs,
            constraint_states=1024,
        )


def serve(checkpoint: str, name: str, serving: Serving, limits: ServeLimits, at: Address) -> int:
    """The command `jaxagent serve`: answers the dialects of OpenAI and Anthropic with a checkpoint, or adapters on theirs."""
    place = next(DeviceMesh.build().replicas())
    policy = peft.load(checkpoint, place)
    template = template_of(peft.base_of(checkpoint), ChatOptions(serving.history))
    options = serving.engine()
    engine = Engine(policy.config, options, place, template.vocabulary())
    try:
        engine.publish(params_of(policy)[1], version=0)
        engine.warm_up().result()
        slots = Slots(template, engine, options.slots)
        return run(slots, Rules(options.slot_tokens), name or Path(checkpoint).resolve().name, limits, at)
    finally:
        engine.close()
