"""Whether a killed run comes to the same end: `python benchmarks/kills.py --out=DIR`, the quickstart killed a hundred times.

Two runs of one config: one that nothing disturbs, and one that is killed with SIGKILL again and again and started again on what
it left. Where it is killed is drawn beforehand: a tenth of the kills over the warm-up, the rest over the steps of training. Of
these every third comes at any moment, the others are aimed at a phase in turn. Each start is a process of its own, forked
before JAX has devices so that it need not import; a thread in it looks at the stacks of all others, and kills it from there:
what it sees is what the kill has hit. The phases:

    start         building, compiling (from the cache on disk), restoring, reading the journal
    warm-up       a supervised step
    sampling      episodes are played, and no call of theirs is under way in the sandbox
    tool call     episodes are played, and at least one waits for the sandbox
    gradient      forward and backward passes, and the optimizer
    publish       new weights go to the engine
    save          from the call that saves until the background threads that write have ended
    evaluation    episodes of an evaluation are played
    between       metrics, trajectories, the journal's next file

Compared at the end, bit for bit: the parameters and the optimizer's moments in the last checkpoint; every line of metrics.jsonl
without the names in CLOCKED (times, and what engine and sandbox count); tokens, log-probs, versions and rewards of all stored
trajectories, and the multiset of (task, seed, rollout) that was trained on; how many tokens were sampled in each of these
episodes, as a multiset; eval.json. With --config.engine.exact=False a token's probability depends in its last bits on who is
decoded beside it: prompts are the same then, and lengths as far as no draw was on such an edge. The same command goes on where
it was stopped. A kill that is aimed waits four steps for its phase: save and evaluate as often, --config.checkpoint.every=4
--config.evaluate.every=4.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent import train
from jaxagent.data.store import Store
from jaxagent.metrics import read
from jaxagent.progress import Progress

PHASES = ("start", "warm-up", "sampling", "tool call", "gradient", "publish", "save", "evaluation", "between")
AIMED = ("sampling", "save", "tool call", "gradient", "publish", "save", "evaluation", "gradient", "publish", "start")
IN_WARM_UP = ("warm-up", "save", "warm-up", "any")
# What may differ between two equal runs: times, and what depends on which request came first.
CLOCKED = ("time/", "engine/", "sandbox/", "feed/streamed", "rollout/tool_latency_s", "rollout/retried", "rollout/seconds")
POLL_S = 0.002
NO_SWITCH_S = 0.1  # within which a look at all stacks is over
LATER_S = 0.05  # a kill comes up to so much after its phase has begun
ANY_S = 3.0  # CPU seconds: a kill that is not aimed comes up to so much after its step has begun
START_S = 7.0  # CPU seconds that a start takes
PATIENCE = 4  # steps that a kill waits for its phase; then it comes as it is


# ---------------------------------------------------------------------- what a process is doing


@contextmanager
def alone() -> Iterator[None]:
    """No other thread runs Python meanwhile: a frame that returns while its callers are walked through takes the process along.

    Nor is anything collected: what that frees may give the interpreter's lock away, and asking for all frames holds another.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(NO_SWITCH_S)
    time.sleep(0)  # whoever waits already has asked for the lock by now, and gets it here
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        sys.setswitchinterval(before)


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def places(frame: FrameType | None) -> set[tuple[str, str]]:
    """(file, function) of everything on a stack."""
    return {(Path(f.f_code.co_filename).stem, f.f_code.co_name) for f in stack(frame)}


def run_of(frame: FrameType | None) -> train.Run | None:
    """The run whose story a stack tells."""
    return next((f.f_locals.get("run") for f in stack(frame) if f.f_code is train.story.__code__), None)


def writing(frames: dict[int, FrameType], main: int) -> bool:
    """Whether a checkpoint is being written behind the main thread."""
    others = [frame for ident, frame in frames.items() if ident not in (main, threading.get_ident())]
    return any(Path(f.f_code.co_filename).stem == "checkpoint_manager" for frame in others for f in stack(frame))


def in_sandbox(loop: asyncio.AbstractEventLoop) -> int:
    """How many tasks of a loop wait for an answer of the sandbox."""
    waiting = 0
    for task in asyncio.all_tasks(loop):
        at: Any = task.get_coro()
        while at is not None and hasattr(at, "cr_frame"):
            if "sandbox_client" in at.cr_code.co_filename:
                waiting += 1
                break
            at = at.cr_await
    return waiting


def phase(here: set[tuple[str, str]], saving: bool, calls: int) -> str:
    """What a process is doing, as it is called above.

    Args:
        here: what stands on the stack of its main thread.
        saving: whether a checkpoint is written behind it.
        calls: that are under way in the sandbox.
    """
    chapters = {("train", "warm_up"), ("train", "train"), ("train", "finish")}
    if ("train", "story") not in here or not here & chapters:
        return "start"
    if saving or ("train", "save") in here:
        return "save"
    named = {
        ("supervised", "supervise"): "warm-up",
        ("update", "finish"): "gradient",
        ("update", "work"): "gradient",
        ("replicas", "publish"): "publish",
        ("evaluate", "evaluate"): "evaluation",
    }
    for place, name in named.items():
        if place in here:
            return name
    if ("feed", "take") in here:
        return "tool call" if calls else "sampling"
    return "between"


class Killer(threading.Thread):
    """Kills its process at a step and in a phase, and writes down what it was doing."""

    def __init__(self, number: int, step: int, target: str, log: Path, seed: int):
        super().__init__(name="killer", daemon=True)
        self.number, self.step, self.target, self.log = number, step, target, log
        self.luck, self.main = random.Random(f"{seed}/{number}"), threading.main_thread().ident

    def look(self) -> tuple[str, int]:
        assert self.main
        with alone():
            frames = sys._current_frames()
            run, here = run_of(frames.get(self.main)), places(frames.get(self.main))
            calls = in_sandbox(run.parts.rollouts._loop) if run and ("feed", "take") in here else 0
            return phase(here, writing(frames, self.main), calls), run.step if run else -1

    def run(self) -> None:
        if self.target == "start":
            self.work(START_S, "start")
        later, since = LATER_S, sys.maxsize
        while True:
            name, step = self.look()
            if name != "start" and step >= self.step:
                since = min(since, step)
            if self.target == "any" and since <= step:
                self.work(ANY_S)
                self.kill()
            elif self.target == name and (since <= step or name == "start"):
                if name != "start":
                    time.sleep(self.luck.uniform(0.0, later))
                later /= 2  # a short phase is hit when it is seen
                self.kill(name)
            elif step >= since + PATIENCE:
                self.kill()
            time.sleep(POLL_S)

    def work(self, most_s: float, only: str = "") -> None:
        """Lets the process work for up to so many CPU seconds; where a phase is named, no longer than it lasts."""
        end = time.process_time() + self.luck.uniform(0.0, most_s)
        while time.process_time() < end and (not only or self.look()[0] == only):
            time.sleep(POLL_S)

    def kill(self, only: str = "") -> None:
        """Ends the process; where a phase is named, only if that is what it is doing."""
        name, step = self.look()
        if only and name != only:
            return
        facts = {"kill": self.number, "aimed": self.target, "phase": name, "step": step, "cpu_s": time.process_time()}
        with self.log.open("a") as log:
            log.write(json.dumps(facts) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------- two runs


def forked(work: Callable[[], int], log: Path) -> int:
    """Starts `work` in a process of its own, whose output goes to a file; its number."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        with log.open("a", buffering=1) as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            code = work()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def ended(pid: int) -> int:
    """Waits for a process; its exit code, negative where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def trained(config: ConfigDict, workdir: Path, killer: Callable[[], Killer] | None = None) -> int:
    if killer:  # made here: a thread made before the fork counts as one that has ended
        killer().start()
    return train.main(config, workdir, Progress(sys.stdout))


def planned(config: ConfigDict, kills: int, seed: int) -> list[tuple[int, str]]:
    """At which step, and in which phase, each kill comes."""
    luck, warm, steps = random.Random(seed), config.warmup.steps, config.train.steps
    early = kills // 10 if warm else 0
    aims = [AIMED[i * 2 // 3 % len(AIMED)] if i % 3 else "any" for i in range(kills - early)]
    luck.shuffle(aims)
    plan = [(luck.randrange(warm), IN_WARM_UP[i % len(IN_WARM_UP)]) for i in range(early)]
    plan += [(warm + luck.randrange(max(1, steps - PATIENCE)), aim) for aim in aims]
    # Evaluations are before the first step of training, after some, and after the last one.
    plan = [(luck.choice((warm, step, warm + steps)) if aim == "evaluation" else step, aim) for step, aim in plan]
    return sorted(plan, key=lambda place: place[0])


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def killed(config: ConfigDict, out: Path, kills: int, seed: int) -> None:
    """The run that is killed, to its end."""
    log, plan = out / "kills.jsonl", planned(config, kills, seed)
    while True:
        number = len(logged(log))
        killer = partial(Killer, number, *plan[number], log, seed) if number < len(plan) else None
        code = ended(forked(partial(trained, config, out / "killed", killer), out / "killed.log"))
        if code == 0:
            return
        if code != -signal.SIGKILL:
            raise RuntimeError(f"after {number} kills the run ended with {code}: {out / 'killed.log'} says why")


# ---------------------------------------------------------------------- compared


def arrays(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """All that a checkpoint holds, by name."""
    found: dict[str, np.ndarray] = {}
    reader = ocp.PyTreeCheckpointer()
    for name in ("params", "opt_state"):
        path = (workdir / "checkpoints" / str(step) / name).absolute()
        shapes = reader.metadata(path).item_metadata.tree
        tree = reader.restore(path, restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes))
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        found |= {name + jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return found


def metrics(workdir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if not k.startswith(CLOCKED)} for record in read(workdir / "metrics.jsonl")]


def played(workdir: Path) -> dict[str, list[Any]]:
    store = Store(workdir / "trajectories")
    return {
        label: [
            (t.task, t.seed, t.group, t.rollout, t.tokens, t.mask, t.logprob, t.version, t.reward, t.stop)
            for t in store.read(label)
        ]
        for label in store.labels()
    }


def prompts(rows: dict[str, list[Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(
        (task, seed, rollout) for label in rows if label.startswith("train") for task, seed, _, rollout, *_ in rows[label]
    )


def lengths(rows: dict[str, list[Any]]) -> Counter[int]:
    """How many of the trained episodes have so many sampled tokens."""
    return Counter(sum(mask) for label in rows if label.startswith("train") for *_, mask, _, _, _, _ in rows[label])


def apart(a: Counter[int], b: Counter[int]) -> str:
    """How far two distributions of lengths are from each other; empty where they are equal.

    D = max |F_a - F_b|, which 5 % of samples of one distribution exceed from 1.36 sqrt(1/n + 1/m) on (Kolmogorov, Smirnov).
    """
    if a == b:
        return ""
    steps = range(max(a | b) + 1)
    below = [[sum(n for x, n in one.items() if x <= step) / one.total() for step in steps] for one in (a, b)]
    distance = max(abs(x - y) for x, y in zip(*below, strict=True))
    means = [sum(x * n for x, n in one.items()) / one.total() for one in (a, b)]
    chance = 1.36 * (1 / a.total() + 1 / b.total()) ** 0.5
    return f"means {means[0]:.3f} and {means[1]:.3f}, distributions {distance:.4f} apart; chance reaches {chance:.3f} at 5 %"


def differences(whole: Path, other: Path, step: int) -> dict[str, str]:
    """What differs, by what was compared; empty where nothing does."""
    want, got = arrays(whole, step), arrays(other, step)
    weights = [
        name
        for name in want.keys() | got.keys()
        if name not in got or name not in want or want[name].tobytes() != got[name].tobytes()
    ]
    lines = [(a, b) for a, b in zip(metrics(whole), metrics(other), strict=False) if a != b]
    counts = [len(metrics(path)) for path in (whole, other)]
    rows, others = played(whole), played(other)
    tables = [(path / "eval.json").read_text() for path in (whole, other)]
    first = next((f"step {a['step']}: {sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))}" for a, b in lines), "")
    labels = [label for label in rows.keys() | others.keys() if rows.get(label) != others.get(label)]
    return {
        f"parameters and moments ({len(want)} arrays, {sum(a.nbytes for a in want.values())} bytes)": ", ".join(
            sorted(weights)
        ),
        f"metrics ({counts[0]} lines)": first or ("" if counts[0] == counts[1] else f"{counts[1]} lines"),
        f"trained prompts ({sum(prompts(rows).values())})": "" if prompts(rows) == prompts(others) else "another multiset",
        f"their lengths ({lengths(rows).total()})": apart(lengths(rows), lengths(others)),
        f"trajectories ({sum(map(len, rows.values()))})": ", ".join(sorted(labels)),
        "eval.json": "" if tables[0] == tables[1] else "differs",
    }


def told(out: Path, config: ConfigDict) -> bool:
    """Prints what was hit and what differs; whether nothing does."""
    kills = logged(out / "kills.jsonl")
    found = differences(out / "whole", out / "killed", config.warmup.steps + config.train.steps)
    hit = Counter(kill["phase"] for kill in kills)
    print(f"{len(kills)} kills; CPU seconds of the killed processes {sum(kill['cpu_s'] for kill in kills):.0f}\n")
    print("| killed in | " + " | ".join(PHASES) + " |")
    print("|---" * (len(PHASES) + 1) + "|")
    print("| kills | " + " | ".join(str(hit[name]) for name in PHASES) + " |\n")
    print("| compared with the run that was not killed | equal bit for bit |\n|---|---|")
    for what, difference in found.items():
        print(f"| {what} | {'no: ' + difference if difference else 'yes'} |")
    return not any(found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the draws where it is killed")
    parser.add_argument("--config", default=str(Path(__file__).parent.parent / "configs" / "quickstart.py"))
    asked, rest = parser.parse_known_args(arguments)
    overrides = [text.removeprefix("--config.") for text in rest if text.startswith("--config.")]
    if len(overrides) < len(rest):
        parser.error(f"--config.KEY=VALUE is wanted, got {' '.join(rest)}")
    config, found = configs.load(asked.config, overrides)
    if found:
        raise configs.ConfigError(found)
    asked.out.mkdir(parents=True, exist_ok=True)
    over = (asked.out / "whole" / "report.html").exists()
    whole = 0 if over else forked(partial(trained, config, asked.out / "whole"), asked.out / "whole.log")
    killed(config, asked.out, asked.kills, asked.seed)
    if whole and (code := ended(whole)):
        raise RuntimeError(f"the run that nothing disturbs ended with {code}: {asked.out / 'whole.log'} says why")
    return 0 if told(asked.out, config) else 1


if __name__ == "__main__":
    sys.exit(main())
