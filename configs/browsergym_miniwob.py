"""BrowserGym's MiniWoB: its accessibility tree and its actions, where configs/miniwob.py has its own. Needs Chromium and
`jaxagent env install browsergym`.

jaxagent train --config=configs/browsergym_miniwob.py --config.init_from=CHECKPOINT_DIR --workdir=DIR
"""

from browser_shop import get_config as browser_shop
from ml_collections import ConfigDict
from text_world import shortened

PAGES = ("click-test-2", "click-button", "click-link", "click-checkboxes", "enter-text", "enter-password", "login-user")


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = browser_shop()
    c.env.options = ConfigDict({"tasks": tuple(f"browsergym/miniwob.{page}" for page in PAGES), "rules": True})
    c.agent.max_turns = 10
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 4096
    return shortened(c, 4096) if arg == "runlocal" else c
