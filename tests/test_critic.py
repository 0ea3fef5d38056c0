"""The critic: it starts from its policy, learns what it is told, and neither moves the other."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx

from jaxagent.algos.table import TABLE
from jaxagent.critic import CriticOptions, begin_again, critic_of
from jaxagent.data.pack import Batch, Row, pack, unpack
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.models.attention import packed
from jaxagent.models.lora import LoraSpec
from jaxagent.models.transformer import Decoder, params_of
from jaxagent.objective import ProcessObjective

OPTIONS = LearnerOptions(batch_rows=8, row_tokens=16, head_chunk=64)
PLAIN = OptimizerOptions(lr=2e-2, lr_final=2e-2, warmup_steps=0, b1=0.0, clip_norm=1e9)
UNTIED = tiny.config(tied_head=False)


def policy_of(config=UNTIED, mesh: tuple[int, ...] = (1, 1, 1), **options) -> Learner:
    made = Learner(config, tiny.params(config), tiny.mesh(*mesh), TABLE["ppo"], replace(OPTIONS, **options))
    made.begin(PLAIN, 9)
    return made


def rows(count: int = 5) -> list[Row]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        n = int(rng.integers(4, 12))
        mask = [False, *[True] * (n - 1)]
        judged = [False, *(rng.random(n - 2) < 0.5).tolist(), True]
        tokens, target = rng.integers(0, 40, n).tolist(), rng.normal(size=n).tolist()
        ones = [1.0] * n
        made.append(Row(tokens, mask, [-3.0] * n, ones, ones, ones, value=[0.0] * n, target=target, judged=judged))
    return made


def packs(given: list[Row]) -> list[Batch]:
    return pack(given, batch_rows=8, row_tokens=16)


@pytest.fixture(scope="module")
def policy() -> Learner:
    return policy_of()


@pytest.fixture(scope="module")
def critic(policy: Learner) -> Learner:
    made = critic_of(policy)
    made.begin(PLAIN, 9)
    return made


@pytest.fixture(autouse=True)
def as_at_first(request: pytest.FixtureRequest) -> None:
    for name in {"policy", "critic"} & set(request.fixturenames):
        learner: Learner = request.getfixturevalue(name)
        if name == "policy":
            learner.trained = jax.device_put(tiny.params(UNTIED))
    if "critic" in request.fixturenames:
        begin_again(request.getfixturevalue("critic"), request.getfixturevalue("policy"))


def test_a_critic_starts_as_its_policy_with_a_head_of_zeros(policy: Learner, critic: Learner) -> None:
    (batch,) = packs(rows())
    assert not critic.score(batch).any()
    theirs = {name: w for name, w in policy.trained.items() if name != "head"}
    jax.tree.map(np.testing.assert_array_equal, {n: w for n, w in critic.trained.items() if n != "value"}, theirs)
    assert critic.trained["value"].shape == (UNTIED.width,)


def test_a_value_is_of_the_state_in_which_the_token_is_chosen(policy: Learner, critic: Learner) -> None:
    critic.trained = {**critic.trained, "value": jnp.asarray(np.random.default_rng(1).normal(size=UNTIED.width), jnp.float32)}
    given = rows()
    values = unpack(given, [critic.score(batch) for batch in packs(given)], batch_rows=8, row_tokens=16)
    decoder: Decoder = nnx.merge(params_of(tiny.policy(UNTIED))[0], tiny.params(UNTIED))
    row = given[0]
    tokens = jnp.asarray([row.tokens])
    attend = packed(jnp.ones_like(tokens), UNTIED.attention)
    hidden = decoder.hidden(tokens, jnp.arange(tokens.shape[1])[None], attend)[0][0]
    np.testing.assert_allclose(values[0][1:], np.asarray(hidden @ critic.trained["value"])[:-1], rtol=1e-4, atol=1e-4)


def test_a_process_reward_model_speaks_of_what_has_been_read(policy: Learner) -> None:
    model = critic_of(policy, ProcessObjective(TABLE["agent_prm"]))
    model.trained = {**model.trained, "value": jnp.asarray(np.random.default_rng(1).normal(size=UNTIED.width), jnp.float32)}
    given = rows()
    values = unpack(given, [model.score(batch) for batch in packs(given)], batch_rows=8, row_tokens=16)
    decoder: Decoder = nnx.merge(params_of(tiny.policy(UNTIED))[0], tiny.params(UNTIED))
    tokens = jnp.asarray([given[0].tokens])
    attend = packed(jnp.ones_like(tokens), UNTIED.attention)
    hidden = decoder.hidden(tokens, jnp.arange(tokens.shape[1])[None], attend)[0][0]
    np.testing.assert_allclose(values[0], np.asarray(hidden @ model.trained["value"]), rtol=1e-4, atol=1e-4)


def test_the_gradient_is_that_of_the_mean_squared_error_at_the_judged_places(policy: Learner, critic: Learner) -> None:
    given = rows()
    critic.trained = {**critic.trained, "value": jnp.full(UNTIED.width, 0.1)}
    batches = packs(given)
    values = unpack(given, [critic.score(b) for b in batches], batch_rows=8, row_tokens=16)
    for batch in batches:
        batch.value = critic.score(batch)  # V is V_old: no clip
        critic.accumulate(batch)
    # with tied weights of the head only: d loss / d head = mean of (V - R) h
    acc = jax.device_get(critic._acc)
    judged = [np.asarray(row.judged) for row in given]
    errors = np.concatenate([v[j] - np.asarray(row.target)[j] for v, j, row in zip(values, judged, given, strict=True)])
    assert acc["sums"]["loss"] == pytest.approx((errors**2).sum() / 2, rel=1e-4)
    metrics = critic.apply()
    assert metrics["critic/loss"] == pytest.approx((errors**2).mean() / 2, rel=1e-4)
    assert metrics["critic/tokens"] == len(errors)
    assert metrics["critic/grad_norm"] > 0


def test_a_critic_learns_its_targets_and_its_policy_does_not_move(policy: Learner, critic: Learner) -> None:
    before, batches = jax.device_get(policy.trained), packs(rows())
    critic.begin(OptimizerOptions(lr=2e-2, lr_final=2e-2, warmup_steps=0), 60)
    told = []
    for _ in range(60):
        for batch in batches:
            batch.value = critic.score(batch)
            critic.accumulate(batch)
        told.append(critic.apply())
    assert told[0]["critic/explained_variance"] < 0.1
    assert told[-1]["critic/explained_variance"] > 0.8
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(policy.trained), before)


def test_an_update_of_the_policy_leaves_its_critic_as_it_is(policy: Learner, critic: Learner) -> None:
    before = jax.device_get(critic.trained)
    for batch in packs(rows()):
        policy.accumulate(batch)
    assert policy.apply()["policy/update_norm"] > 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(critic.trained), before)
    begin_again(critic, policy)
    np.testing.assert_array_equal(critic.trained["norm"], policy.trained["norm"])
    assert np.abs(np.asarray(critic.trained["norm"]) - before["norm"]).max() > 0


def test_over_adapters_a_critic_costs_its_adapters_and_a_head() -> None:
    config = replace(UNTIED, lora=LoraSpec(2, 4.0, ("q", "v")))
    policy = policy_of(config, freeze="blocks.v_lora_a")
    critic = critic_of(policy)
    assert set(critic.trained) == {"blocks", "value"}
    assert set(critic.trained["blocks"]) == {"q_lora_a", "q_lora_b", "v_lora_b"}
    assert "head" not in critic.frozen
    for name in ("embed", "norm"):
        assert critic.frozen[name].unsafe_buffer_pointer() == policy.frozen[name].unsafe_buffer_pointer()
    assert critic.trained["blocks"]["q_lora_a"].unsafe_buffer_pointer() not in {
        w.unsafe_buffer_pointer() for w in jax.tree.leaves(policy.trained)
    }


@pytest.mark.parametrize("patterns", [{"freeze": "head"}, {"train_only": "head,norm"}])
def test_patterns_that_name_the_policys_head_say_nothing_of_the_critics(patterns: dict[str, str]) -> None:
    critic = critic_of(policy_of(**patterns))
    assert "value" in critic.trained
    assert "head" not in {**critic.trained, **critic.frozen}


def test_eight_devices_give_the_update_of_one() -> None:
    found = []
    for mesh in ((1, 1, 1), (2, 2, 2)):
        critic = critic_of(policy_of(mesh=mesh))
        critic.trained = {**critic.trained, "value": jnp.full(UNTIED.width, 0.1, device=critic.trained["value"].sharding)}
        critic.begin(PLAIN, 3)
        for batch in packs(rows()):
            critic.accumulate(batch)
        metrics = critic.apply()
        found.append((jax.device_get(optax.tree.get(critic.opt_state, "mu")), metrics))
    (one, metrics), (eight, again) = found
    assert again == pytest.approx(metrics, rel=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-3), eight, one)


def test_the_rate_of_a_critic_falls_with_its_policys() -> None:
    optimizer = CriticOptions(lr=1e-2).optimizer(OptimizerOptions(lr=1e-3, lr_final=1e-4, b2=0.9))
    assert (optimizer.lr, optimizer.lr_final, optimizer.b2) == (1e-2, pytest.approx(1e-3), 0.9)


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"warmup_steps": -1}])
def test_options_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"critic\.{next(iter(options))} must be"):
        CriticOptions(**options)  # type: ignore[arg-type]
