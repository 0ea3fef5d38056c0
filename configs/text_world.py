"""Worlds of text for a checkpoint that already speaks: rows, turns and batches. By itself it plays Sokoban; others build on it.

jaxagent train --config=configs/text_world.py --config.init_from=CHECKPOINT_DIR --workdir=DIR

Where the checkpoint's chat template rewrites earlier turns, add --config.chat.history=keep or segment.
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = base()
    c.env.name = "sokoban"
    c.env.options = ConfigDict({"rules": True})

    c.agent.max_turns = 20
    c.agent.max_tokens = 4096
    c.sampling.max_tokens = 128
    c.engine.slots = 64
    c.engine.slot_tokens = 4096
    c.engine.append_tokens = (64, 256)
    c.learner.row_tokens = 4096
    c.learner.remat = "full"
    c.algo.name = "dapo"
    c.feed.prompts = 32
    c.evaluate.ablate = False  # muted, a world of text leaves nothing to play by

    return shortened(c, 160) if arg == "runlocal" else c


def shortened(c: ConfigDict, row_tokens: int) -> ConfigDict:
    """A run of seconds: a small policy that knows nothing, rows of `row_tokens`, no rules to be read."""
    c.env.options.rules = type(c.env.options.rules)()  # none, be it a flag or a text
    c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 64, 2, 2, 128
    c.model.tied_head = False
    c.model.rope_theta = 100.0
    c.agent.max_turns = 3
    c.agent.max_tokens = c.engine.slot_tokens = c.engine.chunk = c.learner.row_tokens = row_tokens
    c.sampling.max_tokens = 4
    c.engine.slots, c.engine.decode_tokens, c.engine.append_rows, c.engine.append_tokens = 32, 3, 16, (8,)
    c.learner.remat = "none"
    c.engine.exact, c.engine.dtype, c.learner.dtype = True, "float32", "float32"
    c.algo.name = "grpo"
    c.train.steps, c.feed.prompts, c.feed.rollouts = 2, 2, 4
    c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 1, 4, 4
    return c
