"""The whole story with the algorithms that need more than groups: a critic, a reference, corrections, moving baselines."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from test_train import TINY, configured, run, steady_metrics

from jaxagent.checkpoint import Checkpoints
from jaxagent.data.store import Store, audit
from jaxagent.metrics import read

# Saves within the warm-up of 18 steps, at its end, and within reinforcement.
SHORT = (*TINY, "train.steps=4", "checkpoint.every=3", "evaluate.every=0", "evaluate.final_tasks=2")
SAVED = (*range(3, 22, 3), 22)


def trained(workdir: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of the steps of reinforcement."""
    run(configured("evaluate.ablate=False", *overrides, tiny=SHORT), workdir)
    records = read(workdir / "metrics.jsonl")[18:]
    assert len(records) == 4
    known = [value for record in records for value in record.values() if value is not None]
    assert all(math.isfinite(value) for value in known)
    return records


PPO = (
    *("algo.name=ppo_turn", "algo.kl_coef=0.05", "algo.kl=k3_loss"),
    *("critic.lr=0.01", "critic.warmup_steps=1"),
)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("ppo")
    trained(workdir, *PPO)
    return workdir


def test_the_critic_learns_first_and_the_policy_moves_after_its_warm_up(ppo: Path) -> None:
    records = read(ppo / "metrics.jsonl")[18:]
    assert all({"critic/loss", "critic/explained_variance", "critic/grad_norm"} <= record.keys() for record in records)
    assert "policy/tokens" not in records[0]
    assert all(record["policy/tokens"] > 0 and record["policy/update_norm"] > 0 for record in records[1:])
    assert 0 <= records[1]["policy/kl_reference"] < 1e-4 < records[-1]["policy/kl_reference"]  # it leaves the reference
    assert records[0]["critic/value_mean"] == 0.0 or abs(records[0]["critic/value_mean"]) < 0.1


def test_a_checkpoint_holds_critic_and_reference_from_reinforcement_on(ppo: Path) -> None:
    held = {step: {path.name for path in (ppo / "checkpoints" / str(step)).iterdir()} for step in SAVED}
    more = {"critic_params", "critic_opt_state", "reference"}
    assert [more <= held[step] for step in (15, 18, 21, 22)] == [False, False, True, True]
    assert not more & (held[15] | held[18])
    checkpoints = Checkpoints(ppo / "checkpoints", keep=99)
    facts = checkpoints.facts(22)
    checkpoints.close()
    assert (facts["updates"], facts["critic_updates"]) == (6, 8)  # two minibatches a step


@pytest.mark.parametrize("step", [15, 18, 21])
def test_a_run_with_a_critic_resumes_as_if_it_had_never_stopped(ppo: Path, step: int, tmp_path: Path) -> None:
    workdir = tmp_path / "resumed"
    cut(ppo, step, workdir)
    said = run(configured("evaluate.ablate=False", *PPO, tiny=SHORT), workdir)
    assert f"resumed at step {step}" in said
    assert steady_metrics(workdir) == steady_metrics(ppo)
    assert weights(workdir) == weights(ppo)


def cut(whole: Path, step: int, workdir: Path) -> None:
    shutil.copytree(whole, workdir)
    for saved in SAVED:
        if saved > step:
            shutil.rmtree(workdir / "checkpoints" / str(saved))


def weights(workdir: Path) -> list[float]:
    return [record["policy/param_norm"] for record in read(workdir / "metrics.jsonl") if record.get("policy/param_norm")]


def test_a_distance_in_the_reward_and_corrections_of_the_sampler(tmp_path: Path) -> None:
    records = trained(
        tmp_path,
        *("algo.name=reinforce_pp", "algo.kl_coef=0.1"),
        *("train.old_logprob=trainer", "algo.importance=token_masked", "algo.importance_bounds=(0.5,2.0)"),
        *("algo.filter=geometric", "algo.filter_bounds=(0.5,2.0)", "algo.entropy_coef=0.001"),
    )
    assert records[0]["policy/kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert records[-1]["policy/kl_reference"] > 0
    for record in records:
        assert record["off_policy/masked"] == record["off_policy/filtered"] == 0.0  # the sampler is the trainer
        assert record["off_policy/ess"] == pytest.approx(1.0, abs=1e-4)
        assert record["feed/staleness_max"] == 0.0
        assert record["credit/advantage_mean"] == pytest.approx(0.0, abs=1e-5)
    assert max(record["credit/advantage_std"] for record in records) == pytest.approx(1.0, abs=0.05)


def test_moving_baselines_are_carried_over_a_stop(tmp_path: Path) -> None:
    spiral = ("algo.name=spiral", "feed.rollouts=1", "feed.prompts=8")
    trained(tmp_path / "whole", *spiral)
    cut(tmp_path / "whole", 21, tmp_path / "cut")
    run(configured("evaluate.ablate=False", *spiral, tiny=SHORT), tmp_path / "cut")
    assert steady_metrics(tmp_path / "cut") == steady_metrics(tmp_path / "whole")
    checkpoints = Checkpoints(tmp_path / "whole" / "checkpoints", keep=99)
    baselines = checkpoints.facts(22)["baselines"]
    checkpoints.close()
    rewards = [record["reward/mean"] for record in read(tmp_path / "whole" / "metrics.jsonl")[18:]]
    mean = 0.0
    for reward in rewards:
        mean = 0.95**8 * mean + (1 - 0.95**8) * reward
    assert baselines == {"agent": pytest.approx(mean, rel=1e-4)}
    assert mean > 0


def test_continuations_of_turns_are_sampled_stored_and_trained_on(tmp_path: Path) -> None:
    records = trained(tmp_path, "algo.name=anchor_gae", "feed.branches=3")
    assert sum(record["rollout/branches"] for record in records) > 0
    for step, record in enumerate(records, start=1):
        rows = Store(tmp_path / "trajectories").read(f"train-{step:06d}")
        branches = [row for row in rows if row.trunk >= 0]
        assert [audit(row) for row in rows] == [""] * len(rows)
        assert record["rollout/branches"] == len(branches)
        assert record["rollout/branch_tokens"] == sum(sum(row.mask) for row in branches)
        for row in branches:
            trunk = next(t for t in rows if t.rollout == row.trunk and row.group.startswith(f"{t.group}#"))
            shared = row.turns[0].start
            assert row.tokens[:shared] == trunk.tokens[:shared]
            assert not any(row.mask[:shared])
        if record.get("policy/tokens"):  # what the engine sampled behind a stem is what the learner scores
            assert record["policy/sampler_logprob_gap_max"] < 1e-3
