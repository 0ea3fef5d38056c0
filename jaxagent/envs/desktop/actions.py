"""What can be done at a desktop: lines of a small grammar, and the calls of pyautogui that they stand for.

    click 4            click 120 300      also double_click, triple_click, right_click, middle_click and move, on a row or a
    point drag 4 7           drag 10 10 90 40   from one to the other
    scroll -3          scroll -3 4        so many clicks of the wheel, up or down (negative), over a row or a point
    type some text     press enter        press ctrl+a
    wait               done               fail

The policy's text never becomes a program: numbers are parsed, keys are known, and a text to be typed is ASCII and written as a
literal. The calls are those that OSWorld's own action space `computer_13` makes, in one `python -c` for the guest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxagent.envs.desktop.screen import Row

RULES = (
    "You work at a computer. You are told what is on its screen, a numbered row each. Answer with one action: click 4 (a row) "
    "or click 120 300 (a point), double_click, triple_click, right_click, middle_click and move in the same way, drag 4 7, "
    "scroll -3, scroll -3 4, type some text, press enter, press ctrl+a, wait; done when it is done, fail when it cannot be."
)
POINTED = {
    "click": "click",
    "double_click": "doubleClick",
    "triple_click": "tripleClick",
    "right_click": "rightClick",
    "middle_click": "middleClick",
    "move": "moveTo",
}
KEYS = {
    *(chr(code) for code in range(33, 127) if not chr(code).isupper()),
    *(f"f{number}" for number in range(1, 13)),
    *("enter", "esc", "tab", "space", "backspace", "delete", "insert", "up", "down", "left", "right", "home", "end"),
    *("pageup", "pagedown", "ctrl", "alt", "shift", "win", "capslock", "printscreen"),
}
_LONGEST = 1000  # letters that are typed in one turn
_MOST = 50  # clicks of a wheel
_FARTHEST = 20_000  # of a coordinate
_NUMBER = re.compile(r"-?\d{1,6}")
# pyautogui takes shift for "<" on Linux, where that gives ">".
_PREFIX = (
    "import pyautogui; import time; pyautogui.FAILSAFE = False; "
    "pyautogui.isShiftCharacter = lambda c: c.isupper() or c in set('~!@#$%^&*()_+{}|:\">?'); "
)


class NoAction(Exception):
    """A turn that is none of the actions; says why."""


@dataclass(frozen=True)
class Action:
    """What a turn asks for: `name`, and the calls of pyautogui where it has any."""

    name: str
    calls: str = ""

    @property
    def command(self) -> list[str]:
        """What the guest is to run."""
        return ["python", "-c", _PREFIX + self.calls]


def read(text: str, rows: Sequence[Row]) -> Action:
    """The action of a turn, by the rows that were shown. Raises NoAction."""
    name, _, rest = text.strip().partition(" ")
    if name in ("wait", "done", "fail"):
        if rest.strip():
            raise NoAction(f"{name} stands alone")
        return Action(name)
    if name == "type":
        return Action(name, f"pyautogui.typewrite({_typed(rest)!r}, interval=0.01)")
    if name == "press":
        return Action(name, _pressed(rest.strip().lower()))
    numbers = _numbers(name, rest) if name in (*POINTED, "drag", "scroll") else []
    if name in POINTED:
        x, y = _point(name, numbers, rows)
        return Action(name, f"pyautogui.{POINTED[name]}(x={x}, y={y})")
    if name == "drag":
        if len(numbers) not in (2, 4):
            raise NoAction("drag takes two rows or two points, as in drag 4 7 or drag 10 10 90 40")
        half = len(numbers) // 2
        (x, y), (to_x, to_y) = _point(name, numbers[:half], rows), _point(name, numbers[half:], rows)
        return Action(name, f"pyautogui.moveTo(x={x}, y={y}); pyautogui.dragTo({to_x}, {to_y}, 0.5, button='left')")
    if name == "scroll":
        if not numbers or not 0 < abs(numbers[0]) <= _MOST:
            raise NoAction(f"scroll takes clicks of the wheel, 1 to {_MOST} or less than 0, as in scroll -3")
        over = _point(name, numbers[1:], rows) if numbers[1:] else ()
        return Action(name, f"pyautogui.scroll({', '.join(map(str, (numbers[0], *over)))})")
    known = (*POINTED, "drag", "scroll", "type", "press", "wait", "done", "fail")
    raise NoAction(f"no action {name[:40]!r}; there are {', '.join(known)}")


def _numbers(name: str, rest: str) -> list[int]:
    words = rest.replace(",", " ").split()
    if not words or not all(_NUMBER.fullmatch(word) for word in words):
        raise NoAction(f"{name} takes whole numbers, as in {name} 4; got {rest[:40]!r}")
    return [int(word) for word in words]


def _point(name: str, numbers: Sequence[int], rows: Sequence[Row]) -> tuple[int, int]:
    """The middle of a row, or the point itself."""
    if len(numbers) == 1:
        if not 0 <= numbers[0] < len(rows):
            raise NoAction(f"there is no row {numbers[0]}; there are {len(rows)}, from 0")
        return rows[numbers[0]].x, rows[numbers[0]].y
    if len(numbers) != 2 or not all(0 <= number <= _FARTHEST for number in numbers):
        raise NoAction(f"{name} takes a row or a point, as in {name} 4 or {name} 120 300")
    return numbers[0], numbers[1]


def _typed(text: str) -> str:
    if not text or len(text) > _LONGEST:
        raise NoAction(f"type takes 1 to {_LONGEST} letters, got {len(text)}")
    if not all(letter in "\n\t" or " " <= letter <= "~" for letter in text):
        raise NoAction("only ASCII can be typed")
    return text


def _pressed(text: str) -> str:
    keys = [text] if text == "+" else text.split("+")
    if not text or len(keys) > 4 or not set(keys) <= KEYS:
        raise NoAction(f"no key {text[:40]!r}; keys are letters, enter, tab, ctrl and the like, and together as in ctrl+a")
    return f"pyautogui.hotkey({', '.join(map(repr, keys))})" if len(keys) > 1 else f"pyautogui.press({keys[0]!r})"
