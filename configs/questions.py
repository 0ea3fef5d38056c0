"""A file of questions, and Python in the sandbox to work them out: for a checkpoint that already speaks and calls tools.

jaxagent train --config=configs/questions.py:TASKS.jsonl --config.init_from=CHECKPOINT_DIR --workdir=DIR
"""

from pathlib import Path

from base import get_config as base
from ml_collections import ConfigDict

ARITHMETIC = Path(__file__).resolve().with_name("arithmetic.jsonl")


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: the task file, by default sixty sums; "runlocal" gives a run of seconds that touches every part."""
    c = base()
    c.env.name = "questions"
    c.env.options = ConfigDict({"path": str(Path(arg).resolve()) if arg else str(ARITHMETIC), "reward": "last_number"})

    c.agent.max_turns = 4
    c.agent.max_tokens = 2048
    c.sampling.max_tokens = 512
    c.engine.slots = 64
    c.engine.slot_tokens = 2048
    c.engine.append_tokens = (64, 256)
    c.learner.row_tokens = 4096
    c.learner.remat = "full"
    c.algo.name = "dapo"
    c.feed.prompts = 32

    if arg == "runlocal":
        c.env.options.path = str(ARITHMETIC)
        c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 32, 2, 1, 64
        c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 128
        c.sampling.max_tokens = 16
        c.engine.slots, c.engine.append_tokens = 8, (64,)
        c.train.steps, c.feed.prompts, c.feed.rollouts = 2, 2, 4
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 1, 4, 4
    return c
