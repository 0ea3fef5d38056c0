"""A critic: a second learner, whose decoder has a value head in place of the language head.

It begins as a copy of the policy, with a head of zeros: its first values are 0 and its first advantages plain returns. Having
weights of its own, its loss moves no policy. Where the policy is trained through adapters, so is the critic, over the same
frozen weights: it costs its adapters and not a second model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxagent.learner import Learner, OptimizerOptions
from jaxagent.models.frozen import join
from jaxagent.models.transformer import Params
from jaxagent.objective import ValueObjective


@dataclass(frozen=True)
class CriticOptions:
    """How fast a critic learns beside its policy.

    Args:
        lr: its peak rate; it falls with the policy's.
        warmup_steps: training steps before the policy moves.
    """

    lr: float = 1e-5
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"critic.lr must be positive, got {self.lr}")
        if self.warmup_steps < 0:
            raise ValueError(f"critic.warmup_steps must be at least 0, got {self.warmup_steps}")

    def optimizer(self, policy: OptimizerOptions) -> OptimizerOptions:
        return replace(policy, lr=self.lr, lr_final=self.lr * policy.lr_final / policy.lr)


def critic_of(policy: Learner, objective: ValueObjective | None = None) -> Learner:
    """A critic over the weights of a policy, on its mesh; with another objective than a value's, what that one asks for."""
    config = replace(policy.config, value_head=True)
    options = replace(policy.options, replay_routing=False)  # what was recorded are the policy's experts
    frozen = {name: w for name, w in policy.frozen.items() if name != "head"}
    return Learner(config, join(_copied(policy), frozen), policy.mesh, policy.algorithm, options, objective)


def begin_again(critic: Learner, policy: Learner) -> None:
    """The critic's weights are the policy's as they are now, as after a warm-up; its head says 0."""
    critic.trained = _copied(policy)


def _copied(policy: Learner) -> Params:
    """Copies, since an update gives the memory of the old weights away."""
    trained = jax.tree.map(jnp.copy, {name: w for name, w in policy.trained.items() if name != "head"})
    value = jnp.zeros(policy.config.width, jnp.float32, device=policy.mesh.sharding(("vector",)))
    return {**trained, "value": value}
