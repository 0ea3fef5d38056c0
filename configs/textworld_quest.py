"""TextWorld: quests of growing length, for which one has to look round. Needs `jaxagent env install textworld`.

jaxagent train --config=configs/textworld_quest.py --config.init_from=CHECKPOINT_DIR --workdir=DIR

The settings are ours. Sizes: `jaxagent plan --config=configs/textworld_quest.py --config.init_from=CHECKPOINT_DIR
--config.mesh.cpu_devices=8 --config.mesh.fsdp=8 --config.learner.dtype=bfloat16 --config.engine.dtype=bfloat16` forecasts 20.7
GiB of each of 8 devices for Qwen2.5-1.5B (v6e, or any GPU of 24 GB).
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = text_world()
    c.env.name = "textworld"
    c.env.options = ConfigDict({"kind": "quest", "levels": (1, 2, 3, 4), "rules": True})
    c.agent.max_turns = 12
    return shortened(c, 2048) if arg == "runlocal" else c
