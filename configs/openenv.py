"""OpenEnv: any environment that an OpenEnv server holds.

jaxagent train --config=configs/openenv.py:http://127.0.0.1:8000 --config.env.options.field=message
--config.env.options.shows=text --config.init_from=CHECKPOINT_DIR --workdir=DIR

`field` of an action is what the policy says, `shows` what it reads; where they are empty, both are JSON. The server must allow
`rollout.concurrency` sessions at once. Sizes: those of configs/textworld_quest.py.
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: the server's address; "runlocal:ADDRESS" gives a run of seconds, which without one is of Sokoban."""
    short, url = arg.startswith("runlocal"), arg.removeprefix("runlocal").removeprefix(":")
    c = text_world()
    if url or not short:
        c.env.name = "openenv"
        c.env.options = ConfigDict({"url": url or "http://127.0.0.1:8000", "field": "", "shows": "", "rules": ""})
    c.rollout.concurrency = 8
    return shortened(c, 1024 if url else 160) if short else c
