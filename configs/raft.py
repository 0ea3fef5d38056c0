"""Rejection sampling: from a sloppy warm-up, sample, keep the best rollout of each group, imitate it, sample again."""

from base import get_config as base
from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = base()
    c.env.options = ConfigDict({"hops": (1,), "flaky": 0.0, "demo_last_value": 0.5})
    c.finetune.mode = "raft"
    c.finetune.rounds = 5
    c.finetune.batch = 32
    c.train.steps = 50
    c.feed.prompts = 32
    c.feed.rollouts = 8

    c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 64, 2, 2, 128
    c.model.tied_head = False
    c.model.rope_theta = 100.0
    c.agent.max_turns = 4
    c.agent.max_tokens = 40
    c.sampling.max_tokens = 6  # a call is 5 tokens, an answer 3
    c.engine.slots = 32
    c.engine.slot_tokens = c.engine.chunk = 40
    c.engine.decode_tokens = 5
    c.engine.append_rows = 16
    c.engine.append_tokens = (4, 8)
    c.learner.batch_rows = 8
    c.learner.row_tokens = 80

    c.warmup.steps = 200
    c.warmup.demos = 200 * 32  # each is seen about once
    c.warmup_optimizer.lr = 5e-3
    c.warmup_optimizer.warmup_steps = 20
    c.optimizer.lr = 1e-3
    c.optimizer.lr_final = 1e-4
    c.evaluate.every = 0
    c.evaluate.final_tasks = 128

    if arg == "runlocal":
        c.warmup.steps, c.warmup.demos, c.warmup.batch = 4, 32, 8
        c.train.steps, c.finetune.rounds, c.finetune.batch = 4, 2, 8
        c.feed.prompts, c.feed.rollouts = 2, 4
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 2, 4, 4
    return c
