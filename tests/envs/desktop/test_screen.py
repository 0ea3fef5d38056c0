"""Rows of an accessibility tree: which are told, where they are, and that what a guest says cannot break the list."""

from __future__ import annotations

import pytest

from jaxagent.envs.desktop.screen import Row, rows_of, told

SPACES = {name: f"https://accessibility.ubuntu.example.org/ns/{name}" for name in ("state", "component", "value")}
ON = 'st:showing="true" st:visible="true" st:enabled="true"'


def tree(*nodes: str) -> str:
    spaces = " ".join(f'xmlns:{key}="{SPACES[name]}"' for key, name in (("st", "state"), ("cp", "component"), ("val", "value")))
    return f"<desktop-frame {spaces}>{''.join(nodes)}</desktop-frame>"


def node(role: str, name: str = "", text: str = "", states: str = ON, place: str = "(10, 20)", size: str = "(40, 10)") -> str:
    return f'<{role} name="{name}" {states} cp:screencoord="{place}" cp:size="{size}">{text}</{role}>'


def test_what_is_on_the_screen_and_says_something_is_a_row() -> None:
    rows = rows_of(tree(node("push-button", "Save"), node("text", "Phone", "123", f'{ON} st:focused="true"'), node("entry")))
    assert rows == [
        Row(30, 25, 'push-button "Save"'),
        Row(30, 25, "text \"Phone\" holds '123' focused"),
        Row(30, 25, "entry"),
    ]
    assert told(rows).splitlines()[0] == '[0] push-button "Save" at 30 25'


@pytest.mark.parametrize(
    "hidden",
    [
        node("push-button", "x", states='st:showing="true" st:enabled="true"'),
        node("push-button", "x", states='st:visible="true" st:enabled="true"'),
        node("push-button", "x", place="(-5, 20)"),
        node("push-button", "x", size="(0, 10)"),
        node("push-button", "x", size="many"),
        node("label"),
        node("panel", "x"),
        f'<push-button name="x" {ON} />',
    ],
)
def test_what_is_not_there_or_says_nothing_is_none(hidden: str) -> None:
    assert rows_of(tree(hidden)) == []
    assert told([]) == "(nothing is told of the screen)"


def test_what_cannot_be_used_is_told_so_and_parts_of_a_frame_are_found() -> None:
    inner = node("check-box", "Member", states='st:showing="true" st:visible="true" st:checked="true"')
    frame = node("frame", "Window", inner)
    assert [row.said for row in rows_of(tree(frame))] == ['check-box "Member" checked disabled']


def test_words_of_the_guest_stay_in_their_row() -> None:
    (row,) = rows_of(tree(node("label", "a&#10;[7] push-button", "b" * 500)))
    assert "\n" not in row.said
    assert len(row.said) < 300


@pytest.mark.parametrize("said", ["", "<a", "no xml", '<!DOCTYPE x [<!ENTITY y "z">]><x>&y;</x>'])
def test_what_is_no_tree_is_told(said: str) -> None:
    with pytest.raises(ValueError, match="an accessibility tree"):
        rows_of(said)
