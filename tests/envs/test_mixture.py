"""`mixture`: shares of the worlds, epochs of those that end, and episodes that stay in their own world."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict
from scripted import episode, script

from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.chain import Chain
from jaxagent.envs.env import ENDLESS, end, seats_of, size_of
from jaxagent.envs.mixture import BLOCK, Mixture, shares
from jaxagent.envs.search import Search
from jaxagent.types import Message, ToolCall

PLAIN = PlainTemplate()
SEARCH = {"name": "search", "options": {"style": "bytes", "hops": (1,), "names": 8}}
CHAIN = {"name": "chain", "weight": 3.0}


def questions(folder: Path, name: str, count: int) -> dict[str, Any]:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"question": f"{name} {n}?", "answer": n}) + "\n" for n in range(count)))
    return {"name": "questions", "options": {"path": str(path), "test_path": str(path), "toolbox": ("calculator",)}}


def test_every_block_has_each_world_by_its_weight() -> None:
    mixture = Mixture({"look": CHAIN, "seek": SEARCH})
    for block in (0, 7):
        labels = Counter(mixture.task("train", block * BLOCK + i)["world"] for i in range(BLOCK))
        assert labels == {"look": 75, "seek": 25}
    assert shares({"a": 1, "b": 1, "c": 1}, 100) == {"a": 34, "b": 33, "c": 33}
    assert size_of(mixture, "train") == size_of(mixture, "test") == ENDLESS


def test_tasks_of_endless_worlds_do_not_come_twice_and_are_the_same_for_ever() -> None:
    mixture = Mixture({"look": CHAIN, "seek": SEARCH})
    tasks = [mixture.task("valid", i) for i in range(300)]
    assert len({task["id"] for task in tasks}) == 300
    assert tasks == [Mixture({"look": CHAIN, "seek": SEARCH}).task("valid", i) for i in range(300)]
    assert {task["difficulty"].partition(":")[0] for task in tasks} == {"look", "seek"}
    train = {(task["world"], task["seed"]) for task in (mixture.task("train", i) for i in range(300))}
    assert not train & {(task["world"], task["seed"]) for task in tasks}


def test_an_epoch_has_every_task_and_an_evaluation_none_twice(tmp_path: Path) -> None:
    worlds = {"large": questions(tmp_path, "large", 500), "small": questions(tmp_path, "small", 120)}
    mixture = Mixture(worlds)
    sizes = {label: size_of(world, "train") for label, world in mixture.worlds.items()}
    size = size_of(mixture, "train")
    assert size % BLOCK == 0 and size >= 2 * max(sizes.values())
    counts = Counter(mixture.task("train", i)["id"] for i in range(size))
    assert len(counts) == sum(sizes.values())
    small = [count for name, count in counts.items() if name.startswith("small")]
    assert max(small) - min(small) <= 1
    ids = [mixture.task("test", i)["id"] for i in range(size_of(mixture, "test"))]
    assert len(ids) == len(set(ids)) == 200
    assert not hasattr(mixture, "demonstrate")


def test_an_episode_is_its_worlds_and_another_worlds_tool_is_answered_with_what_there_is() -> None:
    mixture = Mixture(ConfigDict({"look": CHAIN, "seek": SEARCH}))
    assert [spec.name for spec in mixture.tools] == ["A", "B", "S", "O"]
    assert mixture.functions == "jaxagent.envs.chain"
    index = next(i for i in range(BLOCK) if mixture.task("test", i)["world"] == "seek")
    task = mixture.task("test", index)
    corpus = Search(**SEARCH["options"]).corpus(task)
    strange = Message("assistant", calls=(ToolCall("A", {"key": "37"}),))
    answer = Message("assistant", f"{corpus.gold()}[1:x]")
    (row,) = asyncio.run(episode(mixture, task, script(PLAIN, strange, answer)))
    assert row.outcome == 1.0
    assert task["question"] in PLAIN.text(row.tokens)
    assert len(row.turns) == 2 and not row.turns[0].tools


class Started(Chain):
    """A world that has something to end."""

    ended = False

    def close(self) -> None:
        self.ended = True


def test_its_seats_are_those_of_the_largest_table_and_what_its_worlds_started_is_ended() -> None:
    mixture = Mixture({"cards": {"name": "kuhn", "options": {"rules": False, "past": 0.0}}, "look": CHAIN})
    assert seats_of(mixture) == 2
    assert seats_of(Mixture({"look": CHAIN})) == 1
    mixture.worlds["started"] = started = Started()
    end(mixture)
    assert started.ended


def test_demonstrations_are_those_of_the_tasks_world() -> None:
    mixture = Mixture({"look": CHAIN, "seek": SEARCH})
    for i in range(20):
        task = mixture.task("demo", i)
        dialogue = mixture.demonstrate(task, random.Random(0))
        names = {call.name for message in dialogue for call in message.calls}
        assert names <= ({"A", "B"} if task["world"] == "look" else {"S", "O"})


@pytest.mark.parametrize(
    ("worlds", "said"),
    [
        ({}, "weights above 0"),
        ({"a": {"name": "chain", "weight": 0}}, "weights above 0"),
        ({"a": {"weight": 1}}, r"worlds\.a must have name, weight and options; got 'no name'"),
        ({"a": {"name": "chain", "wieght": 1}}, "got 'wieght'"),
        ({"a": {"name": "nowhere"}}, r"worlds\.a: env\.name must be a file"),
        ({"a": {"name": "chain", "options": {"flaky": 2}}}, r"worlds\.a: env\.options\.flaky"),
        ({"a": {"name": "chain", "options": {"flakey": 2}}}, r"worlds\.a: .*flakey"),
        ({"a": {"name": "chain"}, "b": {"name": "maze"}}, "a and b each have a tool 'A', and they differ"),
        ({"a": {"name": "kuhn", "options": {"past": 0.5}}}, r"worlds\.a: earlier versions of the policy play in this world"),
        (
            {"a": {"name": "program", "options": {"function": "json:dumps"}}},
            r"worlds\.a: the episodes .* are runs of a program",
        ),
        ({"a": {"name": "chain", "weight": 1000}, "b": SEARCH}, r"b\.weight=1 is below 1 of 100 tasks"),
    ],
)
def test_worlds_that_cannot_be_mixed_are_told(worlds: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Mixture(worlds)
