"""Reasoning Gym: sums; other tasks by env.options.tasks. Needs `jaxagent env install reasoning_gym`.

jaxagent train --config=configs/reasoning_gym_sums.py --config.init_from=CHECKPOINT_DIR --workdir=DIR
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "reasoning_gym"
    c.env.options = ConfigDict({"tasks": ("chain_sum",), "rules": True})
    c.agent.max_turns = 1
    c.agent.max_tokens = 2048
    c.sampling.max_tokens = 1024
    return shortened(c, 2048) if arg == "runlocal" else c
