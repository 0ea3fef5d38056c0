"""MiniWoB++: small web pages in a Chromium driven by selenium, told as lists of elements, acted on by words or calls."""

import os
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chromedriver_py import binary_path
from miniwob.action import ActionTypes
from miniwob.constants import DEFAULT_ALLOWED_KEYS, DEFAULT_SCROLL_AMOUNT, DEFAULT_SCROLL_TIME, TASK_HEIGHT, TASK_WIDTH
from miniwob.environment import MiniWoBEnvironment
from miniwob.reward import get_raw_reward
from miniwob.selenium_actions import execute_scroll_coords
from miniwob.selenium_instance import HTML_DIR, SeleniumInstance

_CLOCK_MS = 10**9  # a page's own is ten seconds, after which the policy would have lost for thinking
_MOST_LETTERS = 200  # that are typed at once
_SETTLE_S = 2.0  # for animations to end
# No name is resolved and no address reached: the pages are files.
_OFFLINE = ("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--disable-component-update")
_RESTING = """
return document.getAnimations().every(a => a.playState !== 'running') && !(window.jQuery && jQuery(':animated').length);
"""
_PLACED = {"svg", "circle", "rect", "polygon", "ellipse", "line", "path", "canvas", "text"}  # what is told apart by where it is
_PLAIN = {"body", "div", "span", "p", "table", "tbody", "tr", "ul", "ol", "form", "br", "hr", "thead", "center"}
_KEYS = {key.strip("<>").lower(): key for key in DEFAULT_ALLOWED_KEYS}


class Page(SeleniumInstance):
    """The browser. Every episode begins with a page that is loaded anew, or the one before would be seen in it."""

    def begin_task(self, seed: Any = None) -> None:
        self.driver.get(self.url)
        self.driver.execute_script(f"core.EPISODE_MAX_TIME = {_CLOCK_MS};")
        super().begin_task(seed)
        self.rest()

    def perform(self, action: Any, action_space_config: Any) -> None:
        super().perform(action, action_space_config)
        self.rest()

    def rest(self) -> None:
        """Waits until nothing moves: what is seen must not depend on how busy the machine is."""
        until = time.monotonic() + _SETTLE_S
        while not self.driver.execute_script(_RESTING) and time.monotonic() < until:
            time.sleep(0.02)


class Game(MiniWoBEnvironment):
    def _hard_reset_instance(self) -> None:
        self.instance = Page(index=0, **self.instance_kwargs)
        self.instance.record_screenshots = False
        self.instance.start()


class World:
    def __init__(self, chromium: str, calls: bool):
        self.calls = calls
        here = Path.cwd()  # a worker's own folder, which goes with it, and profiles of browsers with that
        os.environ["TMPDIR"] = str(here)
        program = here / "chromium"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(chromium)} "$@" {shlex.join(_OFFLINE)}\n')
        program.chmod(0o755)
        # Both must be named, or selenium looks for them on the network. Without a window the library starts the browser without
        # its sandbox, which root cannot have: the pages are files of the library, and nothing else can be reached.
        os.environ |= {"MINIWOB_CHROME_BINARY": str(program), "MINIWOB_CHROMEDRIVER": binary_path}
        self.game = Game("click-test", field_extractor=lambda utterance: [], reward_processor=get_raw_reward)

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        page, name = self.game.instance, task["page"]
        if not (HTML_DIR / "miniwob" / f"{name}.html").is_file():
            raise ValueError(f"env.options.pages: MiniWoB++ has no page {name!r}")
        page.url = f"{HTML_DIR.as_uri()}/miniwob/{name}.html"
        self.name = name
        self.seen, _ = self.game.reset(seed=seed)
        return {"text": self.told()}

    def step(self, action: Any) -> dict[str, Any]:
        name, arguments = read(action) if isinstance(action, str) else (action["name"], action["arguments"])
        fault = self.take(name, arguments)
        if fault:
            return {"text": f"error: {fault}\n{self.told()}", "state": self.told(), "invalid": True, "reason": fault}
        self.seen, raw, done, _, info = self.game.step(None)
        if not done:
            return {"text": self.told()}
        # A failure is worth as much as no end: pages say -1, and 0 or less of what is done in part.
        reward = max(0.0, float(raw))
        return {
            "text": "The task is over.",
            "reward": reward,
            "done": True,
            "reason": f"the page says {raw:g}{': ' + str(info['reason']) if info.get('reason') else ''}",
        }

    def take(self, name: str, arguments: dict[str, Any]) -> str:
        """Does one thing to the page; returns why it cannot be done."""
        if name not in _ACTIONS:
            return f"no action {name[:20]!r}; there are {', '.join(_ACTIONS)}"
        if set(arguments) != set(_NAMES[name]):
            return f"{name} takes {_TAKES[name]}"
        return _ACTIONS[name](self, **arguments)

    def perform(self, kind: ActionTypes, **arguments: Any) -> str:
        self.game.instance.perform(self.game.create_action(kind, **arguments), self.game.action_space_config)
        return ""

    # ------------------------------------------------------------------ actions

    def click(self, ref: Any) -> str:
        return self.missing(ref) or self.perform(ActionTypes.CLICK_ELEMENT, ref=int(ref))

    def type(self, ref: Any, text: str) -> str:
        return (
            self.missing(ref)
            or unwritable(text)
            or self.perform(ActionTypes.FOCUS_ELEMENT_AND_TYPE_TEXT, ref=int(ref), text=text)
        )

    def press(self, key: str) -> str:
        known = _KEYS.get(str(key).strip("<>").lower())
        if known is None:
            return f"no key {str(key)[:20]!r}; there are {', '.join(list(_KEYS)[:11])} and others"
        return self.perform(ActionTypes.PRESS_KEY, key=DEFAULT_ALLOWED_KEYS.index(known))

    def click_at(self, x: Any, y: Any) -> str:
        return outside(x, y) or self.perform(ActionTypes.CLICK_COORDS, coords=(float(x), float(y)))

    def drag(self, x: Any, y: Any, to_x: Any, to_y: Any) -> str:
        if fault := outside(x, y) or outside(to_x, to_y):
            return fault
        self.perform(ActionTypes.MOUSEDOWN_COORDS, coords=(float(x), float(y)))
        self.perform(ActionTypes.MOVE_COORDS, coords=(float(to_x), float(to_y)))
        return self.perform(ActionTypes.MOUSEUP_COORDS, coords=(float(to_x), float(to_y)))

    def scroll(self, x: Any, y: Any, way: str) -> str:
        if way not in ("up", "down"):
            return "scroll goes up or down"
        if fault := outside(x, y):
            return fault
        amount = DEFAULT_SCROLL_AMOUNT if way == "down" else -DEFAULT_SCROLL_AMOUNT
        execute_scroll_coords(float(x), float(y), amount, DEFAULT_SCROLL_TIME, self.game.instance.driver)
        return ""

    def missing(self, ref: Any) -> str:
        known = {element["ref"] for element in self.seen["dom_elements"] if element["ref"] > 0}
        try:
            return "" if int(ref) in known else f"there is no element [{ref}]"
        except (TypeError, ValueError, OverflowError):
            return f"an element is a number, as in {min(known, default=1)}"

    # ------------------------------------------------------------------ what is told, and what is known

    def told(self) -> str:
        lines = [f"Task: {self.seen['utterance']}"]
        lines += [line for element in self.seen["dom_elements"] if (line := described(element))]
        return "\n".join(lines)

    def oracle(self) -> list[Any]:
        if self.name not in ORACLES:
            raise ValueError(f"nobody knows how {self.name} is done; oracles are there for {', '.join(ORACLES)}")
        words = ORACLES[self.name](self.seen["utterance"], self.seen["dom_elements"])
        return [as_call(word) for word in words] if self.calls else words

    def close(self) -> None:
        self.game.close()


_ACTIONS: dict[str, Callable[..., str]] = {
    "click": World.click,
    "type": World.type,
    "press": World.press,
    "click_at": World.click_at,
    "drag": World.drag,
    "scroll": World.scroll,
}
_TAKES = {
    "click": "an element, as in: click 4",
    "type": "an element and a text, as in: type 5 hello",
    "press": "a key, as in: press Enter",
    "click_at": "a place, as in: click_at 80 100",
    "drag": "two places, as in: drag 20 60 100 60",
    "scroll": "a place and up or down, as in: scroll 80 100 down",
}
_NAMES = {
    "click": ("ref",),
    "type": ("ref", "text"),
    "press": ("key",),
    "click_at": ("x", "y"),
    "drag": ("x", "y", "to_x", "to_y"),
    "scroll": ("x", "y", "way"),
}


def read(line: str) -> tuple[str, dict[str, Any]]:
    """An action in words as a name and arguments: the last of them is the rest of its line."""
    name, _, rest = line.strip().partition("\n")[0].partition(" ")
    wanted = _NAMES.get(name, ())
    return name, dict(zip(wanted, rest.split(None, len(wanted) - 1) if wanted else (), strict=False))


def as_call(line: str) -> dict[str, Any]:
    name, arguments = read(line)
    return {"name": name, "arguments": {key: int(text) if key == "ref" else text for key, text in arguments.items()}}


def unwritable(text: Any) -> str:
    """Why a text cannot be typed. What is no letter may be one of the driver's own keys."""
    if not isinstance(text, str) or not text.isprintable():
        return "only letters, digits, signs and spaces can be typed"
    return f"at most {_MOST_LETTERS} letters can be typed at once" if len(text) > _MOST_LETTERS else ""


def outside(x: Any, y: Any) -> str:
    try:
        inside = 0 <= float(x) < TASK_WIDTH and 0 <= float(y) < TASK_HEIGHT
    except (TypeError, ValueError, OverflowError):
        inside = False
    return "" if inside else f"a place is two numbers, below {TASK_WIDTH} from the left and below {TASK_HEIGHT} from the top"


def described(element: dict[str, Any]) -> str:
    """An element as a line; nothing for one that only holds others."""
    tag, (focused, _, _, leaf) = element["tag"], element["flags"]
    text, value = " ".join(element["text"].split()), element["value"]
    named = f"#{element['id']}" * bool(element["id"]) + "".join(
        f".{name}" for name in element["classes"].split() if name != "SVG_CLASS"
    )
    if element["ref"] < 0:
        return f"    {text}" if text else ""
    if not text and (tag in _PLAIN and not (leaf and named)):
        return ""
    words = [f"[{element['ref']}] {tag}{named}", repr(text) * bool(text)]
    if tag.startswith(("input", "textarea")):
        words.append("checked" * (value == "True") if "checkbox" in tag or "radio" in tag else f"value={value!r}")
    if tag in _PLACED:
        left, top, width, height = (float(element[side][0]) for side in ("left", "top", "width", "height"))
        words.append(f"at {left + width / 2:.0f} {top + height / 2:.0f}, {width:.0f} x {height:.0f}")
    return " ".join([*filter(None, words), *(["focused"] if focused and tag != "body" else [])])


# ---------------------------------------------------------------------- how some pages are done

Elements = Any


def find(elements: Elements, text: str = "", tag: str = "") -> int:
    """The element with this text, or else the first of this tag."""
    fits = (e for e in elements if e["ref"] > 0 and e["tag"].startswith(tag) and (not text or e["text"].strip() == text))
    return int(next(fits)["ref"])


def inputs(elements: Elements, kind: str = "input") -> list[int]:
    return [int(e["ref"]) for e in elements if e["tag"].startswith(kind)]


def quoted(task: str) -> list[str]:
    return re.findall(r'"([^"]*)"', task)


def submit(elements: Elements, text: str = "Submit") -> str:
    return f"click {find(elements, text)}"


def ticked(task: str, elements: Elements) -> list[str]:
    """Checkboxes and options stand before their labels."""
    wanted = re.sub(r"^Select (.*) and click Submit\.?$", r"\1", task).split(", ")
    boxes = [e["ref"] for i, e in enumerate(elements) if e["tag"].startswith("input") and label(elements, i) in wanted]
    return [*(f"click {ref}" for ref in boxes), submit(elements)]


def label(elements: Elements, index: int) -> str:
    return next((e["text"].strip() for e in elements[index:] if e["text"].strip()), "")


def logged_in(task: str, elements: Elements) -> list[str]:
    user, word = quoted(task)
    first, second = inputs(elements)[:2]
    return [f"type {first} {user}", f"type {second} {word}", submit(elements, "Login")]


def added(task: str, elements: Elements) -> list[str]:
    problem = next(found for e in elements if (found := re.search(r"(\d+)\s*([-+x*])\s*(\d+)\s*=", e["text"])))
    a, sign, b = int(problem[1]), problem[2], int(problem[3])
    result = a + b if sign == "+" else a - b if sign == "-" else a * b
    return [f"type {inputs(elements)[0]} {result}", submit(elements)]


ORACLES: dict[str, Callable[[str, Elements], list[str]]] = {
    "click-test": lambda task, e: [f"click {find(e, tag='button')}"],
    "click-test-2": lambda task, e: [f"click {find(e, 'ONE')}"],
    "click-button": lambda task, e: [f"click {find(e, quoted(task)[0])}"],
    "click-link": lambda task, e: [f"click {find(e, quoted(task)[0])}"],
    "click-checkboxes": ticked,
    "click-option": ticked,
    "click-button-sequence": lambda task, e: [f"click {find(e, 'ONE')}", f"click {find(e, 'TWO')}"],
    "enter-text": lambda task, e: [f"type {inputs(e)[0]} {quoted(task)[0]}", submit(e)],
    "enter-password": lambda task, e: [*(f"type {ref} {quoted(task)[0]}" for ref in inputs(e)[:2]), submit(e)],
    "focus-text": lambda task, e: [f"click {inputs(e)[0]}"],
    "login-user": logged_in,
    "simple-arithmetic": added,
}


def make(**options: Any) -> World:
    return World(**options)
