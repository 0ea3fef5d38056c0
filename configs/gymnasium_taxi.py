"""Gymnasium: the taxi, in words; other games by env.options.game. Needs `jaxagent env install gymnasium_text`.

jaxagent train --config=configs/gymnasium_taxi.py --config.init_from=CHECKPOINT_DIR --workdir=DIR
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "gymnasium_text"
    c.env.options = ConfigDict({"game": "Taxi-v3", "rules": True})
    c.agent.max_turns = 30
    return shortened(c, 2048) if arg == "runlocal" else c
