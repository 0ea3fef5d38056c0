"""Worlds in a browser: what can be known without one, and, where all is installed, tasks played to reward."""

from __future__ import annotations

import ast
import contextlib
import http.cookiejar
import importlib.util
import json
import os
import random
import re
import sys
import types
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from libraries import ended, faults, made, played

from jaxagent.envs import browsergym, miniwob
from jaxagent.envs.synchronous import ADAPTERS, Shown
from jaxagent.envs.workers import chromium, install
from jaxagent.envs.workers.pool import WorkerFault

__all__ = ["ended"]  # a fixture
SHOP = Path(__file__).parents[2] / "configs" / "sites" / "shop.py"
KINDS = tuple(f"browsergym/shop.{kind}" for kind in ("order", "price", "cheapest"))


def imported(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ====================================================================== the browser of the system


def a_browser(path: Path, says: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_the_driver_is_pinned_to_the_browser_that_is_here_and_renewed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXAGENT_ENVS", str(tmp_path))
    monkeypatch.setenv("JAXAGENT_CHROMIUM", str(a_browser(tmp_path / "old", "Chromium 155.0.1.2 built on Debian")))
    assert "chromedriver-py==155.*" in install.LIBRARIES["miniwob"].pinned()
    home = tmp_path / "miniwob"
    home.mkdir()
    (home / "installed.json").write_text(json.dumps(install.LIBRARIES["miniwob"].pinned()))
    assert install.python_of("miniwob") == home / "bin" / "python"
    monkeypatch.setenv("JAXAGENT_CHROMIUM", str(a_browser(tmp_path / "new", "Google Chrome 156.0.8078.79")))
    with pytest.raises(ValueError, match="another version than is wanted; run: jaxagent env install miniwob"):
        install.python_of("miniwob")


def test_a_browser_that_is_missing_or_does_not_say_its_version_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXAGENT_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"env\.name=miniwob: it needs the program chromium, and none of chromium, .* is in PATH"
    ):
        miniwob.make_world()
    with pytest.raises(ValueError, match="it needs the program chromium"):
        install.install("browsergym")
    assert "needs the program chromium" in install.state_of("miniwob")
    monkeypatch.setenv("JAXAGENT_CHROMIUM", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"JAXAGENT_CHROMIUM=.*nothing is no program"):
        chromium.find()
    monkeypatch.setenv("JAXAGENT_CHROMIUM", str(a_browser(tmp_path / "mute", "hello")))
    with pytest.raises(ValueError, match="says 'hello', which names none"):
        chromium.major()


def test_what_no_world_in_a_browser_can_be_is_refused() -> None:
    for options, named in (({"pages": ()}, "pages"), ({"pages": ("../x",)}, "pages")):
        with pytest.raises(ValueError, match=rf"env\.options\.{named}"):
            miniwob.make_world(**options)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tasks": ("click-test",)}, "tasks"),
        ({"tasks": ()}, "tasks"),
        ({"register": "/nowhere.py"}, "register"),
        ({"letters": 3}, "letters"),
        ({"tasks": ("browsergym/webarena.0",), "fixed": True}, "fixed: none of the 1 tasks belongs to "),
    ]
    for options, named in refused:
        with pytest.raises(ValueError, match=rf"env\.options\.{named}"):
            browsergym.make_world(**options)


# ====================================================================== the shop, without a browser


class Visitor:
    """Who reads the shop's pages and sends its forms."""

    def __init__(self, address: str):
        self.address = address
        jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self.opener = urllib.request.build_opener(jar)

    def see(self, path: str, **sent: object) -> str:
        data = urllib.parse.urlencode(sent).encode() if sent else None
        with contextlib.closing(self.opener.open(f"http://{self.address}{path}", data, timeout=30.0)) as answer:
            return str(answer.read().decode())


@pytest.fixture
def shop() -> Iterator[Any]:
    server = imported(SHOP, "shop").Server()
    yield server
    server.shutdown()
    server.server_close()


def test_the_shop_shows_nothing_to_strangers_and_sells_what_is_ordered(shop: Any) -> None:
    shop.shop = stock = sys.modules["shop"].Shop(3)
    visitor, stranger = Visitor(shop.address), Visitor(shop.address)
    assert "wrong" in visitor.see("/login", name=stock.user, password="guess")
    assert stock.wanted.price not in visitor.see(f"/items/{stock.wanted.number}")
    assert stock.wanted.name in visitor.see("/login", name=stock.user, password=stock.password)
    assert f"Price: {stock.wanted.price}" in visitor.see(f"/items/{stock.wanted.number}")
    assert "Log in" in stranger.see(f"/items/{stock.wanted.number}")
    for count in ("0", "-1", "x", "999", "1e9"):
        assert "empty" in visitor.see("/add", item=stock.wanted.number, count=count)
    assert f"{stock.count} x" in visitor.see("/add", item=stock.wanted.number, count=stock.count)
    assert stock.judge("order", []) == (0.0, False, "")
    assert "Thank you" in visitor.see("/order", sure="yes")
    assert stock.judge("order", [])[:2] == (1.0, True)
    with pytest.raises(urllib.error.HTTPError, match="404") as missing:
        visitor.see("/items/77")
    missing.value.close()


def test_the_shops_rewards_are_read_from_what_was_done_and_said() -> None:
    made_shop = imported(SHOP, "shop").Shop
    stock = made_shop(5)
    assert [made_shop(5).goal(kind) for kind in ("order", "price")] == [stock.goal(kind) for kind in ("order", "price")]
    assert len({made_shop(seed).goal("order") for seed in range(20)}) == 20
    right, best = stock.wanted.price, stock.cheapest().name
    others = [item.name for item in stock.items if item.name != best]
    assert stock.judge("order", ["done"])[:2] == (0.0, True)
    for answer, reward in ((f"It costs {right}.", 1.0), (f"{right} or 3", 0.0), ("", 0.0), ("1e3", 0.0), (f"-{right}0", 1.0)):
        assert stock.judge("price", [answer])[:2] == (reward, True), answer
    for answer, reward in ((f"The {best.title()}!", 1.0), (f"{best} or {others[0]}", 0.0), (" ".join(others), 0.0)):
        assert stock.judge("cheapest", [answer])[:2] == (reward, True), answer
    assert stock.judge("cheapest", []) == (0.0, False, "")
    stock.orders = [{stock.wanted.number: stock.count, 99: 1}]
    assert stock.judge("order", [])[0] == stock.judge("price", [])[0] == 0.0


# ====================================================================== BrowserGym's protocol, without the library


def tree(*nodes: tuple[str, str, str]) -> dict[str, Any]:
    """An accessibility tree as the library gives it, flat: role, name and browsergym_id of each."""
    return {
        "nodes": [
            {"nodeId": str(i), "role": {"value": role}, "name": {"value": name}, "browsergym_id": bid, "childIds": []}
            for i, (role, name, bid) in enumerate(nodes)
        ]
    }


class Recorded:
    """An environment of BrowserGym's that says what was recorded: a task of WebArena, whose answer is a message."""

    def __init__(self, options: dict[str, Any]):
        self.options, self.closed = options, 0
        self.chat = [{"role": "assistant", "message": "Hi! I am your UI assistant."}, {"role": "user", "message": "How many?"}]
        self.unwrapped = types.SimpleNamespace(task=types.SimpleNamespace())

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        self.seed = seed
        return self.seen(""), {"task_info": {}}

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        try:
            code = self.options["action_mapping"](action)
        except Exception as error:  # as the library does it
            return self.seen(f"{type(error).__name__}: {error}"), 0, False, False, {"task_info": {}}
        answer = re.fullmatch(r"send_msg_to_user\('(.*)'\)", code)
        if answer:
            self.chat.append({"role": "assistant", "message": answer[1]})
        return self.seen(""), float(bool(answer) and answer[1] == "12"), bool(answer), False, {"task_info": {}}

    def seen(self, error: str) -> dict[str, Any]:
        return {
            "goal": "How many?",
            "chat_messages": tuple(self.chat),
            "url": "http://shop.example:7770/orders",
            "open_pages_urls": ("http://shop.example:7770/orders",),
            "open_pages_titles": ("Orders",),
            "active_page_index": [0],
            "axtree_object": tree(("RootWebArea", "Orders", ""), ("link", "12 orders", "a51")),
            "last_action_error": error,
        }

    def close(self) -> None:
        self.closed += 1


class Calls:
    """What the library's parser does: calls with literals, wherever they stand."""

    def search_string(self, text: str) -> Any:
        found = []
        for name, inside in re.findall(r"(\w+)\(([^()]*)\)", text):
            found.append([[name, list(ast.literal_eval(f"({inside},)" if inside else "()"))]])
        return types.SimpleNamespace(as_list=lambda: found)


class Actions:
    def __init__(self, name: str, multiaction: bool):
        self.name, self.python_includes = name, "timeout=500"
        self.action_set = dict.fromkeys(("click", "goto", "noop", "send_msg_to_user", "upload_file"))

    def to_python_code(self, action: str) -> str:
        calls = [call for found in Calls().search_string(action).as_list() for call in found]
        if not calls:
            raise ValueError("Received an empty action.")
        if calls[0][0] not in self.action_set:
            raise NameError(f"Invalid action type '{calls[0][0]}'.")
        return action


@pytest.fixture
def protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter, with recorded worlds in the place of the library's."""
    monkeypatch.chdir(tmp_path)
    for name in ("TMPDIR", "MINIWOB_URL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("WA_SHOPPING", "http://shop.example:7770")
    monkeypatch.setenv("WA_WIKIPEDIA", "http://Wiki.example/start")
    envs: list[Recorded] = []

    def make(name: str, **options: Any) -> Recorded:
        if name != "browsergym/webarena.3":
            raise LookupError(f"no environment {name}")
        envs.append(Recorded(options))
        return envs[-1]

    playwright = types.SimpleNamespace(selectors=None, chromium=None, stop=lambda: None)

    def flat(tree: dict[str, Any], ignored_roles: list[str]) -> str:
        nodes = tree["nodes"]
        return "\n".join(f"[{node['browsergym_id']}] {node['role']['value']} {node['name']['value']!r}" for node in nodes)

    stubs: dict[str, dict[str, Any]] = {
        "gymnasium": {"make": make, "registry": {}},
        "miniwob": {"__file__": str(tmp_path / "miniwob" / "__init__.py")},
        "browsergym": {"__path__": []},
        "browsergym.core": {"_get_global_playwright": lambda: playwright, "_set_global_playwright": lambda none: None},
        "browsergym.core.env": {},
        "browsergym.core.action": {},
        "browsergym.core.action.highlevel": {"HighLevelActionSet": Actions},
        "browsergym.core.action.parsers": {"NamedArgument": type(None), "highlevel_action_parser": Calls()},
        "browsergym.utils": {},
        "browsergym.utils.obs": {"flatten_axtree_to_str": flat},
    }
    for name, words in stubs.items():
        module = types.ModuleType(name)
        module.__dict__.update(words)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], last, module, raising=False)
    world = imported(ADAPTERS / "browsergym.py", "adapter_of_browsergym").make(chromium="/bin/x y", register="", letters=8000)
    world.envs = envs
    yield world
    world.close()
    assert all(env.closed == 1 for env in envs)


def test_a_page_of_webarena_is_told_and_an_answer_by_message_ends_it(protocol: Any) -> None:
    first = protocol.reset({"name": "browsergym/webarena.3"}, 7)
    assert first["text"] == (
        "Task: How many?\nURL: http://shop.example:7770/orders\n[] RootWebArea 'Orders'\n[a51] link '12 orders'"
    )
    assert protocol.envs[0].seed == 7 and protocol.envs[0].options["pre_observation_delay"] == 0.5
    step = protocol.step("click('a51')")
    assert step == {"text": first["text"].removeprefix("Task: How many?\n"), "reward": 0.0, "done": False}
    last = protocol.step("send_msg_to_user('12')")
    assert (last["reward"], last["done"], last["answered"], last["reason"]) == (1.0, True, True, "the task says 1")
    protocol.reset({"name": "browsergym/webarena.3"}, 7)
    wrong = protocol.step("send_msg_to_user('13')")
    assert (wrong["reward"], wrong["done"], wrong["answered"]) == (0.0, True, True)


REFUSED = [
    ("what now?", "Received an empty action"),
    ("upload_file('a51', '/etc/passwd')", "Invalid action type 'upload_file'"),
    (
        "goto('file:///etc/passwd')",
        r"only pages of miniwob\.test, shop\.example:7770, wiki\.example:80 can be opened, got 'file:",
    ),
    ("goto('http://127.0.0.1:8000/')", "only pages of"),
    ("goto('http://shop.example:22/')", "only pages of"),
    ("goto('http://shop.example/')", "only pages of"),
    ("goto('http://wiki.example:8080/')", "only pages of"),
    ("goto('https://wiki.example/')", "only pages of"),
    ("goto('http://shop.example:7770@evil.example/')", "only pages of"),
    ("goto('javascript:open')", "only pages of"),
    ("goto('http://[')", "ValueError"),
    ("noop(1000000000)", "noop waits at most 5000 ms"),
]


def test_what_cannot_or_must_not_be_done_is_told_and_moves_nothing(protocol: Any) -> None:
    protocol.reset({"name": "browsergym/webarena.3"}, 7)
    for action, told in REFUSED:
        step = protocol.step(action)
        assert (step["reward"], step["done"], step["invalid"]) == (0.0, False, True), action
        assert re.search(told, step["reason"]) and step["text"].startswith("error: "), action
    for page in ("shop.example:7770/cart", "wiki.example/", "WIKI.example:80/", "miniwob.test/", "miniwob.test:81/"):
        assert protocol.step(f"goto('http://{page}')").get("invalid") is None, page


def test_the_browser_is_started_so_that_it_reaches_the_tasks_sites_alone(protocol: Any) -> None:
    program = (Path.cwd() / "chromium").read_text()
    address = protocol.hosts["miniwob.test"]
    assert f"MAP miniwob.test {address}, MAP shop.example:7770 shop.example:7770" in program
    assert "MAP wiki.example:80 wiki.example:80, MAP * ~NOTFOUND" in program
    assert program.startswith("#!/bin/sh\nexec '/bin/x y' \"$@\" ")
    assert protocol.options["chromium_sandbox"] == (os.geteuid() != 0)
    with pytest.raises(LookupError, match=r"no environment browsergym/webarena\.99"):
        protocol.reset({"name": "browsergym/webarena.99"}, 0)


# ====================================================================== MiniWoB++, in a browser


def shown(world: Shown, index: int) -> list[str]:
    return [m.content for m in world.demonstrate(world.task("demo", index), random.Random(0)) if m.role == "assistant"]


def test_the_checker_finds_nothing_in_small_web_pages() -> None:
    assert faults(made(miniwob.make_world, pages=("enter-text", "click-checkboxes"))) == {}


def test_every_page_with_a_walkthrough_is_done_by_it() -> None:
    world = made(miniwob.make_world)
    for index, page in enumerate(miniwob.SHOWN):
        steps = played(world, world.task("demo", index), shown(world, index))
        assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0], page
        assert steps[-1].terminated and steps[-1].reason == "the page says 1", page


def test_a_wrong_button_ends_a_page_for_nothing_and_what_is_no_action_moves_nothing() -> None:
    world = made(miniwob.make_world, pages=("click-test-2",))
    nothing = [
        "",
        "hello",
        "click",
        "click 99",
        "click -3",
        "click x",
        "type 4",
        "press Ctrl-Alt-Del",
        "click_at 500 1",
        "drag 1 2",
    ]
    nothing += ["scroll 1 1 left", "type 4 \ue03d", f"type 4 {'x' * 300}", "click_at nan inf", f"click {'9' * 5000}"]
    task = world.task("train", 0)
    steps = played(world, task, [*nothing, "click 4"])
    assert not any(step.terminated or step.reward for step in steps[:-1])
    assert all(step.messages[0].content.startswith("error: ") for step in steps[1:-1])
    assert steps[-1].reward == 1.0 and "[4] button#subbtn 'ONE'" in steps[0].messages[0].content
    wrong = played(world, task, ["click 5"])[-1]
    assert (wrong.reward, wrong.terminated, wrong.reason) == (0.0, True, "the page says -1")


def test_pages_are_acted_on_by_tools_keys_and_places() -> None:
    world = made(miniwob.make_world, pages=("enter-text",), calls=True)
    assert [tool.name for tool in world.tools] == ["click", "type", "press", "click_at", "drag", "scroll"]
    task = world.task("demo", 0)
    dialogue = world.demonstrate(task, random.Random(0))
    assert [m.calls[0].name for m in dialogue if m.role == "assistant"] == ["type", "click"]
    assert faults(world) == {}
    words = made(miniwob.make_world, pages=("enter-text", "choose-list"))
    text = played(words, words.task("train", 0), [])[0].messages[0].content
    wanted = re.findall(r'"([^"]+)"', text)[0]
    keys = ["type 5 oops", *["press Backspace"] * 4, f"type 5 {wanted}", "press Tab", "press Enter"]
    steps = played(words, words.task("train", 0), keys)
    assert "value='oops'" in steps[1].messages[0].content and "value=''" in steps[5].messages[0].content
    assert steps[-1].reward == 1.0
    listed = words.task("train", 1)
    chosen = re.findall(r"Select (.+) from the list", played(words, listed, [])[0].messages[0].content)[0]
    assert played(words, listed, [f"type 4 {chosen}", "click 5"])[-1].reward == 1.0


# ====================================================================== BrowserGym, in a browser


def test_a_page_of_miniwob_is_done_by_the_librarys_actions() -> None:
    world = made(browsergym.make_world)
    task = world.task("train", 0)
    before = played(world, task, ["click('99')", "gibberish"])
    assert before[0].messages[0].content.endswith("\t[13] button 'ONE'\n\t[14] button 'TWO'")
    assert 'Could not find element with bid "99"' in before[1].messages[0].content
    assert not any(step.terminated or step.reward for step in before)
    steps = played(world, task, ["click('13')"])
    assert (steps[-1].reward, steps[-1].terminated) == (1.0, True)
    assert played(world, task, ["click('14')"])[-1].reward == 0.0


def test_the_shop_is_done_page_by_page_and_a_wrong_order_pays_nothing() -> None:
    world = made(browsergym.make_world, tasks=KINDS, register=str(SHOP), shown=True)
    ways = [shown(world, index) for index in range(len(KINDS))]
    for index, way in enumerate(ways):
        steps = played(world, world.task("demo", index), way)
        assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0], steps[-1].reason
        assert steps[-1].answered == (index > 0) and steps[-1].terminated
    way = ways[0]
    twice = [*way[:-1], next(action for action in reversed(way[:-1]) if action.startswith("click")), way[-1]]
    wrong = played(world, world.task("demo", 0), twice)[-1]
    assert (wrong.reward, wrong.terminated, wrong.reason[:7]) == (0.0, True, "ordered")
    guess = played(world, world.task("demo", 1), ["send_msg_to_user('1 2 3')"])[-1]
    assert (guess.reward, guess.terminated, guess.answered) == (0.0, True, True)


def test_a_policy_in_the_browser_reaches_nothing_but_the_site(shop: Any) -> None:
    world = made(browsergym.make_world, tasks=KINDS[:1], register=str(SHOP))
    other = f"http://{shop.address}/"
    assert "Welcome" in Visitor(shop.address).see("/")
    tried = ["goto('file:///etc/passwd')", f"goto('{other}')", "goto('http://localhost/')", "goto('view-source:file:///etc')"]
    tried += ["goto(url='file:///etc/passwd')", f"goto(url='{other}')"]
    steps = played(world, world.task("train", 0), [*tried, "noop(wait_ms=6000)", "new_tab()", "goto(url='http://shop.test/')"])
    told = [step.messages[0].content for step in steps[1:]]
    assert all("only pages of miniwob.test, shop.test can be opened" in text for text in told[: len(tried)])
    assert "noop waits at most 5000 ms" in told[-3] and "Tab 1 (here)" in told[-2]
    assert "URL: http://shop.test/\n" in told[-1] and "Welcome to the shop" in told[-1]


def test_after_a_task_that_cannot_be_made_the_same_worker_plays_the_next_one() -> None:
    world = made(browsergym.make_world)
    task = world.task("train", 0)
    assert played(world, task, ["click('13')"])[-1].reward == 1.0
    with pytest.raises(WorkerFault, match="no-such-page"):
        played(world, {**task, "name": "browsergym/miniwob.no-such-page"}, [])
    assert played(world, task, ["click('13')"])[-1].reward == 1.0
