"""Tasks at a computer: chores on desktops that run here, with Xvfb and xdotool; or OSWorld's tasks at OSWorld's guests.

jaxagent train --config=configs/osworld.py --config.init_from=CHECKPOINT_DIR --workdir=DIR
jaxagent train --config=configs/osworld.py:TASKS --config.env.options.urls=http://HOST:5000 --config.init_from=...

TASKS is a folder of OSWorld's task files; `env.options.restore` is the command that reverts a guest to its snapshot.
"""

from pathlib import Path

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: a folder or file of OSWorld's tasks; none plays chores; "runlocal" gives a run of seconds with them."""
    c = text_world()
    if arg in ("", "runlocal"):
        c.env.name = "desk"
        c.env.options = ConfigDict({"kinds": ("phone", "city", "member", "add", "delete"), "workers": 2, "rules": True})
    else:
        c.env.name = "osworld"
        options = {
            "urls": "http://127.0.0.1:5000",
            "tasks": str(Path(arg).resolve()),
            "files": "",
            "restore": "",
            "max_steps": 15,
        }
        c.env.options = ConfigDict(options)
    c.rollout.concurrency = 2  # guests: who waits for one has its deadline running
    c.rollout.deadline_s = 1800.0
    c.agent.max_turns = 15
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 32768
    if arg != "runlocal":
        return c
    c = shortened(c, 2048)
    c.feed.prompts = c.evaluate.tasks = c.evaluate.final_tasks = 1
    return c
