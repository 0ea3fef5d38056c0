"""Tasks on a phone: by default errands on small phones of ours, which need nothing; or AndroidWorld's at its servers.

jaxagent train --config=configs/android_world.py --config.init_from=CHECKPOINT_DIR --workdir=DIR
jaxagent train --config=configs/android_world.py:URL,URL --config.init_from=CHECKPOINT_DIR --workdir=DIR
"""

from ml_collections import ConfigDict
from text_world import get_config as text_world
from text_world import shortened

# SystemBluetoothTurnOn and SystemWifiTurnOff have no parameters: each is one task, in test as in training.
TASKS = ("ContactsAddContact", "MarkorCreateNote", "SystemBluetoothTurnOn", "SystemWifiTurnOff", "ClockTimerEntry")


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: addresses of AndroidWorld servers; none plays our phones; "runlocal" gives a run of seconds with them."""
    c = text_world()
    if arg in ("", "runlocal"):
        c.env.name = "phone"
        c.env.options = ConfigDict({"workers": 8, "max_steps": 12, "rules": True})
        c.rollout.concurrency = 8  # phones: who waits for one has its deadline running
    else:
        c.env.name = "android_world"
        c.env.options = ConfigDict({"urls": arg, "tasks": TASKS, "instances": 100, "max_steps": 20, "rules": True})
        c.rollout.concurrency = len(arg.split(","))
        c.rollout.deadline_s = 3600.0  # an emulator takes its time
    c.agent.max_turns = 20
    c.agent.max_tokens = c.engine.slot_tokens = c.learner.row_tokens = 16384
    return shortened(c, 2048) if arg == "runlocal" else c
