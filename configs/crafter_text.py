"""Crafter: a hundred steps in the open world. Needs `jaxagent env install crafter`.

jaxagent train --config=configs/crafter_text.py --config.init_from=CHECKPOINT_DIR --workdir=DIR
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "crafter"
    c.env.options = ConfigDict({"steps": 100, "rules": True})
    c.agent.max_turns = 100
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 32768
    c.sampling.max_tokens = 32
    return shortened(c, 2048) if arg == "runlocal" else c
