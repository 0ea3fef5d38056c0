"""Earlier versions of the policy, as opponents: kept in host memory, one of them at a time in engines of their own.

Who plays only against itself can run in circles: each version beats the last, and forgets the one before. Engines of their own
cost a second cache and a second copy of the weights on the device, and leave those of the policy as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxagent.engine.replicas import Replicas
from jaxagent.envs.env import Past
from jaxagent.learner import Learner
from jaxagent.models.frozen import join
from jaxagent.models.transformer import Params

_DRAW = 0x5E1F  # apart from the other draws of a step


class Selves:
    """The last `past.keep` of the versions 0, `past.every`, 2 `past.every`, ... of what a learner trains.

    Frozen weights are the learner's own: with adapters a version costs its adapters.
    """

    def __init__(self, learner: Learner, engines: Replicas, past: Past, seed: int):
        self.learner, self.engines, self.past, self.seed = learner, engines, past, seed
        self._kept: dict[int, Params] = {}
        self.seated = -1  # the version that the engines hold

    @property
    def versions(self) -> list[int]:
        return sorted(self._kept)

    def begin(self) -> None:
        """The policy as it is now is version 0, and the only one."""
        self._kept, self.seated = {}, -1
        self.remember(0)
        self.sit(0)

    def remember(self, version: int) -> None:
        """Keeps the learner's weights if it is their turn; the oldest leave."""
        if version % self.past.every == 0:
            self._kept[version] = jax.device_get(self.learner.trained)
        for oldest in self.versions[: -self.past.keep]:
            del self._kept[oldest]

    def sit(self, step: int) -> None:
        """Seats one of the versions before `step`, each as likely as the others; the draw depends on seed and step only."""
        earlier = [version for version in self.versions if version < step] or self.versions
        version = int(np.random.default_rng((self.seed, _DRAW, step)).choice(earlier))
        if version != self.seated:
            self.engines.publish(join(self._kept[version], self.learner.frozen), version)
            self.seated = version

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, beside the numbers of the versions."""
        return {f"past_{version}": weights for version, weights in self._kept.items()}

    def like(self, versions: list[int]) -> dict[str, Any]:
        """The shapes of that state; on the host, where restored arrays then are."""
        return {
            f"past_{version}": jax.tree.map(lambda w: np.empty(w.shape, w.dtype), self.learner.trained) for version in versions
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._kept = {int(name.removeprefix("past_")): weights for name, weights in state.items()}
        self.seated = -1
