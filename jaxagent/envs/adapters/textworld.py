"""TextWorld: games that are generated, compiled once and kept in a folder, played by typed commands.

Told in brief a game is not compiled: TextWorld plays it by its own logic, as it follows a compiled one, and generates no text.
"""

import contextlib
import fcntl
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import textworld
from textworld.challenges import CHALLENGES

# Words that end or rewind a game, or write files, wherever they stand: none is a move. `then` begins a second command.
_META = {"quit", "q", "restart", "restore", "save", "undo", "script", "transcript", "verify", "version", "score", "notify"}
_META |= {"then", "recording", "replay"}
_WORD = 9  # letters of a word that the machine reads
_SEPARATED = re.compile(r"[.,;]")
_LONGEST = 100  # letters of a command; the machine's own buffer is not much longer
_PROMPT = re.compile(r"\n>[^\n]*\Z")  # the prompt, and the status line behind it
_BANNER = re.compile(r"\A.*\$\$[^\n]*\n", re.DOTALL)  # the name of the library in large letters
_BRIEF = {"go east": "e", "go north": "n", "go south": "s", "go west": "w", "take coin": "t"}


class World:
    def __init__(self, kind: str, hints: bool, commands: bool, brief: bool, games: str):
        self.kind, self.hints, self.commands, self.brief, self.games = kind, hints, commands, brief, Path(games)
        self.game: Any = None

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        self.close()
        infos = textworld.EnvInfos(
            admissible_commands=True, score=True, max_score=True, won=True, lost=True, description=True, inventory=True,
            facts=True, extras=["walkthrough"],
        )  # fmt: skip
        self.game = textworld.start(str(self.compiled(task)), infos)
        self.state = self.game.reset()
        self.score = 0
        return self.told(self.state.feedback)

    def step(self, action: str) -> dict[str, Any]:
        line = action.partition("\n")[0].rstrip(" .,;!")
        # Other letters than these end the machine.
        command = " ".join(re.findall(r"[\w'-]+", line, re.ASCII))[:_LONGEST]
        if not command or _SEPARATED.search(line) or any(map(is_meta, command.split())):
            return {**self.told("That is no move."), "invalid": True, "reason": "no move"}
        if self.brief:
            command = next((long for long, letter in _BRIEF.items() if letter == command.lower()), command)
        self.state, score, done = self.game.step(command)
        gained, self.score = score - self.score, score
        reason = "won" if self.state.won else "lost" if self.state.lost else "scored" if gained > 0 else ""
        return {**self.told(self.state.feedback), "reward": gained / self.state.max_score, "done": bool(done), "reason": reason}

    def oracle(self) -> list[str]:
        return [_BRIEF[command] if self.brief else command for command in self.state["extra.walkthrough"]]

    def close(self) -> None:
        if self.game is not None:
            self.game.close()
        self.game = None

    def told(self, feedback: str) -> dict[str, Any]:
        if self.brief:
            return {"text": self.line()}
        text = _PROMPT.sub("", _BANNER.sub("", feedback))
        text = re.sub(r"\s*\n\s*\n\s*", "\n", text).strip()
        if self.commands:
            text += "\nYou can: " + "; ".join(sorted(self.state.admissible_commands or ()))
        return {"text": text, "state": f"{self.state.description}|{self.state.inventory}".strip()}

    def line(self) -> str:
        """The room and what can be done there: `steam room ens`, `attic nt`."""
        room = next(fact.arguments[1].name for fact in self.state.facts if fact.name == "at" and fact.arguments[0].name == "P")
        letters = sorted(_BRIEF[command] for command in self.state.admissible_commands if command in _BRIEF)
        return f"{room} {''.join(letters)}"

    def compiled(self, task: dict[str, Any]) -> Path:
        """The game of a task, from the folder of games. Compiling takes seconds: one worker does it, the others wait for it."""
        name = f"{self.kind}-{task['level']}-{task['seed']}-{int(self.hints)}-{textworld.__version__}"
        path = self.games / f"{name}.{'json' if self.brief else 'z8'}"
        self.games.mkdir(parents=True, exist_ok=True)
        with (self.games / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                self.compile(task, path)
        return path

    def compile(self, task: dict[str, Any], path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self.games) as folder:
            options = textworld.GameOptions()
            options.seeds = task["seed"]
            options.path = str(Path(folder) / path.name)
            options.grammar.only_last_action = not self.hints
            if self.brief:
                with by_logic():
                    self.generate(task["level"], options).save(options.path)
            else:
                textworld.generator.compile_game(self.generate(task["level"], options), options)
            for file in Path(folder).glob(f"{path.stem}.*"):
                if file.suffix != path.suffix:
                    shutil.move(file, self.games / file.name)
            Path(options.path).replace(path)

    def generate(self, level: int, options: Any) -> Any:
        if self.kind == "coins":
            found = CHALLENGES["tw-coin_collector"]
            return (found[1] if isinstance(found, tuple) else found)({"level": level}, options)
        options.nb_rooms, options.nb_objects = max(1, level // 2), max(1, level * 3 // 4)
        options.chaining.min_length = options.chaining.max_length = options.quest_length = level
        return textworld.generator.make_game(options)


@contextlib.contextmanager
def by_logic() -> Iterator[None]:
    """Lets the library try its games by its logic: it compiles each with Inform only to follow its walkthrough once."""

    def save(maker: Any, path: str) -> str:
        path = str(Path(path).with_suffix(".json"))
        maker.build().save(path)
        return path

    compiles, textworld.GameMaker.compile = textworld.GameMaker.compile, save
    try:
        yield
    finally:
        textworld.GameMaker.compile = compiles


def is_meta(word: str) -> bool:
    """Whether the machine takes a word for one of those, or for one of the library's own commands."""
    return word.lower()[:_WORD] in {meta[:_WORD] for meta in _META} or word.lower().startswith("tw-")


def make(**options: Any) -> World:
    return World(**options)
