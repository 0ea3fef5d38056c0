"""`android_world`: tasks on a phone, behind AndroidWorld's own HTTP server.

An episode takes a free server, has a task made ready there, is told the elements on the screen as numbered rows
(phones/touch.py), and acts by lines that become AndroidWorld's JSON actions. With `done` it ends, and the score is the
server's, which reads it off the phone's state. As in AndroidWorld who runs out of turns earns nothing, whatever the phone
holds. Pixels are not asked for: a policy that reads text cannot see them.

`phone` is the same on small phones of our own, for where there is no emulator.
"""

from __future__ import annotations

from typing import Any

from jaxagent.envs.env import Env, Task
from jaxagent.envs.phones.session import PhoneEpisode, Place, Suite
from jaxagent.envs.workers.places import Places, addresses_of, counted


class AndroidWorld:
    """The world.

    Args:
        urls: of servers, with commas, as in http://127.0.0.1:5000; set rollout.concurrency to as many as there are.
        tasks: types of tasks, as in ContactsAddContact.
        instances: of every type; a tenth of them, at least one, is kept for each of demonstrations, validation and test.
        suite_seed: of the instances.
        max_steps: turns of an episode, after which nothing is earned.
        rules: are told at the beginning.
        timeout_s: of one request; an emulator can take minutes to make a task ready.
    """

    functions = ""
    tools = ()
    examples = ("tap 0", "tap 1", "scroll down", "back", "home", "type 0 hello", "wait", "done")

    def __init__(
        self,
        urls: str,
        tasks: tuple[str, ...],
        instances: int = 100,
        suite_seed: int = 42,
        max_steps: int = 20,
        rules: bool = True,
        timeout_s: float = 300.0,
    ):
        counted(tuple(tasks), "tasks")
        self.suite = Suite(tuple(tasks), instances, suite_seed, max_steps, timeout_s, rules)
        self.sizes = self.suite.sizes
        self.places = Places([Place(url) for url in addresses_of(urls, "AndroidWorld servers")])

    def task(self, split: str, index: int) -> Task:
        return self.suite.task("android_world", split, index)

    def episode(self, name: str, sandbox: Any) -> Env:
        return PhoneEpisode(self.places, self.suite)


make_world = AndroidWorld
