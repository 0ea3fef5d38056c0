"""GEM: a number between 1 and 50 in seven guesses. Needs `jaxagent env install gem`.

jaxagent train --config=configs/gem_guess.py --config.init_from=CHECKPOINT_DIR --workdir=DIR
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "gem"
    c.env.options = ConfigDict({"game": "GuessTheNumber-v0-hard", "strict": True, "rules": ""})
    c.agent.max_turns = 7
    return shortened(c, 2048) if arg == "runlocal" else c
