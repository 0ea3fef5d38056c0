"""BrowserGym: tasks on web sites, in a Chromium driven by playwright, told as accessibility trees, acted on by its actions.

Everything that a task is comes from its gymnasium id, be it browsergym/miniwob.click-test, browsergym/webarena.3, or one that
`register`, a file of the user's, has made; so this adapter is that of WebArena too.
"""

import contextlib
import functools
import http.server
import importlib
import importlib.util
import itertools
import os
import shlex
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import browsergym.core.env
import gymnasium
import miniwob
from browsergym.core import _get_global_playwright, _set_global_playwright
from browsergym.core.action.highlevel import HighLevelActionSet
from browsergym.core.action.parsers import NamedArgument, highlevel_action_parser
from browsergym.utils.obs import flatten_axtree_to_str

_LONGEST = 4000  # letters of an action
_LONGEST_ERROR = 400
_LONGEST_WAIT_MS = 5000
_LONGEST_WAY = 100  # actions of an oracle
_PATIENCE_MS = 5000
_DELAY_S, _FAR_DELAY_S = 0.05, 0.5  # before a page is read; the library's own is the second, for sites elsewhere
_MINIWOB = "miniwob.test"
_DENIED = ("upload_file", "mouse_upload_file")
_UNTOLD = ["LineBreak", "InlineTextBox", "ListMarker"]  # roles that repeat what stands above them
_CUT = "\n(the page goes on)"


class Silent:
    """Where an agent and its user talk. The library's own opens a second browser to show it."""

    def __init__(self, *ignored: Any, **also: Any):
        self.messages: list[dict[str, Any]] = []

    def add_message(self, role: str, msg: str) -> None:
        if role != "info":
            self.messages.append({"role": role, "timestamp": 0.0, "message": msg})

    def close(self) -> None:
        pass


class Kept:
    """Playwright with one browser for all episodes; their contexts keep them apart. The library's own starts one for each."""

    def __init__(self) -> None:
        self.real = _get_global_playwright()
        self.selectors, self.chromium = self.real.selectors, self
        self.browser: Any = None

    def launch(self, **options: Any) -> Any:
        if self.browser is None or not self.browser.is_connected():
            self.browser = self.real.chromium.launch(**options)
        return self

    def new_context(self, **options: Any) -> Any:
        return self.browser.new_context(**options)

    def close(self) -> None:
        pass

    def end(self) -> None:
        try:
            if self.browser is not None:
                self.browser.close()
        finally:
            _set_global_playwright(None)  # else the next world of this worker is given the one that has stopped
            self.real.stop()


class World:
    def __init__(self, chromium: str, register: str, letters: int):
        self.letters = letters
        self.env: Any = None
        self.sets: dict[str, HighLevelActionSet] = {}
        self.own: dict[str, str] = import_file(register).register() if register else {}
        self.server = serve_pages()
        sites = (place_of(value) for name, value in os.environ.items() if name.startswith("WA_"))
        # Servers of this worker have names: their ports are not the same in every worker, and would be told with every page.
        self.hosts = {
            _MINIWOB: f"127.0.0.1:{self.server.server_address[1]}",
            **self.own,
            **{site: site for site in sites if site},
        }
        os.environ["MINIWOB_URL"] = f"http://{_MINIWOB}/miniwob/"
        here = Path.cwd()  # a worker's own folder, which goes with it, and profiles of browsers with that
        os.environ["TMPDIR"] = str(here)
        # Only the sites of the tasks are reached, whatever a page asks for.
        rules = ", ".join([*(f"MAP {host} {address}" for host, address in self.hosts.items()), "MAP * ~NOTFOUND"])
        flags = (f"--host-resolver-rules={rules}", "--disable-background-networking", "--disable-component-update")
        program = here / "chromium"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(chromium)} "$@" {shlex.join(flags)}\n')
        program.chmod(0o755)
        # Root cannot have Chromium's sandbox: the sites are those of the tasks, and no others can be reached.
        self.options = {"executable_path": str(program), "chromium_sandbox": os.geteuid() != 0}
        self.playwright = Kept()
        browsergym.core.env._get_global_playwright = lambda: self.playwright
        browsergym.core.env.Chat = Silent

    # ------------------------------------------------------------------ the three calls

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        self.leave()
        self.task, self.seed = task, seed
        name = task["name"]
        family = name.partition("/")[2].partition(".")[0]
        if name not in gymnasium.registry and importlib.util.find_spec(f"browsergym.{family}"):
            importlib.import_module(f"browsergym.{family}")  # makes its tasks known
        self.actions = self.actions_of("miniwob_all" if family == "miniwob" else "webarena")
        local = family == "miniwob" or bool(self.own)
        self.env = gymnasium.make(
            name,
            disable_env_checker=True,
            slow_mo=0,
            pw_chromium_kwargs=self.options,
            action_mapping=self.code,
            pre_observation_delay=_DELAY_S if local else _FAR_DELAY_S,
        )
        self.seen, _ = self.env.reset(seed=seed)
        self.heard = len(self.seen["chat_messages"])
        return {"text": f"Task: {self.seen['goal']}\n{self.told()}"}

    def step(self, action: str) -> dict[str, Any]:
        self.seen, reward, terminated, truncated, info = self.env.step(action[:_LONGEST])
        done, error = bool(terminated or truncated), self.seen["last_action_error"][:_LONGEST_ERROR]
        said = {"text": self.told(), "reward": float(reward), "done": done}
        if done:
            spoke = any(message["role"] in ("assistant", "infeasible") for message in self.seen["chat_messages"][self.heard :])
            why = info.get("task_info", {}).get("reason") or f"the task says {float(reward):g}"
            said |= {"answered": spoke, "reason": str(why)}
        elif error:
            said |= {"invalid": True, "reason": error}
        self.heard = len(self.seen["chat_messages"])
        return said

    def oracle(self) -> list[str]:
        """What the task advises, page by page: it is done once, and begun again."""
        advise = getattr(self.env.unwrapped.task, "advise", None)
        if advise is None:
            raise ValueError(f"nobody knows how {self.task['name']} is done: its task has no `advise`")
        way: list[str] = []
        done = False
        while not done and len(way) < _LONGEST_WAY:
            way.append(advise(self.told()))
            done = self.step(way[-1])["done"]
        self.reset(self.task, self.seed)
        return way

    def close(self) -> None:
        with contextlib.ExitStack() as last:  # each of them, whatever the others raise
            last.callback(self.server.server_close)
            last.callback(self.server.shutdown)
            last.callback(self.playwright.end)
            self.leave()

    def leave(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            env.close()

    # ------------------------------------------------------------------ what is told, and what may be done

    def told(self) -> str:
        seen, lines = self.seen, []
        if seen["last_action_error"]:
            lines.append(f"error: {seen['last_action_error'][:_LONGEST_ERROR]}")
        lines += [f"The user says: {m['message']}" for m in seen["chat_messages"][self.heard :] if m["role"] == "user"]
        if len(seen["open_pages_urls"]) > 1:
            active = int(seen["active_page_index"][0])
            tabs = zip(seen["open_pages_titles"], seen["open_pages_urls"], strict=True)
            lines += [f"Tab {i}{' (here)' * (i == active)}: {title} {url}" for i, (title, url) in enumerate(tabs)]
        tree = flatten_axtree_to_str(seen["axtree_object"], ignored_roles=_UNTOLD)
        lines += [f"URL: {seen['url']}", tree if len(tree) <= self.letters else tree[: self.letters] + _CUT]
        return "\n".join(lines)

    def actions_of(self, name: str) -> HighLevelActionSet:
        """A set of the library's, without what would send files of this machine."""
        if name not in self.sets:
            made = self.sets[name] = HighLevelActionSet(name, multiaction=False)
            for denied in _DENIED:
                made.action_set.pop(denied, None)
            # The library gives an element half a second to take a click: a matter of how busy the machine is.
            made.python_includes = made.python_includes.replace("timeout=500", f"timeout={_PATIENCE_MS}")
        return self.sets[name]

    def code(self, action: str) -> str:
        """The library's program for an action, whose arguments are literals. Raises ValueError for what no task needs."""
        for name, arguments in itertools.chain(*highlevel_action_parser.search_string(action).as_list()):
            plain = [argument.value if isinstance(argument, NamedArgument) else argument for argument in arguments]
            if name == "goto" and plain:
                self.check(str(plain[0]))
            if name == "noop" and any(not 0 <= float(wait) <= _LONGEST_WAIT_MS for wait in plain):
                raise ValueError(f"noop waits at most {_LONGEST_WAIT_MS} ms")
        return self.actions.to_python_code(action)

    def check(self, url: str) -> None:
        """Whether the policy may go there: it must not read files of this machine, nor speak to its other servers."""
        # A name of this worker's own stands for all its ports, since they all lead to its one server.
        if not (place := place_of(url)) or not {place, place.rpartition(":")[0]} & set(self.hosts):
            raise ValueError(f"only pages of {', '.join(self.hosts)} can be opened, got {url[:80]!r}")


def place_of(url: str) -> str:
    """HOST:PORT of a page's address, "" where it is none. Raises ValueError for a port that is no number."""
    parts = urllib.parse.urlsplit(url)
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.hostname}:{parts.port or usual}" if usual and parts.hostname and "@" not in parts.netloc else ""


def import_file(path: str) -> Any:
    """A Python file of the user's: its `register()` makes tasks known and returns the hosts that they need, with addresses."""
    spec = importlib.util.spec_from_file_location("registered", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"env.options.register={path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["registered"] = module
    spec.loader.exec_module(module)
    return module


class Pages(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *ignored: Any) -> None:
        pass


def serve_pages() -> Any:
    """A server of MiniWoB's pages, which are files of its own package."""
    folder = Path(miniwob.__file__).parent / "html"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Pages, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def make(**options: Any) -> World:
    return World(**options)
