"""A tiny policy from scratch on frozen lakes, in text: a warm-up on a demonstrator that strays, then reinforcement."""

from base import get_config as base
from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = base()
    c.env.name = "frozen_lake"
    # the others are the world's own: side 4, and a demonstrator that strays in three moves of ten and gives up after twelve
    c.env.options = ConfigDict({"slippery": False, "rules": False, "letters": True})

    c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 64, 3, 2, 128
    c.model.tied_head = False
    c.model.rope_theta = 100.0

    c.agent.max_turns = 12
    c.agent.max_tokens = 288  # an observation is 19 letters, its header and that of the turn; an action two tokens
    c.sampling.max_tokens = 3
    c.engine.slots = 32
    c.engine.slot_tokens = c.engine.chunk = 288
    c.engine.decode_tokens = 2
    c.engine.append_rows = 16
    c.engine.append_tokens = (24,)
    c.learner.batch_rows = 8
    c.learner.row_tokens = 288

    c.algo.name = "grpo"
    c.algo.aggregate = "token_mean"
    c.algo.clip_high = 0.28
    c.optimizer.lr = 1e-3
    c.optimizer.lr_final = 1e-4
    c.train.steps = 60
    c.train.minibatches = 2
    c.feed.prompts = 8
    c.feed.rollouts = 8
    c.warmup.steps = 250
    c.warmup.demos = 250 * 16  # each is seen about once
    c.warmup.batch = 16
    c.warmup_optimizer.lr = 5e-3
    c.warmup_optimizer.warmup_steps = 20
    c.evaluate.every = 10
    c.evaluate.tasks = 64

    if arg == "runlocal":
        c.env.options.demo_moves = 6
        c.model.layers, c.agent.max_turns = 2, 6
        c.agent.max_tokens = c.engine.slot_tokens = c.engine.chunk = c.learner.row_tokens = 160
        c.sampling.max_tokens, c.engine.decode_tokens, c.engine.append_tokens = 4, 3, (8,)
        c.warmup.steps, c.warmup.demos, c.warmup.batch = 4, 32, 8
        c.train.steps, c.feed.prompts, c.feed.rollouts = 2, 2, 4
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 1, 4, 4
    return c
