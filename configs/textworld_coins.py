"""A tiny policy from scratch collects coins in TextWorld: walks through few games, then reinforcement on others.

jaxagent env install textworld; jaxagent train --config=configs/textworld_coins.py --workdir=DIR

Chains of rooms, with and without dead ends beside them. Three times in ten the walks that are shown go another way than the
right one, back or into a dead end, and return. Not to go back, and into no dead end twice, is left to reinforcement.

Sizes: `jaxagent plan --config=configs/textworld_coins.py` forecasts 44.5 MiB of each of two CPU devices: 0.15M weights.
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = base()
    c.env.name = "textworld"
    # 1 to 100: chains of as many rooms; 101 to 200: as many, each with a dead end beside it. Held out are longer ones.
    levels = {"demo": (4, 8, 103, 104, 105), "train": (6, 103, 7, 104), "held_out": (105, 8)}
    options = {"kind": "coins", "levels": levels, "games": 512, "told": ("brief",), "demo_slips": 0.3, "rules": False}
    c.env.options = ConfigDict(options)

    c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 64, 3, 2, 128
    c.model.tied_head = False
    c.model.rope_theta = 100.0

    c.agent.max_turns = 16  # who tries no exit twice needs 13 at most for 5 rooms with dead ends, and 8 for 8 without
    c.agent.max_tokens = 320  # a room is 8 to 22 bytes, its header and that of the turn; a command two tokens
    c.sampling.max_tokens = 3
    c.engine.slots = 32
    c.engine.slot_tokens = c.engine.chunk = 320
    c.engine.decode_tokens = 2
    c.engine.append_rows = 16
    c.engine.append_tokens = (24,)
    c.learner.batch_rows = 8
    c.learner.row_tokens = 320

    c.algo.name = "grpo"
    c.algo.aggregate = "token_mean"
    c.algo.clip_high = 0.28
    c.optimizer.lr = 2e-3  # at half of it, with half the updates, a step moves the policy by less than its gradient's noise
    c.optimizer.lr_final = 5e-4
    c.optimizer.warmup_steps = 3
    c.train.steps = 100
    c.train.minibatches = 4
    c.feed.prompts = 8
    c.feed.rollouts = 16
    c.warmup.steps = 400
    c.warmup.demos = 1536  # six walks through each of 256 games, each shown about four times
    c.warmup.batch = 16
    c.warmup_optimizer.lr = 5e-3
    c.warmup_optimizer.warmup_steps = 20
    c.evaluate.every = 50
    c.evaluate.tasks = 32
    c.evaluate.final_tasks = 128

    if arg == "runlocal":
        c.env.options.levels = ConfigDict({"train": (2, 102), "held_out": (3, 103)})
        c.model.layers, c.agent.max_turns = 2, 6
        c.agent.max_tokens = c.engine.slot_tokens = c.engine.chunk = c.learner.row_tokens = 160
        c.warmup.steps, c.warmup.demos, c.warmup.batch = 4, 4, 4
        c.train.steps, c.train.minibatches, c.feed.prompts, c.feed.rollouts = 2, 2, 2, 4
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 1, 4, 4
    return c
