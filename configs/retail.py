"""A shop's clerk before a scripted customer, paid by the database: for a checkpoint that speaks and calls tools.

jaxagent train --config=configs/retail.py --config.init_from=CHECKPOINT_DIR --workdir=DIR

Evaluation plays every task four times: `pass_hat_k` of its tables is tau-bench's pass^k, how often all k go well.
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "retail"
    c.env.options = ConfigDict({"rules": True})

    c.agent.max_turns = 30
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 16384  # rules, tools and orders are long
    c.sampling.max_tokens = 512
    c.engine.slots = 32
    c.engine.append_tokens = (256, 1024)
    c.evaluate.rollouts = 4
    c.evaluate.ablate = True

    return shortened(c, 160) if arg == "runlocal" else c
