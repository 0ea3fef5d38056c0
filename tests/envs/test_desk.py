"""`desk` on real desktops: windows, pointer and keys. Without Xvfb and xdotool, or without the lock, only what needs none."""

from __future__ import annotations

import ast
import asyncio
import os
import random
import re
import struct
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxagent.envs.check import Checker, descendants
from jaxagent.envs.desk import Desktop
from jaxagent.envs.desktop import chores, local
from jaxagent.envs.desktop.guest import Guest, GuestFault
from jaxagent.envs.desktop.local import Desk
from jaxagent.types import Message

REGISTER = Path(local.__file__).with_name("register.py")


@pytest.fixture(scope="module")
def world() -> Iterator[Desktop]:
    if absent := local.missing():
        pytest.skip(absent)
    made = Desktop(workers=1)
    try:
        asyncio.run(steps(made, 0, "wait"))
    except GuestFault as fault:
        made.close()
        if "no isolation" in str(fault):
            pytest.skip(str(fault))
        raise
    yield made
    made.close()


def say(text: str) -> Message:
    return Message("assistant", text)


async def steps(world: Desktop, index: int, *turns: str) -> Any:
    env, task = world.episode("desk/1", None), world.task("train", index)
    try:
        step = await env.reset(task, task["seed"])
        for turn in turns:
            step = await env.step(say(turn))
            if step.terminated:
                break
        return step
    finally:
        await env.close()
        await env.close()


def row(seen: str, words: str) -> str:
    """The number of the first row with these words."""
    return re.findall(rf"^\[(\d+)\] .*{re.escape(words)}", seen, re.MULTILINE)[0]


# ====================================================================== chores, without a desktop


def test_each_kind_asks_for_one_change_of_what_the_file_held() -> None:
    for kind in chores.KINDS:
        for seed in range(30):
            task = chores.chore(kind, seed)
            before = task["config"][0]["parameters"]["text"]
            after = task["evaluator"]["expected"]["rules"]["expected"]
            assert before != after
            lines = [
                set(map(str, ast.literal_eval(re.sub(r"\b(t|f)(rue|alse)\b", lambda m: m[0].capitalize(), text))))
                for text in (before, after)
            ]
            assert (len(lines[0] - lines[1]), len(lines[1] - lines[0])) == {"add": (0, 1), "delete": (1, 0)}.get(kind, (1, 1))
            assert task["wanted"]["name"] in task["instruction"]


def test_the_program_and_the_chores_know_the_same_cities() -> None:
    tree = ast.parse(REGISTER.read_text())
    named = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CITIES"]
    assert ast.literal_eval(named[0].value) == chores.CITIES


def test_what_is_missing_is_told_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"env\.name=desk: it needs the program Xvfb, .*apt install xvfb xdotool"):
        Desktop()
    with pytest.raises(ValueError, match="needs the program Xvfb"):
        Desk(("register",))
    for name in ("Xvfb", "xdotool"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert local.missing() == "" or "tkinter" in local.missing() or "outside of /tmp" in local.missing()


def test_options_that_make_no_world_are_told() -> None:
    for options, why in (
        ({"kinds": ("sing",)}, "must be of phone, city"),
        ({"kinds": ()}, "nothing"),
        ({"workers": -1}, "workers"),
    ):
        with pytest.raises(ValueError, match=rf"env\.options.*{why}"):
            Desktop(**options)  # type: ignore[arg-type]


# ====================================================================== real desktops


def test_who_reads_the_rows_does_every_kind_of_chore(world: Desktop) -> None:
    for index in range(len(chores.KINDS)):
        shown = world.demonstrate(world.task("demo", index), random.Random(0))  # raises where it is not paid 1
        assert shown[-1].content == "done"


def test_a_random_agent_earns_nothing(world: Desktop) -> None:
    rng = random.Random(3)
    for index in range(2):
        turns = [rng.choice((f"click {rng.randrange(800)} {rng.randrange(600)}", "type 555", "press enter")) for _ in range(7)]
        assert asyncio.run(steps(world, index, *turns, "done")).reward == 0.0


def test_what_is_not_the_change_that_was_asked_for_earns_nothing(world: Desktop) -> None:
    """Task 0 asks for a phone: nothing, a word for it, the file's text in a field, another's phone, and one change too many."""
    task = world.task("train", 0)
    who, phone = task["wanted"]["name"], task["wanted"]["phone"]
    people = task["evaluator"]["expected"]["rules"]["expected"]
    other = next(name for name in re.findall(r'"name": "(.*?)"', people) if name != who)

    async def attempt(turns: list[str]) -> float:
        """Turns name rows by their words, in <>."""
        env = world.episode("desk/2", None)
        try:
            step = await env.reset(task, 0)
            for turn in turns:
                seen = step.messages[-1].content if step.messages else ""
                step = await env.step(say(re.sub(r"<(.*?)>", lambda found, seen=seen: row(seen, found[1]), turn)))
            assert step.terminated
            return step.reward
        finally:
            await env.close()

    enter = ['triple_click <text "Phone">', f"type {phone}"]
    mine, theirs, save = f'click <list-item "{who}">', f'click <list-item "{other}">', 'click <push-button "Save">'
    attempts = {
        "at once": ["done"],
        "given up": ["fail"],
        "unsaved": [mine, *enter, "done"],
        "somebody else's": [theirs, *enter, save, "done"],
        "the file as a name": [mine, 'triple_click <text "Name">', "type " + " ".join(people.split())[:300], save, "done"],
        "a program as a phone": [mine, enter[0], "type $(cat people.json); import os; os.remove('people.json')", save, "done"],
        "one too many": [mine, *enter, save, 'click <check-box "Member">', save, "done"],
    }
    for name, turns in attempts.items():
        assert asyncio.run(attempt(turns)) == 0.0, name
    assert asyncio.run(attempt([mine, *enter, save, "done"])) == 1.0


def test_keys_are_pressed_whatever_they_are_and_none_stays_locked(world: Desktop) -> None:
    async def typed(*turns: str) -> str:
        env = world.episode("desk/4", None)
        try:
            step = await env.reset(world.task("train", 0), 0)
            name = row(step.messages[-1].content, 'text "Name"')
            for turn in (f"triple_click {name}", *turns):
                step = await env.step(say(turn))
            return re.findall(r'text "Name" holds (.*?) focused', step.messages[-1].content)[0]
        finally:
            await env.close()

    odd = [*"/+<'\\", "insert", "win", "printscreen", "win+/"]
    assert ast.literal_eval(asyncio.run(typed("type a", *(f"press {key}" for key in odd))))[:6] == "a/+<'\\"
    assert asyncio.run(typed("press capslock", "press a")) == "'A'"
    assert asyncio.run(typed("press a")) == "'a'"


def test_pixels_are_those_of_the_window_and_change_with_what_is_typed(world: Desktop, tmp_path: Path) -> None:
    pictured = Desktop(workers=1, screenshots=str(tmp_path))
    pictured.guests = world.guests
    asyncio.run(steps(pictured, 0, "click 0", "wait", "press enter"))
    first, second, third, _ = [pixels(place.read_bytes()) for place in sorted(tmp_path.rglob("*.png"))]
    assert len(first) == 800 * 600 * 3
    assert len(set(first)) > 10  # letters, edges, grey
    changed = [number // 3 for number in range(0, len(first), 3) if first[number : number + 3] != second[number : number + 3]]
    assert {number % 800 < 400 for number in changed} == {True, False}  # the list and the fields
    assert second == third


def pixels(png: bytes) -> bytes:
    """The colours of a picture whose rows are not filtered."""
    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        data += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    rows = zlib.decompress(data)
    assert set(rows[:: 1 + 800 * 3]) == {0}
    return b"".join(rows[start + 1 : start + 1 + 800 * 3] for start in range(0, len(rows), 1 + 800 * 3))


def test_a_desktop_sees_nothing_of_this_machine_and_runs_no_program_of_a_turn(world: Desktop) -> None:
    async def ask() -> None:
        place = await world.guests.take()
        guest = await place.fresh(30.0)
        try:
            assert (await guest.run(["cat", __file__])).returncode != 0
            assert (await guest.run(["id", "-u"])).output == "1000\n"
            refused = await asyncio.gather(
                guest.run(["python", "-c", "import pyautogui; open('x', 'w').write('y')"]),
                guest.run(["python", "-c", "import pyautogui; pyautogui.press(open('x'))"]),
                guest.run(["python", "-c", "import pyautogui; pyautogui.__class__"]),
                return_exceptions=True,
            )
            assert all(isinstance(one, GuestFault) for one in refused), refused
            assert await guest.file("~/x") is None
            await guest.upload("~/left", b"behind")
        finally:
            await guest.close()
            world.guests.give_back(place)
        again = await place.fresh(30.0)
        assert await again.file("~/left") is None
        await again.close()

    asyncio.run(ask())


def test_a_desktop_that_dies_breaks_its_episode_and_another_takes_its_place(world: Desktop) -> None:
    async def play() -> None:
        env, task = world.episode("desk/3", None), world.task("train", 1)
        await env.reset(task, 0)
        place: Any = world.guests.all[0]
        place.desk._process.kill()
        with pytest.raises(GuestFault):
            await env.step(say("click 0"))
        await env.close()
        place.desk._process.wait()
        assert not (await steps(world, 1, "wait")).terminated

    asyncio.run(play())


def test_the_contract_of_a_world_is_kept(world: Desktop) -> None:
    """All of it is asked by `jaxagent env check desk`; here what a desktop of our own could be at fault in."""

    async def ask() -> list[tuple[bool | None, str]]:
        checker = Checker(world)
        checker.tasks = checker.tasks[:2]
        return [await asked(None) for asked in (checker.beginnings, checker.repeated, checker.unreadable, checker.nonsense)]

    assert [said for ok, said in asyncio.run(ask()) if not ok] == []


def test_a_desktop_is_asked_past_any_proxy(world: Desktop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody is
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # of the process, made when it was first wanted
    monkeypatch.setattr(local, "_START_S", 20.0)
    desk = Desk(("register",))
    try:
        assert desk.start().startswith("http://127.0.0.1:")
    finally:
        desk.close()


def test_a_closed_desktop_leaves_no_process() -> None:
    if absent := local.missing():
        pytest.skip(absent)
    before = descendants(os.getpid())
    desk = Desk(("register",))
    try:
        url = desk.start()
    except GuestFault as fault:
        pytest.skip(str(fault))
    finally:
        desk.close()
    assert desk.lost
    assert descendants(os.getpid()) <= before

    async def ask() -> None:
        guest = Guest(url, 5.0)
        with pytest.raises(GuestFault):
            await guest.tree()
        await guest.close()

    asyncio.run(ask())
