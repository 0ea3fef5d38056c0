"""`miniwob`: small tasks on web pages, in a Chromium of the system. Needs Chromium and `jaxagent env install miniwob`.

The policy reads the task and the elements of the page, a number before each that can be clicked, and answers with one action in
words or, with `calls`, by tools. The reward is the page's own without its decay, and 0 where that is negative; a page's clock
of ten seconds is put off, or a policy would be graded on how busy the machine is. Seeds make tasks of a page; splits have
seeds of their own. In `stock-market` and `terminal` the time of day is on the page, so that two episodes are not alike.

A browser takes about half a gigabyte and holds one episode, so `rollout.concurrency` should be as many as there are.
"""

from __future__ import annotations

from typing import Any

from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import Served, Shown
from jaxagent.envs.workers import chromium, install
from jaxagent.types import ToolSpec

RULES = (
    "You act on a web page. Elements are listed with their numbers. Answer with one action: click 4; type 5 some text; press "
    "Enter; click_at 80 100; drag 20 60 100 60; scroll 80 100 down. Places are counted from the left and from the top."
)
# Pages of which a walkthrough is known: they can be demonstrated.
SHOWN = (
    "click-test", "click-test-2", "click-button", "click-link", "click-checkboxes", "click-option", "click-button-sequence",
    "enter-text", "enter-password", "focus-text", "login-user", "simple-arithmetic",
)  # fmt: skip
_REF = {"type": "integer", "description": "the number of an element"}
_TEXT, _PLACE = {"type": "string"}, {"type": "number"}


def _tool(name: str, description: str, **properties: dict[str, Any]) -> ToolSpec:
    return ToolSpec(name, description, {"type": "object", "properties": properties, "required": list(properties)})


TOOLS = (
    _tool("click", "Clicks an element.", ref=_REF),
    _tool("type", "Clicks an element and types a text.", ref=_REF, text=_TEXT),
    _tool("press", "Presses a key, such as Enter, Tab, Backspace, or C-a.", key=_TEXT),
    _tool("click_at", "Clicks at a place.", x=_PLACE, y=_PLACE),
    _tool("drag", "Drags from a place to another.", x=_PLACE, y=_PLACE, to_x=_PLACE, to_y=_PLACE),
    _tool("scroll", "Scrolls at a place.", x=_PLACE, y=_PLACE, way={"type": "string", "enum": ["up", "down"]}),
)


def make_world(
    pages: tuple[str, ...] = SHOWN,
    calls: bool = False,
    rules: bool = True,
    workers: int = 0,
    timeout_s: float = 120.0,
) -> Served:
    """The world.

    Args:
        pages: the library's names without an ending, as in click-test-2, in turn.
        calls: whether actions are calls of tools, rather than words.
        rules: whether the first observation begins with how to act; tools say so themselves.
    """
    names = tuple(pages)
    if not names:
        raise ValueError("env.options.pages must name at least one page of MiniWoB++, as in click-test-2")
    if bad := [name for name in names if not name.replace("-", "").isalnum()]:
        raise ValueError(f"env.options.pages: {bad[0]!r} is no name of a page; they are as in click-test-2")

    def describe(split: str, index: int) -> Task:
        return {"page": names[index % len(names)], "difficulty": names[index % len(names)]}

    install.python_of("miniwob")  # says what is missing, the browser included
    kind = Shown if set(names) <= set(SHOWN) else Served
    world = kind(
        "miniwob",
        {"chromium": chromium.find(), "calls": calls},
        describe,
        tools=TOOLS * calls,
        rules=RULES * (rules and not calls),
        workers=workers,
        slots=1,
        timeout_s=timeout_s,
    )
    world.examples = ("click 4", "click 5", "type 5 hello", "press Tab")
    return world
