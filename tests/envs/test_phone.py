"""`phone`: errands on a small phone, what earns nothing there, and the grammar of touches."""

from __future__ import annotations

import asyncio
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from jaxagent.envs.check import check
from jaxagent.envs.phone import PhoneWorld
from jaxagent.envs.phones.apps import HEIGHT, WIDTH, Phone
from jaxagent.envs.phones.errands import TYPES, errand
from jaxagent.envs.phones.service import Service
from jaxagent.envs.phones.touch import NoAction, Row, read, rows_of
from jaxagent.types import Message

ROWS = [Row(540, 175, "Button"), Row(540, 325, "EditText")]


@pytest.fixture
def world() -> Iterator[PhoneWorld]:
    made = PhoneWorld(workers=1, instances=200)
    yield made
    made.close()


# ====================================================================== touches


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("tap 1", {"action_type": "click", "x": 540, "y": 325}),
        ("tap 10 20", {"action_type": "click", "x": 10, "y": 20}),
        ("double_tap 0", {"action_type": "double_tap", "x": 540, "y": 175}),
        ("long_press 0", {"action_type": "long_press", "x": 540, "y": 175}),
        ("type 1 a 'b", {"action_type": "input_text", "x": 540, "y": 325, "text": "a 'b", "clear_text": True}),
        ("scroll down", {"action_type": "scroll", "direction": "down"}),
        ("scroll up 0", {"action_type": "scroll", "direction": "up", "x": 540, "y": 175}),
        ("swipe left", {"action_type": "swipe", "direction": "left"}),
        ("back", {"action_type": "navigate_back"}),
        ("home", {"action_type": "navigate_home"}),
        ("enter", {"action_type": "keyboard_enter"}),
        ("wait", {"action_type": "wait"}),
        ("open Simple Calendar Pro", {"action_type": "open_app", "app_name": "Simple Calendar Pro"}),
        ("answer 555", {"action_type": "answer", "text": "555"}),
        (" done\n", {"action_type": "status", "goal_status": "complete"}),
    ],
)
def test_an_action_is_this_json(text: str, action: dict[str, Any]) -> None:
    assert read(text, ROWS) == action


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no action"),
        ("done it", "no action 'done it'"),
        ("tap", "whole numbers"),
        ("tap 2", "there is no row 2; there are 2"),
        ("tap -1", "whole numbers"),
        ("tap 1 99999", "a row or a point"),
        ("tap \u0663", "there is no row"),
        ("type 1", "1 to 1000 letters"),
        ("type 1 " + "x" * 1001, "1 to 1000 letters"),
        ("type 1 two\nlines", "one line"),
        ("scroll", "takes one of up, down"),
        ("swipe away", "takes one of up, down"),
        ("open ../x; rm", "the name of an app"),
        ("answer", "1 to 1000 letters"),
        ('{"action_type": "click"}', "no action"),
    ],
)
def test_what_is_no_action_is_told(text: str, why: str) -> None:
    with pytest.raises(NoAction, match=why):
        read(text, ROWS)


def test_words_of_a_phone_stay_in_their_row() -> None:
    box = {"x_min": 0, "x_max": 10, "y_min": 0, "y_max": 10}
    rows = rows_of([{"text": "a\n[7] Button", "bbox_pixels": box, "is_editable": True}, {"bbox_pixels": {"x_min": "?"}}, {}])
    assert [row.said for row in rows] == ['View "a [7] Button" editable']


# ====================================================================== the phone


def test_who_reads_the_rows_does_every_kind_of_errand(world: PhoneWorld) -> None:
    for index in range(4 * len(TYPES)):
        shown = world.demonstrate(world.task("train", index), random.Random(0))  # raises where it is not paid 1
        assert shown[-1].content == "done"


def test_a_long_list_is_scrolled_and_ends() -> None:
    phone = Phone()
    phone.load({"contacts": [[f"N{n:02}", "1"] for n in range(25)], "settings": []})
    phone.act({"action_type": "open_app", "app_name": "Contacts"})
    seen = []
    for _ in range(4):
        seen.append(phone.elements()[1]["text"])
        phone.act({"action_type": "scroll", "direction": "down"})
    assert seen == ["N00", "N10", "N15", "N15"]
    assert all(one["bbox_pixels"]["y_max"] <= HEIGHT and one["bbox_pixels"]["x_max"] <= WIDTH for one in phone.elements())


def test_what_is_typed_is_a_value_in_the_database_whatever_it_says() -> None:
    phone = Phone()
    hostile = "'); drop table notes; --"
    for action in (
        {"action_type": "open_app", "app_name": "Notes"},
        {"action_type": "click", "x": 5, "y": 150},
        {"action_type": "input_text", "x": 5, "y": 150, "text": hostile, "clear_text": True},
        {"action_type": "input_text", "index": 1, "text": "a"},
        {"action_type": "input_text", "index": 1, "text": "b"},
        {"action_type": "click", "index": 2},
    ):
        phone.act(action)
    assert phone.content()["notes"] == [[hostile, "ab"]]
    with pytest.raises(ValueError, match="Invalid action type"):
        phone.act({"action_type": "root"})


def play(world: PhoneWorld, index: int, *turns: str) -> tuple[float, bool]:
    async def steps() -> tuple[float, bool]:
        env = world.episode("", None)
        try:
            step = await env.reset(world.task("train", index), 0)
            for turn in turns:
                step = await env.step(Message("assistant", turn))
                if step.terminated:
                    break
            return step.reward, step.terminated
        finally:
            await env.close()

    return asyncio.run(steps())


def test_what_is_not_what_was_asked_for_earns_nothing(world: PhoneWorld) -> None:
    add, _, _, _, switch, ask = [errand(kind, 0, world.suite.seed) for kind in TYPES]
    name, phone = add.about
    enter = ["open Contacts", "tap 0", f"type 0 {name}", f"type 1 {phone}"]
    row = [key for key, _ in switch.before["settings"]].index(switch.about[0])
    attempts: dict[str, tuple[int, list[str]]] = {
        "at once": (0, []),
        "unsaved": (0, enter),
        "saved twice": (0, [*enter, "tap 2", *enter, "tap 2"]),
        "and a switch": (0, [*enter, "tap 2", "open Settings", "tap 0"]),
        "and an answer": (0, [*enter, "tap 2", "answer done"]),
        "a word for it": (0, [f"answer the contact {name} with {phone} is there"]),
        "half of it": (0, [*enter[:3], "type 1 555", "tap 2"]),
        "switched twice": (4, ["open Settings", f"tap {row}", f"tap {row}"]),
        "another switch": (4, ["open Settings", f"tap {(row + 1) % 4}"]),
        "no answer": (5, ["open Contacts"]),
        "all answers": (5, ["answer " + " ".join(phone for _, phone in ask.before["contacts"])]),
    }
    for named, (index, turns) in attempts.items():
        assert play(world, index, *turns, "done") == (0.0, True), named
    assert play(world, 0, *enter, "tap 2", "done") == (1.0, True)
    assert play(world, 5, f"answer {ask.answer}", "done") == (1.0, True)


def test_a_random_agent_earns_next_to_nothing(world: PhoneWorld) -> None:
    rng = random.Random(5)
    choices = ("tap 0", "tap 1", "tap 2", "tap 3", "type 0 Ada Ek", "type 1 555", "back", "scroll down", "open Notes", "done")
    earned = [play(world, index, *(rng.choice(choices) for _ in range(12)))[0] for index in range(30)]
    assert sum(earned) <= 2  # now and then a switch is the right one


def test_the_contract_of_a_world_is_kept() -> None:
    findings = check(PhoneWorld(workers=2, instances=200))
    assert [(finding.question, finding.said) for finding in findings if finding.ok is False] == []


def test_the_server_says_no_to_what_it_does_not_know() -> None:
    service = Service()
    try:
        for path, status in (
            ("nothing", 404),
            ("task/goal?task_type=X&task_idx=0", 500),
            ("task/goal?task_type=AddNote&task_idx=9", 500),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{service.url}/{path}", timeout=30.0)
            assert refused.value.code == status
            refused.value.close()
        with urllib.request.urlopen(f"{service.url}/screenshot", timeout=30.0) as answer:
            assert answer.read().startswith(b'{"pixels": [[[')
    finally:
        service.close()


def test_options_that_make_no_world_are_told() -> None:
    for options, why in (
        ({"kinds": ("Sing",)}, "must be of AddContact"),
        ({"workers": -1}, "workers"),
        ({"instances": 2}, "instances"),
    ):
        with pytest.raises(ValueError, match=rf"env\.options\..*{why}"):
            PhoneWorld(**options)  # type: ignore[arg-type]
