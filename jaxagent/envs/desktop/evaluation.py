"""Tasks in OSWorld's format: how a guest is set up for one, and how what is left on it is scored.

    {"id", "instruction", "config": [{"type", "parameters"}], "evaluator": {"func", "result", "expected", "options", "conj",
    "postconfig"}}

`func` names a metric, or several, which compare a `result` with what is `expected`; either is got from the guest, from the
task, or from a file that the task names by its address. Known are those that can be told from the rule: what a command says,
what a file holds. OSWorld's other kinds (LibreOffice, Chrome's profile, VLC and their like) need its own evaluators; a task
with one of them is refused by name, when it is read.

We differ where a command of the evaluator cannot be run at all, or a file cannot be had: there the episode breaks, and OSWorld
pays 0.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from jaxagent.envs.desktop.guest import MOST_BYTES, Declined, Guest, GuestFault

SETUPS = (
    "upload_file",
    "download",
    "write",
    "execute",
    "command",
    "launch",
    "open",
    "sleep",
    "activate_window",
    "close_window",
)
GETTERS = ("rule", "vm_command_line", "vm_command_error", "vm_file", "cloud_file")
_LONGEST_SLEEP_S = 120.0
Metric = Callable[..., float]


def _exact_match(result: Any, rules: Mapping[str, Any]) -> float:
    return float(result == rules["expected"])


def _literal_match(result: Any, expected: Any, **options: Any) -> float:
    """Equal as texts, or as lists of texts; `ignore_case` is its option."""
    pair = [result, expected]
    if options.get("type", "str") == "list":
        if not all(isinstance(one, list) for one in pair) or len(result) != len(expected):
            return 0.0
    else:
        pair = [[str(one)] for one in pair]
    fold = [[str(word).lower() if options.get("ignore_case") else word for word in one] for one in pair]
    return float(fold[0] == fold[1])


def _include_exclude(result: Any, rules: Mapping[str, Any]) -> float:
    if not isinstance(result, str):
        return 0.0
    return float(all(w in result for w in rules.get("include", [])) and all(w not in result for w in rules.get("exclude", [])))


def _is_in_list(result: Any, rules: Mapping[str, Any]) -> float:
    """Whether what is expected is in a list, or in a text."""
    return float(isinstance(result, list | str) and rules["expected"] in result)


def _compare_text_file(actual: Any, expected: Any, **options: Any) -> float:
    if not isinstance(actual, bytes) or not isinstance(expected, bytes):
        return 0.0
    texts = [content.decode(errors="replace").replace("\r\n", "\n") for content in (actual, expected)]
    if options.get("ignore_blanks"):
        texts = [re.sub(r"\s+", " ", text.strip()) for text in texts]
    if options.get("ignore_case"):
        texts = [text.lower() for text in texts]
    return float(texts[0] == texts[1])


METRICS: dict[str, Metric] = {
    "exact_match": _exact_match,
    "literal_match": _literal_match,
    "check_include_exclude": _include_exclude,
    "is_in_list": _is_in_list,
    "compare_text_file": _compare_text_file,
}


def fault_of(task: Mapping[str, Any]) -> str:
    """Why a task cannot be played here, in words; empty where it can."""
    for key in ("id", "instruction", "evaluator"):
        if not task.get(key):
            return f"it has no {key}"
    evaluator = task["evaluator"]
    steps = [*(task.get("config") or []), *(evaluator.get("postconfig") or [])]
    if unknown := [step.get("type") for step in steps if step.get("type") not in SETUPS]:
        return f"its setup {unknown[0]!r} is not known; known are {', '.join(SETUPS)}"
    if evaluator.get("func") == "infeasible":
        return ""
    metrics, results, expected, options = _columns(evaluator)
    if unknown := [name for name in metrics if name not in METRICS]:
        return f"its metric {unknown[0]!r} is not known; known are {', '.join(METRICS)}, infeasible"
    if not len(metrics) == len(results) == len(expected) == len(options):
        return "its metrics, results, expected and options are not as many"
    for got in (*results, *(one for one in expected if one)):
        if not got or got.get("type") not in GETTERS:
            return f"its getter {(got or {}).get('type')!r} is not known; known are {', '.join(GETTERS)}"
        if got.get("multi") or got.get("time_suffix"):
            return f"its getter {got['type']!r} wants several files, or names by the clock"
    return ""


class Files:
    """Files that tasks name by address or path, kept in a folder as OSWorld's own cache names them."""

    def __init__(self, folder: str, timeout_s: float):
        self.folder = Path(folder) if folder else None
        self.timeout_s = timeout_s

    async def from_address(self, url: str, path: str) -> bytes:
        """What stands at an address: from the folder, or else fetched, and then kept there. Raises GuestFault."""
        kept = self.folder / f"{uuid.uuid5(uuid.NAMESPACE_URL, url)}_{Path(path).name}" if self.folder else None
        if kept is not None and kept.is_file():
            return kept.read_bytes()
        try:
            limit = aiohttp.ClientTimeout(total=self.timeout_s)
            async with aiohttp.ClientSession(timeout=limit, raise_for_status=True) as http, http.get(url) as reply:
                content = bytearray()
                async for chunk in reply.content.iter_chunked(1 << 16):
                    content += chunk
                    if len(content) > MOST_BYTES:
                        raise GuestFault(f"{url}: a file of a task has more than {MOST_BYTES >> 20} MiB")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GuestFault(f"{url}: a file of a task cannot be had: {type(error).__name__}: {error}") from None
        if kept is not None:
            _keep(kept, content)
        return bytes(content)

    def local(self, path: str) -> bytes:
        """A file of this machine, by a path in the folder. Raises GuestFault."""
        folder = (self.folder or Path()).resolve()
        place = (folder / path).resolve()
        if not place.is_relative_to(folder) or not place.is_file():
            raise GuestFault(f"{path}: a file in {folder} (env.options.files) was wanted")
        return place.read_bytes()


def _keep(place: Path, content: bytes | bytearray) -> None:
    """Writes a file whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f"{uuid.uuid4()}.part")
    try:
        part.write_bytes(content)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)


async def set_up(guest: Guest, steps: Sequence[Mapping[str, Any]], files: Files, played: bool = False) -> None:
    """Does what a task's `config` says. Raises GuestFault.

    Args:
        played: the policy was there before, and may have closed the windows that are asked for.
    """
    for step in steps:
        kind, about = step["type"], step.get("parameters") or {}
        if kind in ("upload_file", "download"):
            for one in about["files"]:
                fetched = kind == "download"
                content = await files.from_address(one["url"], one["path"]) if fetched else files.local(one["local_path"])
                await guest.upload(one["path"], content)
        elif kind == "write":
            await guest.upload(about["path"], about["text"].encode())
        elif kind in ("execute", "command"):
            await guest.run(about["command"], bool(about.get("shell", False)))
        elif kind == "sleep":
            await asyncio.sleep(min(float(about["seconds"]), _LONGEST_SLEEP_S))
        elif kind == "open":
            await guest.set_up("open_file", path=about["path"])
        else:
            try:
                await guest.set_up(kind, **about)
            except Declined:
                if not played or kind not in ("activate_window", "close_window"):
                    raise


async def evaluate(guest: Guest, task: Mapping[str, Any], files: Files, failed: bool) -> tuple[float, str]:
    """The score of what is left on the guest, and why.

    Args:
        failed: the policy said that it cannot be done, which is right where the task is `infeasible` and nowhere else.
    """
    evaluator = task["evaluator"]
    await set_up(guest, evaluator.get("postconfig") or [], files, played=True)
    if evaluator["func"] == "infeasible" or failed:
        right = failed == (evaluator["func"] == "infeasible")
        return float(right), "it cannot be done" if evaluator["func"] == "infeasible" else "it can be done"
    any_will_do = evaluator.get("conj", "and") == "or"
    scores = []
    for name, result, expected, options in zip(*_columns(evaluator), strict=True):
        got = await _get(guest, result, files)
        wanted = [await _get(guest, expected, files)] if expected else []
        try:
            scores.append(float(METRICS[name](got, *wanted, **(options or {}))))
        except (KeyError, TypeError) as error:
            raise GuestFault(f"{task['id']}: its metric {name} was given what it cannot compare: {error!r}") from None
        if (any_will_do and scores[-1] == 1.0) or (not any_will_do and scores[-1] == 0.0):
            return scores[-1], f"{name}: {scores[-1]:g}"
    score = max(scores) if any_will_do else sum(scores) / len(scores)
    return score, f"{len(scores)} metrics: {score:g}"


async def _get(guest: Guest, about: Mapping[str, Any], files: Files) -> Any:
    kind = about["type"]
    if kind == "rule":
        return about["rules"]
    if kind == "vm_file":
        return await guest.file(about["path"])
    if kind == "cloud_file":
        return await files.from_address(about["path"], about["dest"])
    ran = await guest.run(about["command"], bool(about.get("shell", False)))
    return ran.output if kind == "vm_command_line" else ran.error


def _columns(evaluator: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Metrics, results, expected and options, as lists."""
    several = isinstance(evaluator["func"], list)
    metrics = evaluator["func"] if several else [evaluator["func"]]

    def column(key: str) -> list[Any]:
        given = evaluator.get(key)
        if several:
            return list(given) if given else [None] * len(metrics)
        return [given or None]

    return metrics, column("result"), column("expected"), column("options")


def task_of(text: str, where: str) -> dict[str, Any]:
    """A task from its JSON. Raises ValueError that says where it stands."""
    try:
        task = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    if not isinstance(task, dict):
        raise ValueError(f"{where}: a task, an object, was wanted")
    return task
