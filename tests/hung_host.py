"""One of two hosts of which the second plays a world that never gives the loop back, while the first waits for its word.

python tests/hung_host.py FOLDER    with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from scripted import ScriptedSampler
from toys import Answer, Parity

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.tasks import TaskStream
from jaxagent.envs.env import Step
from jaxagent.feed import Feed, FeedOptions
from jaxagent.hosts import here, join
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Message, Sampling
from jaxagent.watchdog import Budgets, Watchdog

PLAIN = PlainTemplate()


class Asleep(Answer):
    async def step(self, action: Message) -> Step:
        time.sleep(3600)  # noqa: ASYNC251
        raise AssertionError("nobody waits so long")


def main(folder: Path) -> None:
    join()
    hosts, world = here(), Parity()
    sampler = ScriptedSampler(PLAIN, lambda text, request: PLAIN.turn(Message("assistant", "0")))
    rollouts = Rollouts(world, Agent(PLAIN, world.tools, sampler, Limits()), lambda: None, 0, RolloutOptions(deadline_s=0.5))
    feed = Feed(world, TaskStream(100, 3), rollouts, Sampling(max_tokens=20), FeedOptions(prompts=2, rollouts=1), hosts)
    hosts.gather("both are here")
    delay_s = 8.0 if hosts.first else 1.0
    watchdog = Watchdog(folder / hosts.own("overrun.log"), {"rollout": 1.0}, Budgets(floor_s=1.0), delay_s=delay_s)
    watchdog.episodes = rollouts.open
    if not hosts.first:
        world.episode = lambda name, sandbox: Asleep()  # type: ignore[method-assign]
    with watchdog.within("rollout"):
        feed.take(mixed=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
