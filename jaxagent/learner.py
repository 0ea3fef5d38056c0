"""The learner: weights, optimizer, and the jitted gradient of packed rows. It knows neither engine nor rollouts.

What is made smaller is told by objective.py: a decoder with a language head is a policy, one with a value head its critic.

A step is `accumulate` for every micro-batch, then `apply`. Gradients are sums; they are divided once, by the sum of the
tokens' shares, when everything is in. So the split into micro-batches, devices and hosts does not change the result.

Only trained weights have gradients, moments and a place in checkpoints. Frozen ones, as the base under adapters, are an
argument that no program changes; a resumed run gets them from where the first start did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jaxtyping import Array

from jaxagent.algos.table import Algorithm
from jaxagent.data.pack import Batch
from jaxagent.hosts import put_rows, rows_here
from jaxagent.models.adapters import adapters_off, is_adapter
from jaxagent.models.attention_choice import NAMES, Facts, choose
from jaxagent.models.frozen import digest, join, split, trained_names
from jaxagent.models.head import token_logprobs
from jaxagent.models.moe import STATS, aux_loss, balance, z_loss
from jaxagent.models.transformer import Decoder, DecoderConfig, Params, head_table, logical_axes, params_of
from jaxagent.objective import PolicyObjective, ValueObjective
from jaxagent.objective import join as join_sums
from jaxagent.sharding import DeviceMesh


@dataclass(frozen=True)
class LearnerOptions:
    """Shapes and precision of a training step."""

    batch_rows: int = 8  # M, packed rows of a micro-batch
    row_tokens: int = 1024  # T, tokens of a packed row
    head_chunk: int = 1024  # tokens whose logits exist at once
    remat: str = "none"  # what each layer keeps for the backward pass: none (of it computed again), dots, attention, full
    dtype: str = "float32"  # of the forward and backward pass; trained weights and moments stay float32
    train_only: str = ""  # globs on weights, as blocks.*_norm,norm; empty trains all, or with adapters these alone
    freeze: str = ""  # globs on weights that are not trained
    frozen_dtype: str = "float32"  # of weights that are not trained; bfloat16 is half the memory
    temperature: float = 1.0  # at which the rollouts were sampled
    attention: str = "auto"  # the back end: a name of models/attention_choice.py
    replay_routing: bool = False  # a mixture's tokens take the experts that they took in the sampler
    router_aux_coef: float = 0.0  # of a mixture's balance loss
    router_z_coef: float = 0.0  # of the loss that keeps its router's logits small

    def __post_init__(self) -> None:
        if self.attention not in NAMES:
            raise ValueError(f"attention must be one of {', '.join(NAMES)}, got {self.attention!r}")


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with linear warm-up and cosine decay. Without warm-up Adam's first steps are sign steps and ratios jump."""

    lr: float = 1e-6
    lr_final: float = 0.0  # reached at the last step
    warmup_steps: int = 10
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (self.lr > 0 and self.lr_final >= 0):
            raise ValueError(f"lr must be positive and lr_final not negative, got lr={self.lr}, lr_final={self.lr_final}")

    def schedule(self, steps: int) -> optax.Schedule:
        """The rate of update 0, 1, ..., steps - 1."""
        warmup = min(self.warmup_steps, max(steps - 1, 0))
        decay = optax.cosine_decay_schedule(self.lr, max(steps - 1 - warmup, 1), self.lr_final / self.lr)
        if not warmup:
            return decay
        ramp = optax.linear_schedule(self.lr / (warmup + 1), self.lr, warmup)
        return optax.join_schedules([ramp, decay], [warmup])

    def numbers(self, lr: float) -> dict[str, np.float32]:
        """What `adamw` is told at a rate of `lr`."""
        told = {"lr": lr, "b1": self.b1, "b2": self.b2, "weight_decay": self.weight_decay, "clip_norm": self.clip_norm}
        return {name: np.float32(value) for name, value in told.items()}


def adamw(numbers: dict[str, Any]) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm; its numbers may be traced."""
    return optax.chain(
        optax.clip_by_global_norm(numbers["clip_norm"]),
        optax.scale_by_adam(numbers["b1"], numbers["b2"]),
        optax.add_decayed_weights(numbers["weight_decay"]),
        optax.scale(-numbers["lr"]),
    )


def trained_of(config: DecoderConfig, options: LearnerOptions) -> frozenset[str]:
    """The dotted names of the weights that are trained. Raises ValueError for patterns that fit no weight of the decoder.

    A critic's are those of its policy, with its own head for the policy's.
    """
    policy = replace(config, value_head=False)
    shapes = params_of(nnx.eval_shape(lambda: Decoder(policy, nnx.Rngs(0))))[1]
    names = trained_names(flatten_dict(shapes, sep="."), options.train_only, options.freeze)
    return names - {"head"} | {"value"} if config.value_head else names


class Learner:
    """Owns the weights, in two trees: trained and frozen. All arrays live on the mesh, sharded by the table of sharding.py."""

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        mesh: DeviceMesh,
        algorithm: Algorithm,
        options: LearnerOptions,
        objective: PolicyObjective | ValueObjective | None = None,
    ):
        """Makes the programs of a step.

        Args:
            params: or their shapes only; such a learner holds no arrays, and its programs can be lowered but not run.
            objective: what is made smaller; by default what the decoder's head is for.
        """
        self.config, self.mesh, self.algorithm, self.options = config, mesh, algorithm, options
        self.objective = objective or (ValueObjective(algorithm) if config.value_head else PolicyObjective(algorithm))
        if options.batch_rows % (rows := mesh.parts("rows")):
            raise ValueError(
                f"learner.batch_rows={options.batch_rows} must be a multiple of mesh data x fsdp x expert = {rows}"
            )
        if options.row_tokens % (parts := mesh.parts("length")):
            raise ValueError(f"learner.row_tokens={options.row_tokens} must be a multiple of mesh context = {parts}")
        skeleton = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
        mesh.check(params, logical_axes(skeleton))
        facts = Facts.of(config.attention, config.head_width, options.row_tokens, options.dtype, mesh)
        self.attention = choose(options.attention, facts, mesh)
        self._graph = nnx.split(skeleton)[0]
        self._names = trained_of(config, options)
        shardings = mesh.shardings(logical_axes(skeleton), params_of(skeleton)[1])
        self._param_shardings, frozen_shardings = split(shardings, self._names)
        trained, frozen = split(params, self._names)
        self.trained: Params = jax.tree.map(partial(_placed, dtype=jnp.float32), trained, self._param_shardings)
        self.frozen: Params = jax.tree.map(partial(_placed, dtype=jnp.dtype(options.frozen_dtype)), frozen, frozen_shardings)
        self._rows = mesh.sharding(("rows", "length"))
        self._spans_hosts = len({device.process_index for device in mesh.mesh.devices.flat}) > 1
        asked = [name for name in ("replay_routing", "router_aux_coef", "router_z_coef") if getattr(options, name)]
        if asked and not config.experts:
            raise ValueError(f"learner.{asked[0]}={getattr(options, asked[0])} wants a mixture of experts; this model has none")
        sums = dict.fromkeys(self.objective.sums, mesh.sharding())
        routed = dict.fromkeys(STATS if config.experts else (), mesh.sharding())
        self._acc_shardings = acc_shardings = {"grads": self._param_shardings, "sums": sums, "router": routed}
        self._new_acc = jax.jit(self._zeros, out_shardings=acc_shardings)
        self._accumulate = jax.jit(
            self._accumulate_fn, donate_argnums=2, out_shardings=acc_shardings, compiler_options=mesh.compiler_options
        )
        outputs = lambda *parts: self._outputs(join(*parts[:2]), parts[2])[0][self.objective.output]  # noqa: E731
        self._score = jax.jit(outputs, out_shardings=self._rows)
        moments = self._moment_shardings()
        self._new_moments = jax.jit(_IDLE_ADAMW.init, out_shardings=moments)
        self._apply = jax.jit(_apply, donate_argnums=(0, 1), out_shardings=(self._param_shardings, moments, mesh.sharding()))
        self._acc: Any = None
        self._reference: Params | None = None

    @property
    def own_rows(self) -> int:
        """Packed rows of a micro-batch that this host gives: all of them, where there is one host."""
        return self.options.batch_rows // jax.process_count() if self._spans_hosts else self.options.batch_rows

    def empty(self) -> Batch:
        """This host's part of a micro-batch that teaches nothing."""
        return Batch.empty(self.own_rows, self.options.row_tokens)

    @property
    def params(self) -> Params:
        """All weights, trained and frozen."""
        return join(self.trained, self.frozen)

    def begin(self, optimizer: OptimizerOptions, steps: int) -> None:
        """Starts a phase of `steps` updates with fresh moments. Compiles nothing: what differs between phases is traced."""
        self._optimizer, self._schedule = optimizer, optimizer.schedule(steps)
        self.opt_state = self._new_moments(self.trained)
        self.updates = 0

    def accumulate(self, batch: Batch, *, on_policy: bool = False) -> None:
        """Adds a micro-batch's gradient. `on_policy` holds the ratio at 1: old = new, as in supervised learning."""
        if self._acc is None:
            self._acc = self._new_acc()
        self._acc = self._accumulate(self.trained, self.frozen, self._acc, self._put(batch), np.bool_(on_policy))

    def wait(self) -> None:
        """Returns when the gradient of all that was accumulated is computed."""
        jax.block_until_ready(self._acc)

    def apply(self, idle_share: float = 0.0) -> dict[str, float]:
        """Divides, updates the weights, and returns the step's metrics; a gradient that is not finite updates nothing.

        Args:
            idle_share: the share of tokens that were left out because their gradient is zero: they count in the denominator.
        """
        acc = self._acc or self._new_acc()
        sums = acc["sums"]
        lr = float(self._schedule(self.updates))
        numbers = self._optimizer.numbers(lr)
        self.trained, self.opt_state, norms = self._apply(self.trained, self.opt_state, acc, np.float32(idle_share), numbers)
        self._acc = None
        self.updates += 1
        o = self.objective
        metrics = o.metrics(jax.device_get(sums), idle_share)
        metrics |= {f"{o.prefix}/{name}": float(x) for name, x in jax.device_get(norms).items()} | {f"{o.prefix}/lr": lr}
        return metrics | (balance(jax.device_get(acc["router"])) if acc["router"] else {})

    def warm_up(self, *, scores: bool = False) -> None:
        """Compiles accumulation and update on empty rows, without changing anything; and `score`, where it will be wanted.

        The update takes the weights and moments themselves, as it will, and a gradient of nothing leaves them as they are:
        copies of them would be the most that a run of large weights ever holds.
        """
        acc = self._accumulate(self.trained, self.frozen, self._new_acc(), self._put(self.empty()), np.bool_(True))
        numbers = self._optimizer.numbers(0.0)
        self.trained, self.opt_state, _ = self._apply(self.trained, self.opt_state, acc, np.float32(1.0), numbers)
        jax.block_until_ready((self.trained, self.opt_state))
        if scores:
            self.score(self.empty())

    def held(self) -> dict[str, Any]:
        """What a step holds besides the weights, as shapes with placements: the moments and the sums over micro-batches."""
        moments = jax.tree.map(_placed, jax.eval_shape(_IDLE_ADAMW.init, self.trained), self._moment_shardings())
        return {"moments": moments, "sums": jax.tree.map(_placed, jax.eval_shape(self._zeros), self._acc_shardings)}

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """The programs of a step for the devices of the mesh, which need not be here: to be compiled and read."""
        moments, acc = self.held().values()
        empty = Batch.empty(self.options.batch_rows, self.options.row_tokens)
        if self.options.replay_routing:
            empty.route(self.config.layers, self.config.experts_per_token)
        batch = self._read(empty)
        batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._rows) for name, x in batch.items()}
        numbers = OptimizerOptions().numbers(0.0)
        return {
            "accumulate": self._accumulate.lower(self.trained, self.frozen, acc, batch, np.bool_(True)),
            "apply": self._apply.lower(self.trained, moments, acc, np.float32(0.0), numbers),
        }

    def score(self, batch: Batch, *, reference: bool = False) -> np.ndarray:
        """log p of every token under the current weights, [M, T], by the same function as the loss; of a critic its value.

        Args:
            reference: under the weights that `keep_reference` kept, or else under the base, with every adapter's B at zero:
                the same program and no second copy of the weights.
        """
        trained, frozen = self.trained, self.frozen
        if reference:
            trained, frozen = (self._reference, frozen) if self._reference is not None else self._base()
        return rows_here(self._score(trained, frozen, self._put(batch)))

    def keep_reference(self) -> None:
        """Keeps what is trained as it is now, for `score`. In the pass's own precision: it scores exactly as it did.

        With adapters they alone are copied, so that a reference after a warm-up, or over given adapters, costs next to nothing.
        """
        self._reference = jax.tree.map(lambda w: jnp.array(w, self.options.dtype, copy=True), self.trained)

    def _base(self) -> tuple[Params, Params]:
        if others := sorted(name for name in self._names if not is_adapter(name)):
            raise ValueError(
                f"the base's log-probs are wanted, but it is trained itself ({others[0]} and {len(others) - 1} more): "
                "set lora.rank, and leave learner.train_only empty"
            )
        return split(adapters_off(self.params), self._names)

    def weights(self) -> dict[str, Any]:
        """What a checkpoint must hold of the weights: the trained ones, and a number by which the frozen ones are known."""
        if not self.frozen:
            return {"params": self.trained}
        return {"params": self.trained, "frozen": {"digest": self._frozen_digest}}

    @cached_property
    def _frozen_digest(self) -> Array:
        return jax.jit(digest, out_shardings=self.mesh.sharding())(self.frozen)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        kept = {} if self._reference is None else {"reference": self._reference}
        return {**self.weights(), "opt_state": self.opt_state, **kept}

    def restore_weights(self, weights: dict[str, Any]) -> None:
        """Takes up what `weights` gave. Raises ValueError where the frozen weights are not those it was trained over."""
        check_frozen(weights, self.weights())
        self.trained = weights["params"]

    def restore(self, state: dict[str, Any], updates: int) -> None:
        self.restore_weights(state)
        self.opt_state, self.updates = state["opt_state"], updates
        self._reference = state.get("reference")

    # ------------------------------------------------------------------ traced

    def _moment_shardings(self) -> Any:
        """Moments lie where their weights lie."""
        return optax.tree.map_params(
            _IDLE_ADAMW,
            lambda _, sharding: sharding,
            jax.eval_shape(_IDLE_ADAMW.init, self.trained),
            self._param_shardings,
            transform_non_params=lambda _: self.mesh.sharding(),
        )

    def _put(self, batch: Batch) -> dict[str, Array]:
        if self.options.replay_routing and batch.routing is None:
            batch.route(self.config.layers, self.config.experts_per_token)
        return put_rows(self._read(batch), self._rows)

    def _read(self, batch: Batch) -> dict[str, np.ndarray]:
        """The arrays that the programs take, always the same: what a batch lacks is zero, as a reference in a warm-up."""
        there, nothing = batch.arrays(), np.zeros(batch.tokens.shape, np.float32)
        routing = {"routing": there["routing"]} if self.options.replay_routing else {}
        return {name: there.get(name, nothing) for name in self.objective.reads} | routing

    def _zeros(self) -> dict[str, Any]:
        c = self.config
        grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.trained)
        router = {name: jnp.zeros((c.layers, c.experts) if name in ("load", "mass") else c.layers) for name in STATS}
        sums = {name: jnp.zeros(shape) for name, shape in self.objective.sums.items()}
        return {"grads": grads, "sums": sums, "router": router if c.experts else {}}

    def _outputs(self, params: Params, batch: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """What the head says, aligned to the token, and the router's sums by layer.

        The hidden state at t - 1 speaks of token t: of its log-prob and entropy, or of the state it is chosen in. The only
        shift there is; an objective that judges what has been read (`after`) has none.
        """
        o = self.options
        params = jax.tree.map(lambda p: p.astype(o.dtype), params)
        policy = nnx.merge(self._graph, params)
        attend = self.attention.attend(batch["segment"])
        replay = batch["routing"].transpose(2, 0, 1, 3).astype(jnp.int32) if o.replay_routing else None
        valid = batch["segment"] > 0 if self.config.experts else None
        hidden, routing = policy.hidden(
            batch["tokens"], batch["position"], attend, remat=o.remat, mesh=self.mesh, valid=valid, replay=replay
        )
        if self.config.value_head:
            each = {"value": hidden.astype(jnp.float32) @ params["value"].astype(jnp.float32)}
        else:
            table, following = head_table(params, self.config), jnp.pad(batch["tokens"][:, 1:], ((0, 0), (0, 1)))
            both = token_logprobs(hidden, table, following, o.temperature, o.head_chunk, self.config.logit_softcap, self.mesh)
            each = dict(zip(("logprob", "entropy"), both, strict=True))
        if self.objective.after:
            return each, routing.stats if routing else {}
        aligned = {name: jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for name, x in each.items()}
        return aligned, routing.stats if routing else {}

    def _router_loss(self, stats: dict[str, Array]) -> Array:
        """The balance losses of a micro-batch over all its layers, as transformers has them."""
        o, together = self.options, jax.tree.map(lambda x: x.sum(0), stats)
        return o.router_aux_coef * aux_loss(together, self.config.mixture) + o.router_z_coef * z_loss(together)

    def _loss(self, trained: Params, frozen: Params, batch: dict[str, Array], on_policy: Array) -> tuple[Array, Any]:
        o = self.options
        outputs, router = self._outputs(join(trained, frozen), batch)
        total, sums = self.objective.loss(outputs, batch, on_policy)
        if o.router_aux_coef or o.router_z_coef:  # divided by all shares in the end: the mean over micro-batches
            total = total + self._router_loss(router) * sums["share"]
            sums["loss"] = total
        return total, (jax.lax.stop_gradient(sums), jax.lax.stop_gradient(router))

    def _accumulate_fn(self, trained: Params, frozen: Params, acc: Any, batch: dict[str, Array], on_policy: Array) -> Any:
        (_, (sums, router)), grads = jax.value_and_grad(self._loss, has_aux=True)(trained, frozen, batch, on_policy)
        added = {name: jax.tree.map(jnp.add, acc[name], new) for name, new in (("grads", grads), ("router", router))}
        return {**added, "sums": join_sums(acc["sums"], sums)}


def check_frozen(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises ValueError where a checkpoint was trained over other frozen weights than those that are here."""
    then, now = (int(found["frozen"]["digest"]) if "frozen" in found else 0 for found in (saved, here))
    if then != now:
        raise ValueError(
            f"the checkpoint was trained over other frozen weights (digest {then:08x}) than init_from and seed give now "
            f"({now:08x}): put the checkpoint directory of init_from back as it was"
        )


def _placed(x: Any, sharding: NamedSharding, dtype: Any = None) -> Any:
    """An array on the mesh, or the shape of one, in `dtype` where one is given."""
    dtype = dtype or x.dtype
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)
    return jax.device_put(x.astype(dtype), sharding)


def _apply(params: Params, opt_state: Any, acc: Any, idle: Array, numbers: Any) -> tuple[Params, Any, dict[str, Array]]:
    """Divides the gradient and takes the step. Nothing changes where the gradient is not finite or 0 everywhere.

    Where nobody teaches anything, the momentum of earlier gradients would go on moving the weights, into groups that teach
    nothing either. As LazyAdam does it, but for all weights together: moments are of those gradients that there were.
    """
    share = jnp.maximum(acc["sums"]["share"] + idle, 1e-9)
    grads = jax.tree.map(lambda g: g / share, acc["grads"])
    updates, moved = adamw(numbers).update(grads, opt_state, params)
    norm = optax.tree.norm(grads)
    fit = jnp.isfinite(norm) & (norm > 0)
    norms = {"grad_norm": norm, "update_norm": jnp.where(norm > 0, optax.tree.norm(updates), 0.0)}
    norms |= {"param_norm": optax.tree.norm(params), "skipped": 1.0 - jnp.isfinite(norm)}
    both = (optax.apply_updates(params, updates), moved), (params, opt_state)
    params, opt_state = jax.tree.map(lambda new, old: jnp.where(fit, new, old), *both)
    return params, opt_state, norms


_IDLE_ADAMW = adamw(OptimizerOptions().numbers(0.0))  # for the shape of its state, which no number changes
