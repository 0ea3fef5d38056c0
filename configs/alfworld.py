"""ALFWorld with the settings of GiGPO (arXiv:2505.10978): 16 tasks of 8 rollouts, 50 commands, KL to the reference.

jaxagent train --config=configs/alfworld.py --config.init_from=CHECKPOINT_DIR --workdir=DIR

Needs `jaxagent env install alfworld`. As there (its scripts for ALFWorld): turns weigh 1 and gamma is 0.95, both comparisons
divided by their deviation; learning rate 1e-6, KL 0.01 (k3) in the loss, 512 tokens a turn, 150 steps; evaluation at
temperature 0.4. What is not: the games, which are made here (see the world); the prompt, which shows the whole dialogue and not
the last two observations; a step is one update, not several of 256 rows; and a command that is none costs nothing where it
costs 0.1.

Sizes: `jaxagent plan --config=configs/alfworld.py --config.init_from=CHECKPOINT_DIR --config.mesh.cpu_devices=2
--config.mesh.fsdp=2` forecasts 52.4 GiB of each of 2 devices for Qwen2.5-1.5B (H100), and with 4 and 4 for 7B 109.6 (H200).
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "alfworld"
    c.env.options = ConfigDict({"rules": True, "chores": ("place", "look", "clean", "heat", "cool", "two")})
    c.agent.max_turns = 50
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 32768
    c.sampling.max_tokens = 512
    c.algo.name = "gigpo"
    c.algo.advantage = "normalised"
    c.algo.kl, c.algo.kl_coef = "k3_loss", 0.01
    c.optimizer.lr = c.optimizer.lr_final = 1e-6
    c.train.steps = 150
    c.feed.prompts, c.feed.rollouts = 16, 8
    c.evaluate.temperature = 0.4
    c.engine.pages = 4096  # of 128 tokens: sixty-four episodes of 8192 tokens, few of which come near 32768
    c.engine.exact = False
    c.engine.dtype = c.learner.dtype = "bfloat16"
    if arg != "runlocal":
        return c
    c = shortened(c, 4096)
    c.algo.name, c.engine.pages = "gigpo", 0
    return c
