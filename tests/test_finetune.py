"""The short story on a tiny policy: every mode, stopped and gone on, and what must not be learnt from."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from compilations import compiled
from flax import nnx
from ml_collections import ConfigDict
from scripted import ScriptedSampler
from toys import Stairs, climbing

from jaxagent import config as configs
from jaxagent import finetune, train
from jaxagent.__main__ import main as command
from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.checkpoint import Checkpoints
from jaxagent.data.pack import Batch
from jaxagent.data.store import Store, audit
from jaxagent.data.tasks import TaskStream
from jaxagent.feed import Feed, FeedOptions
from jaxagent.metrics import read
from jaxagent.models import hf
from jaxagent.models.transformer import Decoder, params_of
from jaxagent.parts import policy_shape
from jaxagent.progress import Progress
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Group, SampleRequest, Sampling

PLAIN = PlainTemplate()
CONFIGS = Path(__file__).parent.parent / "configs"
SHIPPED = CONFIGS / "dialogues.jsonl"
# Mazes in which a walk at random sometimes arrives, so that rewards differ; two steps of every phase of every round.
MAZE = f"{CONFIGS / 'maze.py'}:runlocal"
WORLD = ("env.options.rooms=6", "env.options.distance=(1,2)", "env.options.demo_moves=5", "agent.max_turns=5")
TINY = (
    *(*WORLD, "agent.max_tokens=80", "model.width=16", "model.layers=1", "model.heads=1", "model.ffn_width=32"),
    *("mesh.cpu_devices=8", "mesh.data=2", "engine.slots=8", "engine.slot_tokens=80", "engine.chunk=80"),
    *("engine.append_rows=4", "learner.batch_rows=4", "warmup.steps=18", "warmup.batch=16", "warmup.demos=300"),
    *("warmup_optimizer.lr=0.02", "warmup_optimizer.warmup_steps=2", "train.steps=8", "feed.prompts=8"),
    *("evaluate.every=4", "checkpoint.every=1", "checkpoint.keep=99", "finetune.batch=4"),
)
MODES = {
    "raft": ("finetune.mode=raft", "finetune.rounds=2"),
    "rest_em": ("finetune.mode=rest_em", "finetune.rounds=2", "finetune.threshold=(0.5,1.0)"),
    "rest_mcts": ("finetune.mode=rest_mcts", "finetune.rounds=2", "critic.lr=0.02"),  # whose first round is that of search
    "dpo": ("finetune.mode=dpo", "finetune.rounds=2"),
}
FIRST, LAST = 18, 26


def configured(*overrides: str, spec: str = MAZE, tiny: tuple[str, ...] = TINY) -> ConfigDict:
    config, faults = configs.load(spec, [*tiny, *overrides])
    assert faults == []
    return config


def run(config: ConfigDict, workdir: Path) -> str:
    said = io.StringIO()
    assert finetune.main(config, workdir, Progress(said)) == 0
    return said.getvalue()


def params(workdir: Path, step: int, folder: str = "checkpoints") -> Any:
    decoder = policy_shape(configs.read(workdir / "config.json"))[1]
    shapes = jax.eval_shape(lambda: params_of(Decoder(decoder, nnx.Rngs(0)))[1])
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpoints = Checkpoints(workdir / folder, keep=99)
    try:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
        return jax.device_get(checkpoints.trees(step, {"params": like})["params"])
    finally:
        checkpoints.close()


def metrics(workdir: Path) -> list[dict[str, Any]]:
    clocked = ("time/", "engine/", "sandbox/", "rollout/tool_latency_s")
    return [{k: v for k, v in record.items() if not k.startswith(clocked)} for record in read(workdir / "metrics.jsonl")]


def same(a: Any, b: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The workdirs of runs that nothing disturbed, one per mode."""
    made: dict[str, Path] = {}

    def get(mode: str) -> Path:
        if mode not in made:
            made[mode] = tmp_path_factory.mktemp(mode)
            run(configured(*MODES[mode]), made[mode])
        return made[mode]

    return get


# ---------------------------------------------------------------------- one run


def test_an_algorithm_with_critic_and_reference_gives_fine_tuning_neither(tmp_path: Path) -> None:
    short = ("warmup.steps=1", "train.steps=1", "feed.prompts=2", "evaluate.every=0", "evaluate.final_tasks=2")
    config = configured("finetune.mode=raft", *short)
    with config.unlocked():  # as in the file of an experiment that fine-tunes first
        config.algo.name, config.algo.kl_coef = "ppo_turn", 0.1
    run(config, tmp_path)
    held = {path.name for path in (tmp_path / "checkpoints" / "2").iterdir()}
    assert "opt_state" in held
    assert not {"critic_params", "critic_opt_state", "reference"} & held


@pytest.mark.parametrize("mode", MODES)
def test_a_run_leaves_its_whole_workdir(whole: Callable[[str], Path], mode: str) -> None:
    workdir = whole(mode)
    records = metrics(workdir)
    assert [record["step"] for record in records] == list(range(1, LAST + 1))
    assert set(json.loads((workdir / "eval.json").read_text())) == {"before", "after", "ablated"}
    assert "maze/test/0" in (workdir / "report.html").read_text()
    labels = ["train-000001", "train-000002", "before", "valid-000004", "after", "ablated"]
    assert Store(workdir / "trajectories").labels() == sorted(labels)
    sampled = [record["step"] for record in records if "select/kept" in record]
    assert sampled == [FIRST + 1, FIRST + 5]
    assert all(record["select/kept"] > 0 for record in records if "select/kept" in record)
    name = "dpo/margin" if mode == "dpo" else "sft/nll"
    assert all(name in record for record in records[FIRST:])
    assert "eval/success" in records[FIRST + 3]


@pytest.mark.parametrize("mode", MODES)
def test_every_round_is_sampled_from_the_weights_that_the_round_before_left(whole: Callable[[str], Path], mode: str) -> None:
    store = Store(whole(mode) / "trajectories")
    for label, version in (("train-000001", 0), ("train-000002", 4), ("after", 8)):
        rows = store.read(label)
        assert {v for row in rows for v, own in zip(row.version, row.mask, strict=True) if own} == {version}


def test_a_margin_is_zero_at_the_start_policy_and_grows(whole: Callable[[str], Path]) -> None:
    records = metrics(whole("dpo"))[FIRST:]
    assert records[0]["dpo/margin"] == pytest.approx(0.0, abs=1e-4)
    assert records[3]["dpo/margin"] > records[0]["dpo/margin"]
    assert records[0]["dpo/loss"] == pytest.approx(np.log(2), abs=1e-4)


def test_a_search_leaves_whole_trajectories_and_the_values_of_their_turns(whole: Callable[[str], Path]) -> None:
    for label in ("train-000001", "train-000002"):
        rows = {f"{row.group}#{row.rollout}": row for row in Store(whole("rest_mcts") / "trajectories").read(label)}
        assert [audit(row) for row in rows.values()] == [""] * len(rows)
        lines = (whole("rest_mcts") / "labels" / f"{label}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert {record["trajectory"] for record in records} <= rows.keys()
        assert any(record["q"] > 0 for record in records)
        assert any(record["visits"] > 1 for record in records)
        for record in records:
            row = rows[record["trajectory"]]
            turn = row.turns[record["turn"]]
            assert (record["start"], record["tokens"]) == (turn.start, row.tokens[: turn.end])
            assert 0 <= record["q"] <= 1


def test_what_searches_say_of_turns_teaches_who_guides_the_next(whole: Callable[[str], Path]) -> None:
    records = metrics(whole("rest_mcts"))[FIRST:]
    assert all(record["critic/tokens"] > 0 for record in records)
    assert records[0]["critic/value_mean"] == pytest.approx(0.5)  # its word before it has learnt anything
    assert records[0]["critic/loss"] == pytest.approx(np.log(2))
    assert all(record["critic/value_mean"] != 0.5 for record in records[1:])
    held = {path.name for path in (whole("rest_mcts") / "checkpoints" / str(LAST)).iterdir()}
    assert {"critic_params", "critic_opt_state"} <= held


def test_a_search_is_guided_from_the_second_round_on_by_what_the_second_learner_says(tmp_path: Path) -> None:
    """Of the same tasks under the same draws, the search finds something else as soon as it is told what states are worth."""
    asked: list[int] = []

    def score(batch: Batch) -> np.ndarray:
        """Log-odds that rise with every move up and fall with every move down."""
        asked.append(batch.tokens.size)
        moved = (batch.tokens == ord("U")).astype(float) - (batch.tokens == ord("D"))
        return np.cumsum(moved, axis=1)

    def found(search: Callable[[Feed], list[Group]]) -> list[list[list[int]]]:
        def write(text: str, request: SampleRequest) -> Any:
            luck = random.Random(f"{request.key}/{request.start + len(request.tokens)}")
            return PLAIN.turn(climbing(luck.choice("UUD"))[0])

        world = Stairs(99)  # nobody arrives, so nothing else tells states apart
        agent = Agent(PLAIN, world.tools, ScriptedSampler(PLAIN, write), Limits(6, 100))
        rollouts = Rollouts(world, agent, lambda: None, seed=0, options=RolloutOptions())
        try:
            feed = Feed(world, TaskStream(99, 0), rollouts, Sampling(max_tokens=4), FeedOptions(prompts=3, rollouts=12))
            return [[row.tokens for row in group.trajectories] for group in search(feed)]
        finally:
            rollouts.close()

    def of_round(feed: Feed, round_: int) -> list[Group]:
        critic = SimpleNamespace(score=score, options=SimpleNamespace(batch_rows=4, row_tokens=128))
        parts, shaping = SimpleNamespace(critic=critic), SimpleNamespace(active=False)
        config = configured(*MODES["rest_mcts"])
        return finetune.sampled(
            SimpleNamespace(config=config, parts=parts, shaping=shaping, feed=feed, workdir=tmp_path, stopping=False), round_
        )

    unguided = found(lambda feed: feed.search()[0])
    assert found(lambda feed: of_round(feed, 0)) == unguided
    assert asked == []
    assert found(lambda feed: of_round(feed, 1)) != unguided
    assert len(asked) >= 12
    assert {path.name for path in (tmp_path / "labels").iterdir()} == {"train-000001.jsonl", "train-000002.jsonl"}


def test_only_rest_em_goes_back_to_the_start_policy(whole: Callable[[str], Path]) -> None:
    """The first step of the second round of the same rollouts would give the same weights as from the start policy."""
    workdir = whole("rest_em")
    start = params(workdir, 0, "start")
    assert same(start, params(workdir, FIRST))

    def distance(step: int, of: Path = workdir) -> float:
        moved = jax.tree.map(lambda a, b: float(np.square(a - b).sum()), params(of, step), start)
        return sum(jax.tree.leaves(moved))

    assert distance(FIRST + 5) < distance(FIRST + 4)
    assert not (whole("raft") / "start").exists()


def test_the_export_of_a_run_is_its_policy(whole: Callable[[str], Path], tmp_path: Path) -> None:
    assert command(["export", f"--workdir={whole('raft')}", f"--to={tmp_path}"]) == 0
    assert same(jax.device_get(params_of(hf.load(tmp_path))[1]), params(whole("raft"), LAST))


# ---------------------------------------------------------------------- stopped and gone on


@pytest.mark.parametrize(("mode", "step"), [("raft", 20), ("rest_em", 22), ("rest_mcts", 23), ("dpo", 21)])
def test_a_run_resumed_from_any_save_equals_the_one_that_was_never_stopped(
    whole: Callable[[str], Path], tmp_path: Path, mode: str, step: int
) -> None:
    """At the end of the warm-up, inside a round and between two; what came later was written only in part."""
    shutil.copytree(whole(mode), tmp_path / "resumed")
    (tmp_path / "resumed" / "eval.json").unlink()
    for saved in (tmp_path / "resumed" / "checkpoints").iterdir():
        if int(saved.name) > step:
            shutil.rmtree(saved)
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "torn')
    assert f"resumed at step {step}" in run(configured(*MODES[mode]), tmp_path / "resumed")
    assert same(params(tmp_path / "resumed", LAST), params(whole(mode), LAST))
    assert metrics(tmp_path / "resumed") == metrics(whole(mode))
    assert (tmp_path / "resumed" / "eval.json").read_text() == (whole(mode) / "eval.json").read_text()


# ---------------------------------------------------------------------- from files

SFT = f"{CONFIGS / 'sft.py'}:runlocal"
QUICK = (
    "mesh.data=2",
    "model.width=16",
    "model.heads=1",
    "evaluate.every=0",
    "evaluate.ablate=False",
    "evaluate.final_tasks=2",
)
OFFLINE = tuple(o for o in TINY if not o.startswith(("feed.", "train.", "evaluate.every")))


def test_imitation_of_a_file_goes_on_after_a_kill_as_if_nothing_was(whole: Callable[[str], Path], tmp_path: Path) -> None:
    path = whole("raft") / "trajectories"
    overrides = ("finetune.mode=sft", f"finetune.path={path}", "train.steps=4", "evaluate.every=0", "evaluate.ablate=False")
    config = configured(*overrides, tiny=OFFLINE)
    run(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for step in (FIRST + 3, FIRST + 4):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / str(step))
    assert f"resumed at step {FIRST + 2}" in run(config, tmp_path / "resumed")
    assert same(params(tmp_path / "resumed", FIRST + 4), params(tmp_path / "whole", FIRST + 4))
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")


@pytest.mark.parametrize("mode", ["raft", "dpo"])
def test_what_a_run_has_stored_is_learnt_from_by_another(whole: Callable[[str], Path], tmp_path: Path, mode: str) -> None:
    """The trajectories of a first round, given as a file, are the same lesson as in the run that sampled them."""
    path = whole("raft") / "trajectories" / "train-000001.jsonl"
    overrides = (f"finetune.mode={mode}", f"finetune.path={path}", "train.steps=4", "evaluate.every=0", "evaluate.ablate=False")
    run(configured(*overrides, tiny=OFFLINE), tmp_path)
    assert Store(tmp_path / "trajectories").labels() == ["after", "before"]
    if mode == "raft":  # the schedule of eight steps is another than that of four: the first step's gradient is the same
        got, want = metrics(tmp_path)[FIRST], metrics(whole("raft"))[FIRST]
        assert got["sft/nll"] == want["sft/nll"]
        assert got["sft/grad_norm"] == want["sft/grad_norm"]
    assert len(metrics(tmp_path)) == FIRST + 4


@pytest.mark.parametrize("name", ["sft", "raft", "dpo"])
def test_every_config_runs_with_runlocal(name: str, tmp_path: Path) -> None:
    run(configured("mesh.data=2", spec=f"{CONFIGS / name}.py:runlocal", tiny=()), tmp_path)
    assert {"before", "after"} <= json.loads((tmp_path / "eval.json").read_text()).keys()


# ---------------------------------------------------------------------- what must not be learnt from


@pytest.mark.parametrize("mode", ["raft", "dpo"])
def test_groups_that_never_succeed_teach_nothing(mode: str, tmp_path: Path) -> None:
    """A policy of random weights never gives a right answer: p = 0, and not a bit of it changes."""
    run(
        configured(*QUICK, f"finetune.mode={mode}", "warmup.steps=0", spec=f"{CONFIGS / 'raft.py'}:runlocal", tiny=()),
        tmp_path,
    )
    records = metrics(tmp_path)
    assert [record["reward/success"] for record in records if "select/kept" in record] == [0.0, 0.0]
    assert [record["select/kept"] for record in records if "select/kept" in record] == [0.0, 0.0]
    decoder = policy_shape(configs.read(tmp_path / "config.json"))[1]
    assert same(params(tmp_path, 4), jax.device_get(params_of(Decoder(decoder, nnx.Rngs(0)))[1]))


# ---------------------------------------------------------------------- bad input, before anything is compiled


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def tune_with(*overrides: str, spec: str = SFT, verb: str = "finetune") -> str:
        compiled.clear()
        arguments = [f"--config.{override}" for override in overrides]
        assert command([verb, f"--config={spec}", f"--workdir={tmp_path / 'run'}", *arguments]) == 2
        assert compiled == []
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return tune_with


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "line 2: not JSON"),
        ('{"messages": [{"role": "user", "content": "1"}]}', "line 2: the last message of messages must be the assistant's"),
        (
            json.dumps({"messages": [{"role": "user", "content": "x" * 99}, {"role": "assistant", "content": "1"}]}),
            "line 2: 103 tokens do not fit a training row of learner.row_tokens=80",
        ),
    ],
)
def test_a_bad_line_is_told(refused: Callable[..., str], tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "dialogues.jsonl"
    path.write_text(SHIPPED.read_text().partition("\n")[0] + f"\n{line}\n")
    assert f"{path}, {said}" in refused(f"finetune.path={path}")


def test_files_that_cannot_be_chosen_from_are_told(refused: Callable[..., str], whole: Callable[[str], Path]) -> None:
    assert "nowhere.jsonl: no such file" in refused("finetune.path=nowhere.jsonl")
    assert "chooses by reward, which dialogues have not" in refused("finetune.mode=raft")
    assert "line 1: 'chosen' is wanted" in refused("finetune.mode=dpo")
    path = whole("raft") / "trajectories" / "train-000001.jsonl"
    world = ("env.name=maze", "env.options=", "learner.row_tokens=80")[::2]
    said = refused(f"finetune.path={path}", "finetune.mode=raft", "finetune.threshold=(7.0,)", *world[1:])
    assert "none of its 32 trajectories reaches finetune.threshold=(7.0,)" in said


def test_a_config_belongs_to_its_story(refused: Callable[..., str]) -> None:
    assert "finetune.mode=sft: this config is for jaxagent finetune, not train" in refused(verb="train")
    assert "finetune.mode is empty: this config is for jaxagent train" in refused(spec=MAZE)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("finetune.mode=sftt",), "finetune.mode must be one of sft, raft, rest_em, search, rest_mcts, dpo"),
        (("finetune.mode=raft", "finetune.path=", "train.steps=7", "finetune.rounds=2"), "must be a multiple of"),
        (("algo.name=rloo",), "algo.name=rloo does nothing: finetune.mode=sft has no policy gradient"),
        (("train.minibatches=2",), "train.minibatches=2 does nothing"),
        (("feed.rollouts=16",), "feed.rollouts=16 does nothing: finetune.path gives what is learnt from"),
        (("finetune.beta=0.2",), "finetune.beta=0.2 does nothing: only finetune.mode=dpo has it"),
        (("finetune.threshold=(0.5,)",), "does nothing: finetune.mode=sft chooses by no threshold"),
    ],
)
def test_a_key_that_cannot_work_is_told(refused: Callable[..., str], overrides: tuple[str, ...], said: str) -> None:
    assert said in refused(*overrides)


def test_an_alarm_that_is_asked_to_stops_the_run_saved_and_with_its_reason(tmp_path: Path) -> None:
    said = io.StringIO()
    config = configured(*MODES["raft"], "alarms.stop=entropy", "alarms.limits.entropy=50.0", "checkpoint.every=99")
    with pytest.raises(train.Alarmed, match=r"stopped by the alarm entropy \(alarms.stop\): at step 5/8 the entropy fell from"):
        finetune.main(config, tmp_path, Progress(said))
    assert "alarm, entropy: at step 5/8 the entropy fell" in said.getvalue()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["23"]
