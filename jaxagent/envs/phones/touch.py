"""What is on a phone's screen, as numbered rows, and what can be done there: a grammar, and AndroidWorld's JSON for it.

tap 4        tap 540 300        also double_tap and long_press, on a row or a point
type 4 some text                into the field of a row, instead of what stands there
scroll down  scroll up 4        swipe left
back   home   enter   wait      open Contacts        answer some text       done
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RULES = (
    "You hold a phone. You are told what is on its screen, a numbered row each. Answer with one action: tap 4 (a row) or "
    "tap 540 300 (a point), double_tap and long_press in the same way, type 4 some text (into the field of a row), "
    "scroll down, scroll up 4, swipe left, back, home, enter, wait, open Contacts (an app), answer some text where a question "
    "was asked; done when all is done."
)
POINTED = {"tap": "click", "double_tap": "double_tap", "long_press": "long_press"}
ALONE = {"back": "navigate_back", "home": "navigate_home", "enter": "keyboard_enter", "wait": "wait"}
MOVED = ("scroll", "swipe")
DIRECTIONS = ("up", "down", "left", "right")
_LONGEST, _FARTHEST, _MOST_ROWS = 1000, 20_000, 150
_APP = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .&+-]{0,40}")
_NUMBER = re.compile(r"\d{1,6}")
_STATES = {"is_checked": "checked", "is_selected": "selected", "is_focused": "focused", "is_editable": "editable"}


class NoAction(Exception):
    """A turn that is none of the actions; says why."""


@dataclass(frozen=True)
class Row:
    """Something on the screen: its middle, and the words for it."""

    x: int
    y: int
    said: str


def rows_of(elements: Sequence[dict[str, Any]]) -> list[Row]:
    """The rows of AndroidWorld's elements: what is visible, has a place, and says something or can be used."""
    rows = []
    for one in elements:
        box = one.get("bbox_pixels") or {}
        try:
            left, right, top, bottom = (int(box[key]) for key in ("x_min", "x_max", "y_min", "y_max"))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        words = [_line(one.get(key)) for key in ("text", "content_description", "hint_text")]
        used = bool(one.get("is_clickable") or one.get("is_editable") or one.get("is_checkable"))
        if one.get("is_visible") is False or right <= left or bottom <= top or not (any(words) or used):
            continue
        kind = _line(one.get("class_name")).rpartition(".")[2] or "View"
        states = [word for key, word in _STATES.items() if one.get(key)]
        said = [
            f'"{words[0]}"' * bool(words[0]),
            f"({words[1]})" * bool(words[1]),
            f"hint {words[2]!r}" * bool(words[2] and not words[0]),
        ]
        disabled = "disabled" if one.get("is_enabled") is False else ""
        rows.append(Row((left + right) // 2, (top + bottom) // 2, " ".join(filter(None, [kind, *said, *states, disabled]))))
    return rows[:_MOST_ROWS]


def told(rows: Sequence[Row]) -> str:
    """Rows as text, with their numbers."""
    lines = [f"[{number}] {row.said} at {row.x} {row.y}" for number, row in enumerate(rows)]
    return "\n".join(lines) or "(nothing is told of the screen)"


def read(text: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The action of a turn as AndroidWorld's JSON; `done` is its `status`. Raises NoAction."""
    name, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    if name == "done" and not rest:
        return {"action_type": "status", "goal_status": "complete"}
    if name in ALONE and not rest:
        return {"action_type": ALONE[name]}
    if name in POINTED:
        return {"action_type": POINTED[name], **_point(name, rest.replace(",", " ").split(), rows)}
    if name == "type":
        number, _, typed = rest.partition(" ")
        return {"action_type": "input_text", **_point(name, [number], rows), "text": _said(name, typed), "clear_text": True}
    if name in MOVED:
        words = rest.split()
        if not words or words[0] not in DIRECTIONS:
            raise NoAction(f"{name} takes one of {', '.join(DIRECTIONS)}, and where it is done a row or a point")
        return {"action_type": name, "direction": words[0], **(_point(name, words[1:], rows) if words[1:] else {})}
    if name == "open":
        if not _APP.fullmatch(rest):
            raise NoAction(f"open takes the name of an app, as in open Contacts; got {rest[:40]!r}")
        return {"action_type": "open_app", "app_name": rest}
    if name == "answer":
        return {"action_type": "answer", "text": _said(name, rest)}
    known = (*POINTED, "type", *MOVED, "open", "answer", *ALONE, "done")
    raise NoAction(f"no action {text.strip()[:40]!r}; there are {', '.join(known)}")


def _point(name: str, words: Sequence[str], rows: Sequence[Row]) -> dict[str, int]:
    if not words or not all(_NUMBER.fullmatch(word) for word in words):
        raise NoAction(f"{name} takes whole numbers, as in {name} 4; got {' '.join(words)[:40]!r}")
    numbers = [int(word) for word in words]
    if len(numbers) == 1:
        if numbers[0] >= len(rows):
            raise NoAction(f"there is no row {numbers[0]}; there are {len(rows)}, from 0")
        return {"x": rows[numbers[0]].x, "y": rows[numbers[0]].y}
    if len(numbers) != 2 or max(numbers) > _FARTHEST:
        raise NoAction(f"{name} takes a row or a point, as in {name} 4 or {name} 540 300")
    return {"x": numbers[0], "y": numbers[1]}


def _said(name: str, text: str) -> str:
    if not text or len(text) > _LONGEST or not text.isprintable():
        raise NoAction(f"{name} takes 1 to {_LONGEST} letters in one line")
    return text


def _line(text: Any) -> str:
    """One line of what can be printed, and not too long."""
    kept = "".join(letter if letter.isprintable() else " " for letter in str(text or "")[:800])
    return " ".join(kept.split())[:200]
