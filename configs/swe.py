"""Repairs of packages whose tests fail, with tools to look, search, change and run: for a checkpoint that already calls tools.

jaxagent swe --source configs/swe_packages.txt --to=TASKS.jsonl --count=55
jaxagent train --config=configs/swe.py:TASKS.jsonl --config.init_from=CHECKPOINT_DIR --workdir=DIR

The tests that grade an episode are put back beside the policy's files, and run as another user. No package of the tasks may be
installed where the sandbox runs.

The tasks are made as SWE-smith's are (arXiv:2504.21798), which imitates and gives no settings of reinforcement: those below are
ours. Sizes: `jaxagent plan --config=configs/swe.py --config.init_from=CHECKPOINT_DIR --config.mesh.cpu_devices=8
--config.mesh.fsdp=8 --config.learner.dtype=bfloat16 --config.engine.dtype=bfloat16` forecasts 123.4 GiB of each of 8 devices
for Qwen2.5-7B (H200), 56 of them the cache of 64 episodes of 16384 tokens.
"""

from pathlib import Path

from base import get_config as base
from ml_collections import ConfigDict

REPAIRS = Path(__file__).resolve().with_name("repairs.jsonl")


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: the task file, by default thirty bugs of a small package; "runlocal" gives a run of seconds."""
    c = base()
    short = arg == "runlocal"
    c.env.name = "swe"
    c.env.options = ConfigDict(
        {"path": str(REPAIRS if short or not arg else Path(arg).resolve()), "toolbox": ("files", "bash", "tests")}
    )

    c.agent.max_turns = 30
    c.agent.max_tokens = 16384
    c.sampling.max_tokens = 1024
    c.rollout.deadline_s = 1200.0
    c.sandbox.timeout_s = 180.0  # the grader runs all tests
    c.engine.slots = 64
    c.engine.slot_tokens = 16384
    c.engine.append_tokens = (64, 512, 2048)
    c.learner.row_tokens = 16384
    c.learner.remat = "full"
    c.algo.name = "dapo"
    c.feed.prompts = 32
    c.evaluate.ablate = False  # without results of tools nothing can be found

    if short:
        c.model.width, c.model.layers, c.model.heads, c.model.ffn_width = 32, 2, 1, 64
        c.agent.max_turns = 2
        c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 512
        c.sampling.max_tokens = 16
        c.engine.slots, c.engine.append_tokens = 8, (64,)
        c.train.steps, c.feed.prompts, c.feed.rollouts = 2, 2, 2
        c.evaluate.every, c.evaluate.tasks, c.evaluate.final_tasks = 1, 2, 2
    return c
