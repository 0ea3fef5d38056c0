"""How fast the page of `jaxagent view --serve` answers: `python benchmarks/page.py` makes a run of 10,000 episodes and asks.

It needs Chromium (`chromium` on the path, or --browser), which it drives over its own protocol, headless. A keystroke is a real
key event of the browser; its time ends with the second animation frame after it, when what it changed has been painted. With
--shots=DIR it leaves pictures of the page, light and dark, wide and narrow.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import Browser
from many_episodes import episode, write_run, write_step

from jaxagent.live import LiveServer

# Marks the time of a key before the page hears of it, and that of the frame after the one in which it was painted.
WATCH = """
window.took = [];
addEventListener("keydown", () => {
  const begun = performance.now();
  requestAnimationFrame(() => requestAnimationFrame(() => took.push(performance.now() - begun)));
}, true);
"""


async def typed(browser: Browser, text: str) -> list[float]:
    """Milliseconds from each keystroke into the search to what it changed on the screen."""
    await browser.value("document.querySelector('input[type=search]').focus()")
    await browser.value("took.length = 0")
    for n, key in enumerate(text, 1):
        await browser.key(key)
        await browser.until(f"took.length >= {n}")
    return list(await browser.value("took"))


async def measure(server: LiveServer, folder: Path, episodes: int, program: str, shots: Path | None) -> dict[str, Any]:
    async with Browser(program) as browser:
        await browser.size(1400, 900, "light")
        await browser.do("Page.enable")
        await browser.do("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        begun = time.monotonic()
        await browser.do("Page.navigate", url=server.address)
        await browser.until(f"document.body && document.body.dataset.episodes >= {episodes}")
        opened_s = time.monotonic() - begun
        words = [await typed(browser, "lamp over")]
        words.append(await typed(browser, " rivers"))
        found = await browser.value("document.querySelector('.filters [role=status]').textContent")
        await browser.value("document.activeElement.value = ''; document.activeElement.dispatchEvent(new Event('input'))")
        await browser.value(
            "document.querySelector('#browse').scrollIntoView(); document.querySelector('#list').focus(); took.length = 0"
        )
        for n in range(1, 21):
            await browser.key("j")
            await browser.until(f"took.length >= {n}")
        moves = await browser.value("took")
        if shots:
            await pictures(browser, shots)
        rng = random.Random(1)
        step = episodes // 500 + 1
        await asyncio.to_thread(write_step, folder, step, [episode(rng, n // 8, n % 8, 1.0) for n in range(80)])
        begun = time.monotonic()
        await browser.until(f"document.body.dataset.episodes >= {episodes + 80}")
        return {
            "episodes": episodes,
            "opened_s": round(opened_s, 1),
            "search": found,
            "key_to_paint_ms": spread([one for times in words for one in times]),
            "next_episode_ms": spread(moves),
            "new_step_seen_after_s": round(time.monotonic() - begun, 1),
        }


def spread(times: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 1), "worst": round(max(times), 1)}


async def pictures(browser: Browser, folder: Path) -> None:
    """The page from top to bottom, light and dark, wide and narrow; then two episodes beside each other, and the focus."""
    sections = ("head", "curves", "time", "runs", "cases", "browse")
    for name, width, scheme in (
        ("light", 1400, "light"),
        ("dark", 1400, "dark"),
        ("narrow", 400, "dark"),
        ("thin", 400, "light"),
    ):
        await browser.size(width, 900, scheme)
        for section in sections:
            await browser.value(f"document.querySelector('#{section}').scrollIntoView({{behavior: 'instant'}})")
            await browser.frames()
            await browser.shot(folder / f"{name}-{section}.png")
        print(f"{name}: page {await browser.value('document.documentElement.scrollWidth')} px wide", file=sys.stderr)
    hold = "[...document.querySelectorAll('#detail button')].find((b) => b.textContent === 'hold beside').click()"
    await browser.value(f"{hold}; document.querySelector('#list').focus()")
    await browser.key("j")
    await browser.until("document.querySelectorAll('#detail .turn').length && document.querySelectorAll('#held .turn').length")
    for name, width, scheme in (("held-narrow", 400, "light"), ("held-dark", 1400, "dark"), ("held", 1400, "light")):
        await browser.size(width, 900, scheme)
        await browser.value("document.querySelector('#browse').scrollIntoView({behavior: 'instant'})")
        await browser.frames()
        await browser.shot(folder / f"{name}.png")
    for name, what in (("focus-token", "#detail [aria-label^=Tokens]"), ("focus-chart", "#curves .plot")):
        await browser.value(f"document.querySelector('{what}').focus({{preventScroll: true}})")
        await browser.value("document.activeElement.scrollIntoView({behavior: 'instant', block: 'center'})")
        for _ in range(3):
            await browser.key("ArrowRight")
        await browser.frames()
        await browser.shot(folder / f"{name}.png")
    await browser.value(hold.replace("detail", "held").replace("hold beside", "let go"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--shots", type=Path)
    parser.add_argument("--beside", action="store_true", help="a second run of as many beside it")
    options = parser.parse_args()
    if options.shots:
        options.shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = [write_run(Path(folder, name), options.episodes, seed=n) for n, name in enumerate("ab"[: 1 + options.beside])]
        server = LiveServer(runs)
        begun = time.process_time()
        server.index.update()
        read_s = time.process_time() - begun
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Thread(target=server.follow, daemon=True).start()
        made = asyncio.run(measure(server, runs[0], len(server.index.rows), options.browser, options.shots))
        server.shutdown()
        server.server_close()
        print(json.dumps({**made, "index_cpu_s": round(read_s, 1)}, indent=1))


if __name__ == "__main__":
    main()
