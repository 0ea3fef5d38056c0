"""To search, read and cite in worlds of invented names: a small policy from scratch, sized for two CPU cores.

jaxagent train --config=configs/search.py --workdir=DIR

`:words` has the settings for a checkpoint that reads: --config=configs/search.py:words --config.init_from=CHECKPOINT_DIR
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part; "words" is for a checkpoint."""
    c = base()
    c.env.name = "search"
    if arg == "words":
        c.env.options = ConfigDict({"style": "words"})
        c.agent.max_turns = 10
        c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 4096
        c.sampling.max_tokens = 512
        c.engine.append_tokens = (64, 256)
        c.learner.remat = "full"
        c.algo.name = "dapo"
        return c

    c.env.options = ConfigDict({"style": "bytes"})
    c.model.tied_head = False
    c.model.rope_theta = 100.0  # rows are 80 tokens long

    c.agent.max_turns = 7  # two calls for a hop, and the answer; two more to look again
    c.agent.max_tokens = 96
    c.sampling.max_tokens = 12  # an answer with its citation is 10 tokens
    c.engine.slots = 32
    c.engine.slot_tokens = c.engine.chunk = 96
    c.engine.decode_tokens = 4
    c.engine.append_rows = 16
    c.engine.append_tokens = (8, 16)
    c.learner.batch_rows = 8
    c.learner.row_tokens = 96

    c.warmup.steps = 900  # to copy a name, an id, and what stands behind a letter, from demonstrations that often go astray
    c.warmup.demos = 900 * 32
    c.warmup.batch = 32
    c.warmup_optimizer.lr = 3e-3
    c.warmup_optimizer.lr_final = 3e-4
    c.warmup_optimizer.warmup_steps = 20

    c.algo.name = "grpo"
    c.algo.aggregate = "token_mean"
    c.algo.clip_high = 0.28
    c.optimizer.lr = 3e-4
    c.optimizer.lr_final = 3e-5
    c.train.steps = 100
    c.train.minibatches = 2
    c.feed.prompts = 16
    c.feed.rollouts = 8

    if arg == "runlocal":
        c.warmup.steps, c.warmup.demos, c.warmup.batch = 4, 32, 8
        c.train.steps, c.feed.prompts, c.feed.rollouts = 2, 2, 4
        c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 32, 2, 1, 64
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 1, 4, 4
    return c
