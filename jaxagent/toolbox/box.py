"""The tools of a world, chosen by name: what a policy is told of them, and those of every episode."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxagent.toolbox import sandboxed
from jaxagent.toolbox.calculator import calculator
from jaxagent.toolbox.kit import Kit, Task, Workplace
from jaxagent.toolbox.memory import memory
from jaxagent.toolbox.model_context import mcp
from jaxagent.toolbox.openapi import openapi
from jaxagent.toolbox.search import retriever, search
from jaxagent.tools import Tool, tool


def functions(names: Sequence[str], timeout_s: float = 10.0, pure: bool = False) -> Kit:
    """The kit `functions`: typed Python functions by their dotted names, which run in this process and are the user's own.

    Raises ValueError for a name that leads to none, TypeError for a parameter without a type that JSON knows.
    """
    found = []
    for name in (names,) if isinstance(names, str) else names:
        module, _, attribute = name.rpartition(".")
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"toolbox.functions.names must be dotted names of functions, got {name!r}: {error}") from None
        found.append(tool(function, timeout_s, pure))
    return Kit(lambda place, task: list(found))


KITS: dict[str, Callable[..., Kit]] = {
    "calculator": calculator,
    "python": sandboxed.python,
    "bash": sandboxed.bash,
    "files": sandboxed.files,
    "tests": sandboxed.tests,
    "sql": sandboxed.sql,
    "search": search,
    "retriever": retriever,
    "memory": memory,
    "functions": functions,
    "mcp": mcp,
    "openapi": openapi,
}


class Toolbox:
    """Kits of one world.

    Args:
        chosen: names of kits, or a mapping from them to their options. A kit may be taken more than once, under names like
            `mcp_weather` and `mcp_maps`.

    Raises ValueError for an unknown kit or option, for two tools of one name, for kits that need different sessions.
    """

    def __init__(self, chosen: Sequence[str] | Mapping[str, Mapping[str, Any]]):
        names = (chosen,) if isinstance(chosen, str) else chosen
        # A config section has items and is no Mapping.
        given = dict(chosen.items()) if hasattr(chosen, "items") else {name: {} for name in names}
        self.kits = [_made(name, dict(options)) for name, options in given.items()]
        nowhere = Workplace("", None)
        self.specs = tuple(one.spec for kit in self.kits for one in kit.tools(nowhere, {}))
        if twice := [name for name, count in Counter(spec.name for spec in self.specs).items() if count > 1]:
            raise ValueError(f"env.options.toolbox has two tools named {twice[0]!r}: leave one of their kits away")
        modules = {kit.functions for kit in self.kits if kit.functions}
        if len(modules) > 1:
            raise ValueError(f"env.options.toolbox wants one session to hold the functions of {' and '.join(sorted(modules))}")
        self.functions = next(iter(modules), "")

    @property
    def runs_code(self) -> bool:
        return any(kit.runs_code for kit in self.kits)

    @property
    def remembers(self) -> bool:
        return any(kit.remembers for kit in self.kits)

    def workplace(self, name: str, sandbox: Any, task: Task) -> Workplace:
        """An episode's, with the files that its task brings along."""
        options = {key: value for kit in self.kits for key, value in kit.options(task).items()}
        return Workplace(name, sandbox, self.functions or None, options, task.get("files") or {})

    def tools(self, place: Workplace, task: Task) -> list[Tool]:
        return [one for kit in self.kits for one in kit.tools(place, task)]


def _made(name: str, options: dict[str, Any]) -> Kit:
    kind = name if name in KITS else name.partition("_")[0]
    if kind not in KITS:
        raise ValueError(f"env.options.toolbox must be of {', '.join(KITS)}; got {name!r}")
    known = inspect.signature(KITS[kind]).parameters
    if strange := [key for key in options if key not in known]:
        raise ValueError(f"env.options.toolbox.{name} has no option {strange[0]!r}; it has {', '.join(known) or 'none'}")
    missing = [key for key, one in known.items() if one.default is one.empty and key not in options]
    if missing:
        raise ValueError(f"env.options.toolbox.{name} needs {' and '.join(missing)}")
    return KITS[kind](**options)
