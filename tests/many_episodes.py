"""Runs of many made-up episodes, for a page to show: tool calls, failures, rewards of several parts, tasks met again."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.store import Store
from jaxagent.types import Message, Sample, StopReason, ToolCall, ToolRecord, Trajectory

TEMPLATE = PlainTemplate()
TEXT = "the path of a lamp over rivers and stone by night under many old trees where paper birds count slow hours"
WORDS = TEXT.split()


def episode(rng: random.Random, task: int, rollout: int, skill: float) -> Trajectory:
    """Some calls, one of which may fail, be repeated or be cut short; and an answer."""
    t = Trajectory(f"toy/{task}", task, f"train/{task}", rollout, difficulty=f"{1 + task % 3} hops", seconds=rng.random())
    t.feed(TEMPLATE.prompt([Message("user", " ".join(random.Random(task).choices(WORDS, k=12)))], ()))
    calls = rng.randint(0, 4)
    keys = [str(rng.randint(0, 9)) for _ in range(calls)]
    if calls > 1 and rng.random() < 0.1:
        keys = keys[:1] * calls
    messages = [Message("assistant", calls=(ToolCall("A", {"key": key}),)) for key in keys]
    messages.append(Message("assistant", " ".join(rng.choices(WORDS, k=10))))
    for message in messages:
        ids = TEMPLATE.turn(message)
        fed = t.tokens[t.turns[-1].end if t.turns else 0 :]
        turn = t.sampled(
            Sample(ids, [-rng.random()] * len(ids), [task] * len(ids), True, len(t.tokens) - len(fed), fed),
            "",
            TEMPLATE.text(ids),
        )
        turn.advantage = rng.gauss(0, 1)
        if message.calls:
            said = " ".join(rng.choices(WORDS, k=20))
            outcome = rng.choices(["ok", "error", "timeout"], [0.9, 0.07, 0.03])[0]
            turn.tools = [ToolRecord("A", message.calls[0].arguments, outcome, said, rng.random())]
            t.feed(TEMPLATE.extend([Message("tool", said)]))
    won = calls > 1 and rng.random() < skill
    t.turns[-1].parts = {"outcome": float(won), "brevity": round(-0.01 * len(t.turns), 2)}
    t.turns[-1].reward, t.turns[-1].reason = sum(t.turns[-1].parts.values()), "right answer" if won else "wrong"
    t.turns[-1].outcome, t.turns[-1].checks = float(won), {"judge": round(rng.random(), 2)}
    t.turns[0].error = "no call could be read" if rng.random() < 0.05 else ""
    t.stop = rng.choices([StopReason.ANSWERED, StopReason.MAX_TURNS, StopReason.INFRA_FAILURE], [0.9, 0.08, 0.02])[0]
    return t


def write_run(folder: Path, episodes: int, per_step: int = 500, seed: int = 0) -> Path:
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    config = {
        "env": {"name": "toy"},
        "init_from": "",
        "warmup": {"steps": 0},
        "train": {"steps": episodes // per_step},
        "seed": seed,
    }
    (folder / "config.json").write_text(json.dumps(config))
    steps = range(1, episodes // per_step + 1)
    for step in steps:
        # every task is met again two steps later
        tasks = [(step % 2) * per_step + number for number in range(per_step // 8)]
        write_step(folder, step, [episode(rng, task, rollout, step / len(steps)) for task in tasks for rollout in range(8)])
    return folder


def write_step(folder: Path, step: int, rows: list[Trajectory]) -> None:
    Store(folder / "trajectories").write(f"train-{step:06d}", rows)
    rng, success = random.Random(step), statistics.fmean(row.solved for row in rows)
    gap = {f"policy/sampler_logprob_gap_turn_{turn}": 0.01 + 0.01 * rng.random() for turn in ("0", "1", "2", "3_on")}
    told = {"reward/success": success, "reward/mean": success, "rollout/entropy": rng.random(), **gap}
    told |= {"policy/sampler_logprob_gap": 0.01, "feed/staleness_mean": rng.random(), "feed/staleness_max": 1.0}
    told |= {f"time/{part}_s": rng.random() for part in ("rollout", "train", "publish")}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **told}) + "\n")
