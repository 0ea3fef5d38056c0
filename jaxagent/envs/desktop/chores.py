"""Tasks in the register of people, in OSWorld's format, and how they are done.

Each changes one thing, and is done where the saved file holds exactly that: the evaluator compares all of it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

CITIES = ("Bergen", "Cadiz", "Lublin", "Tartu")  # those of register.py, which runs elsewhere
FILE = "~/people.json"
_FIRST = (
    "Ada",
    "Bo",
    "Cleo",
    "Dag",
    "Edit",
    "Finn",
    "Gro",
    "Hana",
    "Ivo",
    "Juno",
    "Kian",
    "Lea",
    "Milo",
    "Nura",
    "Otto",
    "Pia",
)
_LAST = ("Arden", "Berg", "Costa", "Dahl", "Ek", "Faro", "Gray", "Holm", "Ito", "Jansen", "Kulik", "Lund")
_ROW = re.compile(r"^\[(\d+)\] (.*) at \d+ \d+$", re.MULTILINE)
Person = dict[str, Any]
People = list[Person]


def _phone(rng: random.Random) -> str:
    return f"555-{rng.randrange(10000):04}"


def _new_phone(people: People, who: Person, rng: random.Random) -> str:
    old = who["phone"]
    while who["phone"] == old:
        who["phone"] = _phone(rng)
    return f"change the phone of {who['name']} to {who['phone']}"


def _new_city(people: People, who: Person, rng: random.Random) -> str:
    who["city"] = rng.choice([city for city in CITIES if city != who["city"]])
    return f"{who['name']} has moved to {who['city']}: change that"


def _membership(people: People, who: Person, rng: random.Random) -> str:
    who["member"] = not who["member"]
    return f"{who['name']} is {'a' if who['member'] else 'no longer a'} member: change that"


def _newcomer(people: People, who: Person, rng: random.Random) -> str:
    names = {person["name"] for person in people}
    while (name := f"{rng.choice(_FIRST)} {rng.choice(_LAST)}") in names:
        pass
    one = {"name": name, "phone": _phone(rng), "city": rng.choice(CITIES), "member": rng.random() < 0.5}
    people.append(one)
    return f"add {name}, phone {one['phone']}, of {one['city']}, {'a' if one['member'] else 'not a'} member"


def _leaver(people: People, who: Person, rng: random.Random) -> str:
    people.remove(who)
    return f"delete {who['name']}"


KINDS: dict[str, Callable[[People, Person, random.Random], str]] = {
    "phone": _new_phone,
    "city": _new_city,
    "member": _membership,
    "add": _newcomer,
    "delete": _leaver,
}


def chore(kind: str, seed: int) -> dict[str, Any]:
    """A task: the people, what is asked for, and what the file must hold then."""
    rng = random.Random(f"{seed}/{kind}")
    names = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], rng.randint(4, 8))
    before = [{"name": n, "phone": _phone(rng), "city": rng.choice(CITIES), "member": rng.random() < 0.5} for n in names]
    after = [dict(person) for person in before]
    who = rng.choice(after)
    asked = KINDS[kind](after, who, rng)
    wanted = after[-1] if kind == "add" else who
    return {
        "instruction": f"In the register of people, {asked}. Save it.",
        "config": [
            {"type": "write", "parameters": {"path": FILE, "text": written(before)}},
            {"type": "launch", "parameters": {"command": ["register", FILE]}},
        ],
        "evaluator": {
            "func": "exact_match",
            "result": {"type": "vm_command_line", "command": ["cat", FILE]},
            "expected": {"type": "rule", "rules": {"expected": written(after)}},
        },
        "kind": kind,
        "wanted": wanted,
    }


def written(people: People) -> str:
    """A file of people as the register writes it."""
    return json.dumps(people, indent=1)


def advise(task: dict[str, Any], seen: str) -> str:
    """What to do next, by what is on the screen."""
    rows = {said: number for number, said in _ROW.findall(seen)}
    kind, wanted = task["kind"], task["wanted"]

    def find(role: str, name: str) -> tuple[str, str]:
        """The first such row: its number and its words."""
        return next((number, said) for said, number in rows.items() if said.startswith(f'{role} "{name}"'))

    def press(name: str) -> str:
        return f"click {find('push-button', name)[0]}"

    ended = "Deleted" if kind == "delete" else "Saved"
    if f'label "{ended} {wanted["name"]}."' in rows:
        return "done"
    if kind == "add":
        if not any(said.startswith('label "Fill in') for said in rows):
            return press("New")
    else:
        number, said = find("list-item", wanted["name"])
        if "selected" not in said:
            return f"click {number}"
    if kind == "delete":
        return press("Yes, delete" if any("Yes, delete" in said for said in rows) else "Delete")
    for field in ("Name", "Phone"):
        number, said = find("text", field)
        if f"holds {wanted[field.lower()]!r}" not in said:
            return f"type {wanted[field.lower()]}" if "focused" in said else f"triple_click {number}"
    number, said = find("radio-button", wanted["city"])
    if "checked" not in said:
        return f"click {number}"
    number, said = find("check-box", "Member")
    if ("checked" in said) != wanted["member"]:
        return f"click {number}"
    return press("Save")
