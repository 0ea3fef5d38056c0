"""MiniWoB++: tasks on small web pages, told as lists of elements. Needs Chromium and `jaxagent env install miniwob`.

jaxagent train --config=configs/miniwob.py --config.init_from=CHECKPOINT_DIR --workdir=DIR
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "miniwob"
    pages = ("click-test-2", "click-button", "click-link", "click-checkboxes", "enter-text", "enter-password", "login-user")
    c.env.options = ConfigDict({"pages": pages, "rules": True})
    c.rollout.concurrency = 4  # browsers: who waits for one has its deadline running
    c.agent.max_turns = 10
    return shortened(c, 4096) if arg == "runlocal" else c
