"""Preferences: from a sloppy warm-up, sample, and prefer the best rollout of each group to its worst."""

from ml_collections import ConfigDict
from raft import get_config as raft


def get_config(arg: str = "") -> ConfigDict:
    """Args: arg: "runlocal" gives a run of seconds that touches every part."""
    c = raft(arg)
    c.finetune.mode = "dpo"
    if arg != "runlocal":
        c.finetune.rounds, c.train.steps = 3, 60
        c.finetune.batch = 16
        c.optimizer.lr, c.optimizer.lr_final = 5e-4, 1e-4
    return c
