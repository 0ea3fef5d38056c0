"""TextArena: tic-tac-toe against oneself. Needs `jaxagent env install textarena`.

jaxagent train --config=configs/textarena_tictactoe.py --config.init_from=CHECKPOINT_DIR --workdir=DIR
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "textarena"
    c.env.options = ConfigDict({"game": "TicTacToe-v0", "rules": ""})
    c.algo.name = "spiral"
    c.agent.max_turns = 8
    return shortened(c, 2048) if arg == "runlocal" else c
