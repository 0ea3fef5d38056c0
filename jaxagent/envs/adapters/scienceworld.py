"""ScienceWorld: experiments of a primary school, in a simulator that runs in a Java machine of its own."""

import os
from typing import Any

from scienceworld import ScienceWorldEnv

_SPLITS = {
    "train": "get_variations_train",
    "demo": "get_variations_train",
    "valid": "get_variations_dev",
    "test": "get_variations_test",
}
# The simulator lists objects in the order of a hash set; with Java's own hashes, which are drawn, it is another at every reset.
_SAME_ORDER = "-XX:+UnlockExperimentalVMOptions -XX:hashCode=2"


class World:
    def __init__(self, simplification: str, steps: int):
        self.simplification = simplification
        os.environ["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} {_SAME_ORDER}".strip()
        self.game = ScienceWorldEnv("", envStepLimit=steps)
        self.steps = steps

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        self.game.load(task["task"], 0, self.simplification)
        variations = sorted(getattr(self.game, _SPLITS[task["split"]])())
        variation = variations[task["index"] % len(variations)]
        self.game.load(task["task"], variation, self.simplification, generateGoldPath=task["split"] == "demo")
        text, _ = self.game.reset()
        self.score = 0.0
        return {"text": f"{self.game.taskdescription()}\n\n{text}", "state": self.state()}

    def step(self, action: str) -> dict[str, Any]:
        command = action.partition("\n")[0].strip()
        # The library's own step also lists all valid actions, a thousand of them, which takes most of its time.
        server = self.game.server
        text = server.step(command)
        points, moves = float(server.getScore()), int(self.game.get_num_moves())
        score = max(0.0, points)  # a wrong focus ends the task with -100 points, which count as none
        gained, self.score = score - self.score, score
        over = bool(server.getCompleted()) or points < 0 or moves > self.steps
        reason = "done" if points >= 1 else "a wrong focus" if points < 0 else "scored" if gained > 0 else ""
        unknown = text.startswith(("No known action", "Unknown action"))
        said = {"text": text, "state": self.state(), "reward": gained, "done": over, "reason": reason}
        return {**said, "invalid": True} if unknown else said

    def oracle(self) -> list[str]:
        return list(self.game.get_gold_action_sequence())

    def state(self) -> str:
        return f"{self.game.look()}|{self.game.inventory()}"

    def close(self) -> None:
        self.game.close()


def make(**options: Any) -> World:
    return World(**options)
