"""The story: live rollouts -> gradient -> new weights. Read it from top to bottom.

    main(config, workdir) -> 0 when done, 75 when it saved on SIGTERM and should be started again

The same config and workdir resume: all draws depend on the seed and the place in the run, never on time.
"""

from __future__ import annotations

import errno
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent import supervised
from jaxagent.alarms import Alarms
from jaxagent.checkpoint import Checkpoints
from jaxagent.credit import group_metrics, role_metrics, sampling_metrics
from jaxagent.critic import CriticOptions, begin_again
from jaxagent.data.store import Store, audit
from jaxagent.echoes import Echoes, MetricsOptions
from jaxagent.engine.replicas import Replicas
from jaxagent.evaluate import evaluate, held_out, settings_of
from jaxagent.feed import Feed, FeedOptions, has_signal, stream_of
from jaxagent.heap import give_back_freed_memory
from jaxagent.hosts import ALONE, Hosts, here, join
from jaxagent.journal import Journal
from jaxagent.learner import OptimizerOptions
from jaxagent.lock import alone
from jaxagent.metrics import Clock, Mean, Metrics, eval_metrics, peak_bytes, read, want_alike
from jaxagent.parts import Learning, Parts, build, faults, shaping_within, use_devices
from jaxagent.process import Process, read_labels
from jaxagent.progress import Progress
from jaxagent.rewards.shaping import components
from jaxagent.rollout import RolloutOptions, Stopped
from jaxagent.selection import SEARCHES
from jaxagent.timeline import Timeline
from jaxagent.types import Group, Sampling, StopReason, Trajectory, Turn
from jaxagent.update import Update, UpdateOptions
from jaxagent.view import report
from jaxagent.watchdog import Budgets, Watchdog, Watched, overruns
from sandbox_client import InfrastructureError, SandboxStartError

EXIT_DONE, EXIT_AGAIN = 0, 75
SAVE_S = 100.0  # from SIGTERM until the run has ended, saved as far as that went; launchers wait longer before they kill
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO)
mean = Mean.of


class Preempted(Exception):
    """SIGTERM came and the run has been saved."""


class Broken(Exception):
    """What was sampled cannot be trained on; the run can be resumed."""


class Alarmed(Exception):
    """An alarm that `alarms.stop` names was raised; the run has been saved."""


FAULTS = (Broken, Alarmed, SandboxStartError, InfrastructureError)  # told in a sentence by the command line


class Course:
    """What learns in a run, at which step it is, and what it is restored from."""

    def __init__(self, config: ConfigDict, workdir: Path, parts: Learning, hosts: Hosts = ALONE):
        self.config, self.workdir, self.parts, self.hosts = config, workdir, parts, hosts
        self.own = "" if hosts.first else f"host-{hosts.index}"  # every host keeps the trajectories that it played
        self.store = Store(workdir / "trajectories" / self.own)
        self.checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep)
        self.shaping = shaping_within(config)(**config.reward)
        self.process = process_of(config, workdir, parts)
        self.baselines: dict[str, float] = {}  # moving means of the roles' returns, for algorithms that have them
        self.step = 0  # warm-up steps first, then training steps: one axis

    def critic_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the critic: nothing before reinforcement, where it begins as a copy of the policy."""
        if self.parts.critic is None or self.step <= self.config.warmup.steps:
            return {}
        return {f"critic_{name}": tree for name, tree in self.parts.critic.state().items()}


class Run(Course):
    """A run's place: its files, and what a checkpoint holds besides weights."""

    parts: Parts

    def __init__(self, config: ConfigDict, workdir: Path, parts: Parts, progress: Progress, watchdog: Watchdog | None = None):
        super().__init__(config, workdir, parts, parts.hosts)
        self.watchdog = watchdog or watchdog_of(workdir, parts.hosts)
        self.watchdog.declared |= budgets(config, mixed=parts.algorithm.select == "mixed")
        self.watchdog.place, self.watchdog.episodes = lambda: f"step {self.step + 1}", parts.rollouts.open
        self.progress = progress
        self.metrics = Metrics(workdir / "metrics.jsonl", writes=self.hosts.first)
        echoed = MetricsOptions(**config.metrics) if self.hosts.first else MetricsOptions()
        self.echoes = Echoes(echoed, workdir, configs.leaves(config), progress.say)
        self.clock: Clock = Watched(self.watchdog)
        self.timeline = Timeline(self.clock) if echoed.hear_spans else None
        if self.timeline:
            parts.engines.note_calls()
        self.results: dict[str, Any] = {}  # evaluations, as they stand in eval.json
        options = FeedOptions(**config.feed)
        tasks = stream_of(parts.world, config.seed, options)
        # With rollouts ahead the weights of a turn may be gone; in exact mode without, they and its key fix every bit of it.
        redraw = config.engine.exact and not options.max_staleness
        topology = f"{self.hosts.count} x {jax.local_device_count()}"
        self.journal = Journal(workdir / "journal", redraw=redraw, own=self.own, topology=topology)
        sampling = Sampling(**config.sampling)
        self.feed = Feed(parts.world, tasks, parts.rollouts, sampling, options, self.hosts, self.journal)
        self.alarms = Alarms(**config.alarms, tools=bool(parts.world.tools))
        self.stopping, self._told_s = False, 0.0
        self.owed: dict[str, float] = {}  # what is known of the step that was saved while its evaluation was played

    def stop(self) -> None:
        """SIGTERM came."""
        self.stopping, self._told_s = True, self._told_s or time.monotonic()
        self.watchdog.hurry(SAVE_S, "SIGTERM")

    def save(self) -> None:
        learner, critic = self.parts.learner, self.parts.critic
        facts: dict[str, Any] = {
            "step": self.step,
            "updates": learner.updates,
            "critic_updates": critic.updates if critic else 0,
        }
        facts |= {"feed": self.feed.state(), "baselines": self.baselines, "results": self.results, "owed": self.owed}
        if self.process:
            facts["process"] = self.process.state()
        past = self.parts.selves.state() if self.parts.selves else {}
        facts["past"] = self.parts.selves.versions if self.parts.selves else []
        with self.clock.part("checkpoint"):
            self.checkpoints.save(self.step, {**learner.state(), **self.critic_state(), **past}, facts)
        self.journal.rotate(self.feed.first)

    @property
    def place(self) -> str:
        """The step as the line of progress says it, which begins anew after the warm-up."""
        return configs.place_in(self.config, self.step)

    @property
    def told_step(self) -> str:
        """The step as checkpoints are named, and where the line of progress says another number, that one too."""
        return f"{self.step}" + f" ({self.place})" * bool(self.config.warmup.steps)

    def saved(self) -> None:
        """Waits until what was saved is on disk."""
        with self.watchdog.within("save"):
            self.checkpoints.wait()

    def told_saved(self) -> None:
        after = f" (saved {time.monotonic() - self._told_s:.1f} s after SIGTERM)" if self._told_s else ""  # another host's
        self.progress.say(f"saved at step {self.told_step}; the same command resumes{after}")

    def record(self, name: str, table: dict[str, Any]) -> None:
        """Keeps an evaluation in eval.json, whole or not at all."""
        self.results[name] = table
        if not self.hosts.first:
            return
        partial = self.workdir / "eval.partial"
        partial.write_text(json.dumps(self.results, indent=2) + "\n")
        partial.rename(self.workdir / "eval.json")

    def unwritable(self, error: OSError) -> Broken:
        """What to tell of a workdir that cannot be written any more."""
        saved = self.checkpoints.whole()
        kept = "nothing was saved yet" if saved is None else f"the checkpoint of step {saved} is whole"
        where = error.filename or self.workdir
        return Broken(
            f"{where}: cannot be written at step {self.step}: {error.strerror}; {kept}. Once there is room, or the right to "
            "write, the same command resumes."
        )

    def played(self, rows: Iterable[Trajectory], update: Update | None = None) -> None:
        """Episodes are over: when they were, and what of an update was done meanwhile, is noted where somebody wants it."""
        if self.timeline:
            self.timeline.episodes(rows)
            self.timeline.learner(update.early_s if update else ())

    def done(self, values: dict[str, float]) -> None:
        """One step is done: write it down, tell what is alarming, save where it is due, stop where that is asked for."""
        self.step += 1
        if self.journal.fault:
            raise self.journal.fault
        if self.timeline:
            self.timeline.engines(self.parts.engines.take_calls())
            self.clock.spans += self.timeline.take()
        spans, whole = self.clock.spans, {**values, **self.clock.take()}
        if self.step & (self.step - 1) == 0:  # ever more rarely: what the first steps freed has no place for what the next need
            give_back_freed_memory()
        self.metrics.write(self.step, whole)
        self.echoes.write(self.step, whole, spans)
        alarms = self.alarms.look(values)
        for name, reason in alarms.items():
            self.progress.say(f"alarm, {name}: at {self.place} {reason}", style="yellow")
        fatal = [name for name in alarms if name in self.alarms.stop]
        self.stopping = self.hosts.any(self.stopping)
        if self.step % self.config.checkpoint.every == 0 or self.stopping or fatal:
            self.save()
        if self.stopping or fatal:
            self.saved()
        if fatal:
            raise Alarmed(f"stopped by the alarm {fatal[0]} (alarms.stop): at {self.place} {alarms[fatal[0]]}")
        if self.stopping:
            raise Preempted


def run(spec: str, overrides: Sequence[str], workdir: str) -> int:
    """The command `jaxagent train`: a config file with overrides, all its faults told at once."""
    config, found = configs.load(spec, overrides)
    if found:
        raise configs.ConfigError([*found, *faults(config)])
    return main(config, workdir)


def main(config: ConfigDict, workdir: str | Path, progress: Progress | None = None) -> int:
    """Trains, evaluates, and leaves a workdir with checkpoints, trajectories, metrics, eval.json and report.html."""
    workdir = Path(workdir)
    if found := faults(config):
        raise configs.ConfigError(found)
    if config.finetune.mode:
        raise configs.ConfigError([f"finetune.mode={config.finetune.mode}: this config is for jaxagent finetune, not train"])
    prepare(config, workdir)
    join()
    use_devices(config)
    hosts = here()
    progress, watchdog = progress or Progress(hosts.voice), watchdog_of(workdir, hosts)
    known = (*FAULTS, ValueError)
    with hosts.ending_together(known, overruns(workdir)), owned(workdir, hosts), watchdog.within("start"):
        hosts.check(workdir, config.to_json(sort_keys=True), jax.local_device_count())
        parts = build(config, workdir / hosts.own("sandbox.log"))
        if hosts.first:
            configs.save(config, workdir / "config.json")  # only now: a config that cannot run leaves its workdir to another
        try:
            return story(Run(config, workdir, parts, progress, watchdog), tell, resume, warm_up, train, finish)
        finally:
            with deaf(signal.SIGTERM), watchdog.within("close"):  # how the story has ended is how this does
                progress.stop()
                parts.close()


def story(run: Run, *chapters: Callable[[Run], None]) -> int:
    """The whole run from its chapters. SIGTERM ends it, saved.

    One process alone hears it within `rollout.STOP_POLL_S` while episodes are waited for: the groups of a step, their
    continuations, a search, an evaluation. While it computes, it hears it at the end of that: of a step of the warm-up, of a
    step's gradient, of what is compiled at the start. Of several hosts those that are told give up their episodes so too, and
    the others come along when theirs are over. After the last evaluation nobody hears it. What is not saved within `SAVE_S` is
    not waited for: the process ends all the same, to be started again from the checkpoint before and the journal.
    """
    previous = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: run.stop())
    try:
        with run.watchdog.within("between"):  # what stands between the parts of a step
            try:
                for chapter in chapters:
                    chapter(run)
                return EXIT_DONE
            except (Preempted, Stopped):
                run.saved()
                if run.checkpoints.latest() != run.step:  # what this step has sampled is in the journal
                    run.save()
                    run.saved()
                with suppress(BrokenPipeError):  # saved all the same
                    run.told_saved()
                return EXIT_AGAIN
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise run.unwritable(error) from error
    finally:
        with deaf(signal.SIGINT, signal.SIGTERM), run.watchdog.within("close"):
            run.checkpoints.close()
            run.journal.close()
            run.metrics.close()
            run.echoes.close()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)


@contextmanager
def deaf(*signals: signal.Signals) -> Iterator[None]:
    """Nobody hears these in it: a second Ctrl-C would leave a checkpoint torn that is about to be whole."""
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals if here}
    try:
        yield
    finally:
        for number, hearer in before.items():
            signal.signal(number, hearer)


# ====================================================================== a place to work, and a place to go on from


def watchdog_of(workdir: Path, hosts: Hosts) -> Watchdog:
    """Who ends this process when a phase does not; of several hosts the first one, whom launchers ask how it ended, last."""
    delay_s = 0.0 if hosts.count == 1 else 10.0 if hosts.first else 5.0
    # How long it was between two phases says nothing of the next time: the journal, demonstrations, new moments, the report.
    declared = {"close": 0.0, "between": Budgets().first_s}
    return Watchdog(workdir / hosts.own("overrun.log"), declared, delay_s=delay_s)


def budgets(config: ConfigDict, *, mixed: bool) -> dict[str, float]:
    """Seconds that the parts of a step may take whose episodes have deadlines of their own."""
    feed, rollouts, e = FeedOptions(**config.feed), RolloutOptions(**config.rollout), config.evaluate
    waves = feed.rollouts if config.finetune.mode in SEARCHES else 1  # a search asks for one episode of a task after the other
    evaluated = max(e.tasks, e.final_tasks) * e.rollouts + feed.most_at_once
    return {"rollout": waves * feed.budget_s(rollouts, mixed=mixed), "eval": rollouts.budget_s(evaluated)}


def process_of(config: ConfigDict, workdir: Path, parts: Learning) -> Process | None:
    """What teaches a process reward model, if there is one: the run's rollouts, and turns with values in `labels/`."""
    if parts.critic is None or not parts.algorithm.process:
        return None
    labels = sorted((workdir / "labels").glob("*.jsonl"))
    return Process(config.seed, [row for path in labels for row in read_labels(path, config.learner.row_tokens)])


def prepare(config: ConfigDict, workdir: Path) -> None:
    """Makes the workdir, or checks that the one that is there belongs to this config."""
    if re.match(r"[a-z0-9]+:/", str(workdir)):
        raise ValueError(
            f"--workdir={workdir}: a directory is wanted, not the address of a store: metrics, trajectories and eval.json are "
            "ordinary files, appended to and renamed, beside Orbax's checkpoints; mount a file system that all hosts see, "
            "such as NFS or Filestore, and name a directory there; a finished run may be copied to a bucket"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "sandbox.log").touch()
    except OSError as error:
        fault = f"--workdir={workdir} cannot be written: {error.strerror} ({error.filename or workdir})"
        raise configs.ConfigError([f"{fault}; make room there, or get the right to write, or name another directory"]) from None
    saved = workdir / "config.json"
    if saved.exists() and (changed := configs.differences(config, saved)):
        other = f"{workdir} holds a run of another config; name another --workdir, or take back what differs (its -> yours)"
        raise configs.ConfigError([other, *changed])


def owned(workdir: Path, hosts: Hosts) -> AbstractContextManager[None]:
    """Keeps other runs out of the workdir; of several hosts the first does, for all. Raises ValueError where one is there."""
    wanted = "trains there already; wait for its end, or end it, or name another --workdir"
    return alone(workdir / "run.lock", wanted) if hosts.first else nullcontext()


def tell(run: Run) -> None:
    c, parts = run.config, run.parts
    trained, frozen = (sum(w.size for w in jax.tree.leaves(part)) for part in (parts.learner.trained, parts.learner.frozen))
    size = f"{(trained + frozen) / 1e6:.2f}M parameters" + f", {trained / 1e6:.2f}M of them trained," * bool(frozen)
    run.progress.say(
        f"{c.env.name}: {size} on {jax.device_count()} {jax.default_backend()} devices, "
        f"{c.feed.prompts} x {c.feed.rollouts} episodes a step, {c.algo.name}; {parts.sandbox.description}"
    )
    run.progress.say(parts.learner.attention.note)


def resume(run: Run) -> None:
    """Compiles, and takes up the last checkpoint if there is one."""
    with run.clock.part("compile"):
        learner, warmup = run.parts.learner, run.config.warmup.steps
        for part in filter(None, (learner, run.parts.critic)):
            part.begin(supervised.warmup_optimizer(**run.config.warmup_optimizer), max(warmup, 1))
        run.parts.compile(scores=run.config.train.old_logprob == "trainer")
    run.progress.say(f"compiled in {run.clock.parts['compile']:.1f} s")
    latest = run.checkpoints.latest()
    if latest is not None:
        with run.watchdog.within("restore"):
            facts = restore(run, latest)
        if run.parts.selves and facts["past"]:
            run.parts.selves.restore(run.checkpoints.trees(latest, run.parts.selves.like(facts["past"])))
        run.feed.restore(facts["feed"])
        run.results, run.owed = facts["results"], facts.get("owed", {})
        if run.hosts.any(any(record["step"] == run.step for record in read(run.metrics.path))):
            run.owed = {}  # paid after it was saved; the checkpoint of a step is never written again
        run.progress.say(f"resumed at step {run.told_step}" + ", whose evaluation is owed" * bool(run.owed))
    recall(run)
    episodes, turns = run.journal.begin(run.feed.first)
    if episodes or turns:
        run.progress.say(f"the journal holds {episodes} episodes since then, and {turns} turns of unfinished ones")
    run.parts.engines.publish(learner.params, version=max(0, run.step - warmup))


def restore(run: Course, at: int) -> dict[str, Any]:
    """Takes up a checkpoint; returns its facts."""
    learner, warmup, facts = run.parts.learner, run.config.warmup.steps, run.checkpoints.facts(at)
    if facts["step"] > warmup:
        begin_training(run)
    run.step = facts["step"]
    ours, critics = learner.state(), run.critic_state()
    trees = run.checkpoints.trees(at, {**ours, **critics})
    learner.restore({name: trees[name] for name in ours}, facts["updates"])
    if run.parts.critic and critics:
        state = {name.removeprefix("critic_"): trees[name] for name in critics}
        run.parts.critic.restore(state, facts["critic_updates"])
    if run.process:
        run.process.restore(facts["process"])
    if facts["step"] == warmup:  # what was saved are the moments of the warm-up
        begin_training(run)
    run.baselines = facts["baselines"]
    return facts


def recall(run: Run) -> None:
    """Takes up the metrics where the run is, and lets the alarms see what they saw."""
    told = run.step - bool(run.owed)
    run.metrics.start(told + 1)
    for record in (record for record in read(run.metrics.path) if record["step"] <= told):
        run.alarms.look(record)


def begin_training(run: Course) -> None:
    """New moments for both, a critic that starts from the policy as it is now, and the policy kept that it is held to."""
    c, learner, critic = run.config, run.parts.learner, run.parts.critic
    optimizer, updates = OptimizerOptions(**c.optimizer), c.train.steps * c.train.minibatches
    still = c.critic.warmup_steps * c.train.minibatches if critic else 0  # while the critic learns, the policy does not move
    if c.finetune.mode == "rest_em":  # every round begins anew
        updates //= c.finetune.rounds
    learner.begin(optimizer, updates - still)
    if run.parts.algorithm.kl_coef and not c.finetune.mode:
        learner.keep_reference()
    if run.parts.selves:
        run.parts.selves.begin()
    if critic:
        begin_again(critic, learner)
        critic.begin(CriticOptions(**c.critic).optimizer(optimizer), updates)


# ====================================================================== warm-up: the format, from a sloppy demonstrator


def warm_up(run: Run) -> None:
    c, parts = run.config, run.parts
    if run.step < c.warmup.steps:
        dialogues = supervised.demonstrations(parts.world, c.warmup.demos, c.seed)
        rows = [supervised.supervised_row(parts.template, dialogue, parts.world.tools) for dialogue in dialogues]
        run.progress.start("warm-up", run.step)
        while run.step < c.warmup.steps:
            with run.clock.part("sft", "learner"):
                metrics = supervised.supervise(parts.learner, rows, c.warmup.batch, (c.seed, run.step), run.hosts)
            run.progress.step(run.step + 1, c.warmup.steps, {"nll": f"{metrics['sft/nll']:.3f}"})
            if parts.selves and run.step + 1 == c.warmup.steps:  # the checkpoint of this step holds it as opponent
                parts.selves.begin()
            run.done(metrics)
        parts.engines.publish(parts.learner.params, version=0)
    if not run.results:  # stopped in it, the run is saved as one that has warmed up, and comes back to here
        before(run)
        begin_training(run)


def before(run: Run) -> None:
    """What the policy can do before it is trained on: what it will be compared with."""
    run.progress.stop()
    if run.parts.selves:
        run.parts.selves.begin()
    run.record("before", score(run, "before", "test", run.config.evaluate.final_tasks))
    run.progress.say(f"held-out success to start from {run.results['before']['success']:.3f}")


# ====================================================================== the loop


def train(run: Run) -> None:
    c, parts = run.config, run.parts
    first = c.warmup.steps
    run.progress.start("step", run.step - first)
    pay_evaluation(run, show)
    while run.step < first + c.train.steps:
        step = run.step - first
        update = next_update(run, step, parts.sampling)
        if parts.selves:  # who plays the seats of earlier versions in this step
            parts.selves.sit(step)
        # Rollouts: every group of this step is sampled from the weights published last, or ones older by feed.max_staleness.
        with run.clock.part("rollout"):
            groups, sampled = run.feed.take(
                mixed=parts.algorithm.select == "mixed",
                shape=shaper(run, step / c.train.steps),
                version=step,
                steps_left=c.train.steps - step - 1,
                meanwhile=update,
                stop=lambda: run.stopping,
            )
        values = run.hosts.combined(described(run, sampled) | group_metrics(groups, sampled) | run.feed.metrics())
        values |= run.hosts.waits()
        # Gradients, as far as they were not computed while other groups were played: rows without advantage cost nothing.
        with run.clock.part("train", "learner"):
            values |= update.finish(groups)
        rows = [row for group in sampled for row in group.rows]
        run.store.write(f"train-{step + 1:06d}", rows)
        run.played(rows, update)
        # New weights into the sampler: a copy on the device.
        with run.clock.part("publish"):
            parts.engines.publish(parts.learner.params, version=step + 1)
            if parts.selves:
                values["rollout/past_version"] = float(parts.selves.seated)
                parts.selves.remember(step + 1)
        end_step(run, values, show)


def due(run: Run) -> bool:
    """Whether what the step that is under way has learnt is to be evaluated."""
    c, step = run.config, run.step - run.config.warmup.steps + 1
    return bool(c.evaluate.every) and step % c.evaluate.every == 0 and step < c.train.steps


def end_step(run: Run, values: dict[str, float], show: Callable[[Run, int, dict[str, float]], None]) -> None:
    """The end of a step whose weights the engines hold: how good they are on tasks that they never see, where that is due.

    Stopped in the evaluation, the run is saved as one that has taken the step and owes this.
    """
    c, step = run.config, run.step - run.config.warmup.steps + 1
    if due(run):
        if run.parts.selves:  # by what is saved with this step, and not by what was there before it
            run.parts.selves.sit(step)
        try:
            table = score(run, f"valid-{step:06d}", "valid", c.evaluate.tasks)
        except Stopped:
            run.owed, run.step = {**values, **run.clock.take()}, run.step + 1
            raise
        values = {**values, **eval_metrics(table)}
    show(run, step, values)
    run.done(values)


def pay_evaluation(run: Run, show: Callable[[Run, int, dict[str, float]], None]) -> None:
    """Makes the evaluation that a stopped run owes, and with it the end of its step."""
    if run.owed:
        values, run.owed, run.step = run.owed, {}, run.step - 1
        end_step(run, values, show)


def next_update(course: Course, step: int, engines: Sequence[Replicas]) -> Update:
    """The update of a step, to which groups are added while others are played."""
    c, parts = course.config, course.parts
    moves = parts.critic is None or step >= c.critic.warmup_steps
    options = UpdateOptions(c.train.minibatches, c.train.old_logprob, ordered=c.engine.exact, policy_moves=moves)
    draw: dict[str, Any] = {"place": (c.seed, step), "baselines": course.baselines, "hosts": course.hosts}
    return Update(parts.learner, parts.critic, engines, options, process=course.process, **draw)


def shaper(run: Course, progress: float) -> Callable[[Group], None] | None:
    """What shapes the rewards of this step's groups, if anything does; `progress` is how far the run is."""
    return (lambda group: run.shaping.apply(group, progress)) if run.shaping.active else None


def sound(rows: Sequence[Trajectory], max_broken: float, hosts: Hosts = ALONE) -> list[Trajectory]:
    """The rows of this host that count.

    Raises Broken, on all hosts, where the infrastructure lost too many of all rows, or a row is not what was sampled.
    """
    good = [row for row in rows if row.stop.counts]
    rows = [row for row in rows if row.stop is not StopReason.STRAGGLER]  # dropped, not lost
    error = next((row.error for row in rows if not row.stop.counts), "")
    fault = next((f"{row.task}: {found}" for row in good if (found := audit(row))), "")
    counts, totals, errors, faults_found = zip(*hosts.gather([len(good), len(rows), error, fault]), strict=True)
    broken = 1 - sum(counts) / max(1, sum(totals))
    if not sum(counts) or broken > max_broken:
        error = next(filter(None, errors), "nobody acted")
        raise Broken(
            f"{broken:.0%} of the episodes of this step were lost to the infrastructure (train.max_broken allows "
            f"{max_broken:.0%}); one of them said: {error}. The same command resumes from the last checkpoint."
        )
    if fault := next(filter(None, faults_found), ""):
        raise Broken(f"what was sampled is not what would be trained: {fault}")
    return good


def want_states(turns: Sequence[Turn], hosts: Hosts) -> None:
    """Raises ValueError, on all hosts, where no turn of any of them was taken in a state with a name."""
    if not hosts.any(any(turn.state for turn in turns)):
        raise ValueError(
            "algo.turns=state compares turns taken in the same state, but this world names no states (Step.state): all turns "
            "would be alike; set algo.turns to index or all, or have the world say its states"
        )


def described(run: Run, groups: Sequence[Group]) -> dict[str, float]:
    """The numbers of a step's rollouts. Raises Broken, and stores the rows, where they cannot be trained on.

    Raises ValueError where turns are to be compared by their states and in the first step, which is of several groups, there
    are none. Later, or of one group alone, it may be that the worlds of a mixture that name them had no turn.
    """
    rows = [row for group in groups for row in group.trajectories]
    branches = [row for group in groups for row in group.branches]
    try:
        good = sound(rows, run.config.train.max_broken, run.hosts)
        branched = run.hosts.any(bool(branches))
        continued = sound(branches, run.config.train.max_broken, run.hosts) if branched else []
    except Broken:
        step = run.step - run.config.warmup.steps + 1
        run.store.write(f"broken-{step:06d}", [row for group in groups for row in group.rows])
        raise
    once = [row for row in good if not row.segment]  # a rollout may have several rows
    sampled = sum(sum(row.mask) for row in good)
    turns = [turn for row in good for turn in row.turns]
    by_state = run.parts.algorithm.turns == "state" and not run.config.finetune.mode
    if by_state and run.step == run.config.warmup.steps and len(groups) > 1:
        want_states(turns, run.hosts)
    tools = [record for turn in turns for record in turn.tools]
    stats = run.parts.engines.take_stats()
    since = run.clock.lap()  # of groups ahead of their step something is sampled all the time
    seconds = since if run.config.feed.max_staleness else run.clock.parts["rollout"]
    values = {
        "rollout/turns": Mean(len(turns), len(once)),
        "rollout/tokens": Mean(sampled, len(once)),
        "rollout/entropy": Mean(-sum(sum(row.logprob) for row in good), sampled),
        "rollout/parse_errors": mean(bool(turn.error) for turn in turns),
        "rollout/tool_errors": mean(record.outcome != "ok" for record in tools),
        "rollout/tool_calls": float(len(tools)),
        "rollout/tools_reached": float(sum(record.outcome not in ("bad_arguments", "unknown_tool") for record in tools)),
        "rollout/tool_latency_s": mean(record.latency_s for record in tools),
        "rollout/broken": mean(not row.stop.counts and row.stop is not StopReason.STRAGGLER for row in rows),
        "rollout/retried": mean(row.attempts > 1 for row in rows),
        "engine/tokens_per_s": stats.sampled / max(1e-9, seconds),
        "engine/fill": Mean(stats.sampled, stats.row_steps),
        "engine/busy_s": stats.busy_s,
        "engine/prefilled": float(stats.prefilled),
        "engine/forked": float(stats.forked),
        "engine/offloaded": float(stats.offloaded),
        "engine/drafted": float(stats.drafted),
        "engine/accepted": Mean(stats.accepted, stats.verified),
        "engine/compiled": float(stats.compiled),
        "sandbox/restarts": float(run.parts.sandbox.restarts),
    }
    if run.config.feed.branches:
        values["rollout/branches"] = float(len(continued))
        values["rollout/branch_tokens"] = float(sum(sum(row.mask) for row in continued))
    values |= sampling_metrics(good, run.step - run.config.warmup.steps) | role_metrics(groups)
    values |= rewards(groups, good)
    stops = run.hosts.gather(sorted({row.stop for row in rows}))
    for stop in sorted({stop for of_host in stops for stop in of_host}):
        values[f"rollout/stop_{stop}"] = mean(row.stop == stop for row in rows)
    paid = run.hosts.gather(sorted(name for name in values if name.startswith("reward/part_")))
    for name in sorted({name for of_host in paid for name in of_host}):  # a part that no episode of this host has is 0 in all
        values.setdefault(name, Mean(0.0, len(once)))
    return values


def rewards(groups: Sequence[Group], good: Sequence[Trajectory]) -> dict[str, float]:
    """What a step's groups earned; `good` are their rows that count."""
    once = [row for row in good if not row.segment]
    values = {
        "reward/mean": mean(row.reward for row in once),
        "reward/outcome": mean(row.outcome for row in once),
        "reward/success": mean(row.solved for row in once),
        "reward/informative_groups": mean(has_signal(group) for group in groups if group.trajectories),
    }
    return values | {f"reward/{name}": value for name, value in components(good).items()}


def show(run: Run, step: int, values: dict[str, float]) -> None:
    shown = {
        "success": f"{values['reward/success']:.2f}",
        "reward": f"{values['reward/mean']:.2f}",
        "turns": f"{values['rollout/turns']:.1f}",
        "entropy": f"{values['rollout/entropy']:.2f}",
        "tok/s": f"{values['engine/tokens_per_s']:.0f}",
    }
    if "eval/success" in values:
        shown["held-out"] = f"{values['eval/success']:.2f}"
    run.progress.step(step, run.config.train.steps, shown, curve=values["reward/success"])


def score(run: Run, label: str, split: str, tasks: int, *, ablated: bool = False) -> dict[str, Any]:
    """Evaluates the weights that the engines hold and stores the trajectories. Raises Stopped where the run is to stop."""
    c = run.config.evaluate
    sampling = held_out(run.config)
    with run.clock.part("eval"):
        how = {"split": split, "tasks": tasks, "k": c.rollouts, "ablated": ablated}
        table, rows = evaluate(run.parts.rollouts, sampling, **how, hosts=run.hosts, stop=lambda: run.stopping)
    table["settings"] = {"policy": {"step": run.step}, **settings_of(run.config, sampling, **how)}
    run.store.write(label, rows)
    run.played(rows)
    run.parts.engines.take_stats()
    return table


# ====================================================================== the end


def finish(run: Run) -> None:
    """Scores the trained policy, without its tools too, says what it learnt, and writes the report."""
    c = run.config
    run.progress.stop()
    if run.checkpoints.latest() != run.step:
        run.save()
    if run.parts.selves:
        run.parts.selves.sit(run.step)
    n = c.evaluate.final_tasks
    run.record("after", score(run, "after", "test", n))
    if c.evaluate.ablate:
        run.record("ablated", score(run, "ablated", "test", n, ablated=True))
    run.saved()
    if not run.hosts.first:
        return
    page = report(run.workdir)
    run.progress.table(*comparison(run.results))
    run.progress.say(f"time: {spent(run)}")
    run.progress.say(f"report: {page}")
    command = sys.argv[0] if Path(sys.argv[0]).name == "jaxagent" else "python -m jaxagent"
    run.progress.say("what to try next:")
    run.progress.say(f"  {command} eval --workdir={run.workdir} --rollouts=8     pass@8 on held-out tasks")
    run.progress.say(f"  {command} export --workdir={run.workdir} --to=DIR       the policy as a Hugging Face checkpoint")
    if not c.finetune.mode:
        run.progress.say("  the same training with --config.algo.name=rloo --config.seed=1 and another --workdir")


def comparison(results: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Title, header and rows of the table of evaluations. Raises ValueError where they cannot be compared."""
    titles = {"before": "before", "after": "after", "ablated": "blind"}
    names = [name for name in titles if name in results]
    tables = [results[name] for name in names]
    want_alike({name: results[name] for name in names}, but=("policy", "ablated"))
    header = ["", *(titles[name] for name in names)]
    rows = [
        ["success", *(f"{t['success']:.3f}" for t in tables)],
        ["95 % interval", *("{:.3f} to {:.3f}".format(*t["ci95"]) for t in tables)],
    ]
    for level in tables[-1]["by_difficulty"]:
        rows += [[f"  {level}", *(f"{t['by_difficulty'].get(level, 0.0):.3f}" for t in tables)]]
    rows += [["turns per episode", *(f"{t['turns']:.1f}" for t in tables)]]
    return f"Sampled success on {tables[-1]['n']} tasks never trained on", header, rows


def spent(run: Run) -> str:
    """Wall seconds by part, the CPU seconds of this process beside them, and its greatest memory."""
    last = run.clock.take()
    records = [*read(run.metrics.path), last]
    names = sorted({name for record in records for name in record if name.startswith("time/")})
    totals = {name.removeprefix("time/").removesuffix("_s"): sum(r.get(name, 0.0) for r in records) for name in names}
    cpu = totals.pop("cpu")
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in sorted(totals.items(), key=lambda x: -x[1]))
    return f"{parts}; {cpu:.0f} CPU-s and {peak_bytes() / 2**30:.1f} GiB in this process"
