"""`scienceworld`: thirty kinds of experiments in a simulated school. Needs Java and `jaxagent env install scienceworld`.

The reward is the increment of the task's score, of which 1 is all; a wrong focus, which the simulator punishes with -100
points, ends the task and takes back what was earned. Splits are the library's own variations of every task; `demo` uses those
of `train`.
"""

from __future__ import annotations

from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import Shown

RULES = (
    "You are in a simulated school. Answer with one action, as in: look around; open door to kitchen; go to kitchen; pick up "
    "cup; focus on cup; pour cup into sink; activate stove; wait."
)


def make_world(
    tasks: tuple[str, ...] = ("boil",),
    simplification: str = "easy",
    variations: int = 14,
    steps: int = 100,
    rules: bool = True,
    workers: int = 0,
    timeout_s: float = 120.0,
) -> Shown:
    """The world.

    Args:
        tasks: the library's names, in turn.
        simplification: its name, or an empty string for none.
        variations: tasks of a split; where a task has fewer variations, some come twice.
        steps: after which an episode ends.
        rules: whether the first observation begins with how to act.
    """
    names = tuple(tasks)
    if not names:
        raise ValueError("env.options.tasks must name at least one task of ScienceWorld, as in boil")

    def describe(split: str, index: int) -> Task:
        return {"task": names[index % len(names)], "index": index // len(names), "difficulty": names[index % len(names)]}

    options = {"simplification": simplification, "steps": steps}
    world = Shown("scienceworld", options, describe, rules=RULES * rules, workers=workers, slots=1, timeout_s=timeout_s)
    world.sizes = dict.fromkeys(("train", "demo", "valid", "test"), variations * len(names))
    return world
