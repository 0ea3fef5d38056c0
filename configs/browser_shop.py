"""BrowserGym: orders and questions in a small shop of its own. Needs Chromium and `jaxagent env install browsergym`.

jaxagent train --config=configs/browser_shop.py --config.init_from=CHECKPOINT_DIR --workdir=DIR

WebArena is the same world: --config.env.options.tasks with its ids and no `register`; see jaxagent/envs/browsergym.py.
"""

from pathlib import Path

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened

SHOP = Path(__file__).parent / "sites" / "shop.py"


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "browsergym"
    tasks = tuple(f"browsergym/shop.{kind}" for kind in ("order", "price", "cheapest"))
    c.env.options = ConfigDict({"tasks": tasks, "register": str(SHOP), "shown": True, "rules": True})
    c.rollout.concurrency = 2  # browsers: who waits for one has its deadline running
    c.agent.max_turns = 20
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 16384
    return shortened(c, 8192) if arg == "runlocal" else c
