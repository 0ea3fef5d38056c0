"""The quickstart's task, played by the OpenAI Agents SDK (`jaxagent[agents]`): `configs/programs/look_up_sdk.py`."""

from pathlib import Path

from ml_collections import ConfigDict
from program import get_config as program

PROGRAM = Path(__file__).parent / "programs" / "look_up_sdk.py"


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part; "responses" asks by /v1/responses."""
    c = program(arg)
    c.env.options.function = f"{PROGRAM}:{'responses' if arg == 'responses' else 'agent'}"
    return c
