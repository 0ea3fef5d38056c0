"""Echoes of the metrics: each tool's own reader finds the steps and values, and one that fails stops nothing."""

from __future__ import annotations

import importlib
import json
import math
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxagent import config as configs
from jaxagent import echoes
from jaxagent.echoes import About, Echoes, MetricsOptions, Otel
from jaxagent.metrics import Clock, Span

VALUES = {"reward/mean": 0.25, "policy/kl": math.nan, "engine/tokens_per_s": 100.0}
TIMED = ("rollout", "train")
SPANS = (Span("rollout", 1000.0, 2.0), Span("train", 1002.0, 0.5))


def told(workdir: Path, name: str, *steps: int) -> list[str]:
    """A run with one echo hears of some steps; what was said of it."""
    said: list[str] = []
    heard = Echoes(MetricsOptions(name), workdir, {"seed": 0, "algo.name": "grpo"}, said.append)
    for step in steps:
        heard.write(step, {**VALUES, "reward/mean": step / 4}, SPANS)
    heard.close()
    return said


def wanted(package: str) -> Any:
    return pytest.importorskip(package, reason=f"{package} is not installed (extra: loggers)")


def test_an_unknown_echo_and_a_missing_package_are_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'carrier pigeon' is not known; there are tensorboard, wandb"):
        MetricsOptions("trace, carrier pigeon")
    monkeypatch.setitem(echoes.PACKAGES, "wandb", ("no_such_package.inside",))
    with pytest.raises(ValueError, match=r"needs no_such_package\.inside: pip install 'jaxagent\[loggers\]'"):
        MetricsOptions("wandb")


def test_the_clock_says_when_the_parts_were() -> None:
    clock = Clock()
    with clock.part("rollout"):
        pass
    (span,) = clock.spans
    assert span.name == "rollout" and span.seconds == clock.parts["rollout"]
    clock.take()
    assert clock.spans == []


def test_a_trace_is_a_time_line_that_goes_on_after_a_kill(tmp_path: Path) -> None:
    assert told(tmp_path, "trace", 1, 2) == []
    assert told(tmp_path, "trace", 3) == []
    events = json.loads((tmp_path / "trace.json").read_text().rstrip().rstrip(",") + "]")
    parts = [event for event in events if event["ph"] == "X" and not event["name"].startswith("step ")]
    assert [(event["name"], event["args"]["step"]) for event in parts] == [
        (n, s) for s in (1, 2, 3) for n in ("rollout", "train")
    ]
    assert (parts[0]["ts"], parts[0]["dur"]) == (1_000_000_000, 2_000_000)
    counted = [event["args"]["value"] for event in events if event["name"] == "reward/mean"]
    assert counted == [0.25, 0.5, 0.75]


class Failing:
    """An echo whose service goes away in its second step."""

    def __init__(self, about: About):
        self.steps: list[int] = []

    def write(self, step: int, values: Mapping[str, float], spans: Sequence[Span]) -> None:
        self.steps.append(step)
        if len(self.steps) == 2:
            raise ConnectionError("gone")

    def close(self) -> None:
        raise AssertionError("it left before")


def test_an_echo_that_fails_is_told_of_once_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(echoes._OF, "otel", Failing)
    monkeypatch.setitem(echoes.PACKAGES, "otel", ())
    assert told(tmp_path, "otel,trace", 1, 2, 3) == ["metrics.echoes: otel hears no more: ConnectionError: gone"]
    assert (tmp_path / "trace.json").read_text().count('"rollout"') == 3


def test_an_echo_that_cannot_begin_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    (said,) = told(tmp_path, "trace", 1, 2)
    assert said.startswith("metrics.echoes: trace hears no more: IsADirectoryError")


def test_tensorboard_reads_the_steps_back(tmp_path: Path) -> None:
    wanted("tensorboardX")
    assert told(tmp_path, "tensorboard", 1, 2) == []
    loader = importlib.import_module("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):  # a record is its length, a checksum, the event, a checksum
            n = int.from_bytes(data[at : at + 8], "little")
            event = loader.Event.FromString(data[at + 12 : at + 12 + n])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += n + 16
    assert [(step, value) for step, tag, value in found if tag == "reward/mean"] == [(1, 0.25), (2, 0.5)]
    assert "policy/kl" not in {tag for _, tag, _ in found}


def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted("wandb")
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert told(tmp_path, "wandb", 1, 2) == []
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while b"reward/mean" not in file.read_bytes() and time.monotonic() < deadline:  # its own process writes, a little later
        time.sleep(0.1)
    assert b"reward/mean" in file.read_bytes()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's own, of its database
def test_mlflow_has_one_run_for_a_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = wanted("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert told(tmp_path, "mlflow", 1, 2) == []
    assert told(tmp_path, "mlflow", 3) == []
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("jaxagent")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.params["algo.name"] == "grpo"


def test_trackio_keeps_a_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    wanted("trackio")
    assert told(tmp_path, "trackio", 1, 2) == []
    (file,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(metrics)["reward/mean"]) for step, metrics in rows] == [(1, 0.25), (2, 0.5)]


def test_spans_of_opentelemetry_hold_a_step_and_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = wanted("opentelemetry.sdk.trace")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    echo = Otel(About(tmp_path, {}, 1))
    echo.tracer = provider.get_tracer("jaxagent")
    echo.write(4, {"reward/mean": 0.5}, SPANS)
    echo.close()
    rollout, train, step = memory.get_finished_spans()
    assert (rollout.name, train.name, step.name) == ("rollout", "train", "step")
    assert rollout.parent.span_id == train.parent.span_id == step.context.span_id
    assert (step.start_time, step.end_time) == (1_000_000_000_000, 1_002_500_000_000)
    assert step.attributes["jaxagent.step"] == 4 and step.attributes["reward/mean"] == 0.5


def test_a_span_of_opentelemetry_is_within_what_it_is_part_of(tmp_path: Path) -> None:
    sdk = wanted("opentelemetry.sdk.trace")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    echo = Otel(About(tmp_path, {}, 1))
    echo.tracer = provider.get_tracer("jaxagent")
    episode = Span("train/0#1", 1000.5, 1.0, "rollout", 2, told={"reward": 0.5})
    echo.write(1, {}, [*SPANS, episode, Span("look", 1000.75, 0.25, "tool", 1, episode, {"outcome": "ok"})])
    made = {span.name: span for span in memory.get_finished_spans()}
    assert made["look"].parent.span_id == made["train/0#1"].context.span_id
    assert made["train/0#1"].parent.span_id == made["step"].context.span_id
    assert made["look"].attributes == {"jaxagent.lane": "tool 1", "jaxagent.outcome": "ok"}
    assert made["train/0#1"].attributes == {"jaxagent.lane": "rollout 2", "jaxagent.reward": 0.5}
    assert (made["step"].start_time, made["step"].end_time) == (1_000_000_000_000, 1_002_500_000_000)


def test_a_run_may_be_resumed_with_other_echoes(tmp_path: Path) -> None:
    base = str(Path(__file__).parents[1] / "configs" / "base.py")
    configs.save(configs.load(base)[0], tmp_path / "config.json")
    assert configs.differences(configs.load(base, ["metrics.echoes=trace"])[0], tmp_path / "config.json") == []
    assert len(configs.differences(configs.load(base, ["seed=1"])[0], tmp_path / "config.json")) == 1
