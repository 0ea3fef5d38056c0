"""Mixtures of experts: against the plain sum over experts, against themselves on meshes, and against transformers."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.moe import (
    AXES_OF,
    MAX_BLOCK,
    ROWS,
    ExpertWeights,
    MixtureSpec,
    Routing,
    aux_loss,
    balance,
    grouped_dot,
    mix_experts,
    z_loss,
)
from jaxagent.sharding import DeviceMesh

D, F, E, K = 16, 8, 8, 2
SPEC = MixtureSpec(experts=E, per_token=K, normalise=True)
MESHES = [
    {"expert": 8},
    {"expert": 2, "tensor": 2, "data": 2},
    {"fsdp": 2, "expert": 4},
    {"context": 2, "expert": 2, "fsdp": 2},
]
FORMS = pytest.mark.parametrize("dense", [False, True], ids=["grouped", "dense"])

Tree = dict[str, Any]


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def experts(seed: int = 0) -> ExpertWeights:
    shapes = ((D, E), (E, D, F), (E, D, F), (E, F, D))
    return ExpertWeights(*(normal(seed + i, *shape) * shape[-2] ** -0.5 for i, shape in enumerate(shapes)))


@partial(jax.jit, static_argnums=2)
def plain(x: jax.Array, w: ExpertWeights, spec: MixtureSpec, chosen: jax.Array | None = None) -> jax.Array:
    """The formula, with every expert computed for every token and most of them multiplied by zero."""
    probs = jax.nn.softmax(x @ w.router_DE, axis=-1)
    if chosen is None:
        chosen = jnp.argsort(-probs, axis=-1, stable=True)[..., : spec.per_token]
    gates = probs * jnp.any(chosen[..., None] == jnp.arange(spec.experts), axis=-2)
    if spec.normalise:
        gates = gates / gates.sum(-1, keepdims=True)
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, w.gate_EDF)) * jnp.einsum("btd,edf->btef", x, w.up_EDF)
    return jnp.einsum("bte,bted->btd", gates, jnp.einsum("btef,efd->bted", hidden, w.down_EFD))


def assert_near(ours: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(0.1, float(np.abs(y).max(initial=0))))


def assert_same(ours: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, ours, wanted)


def run(x: jax.Array, w: ExpertWeights, mesh: DeviceMesh | None = None, **how: Any) -> tuple[jax.Array, Routing]:
    spec = how.pop("spec", SPEC)
    return jax.jit(lambda x, w: mix_experts(x, w, spec, mesh, **how))(x, w)


def objective(x: jax.Array, w: ExpertWeights, mesh: DeviceMesh | None = None, **how: Any) -> tuple[jax.Array, Any]:
    """A generic direction of the output plus both losses; beside it the output and what leaves the layer."""
    y, routing = mix_experts(x, w, SPEC, mesh, **how)
    loss = jnp.sum(y * normal(9, 8, 8, D)[: x.shape[0], : x.shape[1]]) + aux_loss(routing.stats, SPEC) + z_loss(routing.stats)
    return loss, (y, routing)


def gradients(x: jax.Array, w: ExpertWeights, **how: Any) -> tuple[jax.Array, ExpertWeights]:
    return jax.jit(jax.grad(lambda x, w: objective(x, w, **how)[0], (0, 1)))(x, w)


@FORMS
@pytest.mark.parametrize(("per_token", "normalise"), [(1, False), (3, True), (E, True)])
def test_output_and_gradients_equal_the_plain_sum_over_experts(per_token: int, normalise: bool, dense: bool) -> None:
    spec = MixtureSpec(E, per_token, normalise)
    x, w, ct = normal(5, 2, 7, D), experts(), normal(9, 2, 7, D)

    def both(mix: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(mix(x, w) * ct), (0, 1)))(x, w)

    assert_near(run(x, w, spec=spec, dense=dense)[0], plain(x, w, spec))
    assert_near(both(lambda x, w: mix_experts(x, w, spec, None, dense=dense)[0])[1], both(lambda x, w: plain(x, w, spec))[1])


@pytest.mark.parametrize("native", [False, True], ids=["blocks", "ragged_dot"])
@pytest.mark.parametrize("sizes", [(3, 0, 4, 1), (0, 0, 0, 12), (0, 0, 0, 0), (2, 5, 0, 1), (1, 3 * MAX_BLOCK, 0, 9)])
def test_a_grouped_matmul_gives_each_row_its_groups_matrix_and_rows_of_no_group_zero(sizes: Any, native: bool) -> None:
    rows = max(12, sum(sizes))
    x, w, ct, live = normal(0, rows, D), normal(1, 4, D, F), normal(2, rows, F), sum(sizes)
    owner = np.repeat(np.arange(4), sizes)

    def loss(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = grouped_dot(x, w, jnp.asarray(sizes, jnp.int32), native)
        return jnp.sum(y * ct), y

    x = x.at[live:].set(jnp.nan)  # must reach neither values nor gradients
    (dx, dw), y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, w)
    assert_near(y[:live], jnp.einsum("md,mdf->mf", x[:live], w[owner]))
    assert_near(dx[:live], jnp.einsum("mf,mdf->md", ct[:live], w[owner]))
    wanted = np.zeros(w.shape, np.float32)
    np.add.at(wanted, owner, np.einsum("md,mf->mdf", x[:live], ct[:live]))
    assert_near(dw, wanted)
    assert not np.any(y[live:])
    assert not np.any(dx[live:])


@FORMS
def test_no_token_is_dropped_when_all_choose_the_same_expert(dense: bool) -> None:
    x, w = jnp.abs(normal(5, 1, 100, D)), experts()
    w = w._replace(router_DE=w.router_DE.at[:, 3].set(5.0).at[:, 6].set(4.0))
    y, routing = run(x, w, dense=dense)
    np.testing.assert_array_equal(routing.experts_BTk, np.broadcast_to([3, 6], (1, 100, 2)))
    assert_near(y, plain(x, w, SPEC))
    assert np.all(np.any(y != 0, axis=-1))


@FORMS
def test_padding_is_zero_uncounted_and_without_gradient(dense: bool) -> None:
    x, w = normal(5, 2, 6, D), experts()
    valid = jnp.asarray([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]], bool)
    dirty = x.at[:, 4:].set(jnp.inf)
    y, routing = run(dirty, w, valid_BT=valid, dense=dense)
    alone, wanted = run(x[:, :4], w, dense=dense)
    assert not np.any(y[:, 4:])
    assert_near(y[:, :4], alone)
    assert_near(routing.stats, wanted.stats)
    np.testing.assert_array_equal(routing.experts_BTk[:, :4], wanted.experts_BTk)
    assert np.all(routing.experts_BTk[:, 4:] == -1)
    dx, dw = gradients(dirty, w, valid_BT=valid, dense=dense)
    assert not np.any(dx[:, 4:])
    assert_near((dx[:, :4], dw), gradients(x[:, :4], w, dense=dense))


@FORMS
def test_a_rows_bits_do_not_depend_on_its_neighbours(dense: bool) -> None:
    w, mine = experts(), normal(5, 1, 5, D)
    step = jax.jit(lambda x, valid: mix_experts(x, w, SPEC, None, valid_BT=valid, dense=dense)[0])
    everyone, nobody = jnp.ones((12, 5), bool), jnp.zeros((11, 5), bool)
    alone = step(jnp.concatenate([mine, jnp.zeros((11, 5, D))]), everyone.at[1:].set(nobody))[0]
    for seed in range(4):
        neighbours = 3 * normal(seed, 11, 5, D)
        np.testing.assert_array_equal(step(jnp.concatenate([mine, neighbours]), everyone)[0], alone)


@FORMS
def test_replaying_the_own_choice_changes_no_bit_of_output_or_gradient(dense: bool) -> None:
    x, w = normal(5, 2, 6, D), experts()
    own, routing = run(x, w, dense=dense)
    again, replayed = run(x, w, replay_BTk=routing.experts_BTk, dense=dense)
    assert_same((again, replayed), (own, routing))
    assert_same(gradients(x, w, replay_BTk=routing.experts_BTk, dense=dense), gradients(x, w, dense=dense))


@FORMS
def test_replayed_experts_are_used_with_the_weights_of_the_current_router(dense: bool) -> None:
    x, w = normal(5, 2, 6, D), experts()
    recorded = run(x, experts(40), dense=dense)[1].experts_BTk  # of another policy
    recorded = recorded.at[0, 2, 1].set(-1).at[1, 0].set(-1)  # two tokens choose for themselves
    own = run(x, w, dense=dense)[1].experts_BTk
    wanted = recorded.at[0, 2].set(own[0, 2]).at[1, 0].set(own[1, 0])
    assert np.any(wanted != own)
    y, routing = run(x, w, replay_BTk=recorded, dense=dense)
    np.testing.assert_array_equal(routing.experts_BTk, wanted)
    np.testing.assert_array_equal(routing.stats["load"], np.bincount(np.ravel(wanted), minlength=E))
    assert_near(y, plain(x, w, SPEC, wanted))
    ct = normal(9, 2, 6, D)
    ours = jax.jit(jax.grad(lambda w: jnp.sum(mix_experts(x, w, SPEC, None, replay_BTk=recorded, dense=dense)[0] * ct)))(w)
    assert_near(ours, jax.jit(jax.grad(lambda w: jnp.sum(plain(x, w, SPEC, wanted) * ct)))(w))


def test_statistics_are_sums_over_tokens_that_numpy_finds_too() -> None:
    x, w = normal(5, 3, 4, D), experts()
    routing = run(x, w)[1]
    logits = np.asarray(x.reshape(-1, D) @ w.router_DE, np.float64)
    lse = np.log(np.exp(logits).sum(-1))
    probs = np.exp(logits - lse[:, None])
    chosen = np.argsort(-probs, axis=-1)[:, :K]
    np.testing.assert_array_equal(routing.experts_BTk.reshape(-1, K), chosen)
    wanted = {
        "tokens": 12,
        "load": np.bincount(chosen.ravel(), minlength=E),
        "mass": probs.sum(0),
        "z": (lse**2).sum(),
        "entropy": -(probs * np.log(probs)).sum(),
    }
    assert routing.stats.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(routing.stats[name], value, rtol=1e-5, err_msg=name)
    parts = [run(x[i : i + 1], w)[1].stats for i in range(3)]
    assert_near(jax.tree.map(lambda *s: sum(s), *parts), routing.stats)


def some_stats(load: list[float], mass: list[float]) -> dict[str, jax.Array]:
    stats = {"tokens": 10.0, "load": load, "mass": mass, "z": 40.0, "entropy": 5.0}
    return {name: jnp.asarray(value, jnp.float32) for name, value in stats.items()}


def test_the_balance_loss_is_k_when_balanced_and_more_the_more_one_expert_draws() -> None:
    spec = MixtureSpec(experts=4, per_token=2, normalise=True)
    assert float(aux_loss(some_stats([5, 5, 5, 5], [2.5, 2.5, 2.5, 2.5]), spec)) == pytest.approx(2)
    skewed = some_stats([10, 10, 0, 0], [6, 2, 1, 1])  # 4 x (1 x 0.6 + 1 x 0.2)
    assert float(aux_loss(skewed, spec)) == pytest.approx(3.2)
    assert float(z_loss(skewed)) == pytest.approx(4.0)
    stacked = jax.tree.map(lambda *s: jnp.stack(s), skewed, some_stats([5, 5, 5, 5], [2.5, 2.5, 2.5, 2.5]))
    np.testing.assert_allclose(aux_loss(stacked, spec), [3.2, 2.0], rtol=1e-6)
    np.testing.assert_allclose(z_loss(stacked), [4.0, 4.0], rtol=1e-6)


def test_without_a_token_both_losses_are_zero_with_finite_gradients() -> None:
    x, w, valid = normal(5, 1, 3, D), experts(), jnp.zeros((1, 3), bool)
    stats = run(x, w, valid_BT=valid)[1].stats
    assert float(aux_loss(stats, SPEC)) == float(z_loss(stats)) == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(gradients(x, w, valid_BT=valid)))
    assert set(balance(jax.device_get(stats)).values()) == {0.0}


def test_the_gradient_of_the_balance_loss_flows_through_probabilities_only() -> None:
    x, w = normal(5, 1, 9, D), experts()
    share = run(x, w)[1].stats["load"] / 9

    def wanted(router: jax.Array) -> jax.Array:
        return E * jnp.sum(share * jax.nn.softmax(x[0] @ router).mean(0))

    def ours(router: jax.Array) -> jax.Array:
        return aux_loss(mix_experts(x, w._replace(router_DE=router), SPEC, None)[1].stats, SPEC)

    assert_near(*(jax.jit(jax.value_and_grad(loss))(w.router_DE) for loss in (ours, wanted)))


def test_micro_batches_with_the_counts_of_all_give_the_balance_loss_of_all() -> None:
    x, w = normal(5, 4, 5, D), experts()

    def losses(router: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = mix_experts(x, w._replace(router_DE=router), SPEC, None)[1].stats
        parts = [mix_experts(x[i : i + 2], w._replace(router_DE=router), SPEC, None)[1].stats for i in (0, 2)]
        counts = {"load": whole["load"], "tokens": whole["tokens"]}
        return aux_loss(whole, SPEC), sum(aux_loss({**part, **counts}, SPEC) for part in parts)

    whole, parts = (jax.jit(jax.value_and_grad(lambda r, i=i: losses(r)[i]))(w.router_DE) for i in (0, 1))
    assert_near(parts, whole)


def test_the_z_loss_is_the_mean_squared_log_sum_exp_with_its_gradient() -> None:
    x, w = normal(5, 1, 9, D), experts()

    def ours(router: jax.Array) -> jax.Array:
        return z_loss(mix_experts(x, w._replace(router_DE=router), SPEC, None)[1].stats)

    logits = x[0] @ w.router_DE
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    value, grad = jax.jit(jax.value_and_grad(ours))(w.router_DE)
    np.testing.assert_allclose(value, jnp.mean(lse**2), rtol=1e-5)
    assert_near(grad, x[0].T @ (2 * lse * jax.nn.softmax(logits) / 9))


def test_balance_names_the_busiest_expert_of_the_worst_layer_and_the_dead() -> None:
    even, skewed = some_stats([5, 5, 5, 5], [2.5] * 4), some_stats([20, 0, 0, 0], [10, 0, 0, 0])
    assert balance(even) == {"router/max_load": 1.0, "router/dead_frac": 0.0, "router/entropy": 0.5}
    layers = jax.tree.map(lambda *s: np.stack(s), even, skewed)
    assert balance(layers) == {"router/max_load": 4.0, "router/dead_frac": 3 / 8, "router/entropy": 0.5}


def mesh_case() -> tuple[jax.Array, ExpertWeights, Tree]:
    """Rows with padding, of which half replay the experts of another policy."""
    x, w, valid = normal(5, 8, 4, D), experts(), jnp.asarray(np.random.default_rng(1).random((8, 4)) < 0.8)
    return x, w, {"valid_BT": valid, "replay_BTk": run(x, experts(40))[1].experts_BTk.at[::2].set(-1)}


@cache
def on_one_device(dense: bool) -> Any:
    x, w, how = mesh_case()
    return jax.jit(jax.grad(partial(objective, **how, dense=dense), (0, 1), has_aux=True))(x, w)


@pytest.mark.parametrize(
    ("sizes", "dense"), [*((sizes, False) for sizes in MESHES), (MESHES[1], True), (MESHES[3], True)], ids=str
)
def test_every_mesh_gives_the_results_and_gradients_of_one_device(sizes: dict[str, int], dense: bool) -> None:
    mesh, (x, w, how) = DeviceMesh.build(**sizes), mesh_case()
    step = jax.jit(jax.grad(partial(objective, mesh=mesh, **how, dense=dense), (0, 1), has_aux=True))
    x = jax.device_put(x, mesh.sharding(ROWS))
    w = ExpertWeights(**{name: jax.device_put(a, mesh.sharding(AXES_OF[name])) for name, a in w._asdict().items()})
    compiled = step.lower(x, w).compile()
    grads, (y, routing) = compiled(x, w)
    wanted, (wanted_y, wanted_routing) = on_one_device(dense)
    assert_near((grads, y, routing.stats), (wanted, wanted_y, wanted_routing.stats), 2e-6)
    np.testing.assert_array_equal(routing.experts_BTk, wanted_routing.experts_BTk)
    assert_no_shard_sees_other_experts(compiled.as_text(), mesh)


@pytest.mark.parametrize(("sizes", "dense"), [(MESHES[1], True), (MESHES[3], False)], ids=str)
def test_every_mesh_gives_them_too_where_gate_and_up_are_laid_by_their_outputs(sizes: dict[str, int], dense: bool) -> None:
    mesh, (x, w, how) = DeviceMesh.build(**sizes), mesh_case()
    turned = w._replace(gate_EDF=w.gate_EDF.swapaxes(1, 2), up_EDF=w.up_EDF.swapaxes(1, 2))
    step = jax.jit(partial(objective, mesh=mesh, **how, dense=dense, output_first=True))
    (_, wanted), (_, found) = objective(x, w, **how, dense=dense), step(jax.device_put(x, mesh.sharding(ROWS)), turned)
    assert_near(found[0], wanted[0], 2e-6)


def assert_no_shard_sees_other_experts(text: str, mesh: DeviceMesh) -> None:
    """Of the weights, only the shard's own experts are gathered; none crosses the expert axis, nor does a gradient."""
    moved = re.findall(r"= \(?\w+\[([\d,]+)\]\S* (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)\(", text)
    stacks = [[int(n) for n in shape.split(",")] for shape, _ in moved if shape.count(",") == 2]
    own = E // mesh.size["expert"]
    assert [own, D, F // mesh.size["tensor"]] in stacks  # gathered over fsdp and context
    assert all(shape[0] == own for shape in stacks)
    assert all(np.prod([int(n) for n in shape.split(",")]) <= max(own * D * F, 8 * 4 * D) for shape, _ in moved)


def test_layers_can_be_scanned_and_computed_again_backwards() -> None:
    x, layers = normal(5, 2, 6, D), [experts(10 * i) for i in range(2)]

    def scanned(stacked: ExpertWeights) -> tuple[jax.Array, Tree]:
        @jax.checkpoint
        def layer(x: jax.Array, w: ExpertWeights) -> tuple[jax.Array, Tree]:
            y, routing = mix_experts(x, w, SPEC, None)
            return x + y, routing.stats

        y, stats = jax.lax.scan(layer, x, stacked)
        return jnp.sum(y**2), stats

    def unrolled(stacked: ExpertWeights) -> jax.Array:
        y = x
        for i in range(2):
            y = y + plain(y, jax.tree.map(lambda w: w[i], stacked), SPEC)  # noqa: B023 (used at once)
        return jnp.sum(y**2)

    stacked = jax.tree.map(lambda *w: jnp.stack(w), *layers)
    grads, stats = jax.jit(jax.grad(scanned, has_aux=True))(stacked)
    assert_near(grads, jax.jit(jax.grad(unrolled))(stacked))
    assert stats["load"].shape == (2, E)
    np.testing.assert_array_equal(stats["load"].sum(-1), 12 * K)


@pytest.mark.parametrize(("sizes", "dense"), [(None, False), (MESHES[1], True)], ids=str)
def test_bfloat16_gives_bfloat16_near_float32_and_routes_in_float32(sizes: dict[str, int] | None, dense: bool) -> None:
    mesh = DeviceMesh.build(**sizes) if sizes else None
    narrow_x, narrow = normal(5, 8, 4, D).astype(jnp.bfloat16), jax.tree.map(lambda a: a.astype(jnp.bfloat16), experts())
    wide_x, wide = narrow_x.astype(jnp.float32), jax.tree.map(lambda a: a.astype(jnp.float32), narrow)
    (y, routing), (wanted, wanted_routing) = run(narrow_x, narrow, mesh, dense=dense), run(wide_x, wide)
    assert y.dtype == jnp.bfloat16
    assert_near(y, wanted, 0.02)
    np.testing.assert_array_equal(routing.experts_BTk, wanted_routing.experts_BTk)
    assert_near(routing.stats, wanted_routing.stats, 1e-6)
    grads = gradients(narrow_x, narrow, mesh=mesh, dense=dense)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    assert_near(grads, gradients(wide_x, wide), 0.03)


def test_more_experts_per_token_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="per_token=9, experts=8"):
        MixtureSpec(experts=8, per_token=9, normalise=True)


# --- against transformers


def parity(test: Any) -> Any:
    marks = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future", "User")]  # torch's own
    for mark in (pytest.mark.parity, *marks):
        test = mark(test)
    return test


def their_block(w: ExpertWeights, spec: MixtureSpec) -> Any:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(
        hidden_size=D,
        moe_intermediate_size=F,
        num_experts=spec.experts,
        num_experts_per_tok=spec.per_token,
        norm_topk_prob=spec.normalise,
    )
    config._experts_implementation = "eager"
    block = modeling.Qwen3MoeSparseMoeBlock(config)
    gate_up = np.concatenate([w.gate_EDF, w.up_EDF], axis=2).transpose(0, 2, 1)
    with torch.no_grad():
        block.gate.weight.copy_(torch.tensor(np.asarray(w.router_DE).T))
        block.experts.gate_up_proj.copy_(torch.tensor(gate_up))
        block.experts.down_proj.copy_(torch.tensor(np.asarray(w.down_EFD).transpose(0, 2, 1)))
    return block


@parity
@FORMS
@pytest.mark.parametrize(("per_token", "normalise"), [(1, True), (1, False), (2, True), (5, False)])
def test_output_and_all_gradients_equal_those_of_transformers(per_token: int, normalise: bool, dense: bool) -> None:
    torch = pytest.importorskip("torch")
    spec, x, w, ct = MixtureSpec(E, per_token, normalise), normal(5, 3, 7, D), experts(), normal(9, 3, 7, D)
    block, theirs_x = their_block(w, spec), torch.tensor(np.asarray(x), requires_grad=True)
    theirs = block(theirs_x)
    (theirs * torch.tensor(np.asarray(ct))).sum().backward()

    assert_near(run(x, w, spec=spec, dense=dense)[0], theirs.detach().numpy())

    def loss(x: jax.Array, w: ExpertWeights) -> jax.Array:
        return jnp.sum(mix_experts(x, w, spec, None, dense=dense)[0] * ct)

    dx, dw = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    gate_up = block.experts.gate_up_proj.grad.numpy().transpose(0, 2, 1)
    assert_near(dx, theirs_x.grad.numpy())
    assert_near(dw.router_DE, block.gate.weight.grad.numpy().T)
    assert_near((dw.gate_EDF, dw.up_EDF), (gate_up[..., :F], gate_up[..., F:]))
    assert_near(dw.down_EFD, block.experts.down_proj.grad.numpy().transpose(0, 2, 1))


@parity
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_balance_loss_and_its_gradient_equal_those_of_transformers(layers: int, padded: bool) -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    x = normal(5, 2, 7, D)
    routers = [normal(20 + i, D, E) for i in range(layers)]
    valid = jnp.asarray(np.arange(7) < np.asarray([[7], [4]])) if padded else None

    def ours(routers: list[jax.Array]) -> jax.Array:
        stats = [mix_experts(x, experts()._replace(router_DE=r), SPEC, None, valid_BT=valid)[1].stats for r in routers]
        return aux_loss(jax.tree.map(lambda *s: sum(s), *stats), SPEC)

    value, grads = jax.jit(jax.value_and_grad(ours))(routers)
    weights = [torch.tensor(np.asarray(r), requires_grad=True) for r in routers]
    logits = tuple(torch.tensor(np.asarray(x)).reshape(-1, D) @ weight for weight in weights)
    mask = torch.tensor(np.asarray(valid, np.int64)) if padded else None
    theirs = modeling.load_balancing_loss_func(logits, E, K, mask)
    theirs.backward()
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-6)
    assert_near(grads, [weight.grad.numpy() for weight in weights])
