"""Maths with Python in the sandbox, after ToRL (arXiv:2503.23383): 128 problems of 16 rollouts, GRPO without KL.

jaxagent train --config=configs/maths.py:TASKS.jsonl --config.init_from=CHECKPOINT_DIR --workdir=DIR

As there (section 3.1): GRPO, 128 x 16 at temperature 1, one call a solution, the output masked, base models of Qwen2.5-Math of
1.5B and 7B. Tokens, learning rate and steps are not given there; 1024 for the problem, 3072 for the solution and 1e-6 are those
of VerlTool's recipe of it. Otherwise here: success pays 1 and failure 0 where it is 1 and -1, which GRPO's comparison within a
group does not see; the policy calls a tool where it wrote a code block; a fault's traceback is shown, not its last line alone.

Sizes: `jaxagent plan --config=configs/maths.py --config.init_from=CHECKPOINT_DIR --config.mesh.cpu_devices=8
--config.mesh.fsdp=8` forecasts 21.6 GiB of each of 8 devices for Qwen2.5-1.5B (v6e, or any GPU of 40 GB), 83.1 for 7B (H200).
"""

from ml_collections import ConfigDict
from questions import get_config as questions

SYSTEM = "Reason step by step. Where it helps, call python and print what you want to know. Put the final answer in \\boxed{}."


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: the task file, by default sixty sums; "runlocal" gives a run of seconds that touches every part."""
    c = questions(arg)
    c.algo.name = "grpo"
    c.agent.max_turns = 2  # one call, and the answer
    c.optimizer.lr = c.optimizer.lr_final = 1e-6
    if arg == "runlocal":
        return c
    c.env.options.reward, c.env.options.system = "math_match", SYSTEM
    c.sampling.max_tokens = 3072
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 4608
    c.engine.append_tokens = (64, 512)
    c.engine.exact = False
    c.engine.dtype = c.learner.dtype = "bfloat16"
    c.feed.prompts, c.feed.rollouts = 128, 16
    return c
