"""debug-gym: repair a repository with its tools until its tests pass. Needs `jaxagent env install debug_gym`.

jaxagent train --config=configs/debug_gym.py:TASKS.jsonl --config.init_from=CHECKPOINT_DIR --workdir=DIR

Tasks are made by `jaxagent swe`; without any it plays thirty bugs in one small module, which teach nobody anything else.
"""

from pathlib import Path

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened

REPAIRS = Path(__file__).resolve().with_name("repairs.jsonl")


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: the task file, by default thirty bugs; "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "debug_gym"
    path = Path(arg).resolve() if arg not in ("", "runlocal") else REPAIRS
    c.env.options = ConfigDict({"path": str(path), "rules": ""})
    c.rollout.deadline_s = 1800.0  # an episode runs its tests several times, and waits for a worker that is free
    c.agent.max_turns = 30
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 32768
    c.sampling.max_tokens = 1024
    if arg != "runlocal":
        return c
    c = shortened(c, 4096)
    c.evaluate.tasks = c.evaluate.final_tasks = 1
    return c
