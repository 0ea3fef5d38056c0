"""The report page: what is embedded, that it is inert, and that it fits. How it looks is a matter for a browser."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxagent import view
from jaxagent.chat.plain import EOS, PlainTemplate
from jaxagent.data.store import Store
from jaxagent.types import Message, Sample, StopReason, ToolCall, ToolRecord, Trajectory

TEMPLATE = PlainTemplate()
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>&lt;<!--\u2028\u2029\u202e\x00\x1b[31m\ud800 @RUN@ @SCRIPT@"
)
CONFIG = {"env": {"name": "toy"}, "init_from": "", "warmup": {"steps": 2}, "train": {"steps": 3}, "seed": 7}


def episode(group: str, rollout: int = 0, *, reward: float = 0.0, text: str = "64", long: int = 0) -> Trajectory:
    """One call and one answer, as the agent would have recorded them."""
    t = Trajectory(f"toy/{group}", 2**60, group, rollout, difficulty="1 hop", stop=StopReason.ANSWERED, seconds=0.5)
    t.feed(TEMPLATE.prompt([Message("user", "37AB" + "x" * long)], ()))
    for message in (Message("assistant", calls=(ToolCall("A", {"key": "37"}),)), Message("assistant", text)):
        ids = TEMPLATE.turn(message)
        fed = t.tokens[t.turns[-1].end if t.turns else 0 :]
        sample = Sample(ids, [-0.25] * len(ids), [3] * len(ids), True, len(t.tokens) - len(fed), fed)
        turn = t.sampled(sample, "", TEMPLATE.text(ids))
        if message.calls:
            turn.tools = [ToolRecord("A", {"key": "37"}, "ok", "52", 0.01)]
            t.feed(TEMPLATE.extend([Message("tool", "52")]))
    t.turns[-1].reward, t.turns[-1].reason = reward, "right answer" if reward else "wrong"
    return t


def write_run(folder: Path, sets: dict[str, list[Trajectory]], *, steps: int = 3, finished: bool = True, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    store = Store(folder / "trajectories")
    for label, rows in sets.items():
        store.write(label, rows)
    warm = {**CONFIG, **config}["warmup"]["steps"]
    lines = [{"step": i + 1, "sft/nll": 2.0 - i, "time/sft_s": 0.5, "time/cpu_s": 9.0} for i in range(warm)]
    lines += [{"step": warm + i + 1, "reward/success": i / 3, "policy/kl": None, "time/rollout_s": 1.0} for i in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        table = {"success": 0.5, "ci95": [0.1, 0.9], "n": 2, "k": 1, "by_difficulty": {"1 hop": 0.5}, "broken": 0}
        (folder / "eval.json").write_text(json.dumps({"before": table, "after": {**table, "reward": float("nan")}}))
    return folder


def embedded(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="run">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    sets = {
        "before": [episode("test/0"), episode("test/1"), episode("test/2", reward=1.0)],
        "after": [episode("test/0", reward=1.0), episode("test/1"), episode("test/2")],
        "ablated": [episode("test/0")],
        "train-000001": [episode("train/0", i, reward=float(i == 1)) for i in range(4)],
        "valid-000002": [episode("valid/0")],
    }
    return write_run(tmp_path / "run", sets)


def test_page_holds_what_was_collected(finished: Path) -> None:
    path = view.report(finished)
    assert path == finished / "report.html"
    assert embedded(path.read_text(encoding="utf-8")) == view.collect(finished)


def test_command_prints_where_the_page_is(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert view.write_report(str(finished)) == 0
    assert capsys.readouterr().out == f"{finished / 'report.html'}\n"
    assert sorted(path.name for path in finished.iterdir() if path.is_file()) == [
        "config.json",
        "eval.json",
        "metrics.jsonl",
        "report.html",
    ]


def test_page_asks_the_network_for_nothing(finished: Path) -> None:
    page = view.report(finished).read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"\b(src|href)=|@import|url\(", page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_page_makes_no_markup_of_data() -> None:
    head, tail = view._frame()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|\son\w+=", head + tail)
    assert "@" not in re.sub(r"@media|@RUN@", "", head)
    assert tail.count("</script>") == 2


def test_hostile_text_stays_inert_and_whole(tmp_path: Path) -> None:
    rows = [episode("test/0", text=HOSTILE.replace("\ud800", ""))]
    rows[0].task = rows[0].difficulty = rows[0].error = HOSTILE
    rows[0].turns[0].tools = [ToolRecord(HOSTILE, {HOSTILE: HOSTILE, "not": float("nan")}, "ok", HOSTILE)]
    rows[0].turns[1].reason = rows[0].turns[1].error = HOSTILE
    run = write_run(tmp_path / "run", {"before": rows, "after": rows}, env={"name": HOSTILE})
    page = view.report(run).read_text(encoding="utf-8")
    data = page[page.index('id="run">') + len('id="run">') : page.index("</script>")]
    assert not set(data) & set("<>&\u2028\u2029\x00\x1b\u202e") and data.isascii()
    shown = embedded(page)
    assert shown["config"]["env"]["name"] == HOSTILE
    item = shown["trajectories"][0]
    assert item["task"] == item["difficulty"] == item["error"] == item["turns"][1]["reason"] == HOSTILE
    assert item["turns"][0]["tools"][0]["name"] == item["turns"][0]["tools"][0]["result"] == HOSTILE


def test_token_rows_say_who_wrote_and_how_likely(finished: Path) -> None:
    shown = view.collect(finished)
    item = shown["trajectories"][0]
    original = episode("test/0")
    assert item["tokens"] == original.tokens
    assert "".join(shown["vocab"][str(i)] for i in item["tokens"]) == TEMPLATE.text(original.tokens)
    assert [(turn["start"], turn["end"]) for turn in item["turns"]] == [(turn.start, turn.end) for turn in original.turns]
    assert item["logprob"] == [-0.25] * sum(original.mask)
    assert item["version"] == [[3, sum(original.mask)]]
    assert item["seed"] == str(2**60)
    assert shown["stop"] == list(TEMPLATE.stop)


def test_bytes_of_one_character_are_joined_and_stray_bytes_are_not(finished: Path) -> None:
    shelf = view.Shelf(TEMPLATE, "", 1000)
    ids = [*"a→é".encode(), 0xE2, 0x86, EOS, 0xFF, *b"z"]
    assert shelf.joined(ids) == [[1, 4, "→"], [4, 6, "é"]]
    assert shelf.piece(0xFF) == "\ufffd"
    assert shelf.piece(10_000) == "<no token 10000>"


def test_pairs_are_the_tasks_that_changed_then_one_that_stayed_failed(finished: Path) -> None:
    shown = view.collect(finished)
    kinds = [pair["kind"] for pair in shown["pairs"]]
    assert kinds == ["gained", "lost", "failed"]
    for pair in shown["pairs"]:
        before, after = shown["trajectories"][pair["before"]], shown["trajectories"][pair["after"]]
        assert (before["set"], after["set"], before["group"]) == ("before", "after", after["group"])


def test_group_comes_with_all_its_siblings(finished: Path) -> None:
    shown = view.collect(finished)
    siblings = [item for item in shown["trajectories"] if item["set"] == "train"]
    assert [item["rollout"] for item in siblings] == [0, 1, 2, 3]
    assert shown["training"] == {"steps": 1, "steps_shown": 1, "groups": 1, "groups_left_out": 0}
    assert not any(item["set"].startswith("valid") for item in shown["trajectories"])


def test_many_big_episodes_are_thinned_to_the_size_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "PAGE_BYTES", 600_000)
    sets = {label: [episode(f"test/{i}", text="<&>" * 50, long=2000) for i in range(30)] for label in view.EVALUATED}
    for step in range(1, 41):
        sets[f"train-{step:06d}"] = [episode(f"train/{step}", i, reward=float(i), long=1500) for i in range(2)]
    run = write_run(tmp_path / "run", sets)
    page = view.report(run).read_text(encoding="utf-8")
    assert 300_000 < len(page.encode()) <= 600_000
    shown = embedded(page)
    kept = {label: sum(item["set"] == label for item in shown["trajectories"]) for label in view.EVALUATED}
    assert all(kept[label] + shown["left_out"][label] == 30 and kept[label] for label in view.EVALUATED)
    steps = sorted({item["step"] for item in shown["trajectories"] if item["set"] == "train"})
    assert shown["training"]["steps"] == 40 and len(steps) >= 5
    assert steps[0] == 1 and steps[-1] == 40
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 2 * 40 / len(steps)


def test_episode_that_no_page_could_hold_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "PAGE_BYTES", 300_000)
    run = write_run(
        tmp_path / "run", {"before": [episode("test/0", long=200_000)], "train-000001": [episode("a", long=200_000)]}
    )
    shown = view.collect(run)
    assert shown["trajectories"] == [] and shown["left_out"] == {"before": 1}
    assert shown["training"]["groups"] == 0 and shown["training"]["groups_left_out"] == 1


def test_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    shown = view.collect(write_run(tmp_path / "run", {}, steps=0, finished=False, warmup={"steps": 0}))
    assert (shown["x"], shown["steps_done"], shown["trajectories"], shown["evaluations"]) == ([], 0, [], {})
    assert view.report(tmp_path / "run").is_file()


def test_unfinished_run_counts_its_success_from_the_stored_episodes(tmp_path: Path) -> None:
    broken = episode("test/3")
    broken.stop = StopReason.INFRA_FAILURE
    rows = [episode("test/0"), episode("test/1", reward=1.0), broken]
    shown = view.collect(write_run(tmp_path / "run", {"before": rows}, finished=False))
    assert not shown["finished"]
    before = shown["evaluations"]["before"]
    assert (before["success"], before["n"], before["ci95"]) == (0.5, 2, None)
    assert before["by_difficulty"] == {"1 hop": [0.5, 2]}
    assert shown["pairs"] == []


def test_the_segments_of_a_rollout_are_shown_apart_and_counted_once(tmp_path: Path) -> None:
    first, second = episode("test/0"), episode("test/0")
    first.elsewhere = second.elsewhere = 1.0
    second.segment = 1
    rows = [first, second, episode("test/1")]
    shown = view.collect(write_run(tmp_path / "run", {"before": rows}, finished=False))
    assert [item["role"] for item in shown["trajectories"]] == ["agent", "agent, segment 2", "agent"]
    assert (shown["evaluations"]["before"]["success"], shown["evaluations"]["before"]["n"]) == (0.5, 2)


def test_curves_count_training_steps_from_one_and_keep_gaps(finished: Path) -> None:
    shown = view.collect(finished)
    assert shown["x"] == [-1, 0, 1, 2, 3]
    assert shown["curves"]["reward/success"] == [None, None, 0.0, 0.33333, 0.66667]
    assert shown["curves"]["policy/kl"] == [None] * 5
    assert shown["curves"]["sft/nll"] == [2.0, 1.0, None, None, None]
    assert shown["seconds"] == {"rollout": 3.0, "sft": 1.0}
    assert "policy/grad_norm" not in shown["curves"]


def test_staleness_and_the_gap_by_turn_position_have_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {}, warmup={"steps": 0})
    gaps = {f"policy/sampler_logprob_gap_turn_{turn}": 0.1 * i for i, turn in enumerate(("0", "1", "2", "3_on"))}
    ages = {"feed/staleness_mean": 0.5, "feed/staleness_max": 2.0}
    other = {"policy/sampler_logprob_gap_age_1": 0.1, "feed/ahead": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **gaps, **ages, **other}) + "\n")
    shown = view.collect(run)["curves"]
    assert {name: shown[name] for name in (*gaps, *ages)} == {n: [pytest.approx(v)] for n, v in (gaps | ages).items()}
    assert not set(other) & set(shown)
    page = view.report(run).read_text(encoding="utf-8")
    assert "Log-prob gap by turn position" in page and "Staleness of tokens, versions" in page


def test_credit_of_a_turn_has_the_parts_of_its_reward_and_its_checks(tmp_path: Path) -> None:
    rows = [episode("test/0", reward=1.25)]
    rows[0].turns[1].parts = {"format": 0.25}  # what it leaves of the reward is the outcome
    rows[0].turns[1].checks = {"by a judge": float("nan"), "exact": 0.0}
    rows[0].turns[1].advantage = -0.5
    first, last = view.collect(write_run(tmp_path / "run", {"before": rows}))["trajectories"][0]["turns"]
    assert (last["reward"], last["reason"], last["advantage"]) == (1.25, "right answer", -0.5)
    assert last["parts"] == {"outcome": 1.0, "format": 0.25} and last["checks"] == {"by a judge": None, "exact": 0.0}
    assert not {"parts", "checks"} & set(first)


@pytest.mark.parametrize(("told", "shown"), [(None, 0.0), (0.3 - 0.1 - 0.2, 0.0), (0.25, 0.25)])
def test_no_rounding_of_sums_is_shown_as_an_outcome(tmp_path: Path, told: float | None, shown: float) -> None:
    row = episode("test/0", reward=0.3)
    row.turns[1].parts, row.turns[1].outcome = {"format": 0.1, "found": 0.2}, told
    (item,) = view.collect(write_run(tmp_path / "run", {"before": [row]}))["trajectories"]
    assert item["turns"][1]["parts"] == {"outcome": shown, "format": 0.1, "found": 0.2}


def test_long_curve_is_averaged_without_mixing_warm_up_and_training() -> None:
    records = [{"step": i + 1, "reward/mean": float(i >= 1001), "time/train_s": 1.0} for i in range(10_000)]
    shown = view.curves(records, 1001)
    assert shown["steps_per_point"] == 9 and len(shown["x"]) <= 1202
    assert set(shown["curves"]["reward/mean"]) == {0.0, 1.0}
    assert shown["seconds"] == {"train": 10_000.0}


def test_page_without_its_tokenizer_shows_ids_and_the_stored_text(tmp_path: Path) -> None:
    shown = view.collect(write_run(tmp_path / "run", {"before": [episode("test/0")]}, init_from=str(tmp_path / "gone")))
    assert "tokenizer_config.json is missing" in shown["tokenizer_fault"]
    assert shown["vocab"] == {}
    assert shown["trajectories"][0]["turns"][0]["text"] == "<call>A37</call>"


def test_folder_without_a_run_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run: it has no config\.json"):
        view.write_report(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{torn")
    with pytest.raises(ValueError, match="is not JSON"):
        view.write_report(str(tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_page_is_written_without_jax(finished: Path) -> None:
    code = "import sys; from jaxagent import view; view.write_report(sys.argv[1]); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(finished)], check=True, capture_output=True)


def test_steps_are_spread_evenly_with_both_ends() -> None:
    labels = [str(i) for i in range(100)]
    assert view.spread(labels, 3) == ["0", "50", "99"]
    assert view.spread(labels, 1) == ["99"]
    assert view.spread(labels[:2], 5) == ["0", "1"]
