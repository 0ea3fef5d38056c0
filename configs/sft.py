"""Imitation of a file of dialogues: one look-up, from demonstrations that are right.

jaxagent finetune --config=configs/sft.py:DIALOGUES.jsonl --workdir=DIR
"""

from pathlib import Path

from base import get_config as base
from ml_collections import ConfigDict

DIALOGUES = Path(__file__).resolve().with_name("dialogues.jsonl")


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: the file, by default some dozens of dialogues; "runlocal" gives a run of seconds that touches every part."""
    c = base()
    c.env.options = ConfigDict({"hops": (1,), "flaky": 0.0})
    c.finetune.mode = "sft"
    c.finetune.path = str(Path(arg).resolve()) if arg not in ("", "runlocal") else str(DIALOGUES)
    c.finetune.batch = 32
    c.train.steps = 200

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

    c.optimizer.lr = 5e-3
    c.optimizer.lr_final = 3e-4
    c.optimizer.warmup_steps = 20
    c.optimizer.weight_decay = 0.01
    c.evaluate.every = 0
    c.evaluate.final_tasks = 128

    if arg == "runlocal":
        c.train.steps, c.finetune.batch = 4, 8
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 2, 4, 4
    return c
