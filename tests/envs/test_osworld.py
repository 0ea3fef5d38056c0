"""`osworld` against a guest that answers as OSWorld's own does: paths, bodies, forms, and the errors that it gives."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from answering import answering
from scripted import episode, script

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.data.records import split_of
from jaxagent.envs.check import Checker
from jaxagent.envs.desktop.guest import GuestFault
from jaxagent.envs.osworld import SPLITS, OSWorld
from jaxagent.types import Message, Sampling, StopReason

PICTURE = b"\x89PNG\r\n\x1a\n..."
NOTE, GOAL = "~/note.txt", "hello"


class Guest:
    """A desktop of two states: a field that is typed into, and a button that saves it to a file."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.fault, self.answer = "", web.Response(status=500, text="Internal Server Error")
        self.typed, self.launched, self.slow_s = "", False, 0.0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        name = request.path.strip("/")
        self.asked.append(name)
        if self.fault == name:
            await asyncio.sleep(self.slow_s)
            return web.Response(status=self.answer.status, body=self.answer.body, headers={"Location": "/screenshot"})
        return await getattr(self, name.replace("/", "_"))(request)

    async def platform(self, request: web.Request) -> web.Response:
        self.typed, self.launched, self.files = "", False, {}  # an episode begins, and a snapshot would have been reverted
        return web.Response(text="Linux")

    async def screenshot(self, request: web.Request) -> web.Response:
        return web.Response(body=PICTURE, content_type="image/png")

    async def accessibility(self, request: web.Request) -> web.Response:
        state, place = (f'xmlns:{short}="https://accessibility.ubuntu.example.org/ns/{name}"' for short, name in SHORT)
        on = 'st:showing="true" st:visible="true" st:enabled="true" cp:size="(20, 10)"'
        field = f'<text name="Note" {on} cp:screencoord="(100, 20)">{self.typed}</text>'
        button = f'<push-button name="Save" {on} cp:screencoord="(100, 50)" />'
        shown = f"<application name='note'>{field}{button}</application>" if self.launched else ""
        return web.json_response({"AT": f'<desktop-frame {state} {place} name="main">{shown}</desktop-frame>'})

    async def execute(self, request: web.Request) -> web.Response:
        data = await request.json()
        command = data["command"]
        if command[:2] == ["python", "-c"]:
            for node in ast.walk(ast.parse(command[2])):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    given = [ast.literal_eval(one) for one in node.args] if node.func.attr == "typewrite" else []
                    self.typed += "".join(map(str, given))
                    if ast.unparse(node) == "pyautogui.click(x=110, y=55)":
                        self.files[NOTE] = self.typed.encode()
            return self.ran("")
        if command[0] == "cat":
            known = self.files.get(command[1])
            return self.ran((known or b"").decode(), "" if known is not None else "No such file", int(known is None))
        return web.json_response({"status": "error", "message": "No such file or directory"}, status=500)

    def ran(self, output: str, error: str = "", status: int = 0) -> web.Response:
        return web.json_response({"status": "success", "output": output, "error": error, "returncode": status})

    async def file(self, request: web.Request) -> web.Response:
        known = self.files.get(str((await request.post())["file_path"]))
        return web.Response(body=known) if known is not None else web.json_response({"error": "File not found"}, status=404)

    async def setup_upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        content = form["file_data"]
        assert isinstance(content, web.FileField)
        self.files[str(form["file_path"])] = content.file.read()
        return web.Response(text="File Uploaded")

    async def setup_launch(self, request: web.Request) -> web.Response:
        self.launched = (await request.json()) == {"command": ["note"], "shell": False}
        return web.Response(text="launched successfully")


SHORT = (("st", "state"), ("cp", "component"))


@asynccontextmanager
async def running(count: int = 1) -> AsyncIterator[tuple[list[Guest], str]]:
    guests = [Guest() for _ in range(count)]
    async with answering([guest.handle for guest in guests]) as urls:
        yield guests, urls


def note(identity: str = "", **changes: Any) -> dict[str, Any]:
    """A task: to save a word."""
    saved = {"type": "vm_command_line", "command": ["cat", NOTE]}
    evaluator = {"func": "exact_match", "result": saved, "expected": {"type": "rule", "rules": {"expected": GOAL}}}
    setup = [{"type": "launch", "parameters": {"command": ["note"], "shell": False}}]
    about = {"snapshot": "os", "instruction": f"Save {GOAL}, as {identity} asks.", "config": setup, "evaluator": evaluator}
    return {"id": identity, **about, **changes}


def several(make: Any = note) -> list[dict[str, Any]]:
    """One task for each split at least."""
    return [make(f"note-{number}") for number in range(40)]


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    return written(tmp_path, several())


def written(folder: Path, records: list[dict[str, Any]]) -> str:
    for record in records:
        (folder / "tasks" / "os").mkdir(parents=True, exist_ok=True)
        (folder / "tasks" / "os" / f"{record['id']}.json").write_text(json.dumps(record))
    return str(folder / "tasks")


def say(text: str) -> Message:
    return Message("assistant", text)


SOLVED = (say("click 0"), say(f"type {GOAL}"), say("click 1"), say("done"))


async def steps(world: OSWorld, *turns: Message) -> Any:
    env = world.episode("run/1", None)
    try:
        step = await env.reset(world.task("train", 0), 0)
        for turn in turns:
            step = await env.step(turn)
        return step
    finally:
        await env.close()
        await env.close()


def outcome(tasks: str, *turns: Message, **options: Any) -> Any:
    async def play() -> Any:
        async with running() as (_, urls):
            return await steps(OSWorld(urls, tasks, pause_s=0.0, **options), *turns)

    return asyncio.run(play())


def test_an_episode_from_its_task_to_its_score(tasks: str) -> None:
    async def play() -> tuple[Any, Guest]:
        async with running() as ((guest,), urls):
            world = OSWorld(urls, tasks, pause_s=0.0)
            limits = Limits(max_turns=6, max_tokens=9000)
            turns = script(PlainTemplate(), *SOLVED)
            (row,) = await episode(world, world.task("train", 1), turns, limits=limits, sampling=Sampling(max_tokens=100))
            return row, guest

    row, guest = asyncio.run(play())
    assert (row.reward, row.stop) == (1.0, StopReason.ANSWERED)
    text = PlainTemplate().text(row.tokens)
    assert "The task: Save hello, as note-" in text
    assert '[0] text "Note" at 110 25\n[1] push-button "Save" at 110 55' in text
    assert "holds 'hello'" in text
    acted = ["execute", "accessibility"] * 3
    assert guest.asked == ["platform", "setup/launch", "accessibility", *acted, "execute"]


def test_what_was_not_saved_earns_nothing_and_says_by_which_rule(tasks: str) -> None:
    for turns in ([say("done")], [say("fail")], [say(f"type {GOAL}"), say("done")]):
        step = outcome(tasks, *turns)
        assert (step.reward, step.terminated, step.answered) == (0.0, True, True)
    assert step.reason == "exact_match: 0"


def test_a_guest_is_scored_as_it_is_when_the_turns_are_over(tasks: str) -> None:
    step = outcome(tasks, say(f"type {GOAL}"), say("click 1"), say("nothing of that kind"), max_steps=3)
    assert (step.reward, step.terminated, step.answered) == (1.0, True, False)


def test_what_is_no_action_is_told_with_the_screen(tasks: str) -> None:
    for turn, why in ((say("click 9"), "there is no row 9"), (Message("assistant", error="no end"), "no end")):
        step = outcome(tasks, turn)
        assert (step.terminated, step.reward) == (False, 0.0)
        assert why in step.messages[0].content
        assert "[1] push-button" in step.messages[0].content


def test_a_policys_text_reaches_the_guest_as_what_is_typed_and_as_nothing_else(tasks: str) -> None:
    hostile = "'); import os; os.system('rm -rf /'); ('"
    step = outcome(tasks, say(f"type {hostile}"))
    assert "import os" in step.messages[0].content  # in the field, where the guest that runs nothing has put it
    assert "no action" in outcome(tasks, say("import os; os.system('x')")).messages[0].content


ASKED = ("platform", "setup/launch", "accessibility", "screenshot", "execute")


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        *((name, answer) for name in ASKED for answer in ("status 500", "late")),
        *((name, "nonsense") for name in ASKED[2:]),  # whatever the others say is right
        ("screenshot", "elsewhere"),  # where the same would be found
    ],
)
def test_a_guest_that_fails_breaks_the_episode_and_is_tried_again(fault: str, answer: str, tasks: str, tmp_path: Path) -> None:
    async def play() -> None:
        async with running() as ((guest,), urls):
            late = 0.2 if answer == "late" or fault == "platform" else 60.0  # as long as a guest may take to be there
            world = OSWorld(urls, tasks, pause_s=0.0, timeout_s=late, screenshots=str(tmp_path / "seen"))
            guest.fault, guest.slow_s = fault, 0.5 if answer == "late" else 0.0
            if answer != "status 500":
                guest.answer = web.Response(status=302 if answer == "elsewhere" else 200, text="<html>")
            with pytest.raises(GuestFault, match=urls):
                await steps(world, *SOLVED)
            guest.fault, world.ways = "", dataclasses.replace(world.ways, timeout_s=60.0)
            assert (await steps(world, *SOLVED)).reward == 1.0

    asyncio.run(play())


def test_pictures_are_kept_and_shown_to_nobody(tasks: str, tmp_path: Path) -> None:
    outcome(tasks, *SOLVED[:2], screenshots=str(tmp_path / "seen"))
    kept = sorted((tmp_path / "seen").rglob("*.png"))
    assert [place.relative_to(tmp_path / "seen").as_posix() for place in kept] == [f"run_1/{n:03}.png" for n in range(3)]
    assert kept[0].read_bytes() == PICTURE


def test_an_evaluator_that_cannot_run_breaks_the_episode_and_pays_nothing(tmp_path: Path) -> None:
    def broken(identity: str) -> dict[str, Any]:
        made = note(identity)
        made["evaluator"]["result"]["command"] = ["nothing-of-that-name"]
        return made

    with pytest.raises(GuestFault, match="status 500: No such file or directory"):
        outcome(written(tmp_path, several(broken)), say("done"))


def test_metrics_are_joined_and_what_cannot_be_done_wants_a_no(tmp_path: Path) -> None:
    saved = note()["evaluator"]["result"]
    right, wrong = ({"type": "rule", "rules": {"expected": word}} for word in (GOAL, "else"))
    both = {"func": ["exact_match"] * 2, "result": [saved] * 2, "expected": [right, wrong]}
    cases: list[tuple[dict[str, Any], tuple[Message, ...], float]] = [
        (both, SOLVED, 0.0),
        ({**both, "conj": "or"}, SOLVED, 1.0),
        ({**both, "expected": [right, right]}, SOLVED, 1.0),
        ({"func": "infeasible"}, (say("fail"),), 1.0),
        ({"func": "infeasible"}, (say("done"),), 0.0),
        (
            {"func": "compare_text_file", "result": {"type": "vm_file", "path": "~/none"}, "expected": both["result"][0]},
            SOLVED,
            0.0,
        ),
    ]
    for number, (evaluator, turns, score) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        place = written(tmp_path / str(number), several(lambda name, e=evaluator: note(name, evaluator=e)))
        assert outcome(place, *turns).reward == score, evaluator


@pytest.mark.parametrize("kind", ["activate_window", "close_window"])
def test_a_window_that_the_policy_closed_keeps_no_task_from_its_score(kind: str, tmp_path: Path) -> None:
    step = {"type": kind, "parameters": {"window_name": "note"}}
    after = several(lambda name: note(name, evaluator={**note()["evaluator"], "postconfig": [step]}))
    before = several(lambda name: note(name, config=[*note()["config"], step]))

    async def play(records: list[dict[str, Any]], **changes: Any) -> Any:
        async with running() as ((guest,), urls):
            guest.fault, guest.answer = f"setup/{kind}", web.Response(status=404, text="Window not found")
            guest.slow_s = changes.get("slow_s", 0.0)
            world = OSWorld(urls, written(tmp_path, records), pause_s=0.0, timeout_s=0.5 if guest.slow_s else 60.0)
            return await steps(world, *SOLVED)

    assert asyncio.run(play(after)).reward == 1.0
    with pytest.raises(GuestFault, match="TimeoutError"):
        asyncio.run(play(after, slow_s=1.0))  # that is no answer
    with pytest.raises(GuestFault, match="Window not found"):
        asyncio.run(play(before))


def test_files_of_a_task_come_from_the_folder_or_from_their_address_and_are_kept(tmp_path: Path) -> None:
    async def play() -> Guest:
        async with running(2) as ((guest, site), urls):
            mine, address = urls.split(",")
            site.fault, site.answer = "gold.txt", web.Response(text=GOAL)
            config = [
                {"type": "upload_file", "parameters": {"files": [{"local_path": "mine.txt", "path": "~/mine.txt"}]}},
                {"type": "download", "parameters": {"files": [{"url": f"{address}/gold.txt", "path": NOTE}]}},
                {"type": "sleep", "parameters": {"seconds": 0.0}},
            ]
            gold = {"type": "cloud_file", "path": f"{address}/gold.txt", "dest": "note.txt"}
            evaluator = {"func": "compare_text_file", "result": {"type": "vm_file", "path": NOTE}, "expected": gold}
            made = several(lambda name: note(name, config=config, evaluator=evaluator))
            files = tmp_path / "files"
            files.mkdir()
            (files / "mine.txt").write_text("mine")
            world = OSWorld(mine, written(tmp_path, made), files=str(files), pause_s=0.0)
            for _ in range(2):
                assert (await steps(world, say("done"))).reward == 1.0
            assert site.asked == ["gold.txt"]  # once, and then from the folder
            assert (files / f"{uuid.uuid5(uuid.NAMESPACE_URL, f'{address}/gold.txt')}_note.txt").read_text() == GOAL
            return guest

    guest = asyncio.run(play())
    assert guest.files["~/mine.txt"] == b"mine"


def test_a_file_outside_of_the_folder_is_not_sent(tmp_path: Path) -> None:
    config = [{"type": "upload_file", "parameters": {"files": [{"local_path": "../secret", "path": "~/x"}]}}]
    (tmp_path / "secret").write_text("key")
    (tmp_path / "files").mkdir()
    place = written(tmp_path, several(lambda name: note(name, config=config)))
    with pytest.raises(GuestFault, match=r"\.\./secret: a file in .*files"):
        outcome(place, files=str(tmp_path / "files"))


def test_a_guest_is_restored_before_each_episode_or_the_episode_breaks(tasks: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + ' ' + sys.argv[3] + chr(10)); sys.exit(len(sys.argv[4]))"

    async def play(failing: str) -> str:
        async with running() as (_, urls):
            restore = f"""{sys.executable} -c "{code}" {log} {{number}} {{url}} '{failing}'"""
            world = OSWorld(urls, tasks, restore=restore, pause_s=0.0)
            for _ in range(2):
                await steps(world, say("wait"))
            return urls

    urls = asyncio.run(play(""))
    assert log.read_text() == f"0 {urls}\n" * 2
    with pytest.raises(GuestFault, match="ended with status 1"):
        asyncio.run(play("x"))


def test_no_two_episodes_share_a_guest(tasks: str) -> None:
    async def play() -> None:
        async with running(2) as (guests, urls):
            world = OSWorld(urls, tasks, pause_s=0.0)
            await asyncio.gather(*(steps(world, say("wait"), say("done")) for _ in range(6)))
            one = ["platform", "setup/launch", "accessibility", "accessibility", "execute"]
            for guest in guests:
                assert guest.asked == one * (len(guest.asked) // len(one))
            assert sum(len(guest.asked) for guest in guests) == 6 * len(one)

    asyncio.run(play())


def test_the_contract_of_a_world_is_kept(tmp_path: Path) -> None:
    tasks = written(tmp_path, several())

    async def ask() -> list[Any]:
        async with running() as (_, urls):
            world = OSWorld(urls, tasks, pause_s=0.0)
            return await Checker(world).ask_all(None)

    assert [(finding.question, finding.said) for finding in asyncio.run(ask()) if finding.ok is False] == []


def test_options_that_make_no_world_are_told(tasks: str, tmp_path: Path) -> None:
    url = "http://127.0.0.1:5000"
    for options, why in (
        ({"urls": "localhost:5000"}, r"env\.options\.urls must be those of guests"),
        ({"urls": ""}, r"env\.options\.urls: nothing is named"),
        ({"urls": f"{url},{url}/"}, "is named twice"),
        ({"tasks": str(tmp_path / "none")}, "none"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"timeout_s": 0}, "timeout_s must be positive"),
    ):
        with pytest.raises(ValueError, match=why):
            OSWorld(**{"urls": url, "tasks": tasks, **options})  # type: ignore[arg-type]
    (tmp_path / "tasks" / "os" / "note-0.json").write_text(json.dumps(note("note-0", config=[{"type": "login"}])))
    with pytest.raises(ValueError, match=r"1 of 40 tasks cannot be played here.*note-0\.json: its setup 'login' is not known"):
        OSWorld(url, tasks)
    (tmp_path / "few.jsonl").write_text(json.dumps(note("7")) + "\n")
    with pytest.raises(ValueError, match="too few tasks"):
        OSWorld(url, str(tmp_path / "few.jsonl"))


def test_a_task_stays_in_its_split(tasks: str) -> None:
    world = OSWorld("http://127.0.0.1:5000", tasks)
    assert sum(world.sizes.values()) == 40
    for split in SPLITS:
        name = world.task(split, 0)["id"].removeprefix("osworld/")
        assert split_of(name, SPLITS) == split
