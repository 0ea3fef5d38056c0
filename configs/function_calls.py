"""Which functions to call with what, after ToolRL (arXiv:2504.13958): 4 rollouts a task, the parts of a call paid one by one.

jaxagent train --config=configs/function_calls.py:TASKS.jsonl --config.init_from=CHECKPOINT_DIR --workdir=DIR

A task's `question` says which functions there are, `calls` which calls are right, as [{"name": ..., "arguments": {...}}], and
`answer` is empty; `configs/calls.jsonl`, sixty made-up ones, is the default. An episode is one turn.

As there (section 4 and its scripts; 4,000 tasks of ToolACE, Hammer and xLAM): GRPO from an instructed model without fine-tuning
before, no KL, 4 rollouts a task at temperature 1, 2048 tokens for the prompt and 1024 for the turn, learning rate 1e-6; Qwen2.5
of 1.5B to 7B. Tasks of a step and epochs, 512 and 15, have not been confirmed. Otherwise here: format and correctness are parts
beside an outcome of 1 and stay below it (rewards/scorers.py), where they are the whole reward, 0 to 1 and -3 to 3.

Sizes: `jaxagent plan --config=configs/function_calls.py --config.init_from=CHECKPOINT_DIR --config.mesh.cpu_devices=8
--config.mesh.fsdp=8` forecasts 18.9 GiB of each of 8 devices for Qwen2.5-1.5B (v6e, or any GPU of 24 GB), 77.9 for 7B (H200).
"""

from pathlib import Path

from base import get_config as base
from ml_collections import ConfigDict

CALLS = Path(__file__).resolve().with_name("calls.jsonl")
SYSTEM = (
    "Call the functions that the question needs, each as <tool_call>\n"
    '{"name": NAME, "arguments": {PARAMETER: VALUE}}\n</tool_call>. If none fits, say so and call none.'
)


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: the task file; "runlocal" gives a run of seconds that touches every part."""
    short = arg == "runlocal"
    c = base()
    c.env.name = "questions"
    path = str(CALLS if short or not arg else Path(arg).resolve())
    c.env.options = ConfigDict({"path": path, "toolbox": (), "reward": "tool_calls", "system": "" if short else SYSTEM})
    c.agent.max_turns = 1
    c.algo.name = "grpo"
    c.optimizer.lr = c.optimizer.lr_final = 1e-6
    c.evaluate.ablate = False  # nothing answers a call

    if short:
        c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 32, 2, 1, 64
        c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 896
        c.sampling.max_tokens = 8
        c.engine.slots, c.engine.append_tokens = 8, (64,)
        c.train.steps, c.feed.prompts, c.feed.rollouts = 2, 2, 4
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 1, 4, 4
        return c

    c.sampling.max_tokens = 1024
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 3072
    c.engine.append_tokens = (64, 512)
    c.engine.slots = 64
    c.engine.exact = False
    c.engine.dtype = c.learner.dtype = "bfloat16"
    c.learner.remat = "full"
    c.feed.prompts, c.feed.rollouts = 512, 4
    c.train.steps = 105  # fifteen times 3,600 tasks
    return c
