"""TextArena: tic-tac-toe against oneself, after SPIRAL (arXiv:2506.24119). Needs `jaxagent env install textarena`.

jaxagent train --config=configs/textarena_tictactoe.py --config.init_from=CHECKPOINT_DIR --workdir=DIR

As there (its `train_spiral.py` and scripts, for Qwen3-4B-Base on 8 H100): 128 games a step, a moving mean of 0.95 for each
seat, no KL, a constant learning rate of 1e-6, temperature 1, 4096 tokens a turn, 400 steps. Otherwise here: a step is one
update where theirs passes twice over its games, and the prompt shows the whole dialogue. Won games are half of all whoever
learns what, since both seats are played by one policy: look at `reward/part_` and at games against another policy, not at
success.

Sizes: `jaxagent plan --config=configs/textarena_tictactoe.py --config.init_from=CHECKPOINT_DIR --config.mesh.cpu_devices=8
--config.mesh.fsdp=8` forecasts 107.6 GiB of each of 8 devices for Qwen3-4B (H200), 72 of them the cache of its pages.
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "textarena"
    c.env.options = ConfigDict({"game": "TicTacToe-v0", "rules": ""})
    c.algo.name = "spiral"
    c.agent.max_turns = 8
    c.feed.prompts, c.feed.rollouts = 128, 1
    c.optimizer.lr = c.optimizer.lr_final = 1e-6
    c.optimizer.warmup_steps = 0
    c.train.steps = 400
    c.sampling.max_tokens = 4096
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 16384
    c.rollout.concurrency = 32  # a seat keeps its slot until the game is over
    c.engine.pages = 4096
    c.engine.exact = False
    c.engine.dtype = c.learner.dtype = "bfloat16"
    if arg == "runlocal":
        c.engine.pages, c.rollout.concurrency = 0, 16
    return shortened(c, 2048) if arg == "runlocal" else c
