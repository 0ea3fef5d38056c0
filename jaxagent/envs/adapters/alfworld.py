"""ALFWorld: chores in its 120 rooms. Problems are made here of what the wheel knows of these, and its engine plays them."""

import functools
import hashlib
import json
import os
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ALFWORLD_DATA", str(Path.cwd()))  # when imported it makes this folder, or else one of the user's

import fast_downward
import textworld
from alfworld.agents.utils.misc import Demangler
from alfworld.gen import constants, goal_library
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
from textworld.envs import PddlEnv

# By its name here: the library's name of the chore, what is done to the object before it is put down, and where.
CHORES = {
    "place": ("pick_and_place_simple", "", ""),
    "look": ("look_at_obj_in_light", "", ""),
    "clean": ("pick_clean_then_place_in_recep", "Cleanable", "SinkBasin"),
    "heat": ("pick_heat_then_place_in_recep", "Heatable", "Microwave"),
    "cool": ("pick_cool_then_place_in_recep", "Coolable", "Fridge"),
    "two": ("pick_two_obj_and_place", "", ""),
}
DONE = {"clean": "isclean", "heat": "ishot", "cool": "iscool"}
HOLDS: dict[str, set[str]] = constants.VAL_RECEPTACLE_OBJECTS
STATIC = set(HOLDS) - set(constants.MOVABLE_RECEPTACLES_SET) - {"Toaster"}  # which takes slices only
PICKED = {kind for name in STATIC for kind in HOLDS[name] if not kind.endswith("Sliced")}
LAMPS = set(constants.VAL_ACTION_OBJECTS["Toggleable"])
LAMP_PLACES = ("Desk", "SideTable", "Dresser", "CoffeeTable", "DiningTable", "Shelf")
ROOMS = Path(constants.__file__).with_name("layouts")
# Facts that change; all others are the same for a whole game, or only say what has been looked at.
MOVING = {"atlocation", "opened", "inreceptacle", "holds", "isclean", "ishot", "iscool", "ison", "istoggled"}
_PUT = re.compile(r"put (.+?) (?:in/on|into|onto|in|on) (.+)")
_ARTICLES = re.compile(r"\b(?:the|a|an) ")
_LONGEST = 200  # letters of a command

# Both are called twice for every game, and cost seconds.
fast_downward.pddl2sas = functools.lru_cache(maxsize=16)(fast_downward.pddl2sas)
pddl_logic = textworld.envs.pddl.pddl.pddl_logic
pddl_logic.GameLogic = functools.lru_cache(maxsize=1)(pddl_logic.GameLogic)


@dataclass
class Room:
    """Receptacles and objects by their id, each with its type, and in which receptacle every object is."""

    receptacles: dict[str, str]
    objects: dict[str, str] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)

    def of_type(self, kind: str) -> list[str]:
        return [name for name, its in self.receptacles.items() if its == kind]

    def put(self, rng: random.Random, kind: str, places: list[str]) -> None:
        name = f"{kind}|{len(self.objects):02}"
        self.objects[name], self.inside[name] = kind, rng.choice(places)


@dataclass
class Chore:
    """What is to be done: a kind of CHORES, an object's type, and a receptacle's type, or a lamp's."""

    kind: str
    thing: str
    target: str

    @property
    def goal(self) -> str:
        words = {"obj": self.thing, "recep": self.target, "toggle": self.target, "mrecep": ""}
        return str(goal_library.gdict[CHORES[self.kind][0]]["pddl"].format(**words).replace("#", "-"))

    def told(self, rng: random.Random) -> str:
        words = {"obj": self.thing.lower(), "recep": self.target.lower(), "toggle": self.target.lower(), "mrecep": ""}
        return str(rng.choice(goal_library.gdict[CHORES[self.kind][0]]["templates"]).format(**words))


def rooms_of(kind: str, unseen: bool) -> list[int]:
    """Numbers of the rooms that a chore is done in: those that the library trains on, or those that it tests on."""
    scenes = constants.TEST_SCENE_NUMBERS if unseen else constants.TRAIN_SCENE_NUMBERS
    wanted = constants.GOALS_VALID[CHORES[kind][0]]
    return [n for n in scenes if any(n in constants.SCENE_TYPE[room] for room in wanted)]


def furnished(rng: random.Random, number: int, most: int) -> tuple[Room, set[str]]:
    """A room's receptacles, at most so many of a type, and the types of objects that belong there."""
    places = json.loads((ROOMS / f"FloorPlan{number}-openable.json").read_text())
    kinds = sorted(json.loads((ROOMS / f"FloorPlan{number}-objects.json").read_text()))
    named: dict[str, list[str]] = {}
    for name in sorted(places):
        kind, _, part = name.partition("|")
        named.setdefault(f"{kind}Basin" if part.endswith("Basin") else kind, []).append(name)
    for kind in kinds:
        named.setdefault(kind, [f"{kind}|{i}" for i in range(4 if kind == "StoveBurner" else 1)])
    chosen = {kind: sorted(rng.sample(names, min(most, len(names)))) for kind, names in sorted(named.items()) if kind in STATIC}
    receptacles = {name: kind for kind, names in chosen.items() for name in names}
    return Room(receptacles), (PICKED | LAMPS) & set(kinds)


def invented(rng: random.Random, kind: str, unseen: bool, objects: int, most: int) -> tuple[Room, Chore]:
    """A room and a chore that is not done yet and can be done in it."""
    _, action, appliance = CHORES[kind]
    while True:
        room, belong = furnished(rng, rng.choice(rooms_of(kind, unseen)), most)
        has = set(room.receptacles.values())
        homes = {thing: [n for n, its in room.receptacles.items() if thing in HOLDS[its]] for thing in sorted(belong - LAMPS)}
        lamps = {lamp: [n for n, its in room.receptacles.items() if its in LAMP_PLACES] for lamp in sorted(belong & LAMPS)}
        able = constants.VAL_ACTION_OBJECTS.get(action, belong)
        targets = [lamp for lamp in lamps if lamps[lamp]] if kind == "look" else sorted(has - {appliance})
        fit = [
            Chore(kind, thing, target)
            for thing in homes
            for target in targets
            if thing in able and (kind == "look" or thing in HOLDS[target])
            if any(room.receptacles[home] != target for home in homes[thing])
        ]
        if not fit or (appliance and appliance not in has):
            continue
        chore = rng.choice(fit)
        away = [home for home in homes[chore.thing] if room.receptacles[home] != chore.target]
        for _ in range(rng.randint(2 if kind == "two" else 1, 3)):
            room.put(rng, chore.thing, away)
        others = [thing for thing in homes if homes[thing] and thing != chore.thing]
        for thing in rng.choices(others, k=objects) if others else []:
            room.put(rng, thing, homes[thing])
        for lamp, stands in lamps.items():
            if stands:
                room.put(rng, lamp, stands)
        return room, chore


def mangled(name: str) -> str:
    """An id as the library writes it in a problem."""
    for letter, word in (("|", "bar"), ("-", "minus"), ("+", "plus"), (".", "dot"), (",", "comma")):
        name = name.replace(letter, f"_{word}_")
    return name


def written(room: Room, chore: Chore) -> str:
    """The problem in PDDL, as the library's own are written."""
    able = {f"{word.lower()}": kinds for word, kinds in constants.VAL_ACTION_OBJECTS.items()}
    places = {name: f"loc_{number}" for number, name in enumerate(room.receptacles, 1)}
    # The domain names some types itself: they must be there, whether anything has them or not.
    rtypes = sorted({*room.receptacles.values(), "SinkBasin", "Microwave", "Fridge"})
    otypes = sorted({*room.objects.values(), "Knife", "ButterKnife"})
    things = ["agent1 - agent", "loc_0 - location", *(f"{place} - location" for place in places.values())]
    things += [f"{kind}Type - rtype" for kind in rtypes] + [f"{kind}Type - otype" for kind in otypes]
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_0)"]
    facts += [f"(canContain {r}Type {o}Type)" for r in rtypes for o in otypes if o in HOLDS[r]]
    for name, kind in room.receptacles.items():
        word = mangled(name)
        things.append(f"{word} - receptacle")
        facts += [f"(receptacleType {word} {kind}Type)", f"(receptacleAtLocation {word} {places[name]})"]
        facts += [f"(openable {word})"] if kind in constants.OPENABLE_CLASS_SET else []
    for name, kind in room.objects.items():
        word, holder = mangled(name), room.inside[name]
        things.append(f"{word} - object")
        facts += [f"(objectType {word} {kind}Type)", f"(inReceptacle {word} {mangled(holder)})"]
        facts += [f"(objectAtLocation {word} {places[holder]})"]
        facts += [f"({adjective} {word})" for adjective, kinds in able.items() if kind in kinds]
        facts += [f"(pickupable {word})"] if kind not in LAMPS else []
    listed = ["(define (problem chore)", "(:domain alfred)", "(:objects", *things, ")", "(:init", *facts, ")", chore.goal]
    return "\n".join(listed)


class World:
    def __init__(self, objects: int, most: int, commands: bool):
        self.objects, self.most, self.commands = objects, most, commands
        self.game: Any = None

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        rng = random.Random(task["seed"])
        self.room, self.chore = invented(rng, task["chore"], task["unseen"], self.objects, self.most)
        self.aim = self.chore.told(rng)
        if self.game is None:
            self.game = PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True))
        domain, grammar = (Path(path).read_text() for path in (ALFRED_PDDL_PATH, ALFRED_TWL2_PATH))
        self.game.load({"pddl_domain": domain, "grammar": grammar, "pddl_problem": written(self.room, self.chore)})
        names = Demangler(game_infos=self.game._entity_infos)
        for info in self.game._entity_infos.values():
            info.name = names.demangle_alfred_name(info.id)
        self.state = self.game.reset()
        self.met = self.conditions()
        return self.told()

    def step(self, action: str) -> dict[str, Any]:
        command = _ARTICLES.sub("", " ".join(action[:_LONGEST].lower().rstrip(" .!").split()))
        if put := _PUT.fullmatch(command):
            command = f"move {put[1]} to {put[2]}"
        known = command in self.state["_valid_commands"]
        self.state, _, done = self.game.step(command if known else "nothing")
        met, self.met = self.met, self.conditions()
        said = {**self.told(), "done": bool(done), "reward": float(done), "checks": {"goal_conditions": self.met - met}}
        return {**said, "reason": "won"} if done else said if known else {**said, "invalid": True, "reason": "no such command"}

    def oracle(self) -> list[str]:
        """The planner's way, for which everything is in sight."""
        return [command.strip() for command in self.game._pddl_state.replan(self.game._entity_infos)]

    def told(self) -> dict[str, Any]:
        text = self.state.feedback.replace("UNKNOWN GOAL", self.aim).strip()
        text = re.sub(r" +(?=[.,:\n]|$)", "", re.sub(r"\n\s*\n", "\n", text))
        if self.commands:
            listed = (command for command in self.state["admissible_commands"] if command != "help")
            text += "\nYou can: " + "; ".join(command.strip() for command in listed)
        facts = sorted(str(fact) for fact in self.state["_facts"] if fact.name in MOVING)
        return {"text": text, "state": hashlib.sha256("".join(facts).encode()).hexdigest()[:32]}

    def conditions(self) -> float:
        """The share of the conditions of the goal that are met now, as the library counts them."""
        facts = {(fact.name, *(value.name for value in fact.arguments)) for fact in self.state["_facts"]}
        chore = self.chore
        things = [mangled(name).lower() for name, kind in self.room.objects.items() if kind == chore.thing]
        if chore.kind == "look":
            lamps = [mangled(name).lower() for name, kind in self.room.objects.items() if kind == chore.target]
            here = {fact[2] for fact in facts if fact[0] == "atlocation"}
            near = {fact[1] for fact in facts if fact[0] == "receptacleatlocation" and fact[2] in here}
            lit = any(("istoggled", lamp) in facts and near & in_what(facts, lamp) for lamp in lamps)
            return (lit + any(("holds", "agent1", thing) in facts for thing in things)) / 2
        targets = [mangled(name).lower() for name in self.room.of_type(chore.target)]
        if chore.kind == "two":
            return min(2, max(sum(("inreceptacle", thing, target) in facts for thing in things) for target in targets)) / 2
        placed = {thing for thing in things if in_what(facts, thing) & set(targets)}
        if chore.kind == "place":
            return float(bool(placed))
        made = {thing for thing in things if (DONE[chore.kind], thing) in facts}
        return (bool(placed) + bool(made) + bool(placed & made)) / 3

    def close(self) -> None:
        if self.game is not None:
            fast_downward.close_lib(self.game.downward_lib)
        self.game = None


def in_what(facts: set[tuple[str, ...]], thing: str) -> set[str]:
    return {fact[2] for fact in facts if fact[0] == "inreceptacle" and fact[1] == thing}


def make(**options: Any) -> World:
    return World(**options)
