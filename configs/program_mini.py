"""The quickstart's task, played by mini-swe-agent (`jaxagent[agents]`): `configs/programs/look_up_mini.py`."""

from pathlib import Path

from ml_collections import ConfigDict
from program import get_config as program

PROGRAM = Path(__file__).parent / "programs" / "look_up_mini.py"


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = program(arg)
    c.env.options = ConfigDict({"function": f"{PROGRAM}:agent", "world": str(PROGRAM), "inner": {"hops": (1, 2)}})
    c.agent.max_tokens = 128
    c.sampling.max_tokens = 11  # `bash A37` with what opens and closes a call
    c.engine.slot_tokens = c.engine.chunk = 128
    c.engine.append_tokens = (4, 24)
    c.warmup.steps = min(c.warmup.steps, 200)
    c.warmup.demos = c.warmup.steps * c.warmup.batch
    return c
