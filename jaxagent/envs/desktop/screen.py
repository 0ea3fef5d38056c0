"""What a guest's accessibility tree says, as numbered rows that a policy without eyes can read and point at.

A row is what is on the screen, has a place there, and says something or can be used. Trees are AT-SPI's, in the namespaces of
OSWorld's guest on Ubuntu; coordinates are those of the screen.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

_NAMESPACE = "{https://accessibility.ubuntu.example.org/ns/"
_STATE, _COMPONENT, _VALUE = (f"{_NAMESPACE}{name}}}" for name in ("state", "component", "value"))
_PAIR = re.compile(r"\((-?\d+), (-?\d+)\)")
_TOLD = ("checked", "selected", "focused", "expanded", "pressed")
_LONGEST = 200  # letters of a name or a text
# What can be used though it has no name.
_USED = {
    "check-box",
    "combo-box",
    "entry",
    "list-item",
    "menu-item",
    "page-tab",
    "password-text",
    "push-button",
    "radio-button",
    "scroll-bar",
    "slider",
    "spin-button",
    "terminal",
    "text",
    "toggle-button",
}
# Of these their parts say all.
_FRAMES = {"application", "desktop-frame", "document-frame", "filler", "frame", "list", "panel", "scroll-pane", "section"}


@dataclass(frozen=True)
class Row:
    """Something on the screen: its middle, and the words for it."""

    x: int
    y: int
    said: str


def rows_of(tree: str) -> list[Row]:
    """The rows of a tree in its order. Raises ValueError where it is none."""
    if "<!" in tree:
        raise ValueError("an accessibility tree without declarations was wanted")
    try:
        root = ElementTree.fromstring(tree)
    except ElementTree.ParseError as error:
        raise ValueError(f"an accessibility tree was wanted, got {tree[:80]!r}: {error}") from None
    return [row for node in root.iter() if (row := _row(node))]


def _row(node: ElementTree.Element) -> Row | None:
    states = {state for state in ("showing", "visible", "enabled", *_TOLD) if node.get(_STATE + state) == "true"}
    place, size = (_pair(node.get(_COMPONENT + key, "")) for key in ("screencoord", "size"))
    if not {"showing", "visible"} <= states or place is None or size is None or min(*place, size[0] - 1, size[1] - 1) < 0:
        return None
    name, text = _line(node.get("name", "")), _line(node.text or node.get(_VALUE + "value") or "")
    if node.tag in _FRAMES or not (name or text or node.tag in _USED):
        return None
    known = [node.tag, f'"{name}"' if name else "", f"holds {text!r}" if text and text != name else ""]
    said = [*known, *(state for state in _TOLD if state in states), "" if "enabled" in states else "disabled"]
    return Row(place[0] + size[0] // 2, place[1] + size[1] // 2, " ".join(filter(None, said)))


def told(rows: list[Row]) -> str:
    """Rows as text, with their numbers."""
    lines = [f"[{number}] {row.said} at {row.x} {row.y}" for number, row in enumerate(rows)]
    return "\n".join(lines) or "(nothing is told of the screen)"


def _pair(text: str) -> tuple[int, int] | None:
    found = _PAIR.fullmatch(text)
    return (int(found[1]), int(found[2])) if found else None


def _line(text: str) -> str:
    """One line of what can be printed, and not too long."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 4 * _LONGEST]).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
