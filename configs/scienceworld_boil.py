"""ScienceWorld: boiling and melting, without the simulator's harder rules. Needs `jaxagent env install scienceworld`.

jaxagent train --config=configs/scienceworld_boil.py --config.init_from=CHECKPOINT_DIR --workdir=DIR
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "scienceworld"
    c.env.options = ConfigDict({"tasks": ("boil", "melt"), "rules": True})
    c.rollout.concurrency = 4  # simulators: who waits for one has its deadline running
    c.agent.max_turns = 40
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 16384
    return shortened(c, 2048) if arg == "runlocal" else c
