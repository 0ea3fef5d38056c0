"""Echoes of the metrics: TensorBoard, W&B, MLflow, Trackio, OpenTelemetry and a trace file. `metrics.jsonl` stays the source.

All are fed with the lines of metrics.jsonl, on its one step axis. An echo that fails is told of once and leaves; it never stops
a run. What a tool can be told otherwise is told by its own environment variables:

    tensorboard  event files in WORKDIR/tensorboard
    wandb        a run of project WANDB_PROJECT or "jaxagent"; WANDB_MODE is offline where it is not set
    mlflow       a run at MLFLOW_TRACKING_URI, or in WORKDIR/mlflow.db; its experiment is MLFLOW_EXPERIMENT_NAME or "jaxagent"
    trackio      a run of project TRACKIO_PROJECT or "jaxagent"; TRACKIO_DIR is WORKDIR/trackio where it is not set
    otel         a span for every step, in it one for each of its parts, its episodes with their turns and tool calls, when the
                 engines were busy and the learner; to OTEL_EXPORTER_OTLP_ENDPOINT or to the tracer provider that is set
    trace        WORKDIR/trace.json, the same on a time line, for Perfetto or chrome://tracing; needs no package

An episode that is played ahead of its step (feed.max_staleness) belongs to the step that trains on it, and begins before that.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxagent.metrics import LANES, Span

PACKAGES = {
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
    "otel": ("opentelemetry.sdk.trace",),
    "trace": (),
}
HEAR_SPANS = ("otel", "trace")
_TRACE_BYTES = 200_000_000  # of a trace file, from which on it has only the parts of steps: viewers read all of it at once
_OTEL_QUEUE = 1 << 16  # spans that wait to be sent; a step's come all at once


@dataclass(frozen=True)
class MetricsOptions:
    """Which tools hear the metrics, by name, with commas."""

    echoes: str = ""

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in PACKAGES:
                raise ValueError(f"metrics.echoes: {name!r} is not known; there are {', '.join(PACKAGES)}")
            if missing := [package for package in PACKAGES[name] if not _there(package)]:
                raise ValueError(f"metrics.echoes={name} needs {missing[0]}: pip install 'jaxagent[loggers]'")

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.echoes.split(",") if name.strip()]

    @property
    def hear_spans(self) -> bool:
        """Whether one of them wants to know when what of a step was."""
        return any(name in HEAR_SPANS for name in self.names)


class Echo(Protocol):
    """One tool."""

    def write(self, step: int, values: Mapping[str, float], spans: Sequence[Span]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class About:
    """What an echo may know of a run: where it is, its config as plain values, and the step that it goes on from."""

    workdir: Path
    config: Mapping[str, Any]
    step: int

    @property
    def name(self) -> str:
        return self.workdir.resolve().name

    @property
    def identity(self) -> str:
        """The same whenever the run goes on in its workdir."""
        return hashlib.blake2b(str(self.workdir.resolve()).encode(), digest_size=8).hexdigest()


class Echoes:
    """All echoes of a run. They begin with its first line, so that a run that does not start leaves none."""

    def __init__(self, options: MetricsOptions, workdir: Path, config: Mapping[str, Any], say: Callable[[str], None]):
        self.workdir, self.config, self.say = workdir, config, say
        self._waiting = options.names
        self._echoes: dict[str, Echo] = {}

    def write(self, step: int, values: Mapping[str, float], spans: Sequence[Span] = ()) -> None:
        """Tells all of a step. Values that are no finite numbers are left out."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        waiting, self._waiting = self._waiting, []
        for name in waiting:
            self._try(name, lambda name=name: self._echoes.update({name: _OF[name](About(self.workdir, self.config, step))}))
        for name, echo in list(self._echoes.items()):
            self._try(name, lambda echo=echo: echo.write(step, finite, spans))

    def close(self) -> None:
        for name, echo in list(self._echoes.items()):
            self._try(name, echo.close)
        self._echoes.clear()

    def _try(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # whatever a tool of others raises, the run goes on
            self._echoes.pop(name, None)
            self.say(f"metrics.echoes: {name} hears no more: {type(error).__name__}: {error}")


class TensorBoard:
    """Scalars in event files; those at and after the step that a run goes on from are purged."""

    def __init__(self, about: About):
        library = importlib.import_module("tensorboardX")
        self.writer = library.SummaryWriter(str(about.workdir / "tensorboard"), purge_step=about.step)

    def write(self, step: int, values: Mapping[str, float], spans: Sequence[Span]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run with one identity for one workdir, which is taken up again."""

    def __init__(self, about: About):
        library = importlib.import_module("wandb")
        self.run = library.init(
            project=os.environ.get("WANDB_PROJECT", "jaxagent"),
            name=about.name,
            id=about.identity,
            resume="allow",
            dir=str(about.workdir),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(about.config),
        )

    def write(self, step: int, values: Mapping[str, float], spans: Sequence[Span]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """A run found again by its workdir's identity."""

    def __init__(self, about: About):
        library = importlib.import_module("mlflow")
        self.metric = library.entities.Metric
        at = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{about.workdir.resolve()}/mlflow.db"
        self.client = library.MlflowClient(tracking_uri=at)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "jaxagent")
        found = self.client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self.client.create_experiment(experiment)
        tags = {"jaxagent.workdir": about.identity}
        old = self.client.search_runs([number], f"tags.`jaxagent.workdir` = '{about.identity}'")
        self.run = (old[0] if old else self.client.create_run(number, run_name=about.name, tags=tags)).info.run_id
        for name, value in about.config.items() if not old else ():
            self.client.log_param(self.run, name, str(value)[:500])

    def write(self, step: int, values: Mapping[str, float], spans: Sequence[Span]) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(self.run, [self.metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Trackio:
    """A run of the local dashboard."""

    def __init__(self, about: About):
        os.environ.setdefault("TRACKIO_DIR", str(about.workdir.resolve() / "trackio"))
        library = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", "jaxagent")
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self.run = library.init(project=project, name=about.name, config=dict(about.config), resume="allow", **quiet)

    def write(self, step: int, values: Mapping[str, float], spans: Sequence[Span]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class Otel:
    """Spans: a step with its metrics as attributes, and within it all that a step is made of."""

    def __init__(self, about: About):
        self.trace = importlib.import_module("opentelemetry.trace")
        self.own: Any = None
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            self.own = sdk.TracerProvider()
            queue = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", _OTEL_QUEUE))
            self.own.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(), max_queue_size=queue))
        self.tracer = (self.own or self.trace.get_tracer_provider()).get_tracer("jaxagent")
        self.name = about.name

    def write(self, step: int, values: Mapping[str, float], spans: Sequence[Span]) -> None:
        if not spans:
            return
        began, ended = _bounds(spans)
        attributes = {"jaxagent.run": self.name, "jaxagent.step": step, **values}
        whole = self.tracer.start_span("step", start_time=_ns(began), attributes=attributes)
        made = {id(None): self.trace.set_span_in_context(whole)}  # contexts, by the identity of spans
        for span in spans:
            told = {"jaxagent.lane": span.row, **{f"jaxagent.{name}": value for name, value in span.told.items()}}
            within = made[id(span.within)]
            part = self.tracer.start_span(span.name, context=within, start_time=_ns(span.began_s), attributes=told)
            part.end(_ns(span.began_s + span.seconds))
            made[id(span)] = self.trace.set_span_in_context(part)
        whole.end(_ns(ended))

    def close(self) -> None:
        if self.own:
            self.own.shutdown()


class TraceFile:
    """The JSON array of Chrome's trace format, which may end anywhere: a killed run's can be read too.

    A lane is a process of the format and each of its rows a thread, by numbers that a run that goes on finds again.
    """

    def __init__(self, about: About):
        self.path, self.name = about.workdir / "trace.json", about.name
        new = not self.path.exists()
        self.file = self.path.open("a", encoding="utf-8")
        self._named: set[str] = set()
        self._full = False
        if new:
            self.file.write("[\n")

    def write(self, step: int, values: Mapping[str, float], spans: Sequence[Span]) -> None:
        began, ended = _bounds(spans) if spans else (time.time(),) * 2
        if spans:
            self._span(Span(f"step {step}", began, ended - began), step)
        for span in spans:
            if not self._full or span.lane == "step":
                self._span(span, step)
        for name in ("reward/mean", "engine/tokens_per_s"):
            if name in values:
                self._add({"name": name, "ph": "C", "ts": _us(ended), "args": {"value": values[name]}}, Span("", 0, 0))
        self.file.flush()
        if not self._full and self.path.stat().st_size > _TRACE_BYTES:
            self._full, why = True, f"from here on the steps' parts only: the file has {_TRACE_BYTES // 10**6} MB"
            self._add({"name": why, "ph": "i", "s": "g", "ts": _us(ended)}, Span("", 0, 0))
            self.file.flush()

    def close(self) -> None:
        self.file.close()

    def _span(self, span: Span, step: int) -> None:
        began, ended = _us(span.began_s), _us(span.began_s + span.seconds)  # both rounded alike: what is within stays within
        told = {"step": step, **span.told, **({"of": span.within.name} if span.lane == "tool" and span.within else {})}
        self._add({"name": span.name, "cat": span.lane, "ph": "X", "ts": began, "dur": ended - began, "args": told}, span)

    def _add(self, event: dict[str, Any], span: Span) -> None:
        lane = LANES.index(span.lane)
        place = {"pid": lane + 1, "tid": 100_000 * lane + span.number + 1}
        if span.row not in self._named:
            self._named.add(span.row)
            process = self.name if span.lane == "step" else f"{self.name}: {span.lane}"
            for kind, name in (("process_name", process), ("thread_name", span.row)):
                self._write({"name": kind, "ph": "M", **place, "args": {"name": name}})
        self._write({**event, **place})

    def _write(self, event: dict[str, Any]) -> None:
        self.file.write(json.dumps(event) + ",\n")


_OF: dict[str, Callable[[About], Echo]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "otel": Otel,
    "trace": TraceFile,
}


def _there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent of it is missing
        return False


def _bounds(spans: Sequence[Span]) -> tuple[float, float]:
    """When a step began and ended: its own parts say so."""
    parts = [span for span in spans if span.lane == "step"] or spans
    return min(span.began_s for span in parts), max(span.began_s + span.seconds for span in parts)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
