"""OSWorld's metrics that are known here, by hand; and which of its tasks are refused, in which words."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from jaxagent.envs.desktop import evaluation
from jaxagent.envs.desktop.evaluation import METRICS, Files, fault_of
from jaxagent.envs.desktop.guest import GuestFault

RULE = {"type": "rule", "rules": {"expected": "x"}}
SAYS = {"type": "vm_command_line", "command": ["cat", "f"]}


@pytest.mark.parametrize(
    ("metric", "got", "wanted", "options", "score"),
    [
        ("exact_match", "a\n", {"expected": "a\n"}, {}, 1.0),
        ("exact_match", "a", {"expected": "a\n"}, {}, 0.0),
        ("exact_match", None, {"expected": "a"}, {}, 0.0),
        ("literal_match", "Ab", "aB", {"ignore_case": True}, 1.0),
        ("literal_match", "Ab", "aB", {}, 0.0),
        ("literal_match", 3, "3", {}, 1.0),
        ("literal_match", ["a", "b"], ["A", "b"], {"type": "list", "ignore_case": True}, 1.0),
        ("literal_match", ["a", "b"], ["b", "a"], {"type": "list"}, 0.0),
        ("literal_match", "ab", ["a", "b"], {"type": "list"}, 0.0),
        ("check_include_exclude", "a b c", {"include": ["a", "c"], "exclude": ["d"]}, {}, 1.0),
        ("check_include_exclude", "a b c", {"include": ["a", "d"]}, {}, 0.0),
        ("check_include_exclude", "a b c", {"include": ["a"], "exclude": ["c"]}, {}, 0.0),
        ("check_include_exclude", None, {"exclude": ["x"]}, {}, 0.0),
        ("is_in_list", ["a", "b"], {"expected": "b"}, {}, 1.0),
        ("is_in_list", ["a", "b"], {"expected": "c"}, {}, 0.0),
        ("is_in_list", None, {"expected": "c"}, {}, 0.0),
        ("compare_text_file", b"a\r\nb", b"a\nb", {}, 1.0),
        ("compare_text_file", b"a  b\n", b"a\n\tb", {}, 0.0),
        ("compare_text_file", b"a  b\n", b"a\n\tb", {"ignore_blanks": True}, 1.0),
        ("compare_text_file", b"Ab", b"aB", {"ignore_case": True}, 1.0),
        ("compare_text_file", None, b"", {}, 0.0),
    ],
)
def test_a_metric_by_hand(metric: str, got: Any, wanted: Any, options: dict[str, Any], score: float) -> None:
    assert METRICS[metric](got, wanted, **options) == score


def task(**evaluator: Any) -> dict[str, Any]:
    return {"id": "1", "instruction": "do", "evaluator": {"func": "exact_match", "result": SAYS, "expected": RULE, **evaluator}}


def test_tasks_whose_rules_are_known_are_played() -> None:
    assert fault_of(task()) == ""
    assert fault_of(task(func="infeasible", result=None, expected=None)) == ""
    several = task(func=["exact_match", "exact_match"], result=[SAYS, SAYS], expected=[RULE, RULE], conj="or")
    assert fault_of(several) == ""


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        ({**task(), "instruction": ""}, "it has no instruction"),
        ({**task(), "config": [{"type": "chrome_open_tabs"}]}, "its setup 'chrome_open_tabs' is not known"),
        (task(postconfig=[{"type": "login"}]), "its setup 'login' is not known"),
        (task(func="compare_pptx_files"), "its metric 'compare_pptx_files' is not known"),
        (task(result={"type": "bookmarks"}), "its getter 'bookmarks' is not known"),
        (task(result=None), "its getter None is not known"),
        (task(result={"type": "vm_file", "multi": True}), "wants several files"),
        (task(func=["exact_match"], result=[SAYS, SAYS], expected=[RULE]), "are not as many"),
    ],
)
def test_a_task_that_cannot_be_scored_here_is_refused_by_what_it_wants(refused: dict[str, Any], why: str) -> None:
    assert why in fault_of(refused)


async def fetched(files: Files, content: bytes) -> bytes:
    """A file of this content from its address."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=content)

    app = web.Application()
    app.router.add_get("/gold", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return await files.from_address(f"http://127.0.0.1:{runner.addresses[0][1]}/gold", "gold")
    finally:
        await runner.cleanup()


def test_of_a_file_that_cannot_be_written_whole_nothing_is_kept(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            asyncio.run(fetched(Files(str(tmp_path), 10.0), b"x" * (5 << 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    assert asyncio.run(fetched(Files(str(tmp_path), 10.0), b"x")) == b"x"
    assert [kept.read_bytes() for kept in tmp_path.iterdir()] == [b"x"]


def test_a_file_without_end_is_not_read_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MOST_BYTES", 1 << 20)
    with pytest.raises(GuestFault, match="more than 1 MiB"):
        asyncio.run(fetched(Files(str(tmp_path), 10.0), b"x" * (2 << 20)))
    assert list(tmp_path.iterdir()) == []
