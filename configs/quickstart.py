"""`make quickstart`: a small policy learns dependent look-ups through a tool that sometimes fails, on two CPU cores."""

from base import get_config as base
from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = base()
    c.env.name = "chain"
    c.env.options = ConfigDict({"hops": (1, 2, 3), "flaky": 0.15})

    c.model.tied_head = False  # a tied table must start small for the head, and drowns in the residual stream
    c.model.rope_theta = 100.0  # rows are 80 tokens long: no slower waves are needed, and it learns sooner

    c.agent.max_turns = 8  # up to 7 calls for 3 hops: with a 15 % flaky tool 0.999 of the tasks can be solved
    c.agent.max_tokens = 80
    c.sampling.max_tokens = 6  # a call is 5 tokens, an answer 3

    c.engine.slots = 32
    c.engine.slot_tokens = c.engine.chunk = 80
    c.engine.decode_tokens = 5
    c.engine.append_rows = 16
    c.engine.append_tokens = (4, 8)
    c.learner.batch_rows = 8
    c.learner.row_tokens = 128

    c.warmup.steps = 350  # format and copying, from demonstrations that are right in length and wrong in content
    c.warmup.demos = 350 * 32  # each is seen about once: repeated, they are learnt by heart
    c.warmup.batch = 32
    c.warmup_optimizer.lr = 5e-3
    c.warmup_optimizer.lr_final = 3e-4
    c.warmup_optimizer.warmup_steps = 20

    c.algo.name = "grpo"
    c.algo.aggregate = "token_mean"
    c.algo.clip_high = 0.28
    c.optimizer.lr = 3e-4
    c.optimizer.lr_final = 3e-5
    c.train.steps = 110
    c.train.minibatches = 2
    c.feed.prompts = 16
    c.feed.rollouts = 8

    if arg == "runlocal":
        c.warmup.steps, c.warmup.demos, c.warmup.batch = 4, 32, 8
        c.train.steps, c.feed.prompts, c.feed.rollouts = 2, 2, 4
        c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 32, 2, 1, 64
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 1, 4, 4
    return c
