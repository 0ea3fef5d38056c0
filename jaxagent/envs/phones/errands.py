"""Tasks on the small phone, as types with numbered instances, and how they are done.

Each is scored by all that the phone holds in the end, and by what was answered: what was asked for and nothing else.
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass

from jaxagent.envs.phones.apps import SETTINGS, Content, Phone

_NAMES = tuple(
    f"{one} {two}" for one in ("Ada", "Bo", "Cleo", "Dag", "Edit", "Finn", "Gro") for two in ("Ek", "Ito", "Lund", "Marsh")
)
_TITLES = (
    "Shopping",
    "Garden",
    "Books",
    "Recipe",
    "Travel",
    "Meeting",
    "Ideas",
    "Repairs",
    "Birthdays",
    "Music",
    "Bills",
    "Trip",
    "Plans",
)
_BODIES = ("milk and bread", "ask about the key", "call on Monday", "two at the door", "read chapter nine", "water twice")
TYPES = ("AddContact", "DeleteContact", "AddNote", "DeleteNote", "ToggleSetting", "AnswerPhone")
_ROW = re.compile(r"^\[(\d+)\] (.*) at \d+ \d+$", re.MULTILINE)


@dataclass(frozen=True)
class Errand:
    """What a phone holds before and is to hold after, what is to be answered, and `about` what."""

    kind: str
    goal: str
    before: Content
    after: Content
    answer: str | None
    about: tuple[str, ...]

    def score(self, phone: Phone) -> float:
        wanted = {table: sorted(rows) for table, rows in self.after.items()}
        answered = phone.answered.strip() if phone.answered is not None else None
        return float(phone.content() == wanted and answered == self.answer)


def errand(kind: str, number: int, seed: int) -> Errand:
    """Instance `number` of a type, in the suite of a seed."""
    rng = random.Random(f"{seed}/{kind}/{number}")
    names, titles = rng.sample(_NAMES, rng.randint(3, 14)), rng.sample(_TITLES, rng.randint(2, 12))
    before: Content = {
        "contacts": [[name, f"555-{rng.randrange(10000):04}"] for name in names],
        "notes": [[title, rng.choice(_BODIES)] for title in titles],
        "settings": [[name, rng.choice(("on", "off"))] for name in SETTINGS],
    }
    after, answer = copy.deepcopy(before), None
    if kind == "AddContact":
        about = (rng.choice([name for name in _NAMES if name not in names]), f"555-{rng.randrange(10000):04}")
        after["contacts"].append(list(about))
        goal = f"Create a contact {about[0]} with the phone {about[1]}."
    elif kind == "DeleteContact":
        about = (rng.choice(names), "")
        after["contacts"] = [row for row in before["contacts"] if row[0] != about[0]]
        goal = f"Delete the contact {about[0]}."
    elif kind == "AddNote":
        about = (rng.choice([title for title in _TITLES if title not in titles]), rng.choice(_BODIES))
        after["notes"].append(list(about))
        goal = f"Write a note with the title {about[0]} that says: {about[1]}"
    elif kind == "DeleteNote":
        about = (rng.choice(titles), "")
        after["notes"] = [row for row in before["notes"] if row[0] != about[0]]
        goal = f"Delete the note {about[0]}."
    elif kind == "ToggleSetting":
        name, value = rng.choice(before["settings"])
        about = (name, "off" if value == "on" else "on")
        after["settings"] = [list(about) if row[0] == name else row for row in before["settings"]]
        goal = f"Turn {name} {about[1]}."
    elif kind == "AnswerPhone":
        name, answer = rng.choice(before["contacts"])
        about = (name, answer)
        goal = f"What is the phone of {name}? Answer with the number alone."
    else:
        raise ValueError(f"no type of task {kind!r}; there are {', '.join(TYPES)}")
    return Errand(kind, goal, before, after, answer, about)


def advise(task: Errand, seen: str) -> tuple[str, bool]:
    """What to do next, by what is on the screen, and whether all is done with it."""
    rows = {words: number for number, words in _ROW.findall(seen)}
    key, other = task.about

    def tap(name: str) -> str:
        return next((f"tap {number}" for words, number in rows.items() if f'"{name}"' in words), "")

    app = "Settings" if task.kind == "ToggleSetting" else "Notes" if task.kind.endswith("Note") else "Contacts"
    if tap("Settings"):  # the home screen
        return tap(app), False
    if task.kind == "ToggleSetting":
        return tap(key), True
    if task.kind == "AnswerPhone" and tap(other):
        return f"answer {other}", True
    if task.kind.startswith("Add"):
        for field, text in zip(("Name", "Phone") if app == "Contacts" else ("Title", "Body"), (key, other), strict=True):
            place = [number for words, number in rows.items() if f"({field})" in words and f'"{text}"' not in words]
            if place:
                return f"type {place[0]} {text}", False
        return (tap("Save"), True) if tap("Save") else (tap(f"New {app.lower()[:-1]}"), False)
    if task.kind.startswith("Delete") and tap("Delete"):
        return tap("Delete"), True
    return tap(key) or "scroll down", False
