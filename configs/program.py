"""The quickstart's task, played by a program of the user's own that asks over HTTP: `configs/programs/look_up.py`."""

from pathlib import Path

from ml_collections import ConfigDict
from quickstart import get_config as quickstart

PROGRAM = Path(__file__).parent / "programs" / "look_up.py"


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = quickstart(arg)
    c.env.name = "program"
    c.env.options = ConfigDict({"function": f"{PROGRAM}:agent", "world": "chain"})
    return c
