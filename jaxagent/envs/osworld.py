"""`osworld`: tasks at a computer, in OSWorld's format, at guests that speak the protocol of its virtual machines.

The guests run elsewhere, as OSWorld's own providers start them; an episode takes a free one, has it restored, sets up the task,
and is told what is on the screen as numbered rows of the accessibility tree. What the policy does is a small grammar
(desktop/actions.py), from which the calls of pyautogui are made here: its text is never run. The score is the task's own
evaluator's, as far as that can be told from the rule (desktop/evaluation.py). Screenshots can be kept beside the run; a policy
that reads text is not shown them.

`desk` is the same with desktops and tasks of our own, for where there is no virtual machine.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from jaxagent.data.records import read_records, split_of
from jaxagent.envs.desktop.evaluation import Files, fault_of, task_of
from jaxagent.envs.desktop.session import DesktopEpisode, Elsewhere, Guests, Ways
from jaxagent.envs.env import Env, Task
from jaxagent.envs.workers.places import addresses_of, counted

SPLITS = ("train", "valid", "test")
_TOLD = 20  # faults, of one message


class OSWorld:
    """The world.

    Args:
        urls: of guests, with commas, as in http://127.0.0.1:5000; set rollout.concurrency to as many as there are.
        tasks: a folder of OSWorld's task files, at any depth, or JSONL of them.
        files: a folder for the files that tasks name: what is fetched is kept there, under the names of OSWorld's cache.
        restore: a command of this machine that makes a guest what it was before any task, with {number}, from 0, and {url}
            where it stands in `urls`, as in "docker restart guest-{number}"; empty leaves on a guest what was done there
            before.
        max_steps: turns after which a guest is scored as it is.
        pause_s: between an action and the look at what it did; OSWorld has 2.
        screenshots: a folder that a picture of every turn is kept in; empty keeps none.
        timeout_s: of one request.
    """

    functions = ""
    tools = ()
    examples = ("click 1", "click 2", "type hello", "press enter", "scroll -3", "wait")

    def __init__(
        self,
        urls: str,
        tasks: str,
        files: str = "",
        restore: str = "",
        max_steps: int = 15,
        pause_s: float = 2.0,
        screenshots: str = "",
        timeout_s: float = 120.0,
    ):
        addresses = addresses_of(urls, "guests")
        self.ways = Ways(max_steps, pause_s, timeout_s, screenshots=screenshots)
        self.records: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        read = _read(tasks)
        if faults := [f"{where}: {fault}" for where, record in read if (fault := fault_of(record))]:
            raise ValueError(
                f"{len(faults)} of {len(read)} tasks cannot be played here, and are to be left out: {'; '.join(faults[:_TOLD])}"
            )
        for _, record in read:
            self.records[split_of(str(record["id"]), SPLITS)].append(record)
        counted([record["id"] for records in self.records.values() for record in records], "tasks")
        if empty := [split for split, records in self.records.items() if not records]:
            raise ValueError(f"{tasks}: too few tasks, none is left for {' and '.join(empty)}; some dozens are wanted")
        self.sizes = {split: len(records) for split, records in self.records.items()}
        self.files = Files(files, timeout_s)
        commands = [
            [word.replace("{number}", str(number)).replace("{url}", url) for word in shlex.split(restore)]
            for number, url in enumerate(addresses)
        ]
        self.guests = Guests([Elsewhere(url, command) for url, command in zip(addresses, commands, strict=True)])

    def task(self, split: str, index: int) -> Task:
        record = self.records[split][index]
        kind = str(record.get("snapshot") or "all")
        return {**record, "id": f"osworld/{record['id']}", "seed": index, "difficulty": kind}

    def episode(self, name: str, sandbox: Any) -> Env:
        return DesktopEpisode(name, self.guests, self.files, self.ways)


def _read(tasks: str) -> list[tuple[str, dict[str, Any]]]:
    """Tasks, each with where it stands. Raises ValueError where there are none."""
    folder = Path(tasks)
    if not folder.is_dir():
        return [(f"{tasks}, {where}", record) for where, record in read_records(folder, ("id", "instruction", "evaluator"))]
    return [(str(path), task_of(path.read_text(), str(path))) for path in sorted(folder.rglob("*.json"))]


make_world = OSWorld
