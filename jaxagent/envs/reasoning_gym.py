"""`reasoning_gym`: a hundred kinds of generated puzzles with exact scorers. Needs `jaxagent env install reasoning_gym`.

One question, one answer: the policy's turn, or what stands between <answer> and </answer> in it. The reward is the library's
score, 0 to 1; only 1 counts as solved. For wrong answers of the right form some kinds give a little.
"""

from __future__ import annotations

from typing import Any

from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import SPLITS, Shown

# Their scorers hand the answer to an interpreter of formulas, which runs any Python, or hide which scorer it is.
REFUSED = ("polynomial_multiplication", "simple_integration", "intermediate_integration", "composite")
RULES = "Answer the question. Put your final answer, and nothing else, between <answer> and </answer>."


def make_world(
    tasks: tuple[str, ...] = ("chain_sum",),
    settings: dict[str, Any] | None = None,
    size: int = 10_000,
    seed: int = 0,
    rules: bool = True,
    workers: int = 0,
    timeout_s: float = 60.0,
) -> Shown:
    """The world.

    Args:
        tasks: names of the library's datasets, in turn.
        settings: of the dataset, as in {"max_terms": 3}, where there is one.
        size: questions of a split.
        seed: of all questions.
        rules: whether the question begins with how to answer.
    """
    names, settings = tuple(tasks), dict(settings or {})
    if not names:
        raise ValueError("env.options.tasks must name at least one dataset of Reasoning Gym, as in chain_sum")
    if refused := [name for name in names if name in REFUSED]:
        raise ValueError(
            f"env.options.tasks: {refused[0]} is scored by running the answer as a program, in a process without a sandbox; "
            "choose another task"
        )
    if settings and len(names) > 1:
        raise ValueError(f"env.options.settings belong to one dataset, but env.options.tasks names {len(names)}")
    if size < 1:
        raise ValueError(f"env.options.size must be at least 1, got {size}")

    def describe(split: str, index: int) -> Task:
        name = names[index % len(names)]
        # Question i of a dataset is drawn from its seed plus i: splits stand further apart than their sizes.
        return {"task": name, "base": (seed * len(SPLITS) + SPLITS[split]) * size, "index": index, "difficulty": name}

    options = {"settings": settings, "size": size}
    world = Shown("reasoning_gym", options, describe, rules=RULES * rules, workers=workers, timeout_s=timeout_s)
    world.sizes = dict.fromkeys(SPLITS, size)
    return world
