"""A small phone of ours: contacts, notes and settings in a database, and the screens to them.

It is told and touched as AndroidWorld's phones are: elements with their bounds, JSON actions. Whatever is typed goes into the
database as a value and nowhere else.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 1080, 2400
_ROW, _TOP = 150, 100
_ON_SCREEN = 10  # rows of a list
APPS = ("Contacts", "Notes", "Settings")
SETTINGS = ("Wi-Fi", "Bluetooth", "Airplane mode", "Dark theme")
TABLES = {"contacts": ("name", "phone"), "notes": ("title", "body"), "settings": ("name", "value")}
Content = dict[str, list[list[str]]]  # rows of every table
Do = Callable[[], None]


@dataclass
class Item:
    """Something on the screen: what it is called, and what a tap on it does."""

    said: str
    kind: str = "android.widget.Button"
    do: Do | None = None
    field: str = ""  # of a form, that is typed into
    checked: bool | None = None


class Phone:
    """One phone. A screen is where one is, one after the other; the last is shown."""

    def __init__(self) -> None:
        self.base = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        for table, columns in TABLES.items():
            self.base.execute(f"create table {table} ({', '.join(f'{column} text' for column in columns)})")
        self.load({})

    def load(self, content: Content) -> None:
        """Makes the phone hold this and nothing else, and shows its home screen."""
        for table, columns in TABLES.items():
            self.base.execute(f"delete from {table}")
            self.base.executemany(f"insert into {table} values ({', '.join('?' * len(columns))})", content.get(table, []))
        self.answered: str | None = None
        self.home()

    def content(self) -> Content:
        """All that it holds, in an order of its own."""
        return {table: sorted(list(row) for row in self.base.execute(f"select * from {table}")) for table in TABLES}

    def home(self) -> None:
        self.screens: list[tuple[str, ...]] = [("home",)]
        self.leave()

    def leave(self) -> None:
        """Forgets what was typed into a form and how far a list was scrolled."""
        self.form: dict[str, str] = {}
        self.focus, self.above = "", 0

    def show(self, *screen: str) -> Do:
        def do() -> None:
            self.screens.append(screen)
            self.leave()

        return do

    # ------------------------------------------------------------------ screens

    def items(self) -> list[Item]:
        name, *about = self.screens[-1]
        if name == "home":
            return [Item(app, do=self.show(app.lower())) for app in APPS]
        if name in ("contacts", "notes"):
            one, key = (name[:-1], TABLES[name][0])
            known = [row[0] for row in self.base.execute(f"select {key} from {name} order by {key}, rowid")]
            entries = [Item(entry, "android.widget.TextView", self.show(one, entry)) for entry in known]
            return [Item(f"New {one}", do=self.show(f"new {one}")), *entries[self.above : self.above + _ON_SCREEN]]
        if name == "settings":
            values = dict(self.base.execute("select name, value from settings"))
            kind = "android.widget.Switch"
            return [Item(key, kind, self.switch(key, values.get(key)), checked=values.get(key) == "on") for key in SETTINGS]
        if name in ("new contact", "new note"):
            table = name.removeprefix("new ") + "s"
            fields = [Item(field.capitalize(), "android.widget.EditText", field=field) for field in TABLES[table]]
            return [*fields, Item("Save", do=self.save(table))]
        table = name + "s"
        key, other = TABLES[table]
        found = self.base.execute(f"select {other} from {table} where {key} = ?", about).fetchone()
        text = [Item(words, "android.widget.TextView") for words in (about[0], found[0] if found else "")]
        return [*text, Item("Delete", do=self.delete(table, about[0]))]

    def switch(self, key: str, value: str | None) -> Do:
        def do() -> None:
            self.base.execute("update settings set value = ? where name = ?", ("off" if value == "on" else "on", key))

        return do

    def save(self, table: str) -> Do:
        def do() -> None:
            row = [self.form.get(field, "").strip() for field in TABLES[table]]
            if all(row):
                self.base.execute(f"insert into {table} values (?, ?)", row)
                self.back()

        return do

    def delete(self, table: str, key: str) -> Do:
        def do() -> None:
            self.base.execute(f"delete from {table} where {TABLES[table][0]} = ?", (key,))
            self.back()

        return do

    def back(self) -> None:
        self.screens = self.screens[:-1] or [("home",)]
        self.leave()

    # ------------------------------------------------------------------ as AndroidWorld tells and touches it

    def elements(self) -> list[dict[str, Any]]:
        """The screen as AndroidWorld's elements."""
        told = []
        for number, item in enumerate(self.items()):
            top = _TOP + _ROW * number
            about: dict[str, Any] = {
                "text": self.form.get(item.field, "") if item.field else item.said,
                "hint_text": item.said if item.field else None,
                "content_description": item.said if item.field else None,
                "class_name": item.kind,
                "bbox_pixels": {"x_min": 0, "x_max": WIDTH, "y_min": top, "y_max": top + _ROW},
                "is_clickable": item.do is not None or bool(item.field),
                "is_editable": bool(item.field),
                "is_focused": bool(item.field) and item.field == self.focus,
                "is_checkable": item.checked is not None,
                "is_checked": bool(item.checked),
                "is_enabled": True,
                "is_visible": True,
            }
            told.append(about)
        return told

    def pixels(self) -> list[list[list[int]]]:
        """The screen as a coarse picture, a pixel for each 30: rows are bands, grey by what they say."""
        bands = [sum(map(ord, item.said)) % 200 + 30 for item in self.items()]
        grey = [bands[n] if 0 <= (n := (30 * y - _TOP) // _ROW) < len(bands) else 0 for y in range(HEIGHT // 30)]
        return [[[value] * 3 for _ in range(WIDTH // 30)] for value in grey]

    def act(self, action: dict[str, Any]) -> None:
        """Does an action. Raises ValueError for one that is none of AndroidWorld's."""
        kind = action.get("action_type")
        if kind in ("click", "double_tap", "long_press"):
            self.touch(action)
        elif kind == "input_text":
            self.touch(action)
            if self.focus:
                before = "" if action.get("clear_text") else self.form.get(self.focus, "")
                self.form[self.focus] = before + str(action["text"])
        elif kind == "navigate_back":
            self.back()
        elif kind == "navigate_home":
            self.home()
        elif kind == "open_app":
            if action.get("app_name") in APPS:
                self.home()
                self.show(str(action["app_name"]).lower())()
        elif kind == "scroll" and self.screens[-1][0] in ("contacts", "notes"):
            most = self.base.execute(f"select count(*) from {self.screens[-1][0]}").fetchone()[0] - _ON_SCREEN
            step = {"down": _ON_SCREEN, "up": -_ON_SCREEN}.get(str(action.get("direction")), 0)
            self.above = max(0, min(self.above + step, most))
        elif kind == "answer":
            self.answered = str(action["text"])
        elif kind not in ("scroll", "swipe", "keyboard_enter", "wait", "status", "unknown"):
            raise ValueError(f"Invalid action type: {kind!r}")

    def touch(self, action: dict[str, Any]) -> None:
        """A tap on a point, or on the element of an index, or on nothing where neither is given."""
        items = self.items()
        number = action.get("index")
        if number is None and action.get("y") is not None:
            number = (int(action["y"]) - _TOP) // _ROW if 0 <= int(action.get("x", -1)) < WIDTH else -1
        if number is None or not 0 <= int(number) < len(items):
            return
        item = items[int(number)]
        if item.field:
            self.focus = item.field
        elif item.do:
            item.do()
