"""`browsergym`: tasks on web sites, in a Chromium of the system. Needs Chromium and `jaxagent env install browsergym`.

A task is a gymnasium id of BrowserGym's: those of MiniWoB come with it; WebArena's are there once `browsergym-webarena` is
installed into the same environment and WA_SHOPPING and its like say where the sites are; those of a file of one's own are made
known by its `register()` (`configs/sites/shop.py` is an example). The policy reads the goal and the accessibility tree and
answers with one of the library's actions, which is passed on; what was wrong with it is told. Reward and end are the task's.

The browser reaches the sites of the tasks and nothing else. It holds one episode, so `rollout.concurrency` should be as many as
there are.
"""

from __future__ import annotations

from pathlib import Path

from jaxagent.data.records import split_of
from jaxagent.envs.env import Task
from jaxagent.envs.synchronous import Served, Shown
from jaxagent.envs.workers import chromium, install

_BOTH = "click('12'); fill('12', 'some text'); scroll(0, 200); keyboard_press('Enter'); noop()"
_SMALL = "mouse_click(80, 100); keyboard_type('some text')"
_SITE = (
    "hover('12'); select_option('12', 'red'); goto('http://...'); go_back(); new_tab(); tab_focus(0); tab_close(); "
    "send_msg_to_user('the answer'), which ends the task; report_infeasible('why')"
)
MINIWOB = "browsergym/miniwob."


def make_world(
    tasks: tuple[str, ...] = ("browsergym/miniwob.click-test-2", "browsergym/miniwob.enter-text"),
    register: str = "",
    shown: bool = False,
    fixed: bool = False,
    letters: int = 8000,
    rules: bool = True,
    workers: int = 0,
    timeout_s: float = 180.0,
) -> Served:
    """The world.

    Args:
        tasks: gymnasium ids, in turn.
        register: a Python file with tasks of one's own; it runs in the workers.
        shown: all tasks have an `advise(text)` that says what to do next, so that they can be demonstrated.
        fixed: a task is the same whatever its seed, as in WebArena: then each belongs to one split, by its name.
        letters: of a page that are told at most.
        rules: whether the first observation begins with how to act.
    """
    names = tuple(tasks)
    if bad := [name for name in names if not name.startswith("browsergym/")] or ["none"] * (not names):
        raise ValueError(f"env.options.tasks must be ids as browsergym/miniwob.click-test-2; got {bad[0]!r}")
    if register and not Path(register).is_file():
        raise ValueError(f"env.options.register={register}: no such file")
    if letters < 100:
        raise ValueError(f"env.options.letters must be at least 100, got {letters}")
    splits = ("train", "demo", "valid", "test") if shown else ("train", "valid", "test")
    members = {split: [name for name in names if split_of(name, splits) == split] for split in splits if fixed}
    if empty := [split for split, mine in members.items() if not mine]:
        raise ValueError(f"env.options.fixed: none of the {len(names)} tasks belongs to {', '.join(empty)}; name more")

    def describe(split: str, index: int) -> Task:
        mine = members.get(split, names)
        return {"name": mine[index % len(mine)], "difficulty": mine[index % len(mine)]}

    install.python_of("browsergym")  # says what is missing, the browser included
    small = all(name.startswith(MINIWOB) for name in names)
    told = f"You act in a web browser. Answer with one action, as in: {_BOTH}; {_SMALL if small else _SITE}."
    world = (Shown if shown else Served)(
        "browsergym",
        {"chromium": chromium.find(), "register": str(Path(register).absolute()) if register else "", "letters": letters},
        describe,
        rules=told * rules,
        workers=workers,
        slots=1,
        timeout_s=timeout_s,
    )
    world.sizes = {split: len(mine) for split, mine in members.items()}
    world.examples = ("click('12')", "click('13')", "fill('12', 'hello')", "noop()", "go_back()")
    return world
