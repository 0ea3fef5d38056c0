"""Reasoning Gym: one procedurally generated question, one answer, the library's own scorer."""

import re
from typing import Any

import reasoning_gym

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class World:
    def __init__(self, settings: dict[str, Any], size: int):
        self.settings, self.size = settings, size
        self.sets: dict[tuple[str, str], Any] = {}

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        key = (task["task"], task["split"])
        if key not in self.sets:  # some take long to be made
            self.sets[key] = reasoning_gym.create_dataset(key[0], size=self.size, seed=task["base"], **self.settings)
        self.set = self.sets[key]
        self.item = self.set[task["index"]]
        return {"text": self.item["question"]}

    def step(self, action: str) -> dict[str, Any]:
        tagged = _TAGGED.findall(action)
        answer = (tagged[-1] if tagged else action).strip()
        score = float(self.set.score_answer(answer, self.item))
        right = self.item.get("answer")
        reason = "right answer" if score == 1 else f"answered {answer[:80]!r}, one right answer is {str(right)[:80]!r}"
        return {"reward": score, "done": True, "answered": True, "reason": reason}

    def oracle(self) -> list[str]:
        return [str(self.item["answer"])]

    def close(self) -> None:
        pass


def make(**options: Any) -> World:
    return World(**options)
