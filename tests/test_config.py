"""A config cannot lie: faults are found before anything is compiled, and all of them are told at once."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent.config import ConfigError, differences, leaves, load, nearest, parse, read, save
from jaxagent.parts import faults

CONFIGS = Path(__file__).parents[1] / "configs"
BASE = str(CONFIGS / "base.py")
# What a fault says that is of this machine.
MISSING = ("jaxagent env install", "needs the program", "needs the package", "pip install 'jaxagent[")


def faults_with(*overrides: str, spec: str = BASE) -> list[str]:
    config, found = load(spec, overrides)
    return [*found, *faults(config)]


def value(override: str, spec: str = BASE) -> Any:
    config, found = load(spec, [override])
    assert found == []
    return leaves(config)[override.partition("=")[0]]


# ====================================================================== the files


@pytest.mark.parametrize("arg", ["", ":runlocal"])
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_of_ours_loads_without_a_fault(path: Path, arg: str) -> None:
    found = faults_with(spec=f"{path}{arg}")
    if [fault for fault in found if any(words in fault for words in MISSING)] == found != []:
        pytest.skip(found[0])
    assert found == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_a_config_of_ours_holds_every_key_of_base(path: Path) -> None:
    assert leaves(load(BASE)[0]).keys() <= leaves(load(str(path))[0]).keys()


def test_every_key_and_section_of_base_says_what_it_is() -> None:
    """On its line or on the one above: base.py is the only list of options."""
    lines = Path(BASE).read_text().splitlines()
    said = {}
    for above, line in itertools.pairwise(lines):
        if found := re.match(r" {4}c\.([\w.]+) = ", line):
            said[found[1]] = "  # " in line or above.strip().startswith("# ")
    config = load(BASE)[0]
    assert said.keys() >= leaves(config).keys() | {name for name in config if isinstance(config[name], ConfigDict)}
    assert [name for name, has in said.items() if not has] == []


def test_a_config_that_is_no_file_is_told_by_its_path() -> None:
    with pytest.raises(ConfigError, match=r"got 'configs/nothing\.py': no such file"):
        load("configs/nothing.py:runlocal")


def test_a_config_without_its_function_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("c = 3\n")
    with pytest.raises(ConfigError, match=r"empty\.py has no function get_config\(arg\)"):
        load(str(tmp_path / "empty.py"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("def get_config(arg='') return 3\n", r"mine\.py, line 1: SyntaxError: expected ':'"),
        ("\nimport no_such_package\n", r"mine\.py, line 2: ModuleNotFoundError: No module named 'no_such_package'"),
        ("import base\n", r"mine\.py, line 1: .* 'base'; an experiment stands beside configs/base\.py"),
        ("def get_config(arg):\n    return c\n", r"mine\.py, line 2: NameError: name 'c' is not defined"),
        ("def get_config():\n    return 3\n", r"mine\.py: TypeError: get_config\(\) takes 0 positional arguments"),
        ("def get_config(arg):\n    return 3\n", r"mine\.py: get_config\(arg\) must return a ConfigDict, got int"),
    ],
)
def test_what_is_wrong_in_a_config_file_is_told_with_its_line(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=fault):
        load(str(tmp_path / "mine.py"))


def test_a_fault_of_a_file_that_the_config_imports_is_told_with_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text("def base():\n    return {}['width']\n")
    (tmp_path / "mine.py").write_text("from shared import base\n\n\ndef get_config(arg):\n    return base()\n")
    with pytest.raises(ConfigError, match=r"shared\.py, line 2: KeyError: 'width'"):
        load(str(tmp_path / "mine.py"))


def experiment(folder: Path, *lines: str) -> str:
    """A config file beside a copy of base.py."""
    (folder / "base.py").write_text((CONFIGS / "base.py").read_text())
    body = "".join(f"    {line}\n" for line in lines)
    (folder / "mine.py").write_text(
        f"from base import get_config as base\n\ndef get_config(arg):\n    c = base()\n{body}    return c\n"
    )
    return str(folder / "mine.py")


def test_a_key_that_base_does_not_have_is_a_fault_with_the_nearest_one(tmp_path: Path) -> None:
    found = load(experiment(tmp_path, "c.algo.clip_hihg = 0.3", "c.trian = 1"))[1]
    assert found[0] == "unknown key 'algo.clip_hihg'; did you mean 'algo.clip_high'?"
    assert found[1].startswith("unknown key 'trian'")


def test_all_keys_that_are_missing_are_told_at_once_and_before_any_rule_reads_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        load(experiment(tmp_path, "del c.algo.select", "del c.sandbox", "c.train.stepps = 3"), ["seed=x"])
    text = str(told.value)
    assert "missing key 'algo.select'; start from configs/base.py" in text
    assert "missing key 'sandbox.url'" in text
    assert "unknown key 'train.stepps'; did you mean 'train.steps'?" in text
    assert "seed wants int, got 'x'" in text


def test_two_folders_with_a_base_of_their_own_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = ModuleType("base")
    monkeypatch.setitem(sys.modules, "base", stranger)
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        spec = experiment(folder, "c.agent.max_turns += 1")
        text = (folder / "base.py").read_text()
        (folder / "base.py").write_text(text.replace("max_turns = 8", f"max_turns = {len(name) * 10 + ord(name[0])}"))
        assert load(spec)[0].agent.max_turns == len(name) * 10 + ord(name[0]) + 1
    assert sys.modules["base"] is stranger
    assert str(tmp_path / "one") not in sys.path


# ====================================================================== overrides


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("seed=3", 3),
        ("optimizer.lr=1", 1.0),
        ("optimizer.lr=3e-4", 3e-4),
        ("learner.remat=full", "full"),
        ("evaluate.ablate=True", True),
        ("evaluate.ablate=false", False),
        ("algo.name=dr_grpo", "dr_grpo"),
        ("algo.aggregate=token_mean", "token_mean"),
        ("algo.clip_high=1", 1.0),
        ("algo.clip_high=None", None),
        ("engine.append_tokens=(4,)", (4,)),
        ("engine.append_tokens=[8, 16]", (8, 16)),
        ("env.options.hops=(1,2)", (1, 2)),
        ("env.options.tools=AB", "AB"),
        ("init_from=runs/a=b", "runs/a=b"),
    ],
)
def test_an_override_takes_the_type_of_its_key(override: str, wanted: Any) -> None:
    found = value(override)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("seed=1.5", "seed wants int, got '1.5'"),
        ("seed=True", "seed wants int, got 'True'"),
        ("seed=None", "seed wants int, got 'None'"),
        ("optimizer.lr=small", "optimizer.lr wants float, got 'small'"),
        ("optimizer.lr=false", "optimizer.lr wants float, got 'false'"),
        ("evaluate.ablate=1", "evaluate.ablate wants bool, got '1'"),
        ("algo.clip_high=wide", "algo.clip_high wants float, got 'wide'"),
        ("lora.rank=eight", "lora.rank wants int, got 'eight'"),
        ("engine.append_tokens=8", "engine.append_tokens wants tuple, got '8'"),
        ("engine.append_tokens=4,8", "engine.append_tokens wants tuple, got '4,8'"),
        ("seed", "'seed': write key.path=value"),
    ],
)
def test_an_override_of_the_wrong_type_says_what_was_wanted_and_what_came(override: str, fault: str) -> None:
    assert load(BASE, [override])[1] == [fault]


def test_an_unknown_override_names_the_nearest_key() -> None:
    found = load(BASE, ["algo.nmae=grpo", "warmup.step=3", "env=chain"])[1]
    assert found[0] == "unknown key 'algo.nmae'; did you mean 'algo.name'?"
    assert found[1] == "unknown key 'warmup.step'; did you mean 'warmup.steps'?"
    assert found[2].startswith("unknown key 'env'")


@given(st.text())
@drawn
def test_reading_a_value_never_raises_and_leaves_text_where_text_is_wanted(text: str) -> None:
    assert parse(text, "old") == text
    for old in (1, 1.0, True, (1,), None):
        parse(text, old)


def test_a_word_that_is_near_nothing_shows_what_there_is() -> None:
    assert nearest("zzz", ["grpo", "rloo"]) == "; known are grpo, rloo"
    assert nearest("zzz", [f"key{i}" for i in range(13)]) == ""


# ====================================================================== faults


def test_all_faults_of_all_sections_are_told_at_once() -> None:
    told = "\n".join(
        faults_with(
            "algo.nmae=grpo",
            "seed=x",
            "agent.max_tokens=9000",
            "sampling.temperature=0",
            "sampling.top_k=5",
            "feed.rollouts=1",
            "feed.max_staleness=-1",
            "algo.select=some",
            "algo.length=5",
            "env.options.flaky=1",
            "env.options.hopps=(1,)",
            "train.old_logprob=guess",
            "train.minibatches=17",
            "rollout.concurrency=0",
            "agent.max_turns=0",
            "sandbox.code=maybe",
            "sandbox.url=http://127.0.0.1:1",
        )
    )
    for fault in (
        "unknown key 'algo.nmae'",
        "seed wants int",
        "agent.max_tokens=9000 does not fit engine.slot_tokens=1024",
        "agent.max_tokens=9000 does not fit learner.row_tokens=1024",
        "sampling.temperature must be positive",
        "sampling.top_k and sampling.top_p must be off",
        "algo.select must be all or mixed; got 'some'",
        "algo.length=5.0 does nothing",
        "unknown key 'env.options.hopps'; did you mean 'hops'?",
        "train.old_logprob must be sampler or trainer, got 'guess'",
        "train.minibatches must be 1 to feed.prompts=16, got 17",
        "rollout.concurrency must be at least 1, got 0",
        "agent.max_turns must be at least 1, got 0",
        "sandbox.code must be auto, require or off, got 'maybe'",
        "sandbox.url needs sandbox.token_file",
    ):
        assert fault in told
    assert "feed.max_staleness must be at least 0" in told or "feed.rollouts must be at least 2" in told


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("agent.max_turns=0", "agent.max_turns must be at least 1, got 0"),
        ("rollout.attempts=0", "rollout.attempts must be at least 1, got 0"),
        ("rollout.concurrency=0", "rollout.concurrency must be at least 1, got 0"),
        ("rollout.deadline_s=0", "rollout.deadline_s must be positive, got 0.0"),
        ("feed.prompts=0", "feed.prompts must be at least 1, got 0"),
        ("lora.rank=-1", "lora.rank must be at least 0, which is off, got -1"),
        ("lora.alpha=0", "lora.alpha must be positive, got 0.0"),
        ("lora.targets=w_proj", "'w_proj' matches no linear map; there are q (self_attn.q_proj)"),
        ("learner.frozen_dtype=int8", "learner.frozen_dtype must be one of float32, bfloat16, got 'int8'"),
        ("feed.rollouts=1", "feed.rollouts must be at least 2"),
        ("feed.max_staleness=-1", "feed.max_staleness must be at least 0, got -1"),
        ("algo.name=ppo2", "algo.name must be one of reinforce, rloo, grpo"),
        ("algo.clip_low=-1", "algo.clip_low must not be negative, got -1.0"),
        ("critic.lr=0", "critic.lr must be positive, got 0.0"),
        ("critic.warmup_steps=-1", "critic.warmup_steps must be at least 0, got -1"),
        ("env.options.flaky=1", r"env.options.flaky must be in [0, 1), got 1"),
        ("env.name=chian", "env.name must be a file of jaxagent/envs or a dotted module; got 'chian'; did you mean 'chain'?"),
        ("env.name=no_such_package.world", "got 'no_such_package.world'; nothing of that name is installed or in a folder of"),
        ("env.name=env", "module jaxagent.envs.env has no `make_world`"),
        ("sampling.max_tokens=1024", "sampling.max_tokens=1024 (per turn) must be below agent.max_tokens=1024"),
    ],
)
def test_a_value_that_a_component_refuses_is_a_fault_in_its_words(override: str, fault: str) -> None:
    assert any(fault in told for told in faults_with(override))


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("127.0.0.1:1", "sandbox.url must be URLs, by commas, or one fleet file (*.toml), got '127.0.0.1:1'"),
        ("http://a,ftp://b", "sandbox.url must be URLs, by commas, or one fleet file (*.toml), got 'ftp://b'"),
        ("http://a,http://b,http://a/", "sandbox.url must name each server once"),
        ("a.toml,http://b", "sandbox.url must be one fleet file or the URLs of servers, got 'a.toml,http://b'"),
    ],
)
def test_a_sandbox_url_that_cannot_be_is_a_fault(url: str, fault: str) -> None:
    assert any(fault in told for told in faults_with(f"sandbox.url={url}", "sandbox.token_file=token"))


def test_a_sandbox_url_may_name_several_servers_or_a_fleet_file_that_has_the_token() -> None:
    assert faults_with("sandbox.url=http://a, https://b:1/", "sandbox.token_file=token") == []
    assert faults_with("sandbox.url=launch/fleets/sandbox-server.toml") == []
    (fault,) = faults_with("sandbox.url=launch/fleets/sandbox-server.toml", "sandbox.token_file=token")
    assert "the fleet file names its servers' token" in fault


@pytest.mark.parametrize(
    ("override", "spec", "why"),
    [
        ("warmup.demos=5", BASE, "warmup.steps is 0"),
        ("warmup_optimizer.lr=0.1", BASE, "warmup.steps is 0"),
        ("feed.max_rounds=5", BASE, "the algorithm keeps all groups"),
        ("feed.branches=5", BASE, "the algorithm knows no continuations of turns"),
        ("algo.length=50", BASE, "only the aggregation sequence_sum_norm divides by it"),
        ("algo.gamma=0.9", BASE, "returns of whole rollouts are not discounted"),
        ("algo.gae_lambda=0.9", BASE, "grpo has no critic"),
        ("algo.kl=k2_loss", BASE, "algo.kl_coef is 0"),
        ("algo.importance_bounds=(0,3)", BASE, "algo.importance=none has no bounds"),
        ("algo.filter_bounds=(0,3)", BASE, "algo.filter is none"),
        ("engine.recompute=true", BASE, "feed.max_staleness is 0: nothing is in flight when weights are published"),
        ("critic.lr=0.1", BASE, "grpo has no critic"),
        ("sandbox.token_file=token", BASE, "the embedded server makes its own token"),
        ("lora.alpha=3", BASE, "lora.rank is 0"),
        ("lora.targets=q_proj", BASE, "lora.rank is 0"),
        ("learner.frozen_dtype=bfloat16", BASE, "no weight is frozen"),
        ("chat.history=keep", BASE, "the template of a policy from scratch rewrites nothing"),
    ],
)
def test_a_key_that_does_nothing_is_a_fault(override: str, spec: str, why: str) -> None:
    (fault,) = load(spec, [override])[1]
    assert f"{override.partition('=')[0]}=" in fault
    assert f"does nothing: {why}" in fault


@pytest.mark.parametrize("bound", [1, 4])
def test_tokens_that_may_be_old_want_ratios_that_see_it(bound: int) -> None:
    """Against the sampler's log-probs every ratio holds the age; against the trainer's, only what corrects does."""
    ahead, trainer = f"feed.max_staleness={bound}", "train.old_logprob=trainer"
    assert faults_with(ahead) == faults_with(ahead, "algo.name=reinforce_pp") == []
    (fault,) = faults_with(ahead, trainer)
    assert f"{ahead} with {trainer} needs algo.importance or algo.filter" in fault
    for name in ("decoupled", "tis", "sequence_mis", "geometric"):
        assert faults_with(ahead, trainer, f"algo.name={name}") == []
    assert faults_with(trainer) == []


def test_a_key_is_not_inert_where_another_gives_it_a_meaning() -> None:
    assert faults_with("feed.max_rounds=5", "algo.name=dapo") == []
    assert faults_with("algo.length=50", "algo.name=dr_grpo") == []
    assert faults_with("feed.branches=5", "algo.name=anchor_gae") == []
    assert faults_with("warmup.demos=5", "warmup.steps=2") == []
    assert faults_with("algo.importance=token_truncated", "algo.importance_bounds=(0,3)", "train.old_logprob=trainer") == []
    assert faults_with("algo.kl=k1_reward", "algo.kl_coef=0.01") == []
    assert faults_with("algo.gamma=0.9", "algo.turns=all") == []
    assert faults_with("engine.recompute=true", "feed.max_staleness=2") == []
    assert faults_with("critic.lr=0.1", "critic.warmup_steps=5", "algo.name=ppo", "algo.gae_lambda=0.9") == []
    assert faults_with("feed.rollouts=1", "algo.name=reinforce_pp") == []
    assert faults_with("lora.alpha=3", "lora.targets=q_proj,mlp.*", "lora.rank=4", "learner.frozen_dtype=bfloat16") == []
    for pattern in ("learner.freeze=embed", "learner.train_only=*norm"):
        assert faults_with("learner.frozen_dtype=bfloat16", pattern) == []


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["algo.name=icepop"], "train.old_logprob must be trainer for algo.importance=token_masked and algo.filter=none"),
        (
            ["algo.filter=k3", "algo.filter_bounds=(0,0.01)"],
            "train.old_logprob must be trainer for algo.importance=none and algo.filter=k3",
        ),
        (["feed.rollouts=1"], "feed.rollouts must be at least 2, a group of one has no baseline in grpo; got 1"),
        (["feed.rollouts=1", "algo.name=ppo", "algo.select=mixed"], "feed.rollouts must be at least 2"),
        (["feed.rollouts=1", "algo.name=anchor_gae"], "feed.rollouts must be at least 2"),
        (
            ["algo.name=anchor_gae", "feed.branches=4", "reward.efficiency=0.3"],
            "feed.branches must be 0 where reward shapes whole episodes",
        ),
        (["algo.name=ppo", "critic.warmup_steps=100"], "critic.warmup_steps=100 must be below train.steps=100"),
    ],
)
def test_what_an_algorithm_wants_of_other_sections_is_told(overrides: list[str], fault: str) -> None:
    (found,) = faults_with(*overrides)
    assert found.startswith(fault)


def test_fine_tuning_asks_nothing_of_an_algorithm_that_it_does_not_run(tmp_path: Path) -> None:
    lines = ('c.algo.name = "icepop"', 'c.finetune.mode = "raft"')
    assert [fault for fault in faults_with(spec=experiment(tmp_path, lines[0])) if "train.old_logprob" in fault]
    assert not [fault for fault in faults_with(spec=experiment(tmp_path, *lines)) if "train.old_logprob" in fault]


def test_clipping_an_algorithm_without_a_bound_does_nothing_and_is_told() -> None:
    assert load(BASE, ["algo.clip_high=0.3"])[1] == []
    (fault,) = load(BASE, ["algo.clip_high=0.3", "algo.name=rloo"])[1]
    assert fault == "algo.clip_high=0.3 does nothing: rloo does not bound its ratio"


def test_an_inert_key_is_found_in_the_file_as_well_as_on_the_command_line(tmp_path: Path) -> None:
    (fault,) = load(experiment(tmp_path, "c.feed.max_rounds = 9"))[1]
    assert fault == "feed.max_rounds=9 does nothing: the algorithm keeps all groups"


def test_the_model_of_a_checkpoint_cannot_be_changed(tmp_path: Path) -> None:
    (fault,) = load(BASE, [f"init_from={tmp_path}", "model.width=64"])[1]
    assert fault == "model.width=64 does nothing: init_from gives the model's shape"


def test_what_a_run_knows_of_its_episodes_is_no_key_of_its_shaping() -> None:
    assert faults_with("reward.overlong=0.2", "reward.staged=(0,1)") == []
    (fault,) = faults_with("reward.limit=5")
    assert fault == "unknown key 'reward.limit'; known are progressive, staged, overlong, failed_calls, efficiency, otc"


def test_the_options_of_a_world_are_checked_against_its_signature() -> None:
    (fault,) = faults_with("env.options.roms=5", "env.name=maze")
    assert fault == "unknown key 'env.options.roms'; did you mean 'rooms'?"


# ====================================================================== saved beside the run


def test_a_saved_config_is_read_as_it_was(tmp_path: Path) -> None:
    config, _ = load(str(CONFIGS / "quickstart.py"), ["algo.aggregate=None", "seed=4"])
    save(config, tmp_path / "config.json")
    again = read(tmp_path / "config.json")
    assert leaves(again) == leaves(config)
    assert {key: type(v) for key, v in leaves(again).items()} == {key: type(v) for key, v in leaves(config).items()}
    assert differences(config, tmp_path / "config.json") == []
    assert configs.faults_of(again, {}) == []


def test_a_config_that_differs_from_the_saved_one_says_in_which_keys(tmp_path: Path) -> None:
    save(load(BASE)[0], tmp_path / "config.json")
    other, _ = load(BASE, ["seed=4", "engine.append_tokens=(8,)", "env.options.flaky=0.5"])
    assert differences(other, tmp_path / "config.json") == [
        "engine.append_tokens: [64] -> [8]",
        "env.options.flaky: None -> 0.5",
        "seed: 0 -> 4",
    ]


def test_reading_a_config_where_none_was_saved_asks_whether_this_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is this the workdir of a run"):
        read(tmp_path / "config.json")


def test_a_loaded_config_is_locked() -> None:
    config, _ = load(BASE)
    with pytest.raises(AttributeError):
        config.algo.nmae = "grpo"
    assert isinstance(config, ConfigDict)


@pytest.mark.parametrize("override", ["algo.name=rloo", "warmup.steps=0"])
def test_what_an_override_switches_off_in_the_file_is_no_fault(override: str) -> None:
    _, faults = load(str(CONFIGS / "quickstart.py"), [override])
    assert faults == []


def test_a_component_tells_all_that_it_refuses() -> None:
    config, _ = load(str(CONFIGS / "quickstart.py"), ["feed.rollouts=1", "feed.max_staleness=-2", "rollout.attempts=0"])
    assert {fault.partition(" must ")[0] for fault in faults(config)} == {
        "feed: feed.max_staleness",
        "feed.rollouts",
        "rollout: rollout.attempts",
    }


@pytest.mark.parametrize(
    "override", ["checkpoint.every=0", "warmup.demos=0", "seed=-1", "engine.slots=0", "engine.dtype=bf16", "learner.dtype=int8"]
)
def test_a_number_or_a_type_that_cannot_work_is_a_fault(override: str) -> None:
    (fault,) = faults_with(override, spec=str(CONFIGS / "quickstart.py"))
    assert fault.startswith(override.partition("=")[0] + " must be")
