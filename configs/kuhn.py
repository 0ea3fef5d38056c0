"""Self-play: one tiny policy learns Kuhn's poker in both seats, against itself and against earlier versions of itself.

jaxagent train --config=configs/kuhn.py --workdir=DIR
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = base()
    c.env.name = "kuhn"
    c.env.options = ConfigDict({"rules": False, "past": 0.25, "past_every": 5})

    c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 64, 2, 2, 128
    c.model.tied_head = False
    c.model.rope_theta = 100.0

    c.agent.max_turns = 4
    c.agent.max_tokens = 160
    c.sampling.max_tokens = 6
    c.rollout.concurrency = 16  # both players keep a slot until their game is over
    c.engine.slots = 32
    c.engine.slot_tokens = c.engine.chunk = 160
    c.engine.decode_tokens = 3
    c.engine.append_rows = 16
    c.engine.append_tokens = (8,)
    c.learner.batch_rows = 8
    c.learner.row_tokens = 160

    c.algo.name = "spiral"  # a moving baseline for each role: the mean of a group would hide that the second seat is better
    c.optimizer.lr = 1e-3
    c.optimizer.lr_final = 1e-4
    c.train.steps = 60
    c.feed.prompts = 64
    c.feed.rollouts = 2
    c.warmup.steps = 80
    c.warmup.demos = 1280
    c.warmup.batch = 16
    c.warmup_optimizer.lr = 5e-3
    c.warmup_optimizer.warmup_steps = 10
    c.evaluate.every = 20
    c.evaluate.final_tasks = 600
    c.evaluate.ablate = False  # muted, it is told neither card nor moves: that scores luck

    if arg == "runlocal":
        c.env.options.past, c.env.options.past_every = 0.5, 1
        c.warmup.steps, c.warmup.demos, c.warmup.batch = 2, 16, 8
        c.train.steps, c.feed.prompts, c.feed.rollouts = 2, 4, 2
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 1, 6, 6
    return c
