"""The house keeps its plan: arrows only down, two wings, sizes, faces. Read from the source, by its syntax trees."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from jaxagent.config import leaves, load

HOME = Path(__file__).parents[1]
STORIES = ("jaxagent.train", "jaxagent.finetune")

# Every module of jaxagent, from the ground up: an import goes to a lower floor, or stays on its own without a circle.
FLOORS = (
    "types metrics timeline echoes alarms progress watchdog config lock sharding hosts compiled heap algos",
    "rewards tools toolbox chat data view notebook badcases live models checkpoint objective journal lengths",
    "credit selection envs hold stem engine learner critic door selves process",
    "agent",
    "rollout serve endpoint",
    "feed search programs",
    "topology estimates parts evaluate follow policy supervised plan update",
    "train finetune replay",
    "__main__",
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
HOST = {
    "types",
    "chat",
    "tools",
    "toolbox",
    "rewards",
    "envs",
    "agent",
    "stem",
    "hold",
    "rollout",
    "endpoint",
    "search",
    "feed",
    "journal",
    "lengths",
    "serve",
    "door",
    "programs",
    "data",
    "view",
    "notebook",
    "badcases",
    "live",
    "metrics",
    "timeline",
    "watchdog",
    "echoes",
    "lock",
    "config",
}
KNOW_THE_CONFIG = {"config", "parts", "evaluate", "follow", "plan", "policy", "view", "train", "finetune", "replay", "__main__"}


def modules(package: str) -> dict[str, Path]:
    files = sorted((HOME / package).rglob("*.py"))
    names = [".".join(file.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return dict(zip(names, files, strict=True))


MODULES = {**modules("jaxagent"), **modules("sandbox_client")}
OURS = [name for name in MODULES if name.startswith("jaxagent")]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def told(name: str, node: ast.AST) -> Iterator[str]:
    """The dotted names that an import statement names; of `from a import b` both a and a.b, if that is a module of ours."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
        parents = package.split(".")[: len(package.split(".")) - node.level + 1]
        source = ".".join([*parents, *filter(None, [node.module])]) if node.level else node.module or ""
        found = [f"{source}.{alias.name}" for alias in node.names if f"{source}.{alias.name}" in MODULES]
        yield from found or [source]


@cache
def imports(name: str) -> set[str]:
    return {found for node in ast.walk(tree(name)) for found in told(name, node)}


def roots(name: str) -> set[str]:
    return {found.partition(".")[0] for found in imports(name)}


@cache
def reach(name: str) -> set[str]:
    """The modules of ours that are imported when this one is."""
    seen, ahead = {name}, [name]
    while ahead:
        new = {found for found in imports(ahead.pop()) if found in MODULES} - seen
        seen |= new
        ahead += new
    return seen


def room(name: str) -> str:
    """The file or folder of jaxagent that a module is, or is in."""
    return name.split(".")[1] if "." in name else ""


def test_nothing_of_ours_imports_what_stands_around_it_and_the_sandbox_client_stands_alone() -> None:
    outside = {"configs", "launch", "colab", "tests", "benchmarks", "base"}
    assert [name for name in MODULES if roots(name) & outside] == []
    alone = [name for name in MODULES if name.startswith("sandbox_client")]
    assert [name for name in alone if roots(name) & {"jaxagent", "jax", "flax", "numpy", *outside}] == []


def test_the_host_wing_knows_no_arrays_directly_or_through_others() -> None:
    wing = [name for name in OURS if room(name) in HOST]
    assert len(wing) > 15
    assert [(name, other) for name in wing for other in reach(name) if roots(other) & {"jax", "flax", "optax"}] == []


def test_algorithms_know_arrays_and_themselves_only() -> None:
    for name in (name for name in OURS if room(name) == "algos"):
        allowed = {"jax", "jaxtyping", "numpy", *sys.stdlib_module_names}
        assert {found for found in imports(name) if found.partition(".")[0] not in allowed} <= set(OURS)
        assert {room(found) for found in imports(name) & set(OURS)} <= {"algos"}


@pytest.mark.parametrize(
    ("here", "never"),
    [
        ("models", {"engine"}),
        ("engine", {"chat", "envs", "agent", "algos"}),
        ("learner", {"engine", "rollout"}),
        ("feed", {"learner"}),
    ],
)
def test_rooms_that_must_not_know_each_other_do_not(here: str, never: set[str]) -> None:
    inside = [name for name in OURS if room(name) == here]
    assert inside
    assert [(name, found) for name in inside for found in reach(name) if room(found) in never] == []


def test_the_config_stops_at_the_stories_and_where_parts_are_built() -> None:
    knowing = {name for name in OURS if "ml_collections" in roots(name) or "jaxagent.config" in imports(name)}
    assert {room(name) for name in knowing} <= KNOW_THE_CONFIG


def test_no_import_stands_inside_a_function() -> None:
    found = []
    for name in MODULES:
        for function in (node for node in ast.walk(tree(name)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            inner = [node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)]
            found += [f"{name}:{node.lineno}" for node in inner]
    assert found == []


def test_every_room_has_its_floor_and_imports_go_down() -> None:
    assert {room(name) for name in OURS} - {""} <= set(FLOOR)
    upward = [
        f"{name} -> {found}"
        for name in OURS
        for found in imports(name)
        if room(name) and room(found) in FLOOR and found.startswith("jaxagent") and FLOOR[room(found)] > FLOOR[room(name)]
    ]
    assert upward == []


def test_there_is_no_circle() -> None:
    circles = [name for name in MODULES if any(name in reach(found) for found in imports(name) & set(MODULES) - {name})]
    assert circles == []


def test_files_and_functions_are_short_and_take_few_parameters() -> None:
    found = []
    for name in MODULES:
        lines = len(MODULES[name].read_text().splitlines())
        if lines > 500 and name not in STORIES:
            found.append(f"{name} has {lines} lines")
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                a = node.args
                parameters = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if p.arg not in ("self", "cls")]
                if size > 80 and name not in STORIES:
                    found.append(f"{name}.{node.name} has {size} lines")
                if len(parameters) > 8:
                    found.append(f"{name}.{node.name} has {len(parameters)} parameters")
    assert found == []


def test_classes_inherit_at_most_once_beyond_what_the_house_allows() -> None:
    bases: dict[str, list[str]] = {}
    for name in MODULES:
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases]

    def depth(name: str) -> int:
        """Steps to a class that is not ours; exceptions, protocols and modules are free."""
        return 1 + max((depth(base) for base in bases[name] if base in bases), default=0)

    trees = [name for name in bases if depth(name) > 2 and not exceptional(name, bases)]
    assert trees == []


def exceptional(name: str, bases: dict[str, list[str]]) -> bool:
    above = bases.get(name, [])
    return any(
        base in ("Module", "Protocol") or base.endswith(("Exception", "Error")) or exceptional(base, bases) for base in above
    )


@pytest.mark.parametrize("name", MODULES)
def test_every_public_module_says_what_lives_in_it(name: str) -> None:
    nothing = MODULES[name].name == "__init__.py" and not MODULES[name].read_text().strip()
    assert nothing or ast.get_docstring(tree(name))


def test_no_room_has_a_name_that_says_nothing() -> None:
    words = {"utils", "util", "common", "manager", "helper", "helpers", "handler", "core", "experimental", "legacy"}
    assert [name for name in MODULES if words & set(name.split("."))] == []


@pytest.mark.parametrize("path", sorted((HOME / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_a_config_has_few_enough_keys_to_be_read(path: Path) -> None:
    keys = [key for key in leaves(load(str(path))[0]) if not key.startswith("env.options.")]  # those are the world's own
    assert 0 < len(keys) < 120


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them all as top-level modules."""
    names = [path.name for path in (HOME / "tests").rglob("test_*.py")]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []


def globals_read(table: symtable.SymbolTable) -> set[str]:
    """Names that the functions and classes of a module look for outside themselves."""
    own = {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
    below = [child for child in table.get_children() if child.get_type() in ("function", "class")]
    return (own if table.get_type() != "module" else set()).union(*map(globals_read, below))


@pytest.mark.parametrize("name", MODULES)
def test_every_name_that_is_read_is_known(name: str) -> None:
    """The checkers cannot say it: the shapes in annotations are strings full of names that nobody knows."""
    table = symtable.symtable(MODULES[name].read_text(), name, "exec")
    known = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    assert globals_read(table) - known - set(dir(builtins)) - {"__file__"} == set()
