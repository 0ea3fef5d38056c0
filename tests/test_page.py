"""The page of a run in Chromium: what its filters, keys, tables and colours do, live and as report.html."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from many_episodes import episode, write_run, write_step

from jaxagent import view
from jaxagent.data.store import Store
from jaxagent.live import LiveServer

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
EPISODES, PER_STEP = 280, 40
LIST = "document.querySelector('#list')"
FILTERED = "document.querySelector('.filters [role=status]').textContent"
TASK = "document.querySelector('{} h3').textContent"
pytestmark = pytest.mark.skipif(not PROGRAM, reason="Chromium is not installed")


class Page:
    """The browser as a test speaks to it: one call after another."""

    def __init__(self, runner: asyncio.Runner, browser: Browser):
        self._runner, self.browser = runner, browser

    def open(self, url: str, until: str = "true", width: int = 1100) -> None:
        self.browser.faults.clear()
        self.look(width, "light")
        self._runner.run(self.browser.open(url, until))

    def look(self, width: int, scheme: str) -> None:
        self._runner.run(self.browser.size(width, 700, scheme))

    def __call__(self, script: str) -> Any:
        return self._runner.run(self.browser.value(script))

    def until(self, script: str) -> None:
        self._runner.run(self.browser.until(script))

    def press(self, *keys: str) -> None:
        for key in keys:
            self._runner.run(self.browser.key(key))
        self._runner.run(self.browser.frames())

    def choose(self, label: str, value: str) -> str:
        """Sets a filter; returns what the page says is left."""
        field = f"document.querySelector('.filters [aria-label={json.dumps(label)}]')"
        self(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('input'))")
        assert self(f"{field}.value") == value
        return str(self(FILTERED))

    def chosen(self) -> int:
        """The place in the list of the episode that is open."""
        return int(self("document.querySelector('#list [aria-selected=true]').getAttribute('aria-posinset')"))

    def sound(self) -> None:
        """Nothing was complained of, and nothing is wider than the window."""
        assert self("document.documentElement.scrollWidth <= innerWidth")
        assert self.browser.faults == []


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with asyncio.Runner() as runner:
        browser = runner.run(Browser(PROGRAM).__aenter__())
        yield Page(runner, browser)
        runner.run(browser.__aexit__())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run, and a shorter one of another seed."""
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / "first", EPISODES, PER_STEP), write_run(folder / "second", 80, PER_STEP, seed=1)]


@pytest.fixture(scope="module")
def server(runs: list[Path]) -> Iterator[LiveServer]:
    with LiveServer(runs) as running:
        running.index.update()
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def live(page: Page, server: LiveServer) -> Page:
    """The page of both runs, as it is when it is opened; opening it anew would take a second of CPU."""
    if page("location.href") != server.address:
        page.open(server.address, f"document.body.dataset.episodes == {len(server.index.rows)}")
    if page("innerWidth") != 1100:
        page.look(1100, "light")
    page("""{ const fields = [...document.querySelectorAll('.filters select, .filters input')];
      if (fields.some((field) => field.value))
        { for (const field of fields) field.value = ''; fields[0].dispatchEvent(new Event('input')); }
      if (!document.querySelector('#held').hidden) document.querySelector('#held button.hint').click(); }""")
    page(f"document.querySelector('#browse').scrollIntoView({{behavior: 'instant'}}); {LIST}.focus({{preventScroll: true}})")
    page.press("Home")
    page("document.activeElement.blur()")
    return page


def counted(server: LiveServer, passes: Callable[[dict[str, Any]], bool]) -> str:
    rows = server.index.rows
    return f"{sum(map(passes, rows))} of {len(rows)}"


def test_filters_leave_what_they_say_and_join(live: Page, server: LiveServer) -> None:
    assert live(FILTERED) == counted(server, lambda row: True) == "360 of 360"
    assert live.choose("any stop", "max_turns") == counted(server, lambda row: row["stop"] == "max_turns")
    both = counted(server, lambda row: row["stop"] == "max_turns" and row["run"] == 0)
    assert live.choose("both runs", "0") == both != counted(server, lambda row: row["stop"] == "max_turns")
    live.choose("any stop", "")
    one = counted(server, lambda row: row["run"] == 0 and row["step"] == 3 and row["solved"])
    live.choose("all sets", "train 3")
    assert live.choose("any result", "solved") == one and not one.startswith("0 ")
    for label in ("any result", "all sets", "both runs"):
        live.choose(label, "")
    assert live.choose("any difficulty", "2 hops") == counted(server, lambda row: row["difficulty"] == "2 hops")
    live.choose("any difficulty", "")
    assert live.choose("search", "LAMP over") == counted(server, lambda row: "lamp over" in row["plain"])
    assert live.choose("search", "no such words") == "0 of 360"
    live.sound()


def test_a_cell_of_bad_cases_leads_to_its_episodes(live: Page, server: LiveServer) -> None:
    shown = live("[...document.querySelectorAll('.cases tbody tr')].map((tr) => [...tr.cells].map((td) => td.textContent))")
    heads = live("[...document.querySelectorAll('.cases thead th')].map((th) => th.textContent)")
    rows = server.index.rows
    tally = Counter((row["run"], row["step"], kind) for row in rows for kind in row["bad"])
    assert len(shown) == EPISODES // PER_STEP + 2 and "repeated call" in heads
    for told in shown:
        run, step = "AB".index(told[0][0]), int(told[0].rpartition(" ")[2])
        assert [int(n) for n in told[1:-1]] == [tally[run, step, kind] for kind in heads[1:-1]]
    column = heads.index("repeated call")
    live(f"document.querySelectorAll('.cases tbody tr')[4].cells[{column}].querySelector('button').click()")
    assert live(FILTERED) == f"{shown[4][column]} of {len(rows)}"
    places = live("[...document.querySelectorAll('#list [role=option]')].map((row) => +row.id.slice(7))")
    assert len(places) == int(shown[4][column])
    assert all("repeated call" in rows[j]["bad"] and (rows[j]["run"], rows[j]["step"]) == (0, 5) for j in places)
    live.sound()


def test_keys_do_what_the_page_says_of_them(live: Page) -> None:
    assert "j k next, previous · / search · h hold beside" in live("document.querySelector('.keys').textContent")
    live(f"{LIST}.focus({{preventScroll: true}})")
    live.press("j", "j", "k")
    assert live.chosen() == 2
    live.press("ArrowDown", "PageDown", "ArrowUp")
    assert live.chosen() == 12
    live.press("End")
    assert live.chosen() == 360
    live.press("Home")
    assert live.chosen() == 1
    live.press("h")
    assert live("!document.querySelector('#held').hidden")
    live.press("h")
    assert live("document.querySelector('#held').hidden")
    live.press("/", "j")
    assert live("document.activeElement.type") == "search"
    assert live("document.activeElement.value") == "j"  # what is typed there moves nothing
    live.choose("search", "")
    assert live.chosen() == 1
    live.until("document.querySelector('#detail [aria-label^=Tokens]')")
    live("document.querySelector('#detail [aria-label^=Tokens]').focus()")
    live.press("ArrowRight", "ArrowRight")
    assert live("document.querySelector('#tip').textContent").startswith("prompt\ntoken 1 ")
    live("document.querySelector('#curves .plot').focus()")
    live.press("ArrowRight", "ArrowRight")
    assert live("document.querySelector('#at').textContent") == "step 2"
    live.sound()


def test_two_steps_of_one_task_are_held_beside_each_other(live: Page) -> None:
    live.choose("both runs", "0")
    live.choose("all sets", "train 1")
    live.press("h")
    chip = "[...document.querySelectorAll('#detail .chips button')].find((b) => b.textContent.includes('A · step 3:'))"
    live(f"{chip}.click()")
    assert live(TASK.format("#held")) == live(TASK.format("#detail"))
    about = "document.querySelector('{} .small').textContent"
    assert live(about.format("#held")).startswith("A · step 1 ·") and live(about.format("#detail")).startswith("A · step 3 ·")
    live.until("document.querySelectorAll('#held .turn').length && document.querySelectorAll('#detail .turn').length")
    boxes = live("['#detail', '#held'].map((id) => document.querySelector(id).getBoundingClientRect().toJSON())")
    assert boxes[0]["right"] <= boxes[1]["left"] and boxes[0]["top"] == boxes[1]["top"]
    live.sound()


def test_two_runs_are_compared_in_what_differs(live: Page) -> None:
    rows = live("[...document.querySelectorAll('#runs tr')].map((tr) => [...tr.cells].map((td) => td.textContent))")
    assert rows[0] == ["", "A · first", "B · second"]
    told = {name: values for name, *values in rows[1:]}
    assert told["seed"] == ["0", "1"] and told["training steps"] == ["7", "2"]
    assert "feed/staleness_mean, last" in told and "init_from" not in told
    live.sound()


def test_a_turn_shows_where_its_credit_comes_from(live: Page) -> None:
    live.until("document.querySelector('#detail .turn')")
    shown = live("document.querySelector('#detail .turn:last-child .about').textContent")
    assert " = outcome " in shown and "+ brevity −0.0" in shown and "checked, not trained on: judge 0." in shown
    assert "advantage" in shown


def test_light_and_dark_differ_and_both_can_be_read_on_any_screen(live: Page) -> None:
    colours = """(() => { const shine = (c) => c.match(/[0-9.]+/g).slice(0, 3).map((x) => (x / 255) ** 2.2)
      .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
      const of = (node) => shine(getComputedStyle(node).color), ground = shine(getComputedStyle(document.body).backgroundColor);
      return [ground, of(document.body), of(document.querySelector('.soft'))]; })()"""
    found = {}
    for width, scheme in ((1100, "light"), (1100, "dark"), (400, "light"), (400, "dark")):
        live.look(width, scheme)
        found[width, scheme] = ground, *inks = live(colours)
        for ink in inks:  # the contrast that WCAG wants of small text
            assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) > 4.5, (width, scheme)
        live.sound()
    assert found[1100, "light"][0] > 0.8 and found[1100, "dark"][0] < 0.05


def test_a_step_that_is_written_appears_and_what_is_open_stays(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", PER_STEP, PER_STEP)
    with LiveServer([run]) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        running.index.update()
        page.open(running.address, f"document.body.dataset.episodes == {PER_STEP}")
        page("document.querySelector('#browse').scrollIntoView({behavior: 'instant'})")
        page.press("j", "j")
        before = page(TASK.format("#detail")), page.chosen()
        write_step(run, 2, [episode(random.Random(0), 500, rollout, 1.0) for rollout in range(8)])
        running.index.update()
        page.until(f"document.body.dataset.episodes == {PER_STEP + 8}")
        page.until("document.querySelector('.cases tbody').rows.length === 2")
        page.until("document.querySelector('#head').textContent.includes('2 of 1')")  # steps done of those in the config
        assert (page(TASK.format("#detail")), page.chosen()) == before
        assert page.choose("all sets", "train 2") == f"8 of {PER_STEP + 8}"
        page.sound()
        page("location.href = 'about:blank'")
        running.shutdown()


def test_report_html_is_whole_on_any_screen(page: Page, runs: list[Path]) -> None:
    page.open(view.report(runs[0]).as_uri())
    stored = [row for label in Store(runs[0] / "trajectories").labels() for row in Store(runs[0] / "trajectories").read(label)]
    solved = sum(row.solved for row in stored)
    assert page(FILTERED) == f"{EPISODES} of {EPISODES}"
    assert page.choose("any result", "solved") == f"{solved} of {EPISODES}"
    page("document.querySelector('#browse').scrollIntoView({behavior: 'instant'})")
    page.press("j", "j", "k", "/")
    assert page.chosen() == 2 and page("document.activeElement.type") == "search"
    names = page("[...document.querySelectorAll('#curves figcaption span:first-child')].map((span) => span.textContent)")
    assert {"Success", "Log-prob gap by turn position", "Staleness of tokens, versions"} <= set(names)
    keys = page("[...document.querySelectorAll('#curves .legend')].map((legend) => legend.textContent)")
    assert any(all(f"turn {n}" in text for n in (1, 2, 3, "4 on")) for text in keys)
    page.look(400, "light")
    page.sound()
