"""Supervised learning on dialogues: the short story, and the warm-up of train.py."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from jaxagent.chat.template import Template, render
from jaxagent.data.pack import Row, pack
from jaxagent.envs.env import World
from jaxagent.learner import Learner
from jaxagent.types import Message, ToolSpec


def demonstrations(world: World, count: int, seed: int) -> list[list[Message]]:
    """`count` dialogues of the world's demonstrator, on tasks that are neither trained on nor tested."""
    rng = random.Random(f"{seed}/demonstrations")
    first = seed * count
    return [world.demonstrate(world.task("demo", first + i), rng) for i in range(count)]


def supervised_row(template: Template, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Row:
    """A dialogue as a training row: every token the assistant wrote counts once, observations never."""
    tokens, mask = render(template, messages, tools)
    ones = [1.0] * len(tokens)
    return Row(tokens, mask, [0.0] * len(tokens), ones, ones, ones)


def supervise(learner: Learner, rows: Sequence[Row], batch: int, draw: tuple[int, int]) -> dict[str, float]:
    """One step of cross-entropy on `batch` rows, chosen by the seeds `draw`; returns the step's metrics."""
    chosen = np.random.default_rng(draw).integers(0, len(rows), batch)
    o = learner.options
    for micro in pack([rows[i] for i in chosen], batch_rows=o.batch_rows, row_tokens=o.row_tokens):
        learner.accumulate(micro, on_policy=True)
    metrics = learner.apply()
    return {"sft/nll": metrics["policy/nll"], "sft/lr": metrics["policy/lr"], "sft/tokens": metrics["policy/tokens"]}
