"""Nothing hangs, where time cannot be virtual: at the sandbox, the door of a program, an endpoint, engines and scorers.

Every place where they wait is tried, each in an event loop of its own, side by side: what hangs costs one deadline in all.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tiny
from aiohttp import web
from awaits import Faults
from judging import judging
from scripted import ScriptedSampler
from serving import serving
from toys import Lone

import jaxagent
from jaxagent import agent, endpoint, journal, lengths, programs, rollout, serve, tools
from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.door import session
from jaxagent.door.session import Slots
from jaxagent.endpoint import Endpoint, EndpointOptions
from jaxagent.engine import engine, replicas
from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.engine.replicas import Replicas
from jaxagent.envs import chain
from jaxagent.envs.chain import Chain
from jaxagent.envs.env import Env, Step, Task, World
from jaxagent.envs.program import ProgramWorld
from jaxagent.rewards import compose, judge, mathematics
from jaxagent.rewards import programs as tests_of_programs
from jaxagent.rewards.compose import Case
from jaxagent.rewards.scorers import scorer_of
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Constraint, Json, Message, Sample, SampleRequest, Sampling, StopReason, ToolCall, Trajectory
from sandbox_client import EmbeddedServer, SandboxClient, SandboxStartError

PLAIN = PlainTemplate()
KINDS = ("hang", "raise", "cancel")
OPTIONS = RolloutOptions(deadline_s=4.0, attempts=1)
LOOK_UP = Path(__file__).parents[1] / "configs" / "programs" / "look_up.py"
VIRTUAL = {agent, journal, lengths, programs, rollout, tools}  # in test_deadlines.py; programs here
TRIED = {session, serve, endpoint, engine, replicas, compose, judge, mathematics, tests_of_programs}
UNTRIED = {"jaxagent.parts": "asks sandbox servers, each with a time limit of its own, before there is a loop"}
# The command `serve`, in which no episode waits for anything.
OF_THE_COMMAND = {f"serve._serve: {what}" for what in ("server.start(at.host, at.port)", "ended.wait()", "server.stop()")}


# Where closing is what fails, something stays open.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rollout, "LEAVE_S", 0.5)
    yield
    gc.collect()  # what stays open goes here, and not in another test


def play(
    world: World,
    player: Any,
    count: int,
    loop: Any,
    sandbox: Callable[[], Any] = lambda: None,
    tasks: int = 2,
    sampling: Sampling = Sampling(max_tokens=12),  # noqa: B008
) -> list[Trajectory]:
    """A group of `count` episodes for each task, over within their budget."""
    made = Rollouts(world, player, sandbox, 7, OPTIONS, loop)
    try:
        named = [(f"train/{i}", world.task("train", i)) for i in range(tasks)]
        futures = [future for group in made.play(named, count, sampling) for future in group]
        return [row for future in futures for row in future.result(timeout=OPTIONS.budget_s(len(futures)) + 30)]
    finally:
        made.close()


def told(row: Trajectory) -> tuple[Any, ...]:
    return row.group, row.rollout, row.segment, row.tokens, row.stop, row.reward


Scene = Callable[[asyncio.AbstractEventLoop], list[Trajectory]]


def tried(found: Faults, places: Sequence[str], scene: Scene, *, at_once: int = 16) -> dict[tuple[str, str], list[Trajectory]]:
    """What breaks by each fault: its rows say why, and all others are what they are without one."""

    def rows_of(place: str, kind: str) -> tuple[Faults, list[Trajectory]]:
        loop, own = asyncio.new_event_loop(), Faults()
        own.arm(place, kind)
        found.apart[loop] = own
        return own, scene(loop)

    calm, usual = rows_of("", "")
    assert [row.error for row in usual if not row.stop.counts] == []
    assert set(places) - set(calm.seen) == set()
    known = {told(row)[:3]: told(row) for row in usual}
    broken: dict[tuple[str, str], list[Trajectory]] = {}
    with ThreadPoolExecutor(at_once) as pool:
        pairs = [(place, kind) for kind in KINDS for place in places]
        for (place, kind), (_, rows) in zip(pairs, pool.map(rows_of, *zip(*pairs, strict=True)), strict=True):
            broken[place, kind] = [row for row in rows if not row.stop.counts]
            for row in rows:
                if row.stop.counts:
                    assert told(row) == known[told(row)[:3]], (place, kind)
                else:
                    assert row.stop is StopReason.INFRA_FAILURE, (place, kind, row.error)
                    assert row.error.startswith(f"turn {len(row.turns)}: "), row.error
                    assert "; waiting for the " in row.error, row.error
    return broken


def test_every_module_of_the_loop_that_waits_is_tried() -> None:
    """What worlds and toolboxes wait for lies within `env.step`, which is tried."""
    folder = Path(jaxagent.__file__).parent
    waiting = {
        ".".join(("jaxagent", *path.relative_to(folder).with_suffix("").parts))
        for path in folder.rglob("*.py")
        if path.relative_to(folder).parts[0] not in ("envs", "toolbox")
        if any(isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert waiting == {module.__name__ for module in VIRTUAL | TRIED} | set(UNTRIED)


# ====================================================================== a sandbox


def test_every_wait_for_the_sandbox_may_fail_and_the_other_episodes_go_on() -> None:
    found, world = Faults(), Chain()

    def write(text: str, request: SampleRequest) -> Sequence[int]:
        call = Message("assistant", calls=(ToolCall("A", {"key": "37"}),))
        return PLAIN.turn(Message("assistant", "x") if "<result>" in text else call)

    with EmbeddedServer(functions=(Chain.functions,), code="off") as server, found.within(chain) as places:

        def scene(loop: asyncio.AbstractEventLoop) -> list[Trajectory]:
            sampler = ScriptedSampler(PLAIN, write)
            player = Agent(PLAIN, world.tools, sampler, Limits(max_turns=8, max_tokens=100))
            rows = play(world, player, 2, loop, lambda: SandboxClient(server.url, server.token))
            assert sampler.rows == {}
            return rows

        broken = tried(found, places, scene)
    for (place, _), rows in broken.items():
        assert len(rows) == (0 if place.endswith("self.session.close()") else 1), place
        assert all("; sandbox session " in row.error for row in rows)
        if "call" in place:
            assert all("; waiting for the environment, asked for A" in row.error for row in rows)


# ====================================================================== a program, and its door


class Breaking(ScriptedSampler):
    """Breaks off, once in an episode, in the middle of the turn that is asked for with the word."""

    def __init__(self, template: Any, write: Any):
        super().__init__(template, write)
        self.broken: set[str] = set()

    async def generate(self, request: SampleRequest) -> Sample:
        sample = await super().generate(request)
        episode = request.trajectory.rpartition("/")[0]
        if "break" in self.template.text(request.tokens) and episode not in self.broken:
            self.broken.add(episode)
            raise RuntimeError("broken off")
        return sample


async def program(task: Task, url: str, key: str) -> float:
    """Asks for a whole turn, a streamed one, one that is refused, and twice for one that breaks off the first time."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:

        async def ask(*messages: str, stream: bool = True) -> tuple[int, str]:
            said = [{"role": "user", "content": message} for message in messages]
            async with http.post(f"{url}/chat/completions", json={"messages": said, "stream": stream}) as reply:
                return reply.status, await reply.text()

        assert (await ask("q", stream=False))[0] == 200
        status, events = await ask("q2")
        assert status == 200 and events.rstrip().endswith("data: [DONE]")
        assert (await ask())[0] == 400
        status, events = await ask("break")
        assert status == 200 and '"error"' in events
        status, events = await ask("break")
        assert status == 200 and events.rstrip().endswith("data: [DONE]")
    return 1.0


def test_every_wait_of_a_program_and_at_its_door_may_fail_and_the_other_episodes_go_on() -> None:
    found, world = Faults(), ProgramWorld(function=f"{LOOK_UP}:agent")
    world.function = program

    def scene(loop: asyncio.AbstractEventLoop) -> list[Trajectory]:
        sampler = Breaking(PLAIN, lambda text, request: PLAIN.turn(Message("assistant", "x")))
        player = programs.Programs(Slots(PLAIN, sampler, 8), Limits(max_turns=8, max_tokens=100))
        rows = play(world, player, 1, loop)
        assert sampler.rows == {}
        return rows

    with found.within(programs, session, serve) as places:
        broken = tried(found, [place for place in places if place not in OF_THE_COMMAND], scene)
    for (place, kind), rows in broken.items():
        door = "_serving" in place or "Server.start" in place
        # Who waits for the server's start waits with the first; at its deadline the server may have begun, its program not.
        assert len({row.group for row in rows}) <= (2 if door else 1), (place, kind)
        if not place.endswith((".stop()", ".cleanup()")):
            assert rows or kind != "hang", place
        waits = {row.error.rpartition("; waiting for the ")[2] for row in rows}
        assert waits <= {"door", "program"} and "door" in waits if door and rows else waits <= {"program"}, (place, kind, waits)


# ====================================================================== a model behind an endpoint


class Once(Lone):
    """Asks twice; what is said then is worth 1."""

    def task(self, split: str, index: int) -> Task:
        return {"id": f"once/{index}", "seed": index, "difficulty": ""}

    def episode(self, name: str, sandbox: Any) -> Env:
        return Asked()


class Asked(Lone):
    turns = 0

    async def step(self, action: Message) -> Step:
        self.turns += 1
        return Step([Message("user", "more")]) if self.turns < 2 else Step(terminated=True, answered=True, reward=1.0)


def test_every_wait_for_an_endpoint_may_fail_and_the_other_episodes_go_on() -> None:
    found, asked = Faults(), dict[str, int]()

    async def answer(request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        asked[model] = asked.get(model, 0) + 1
        if asked[model] == 1:  # so that one is asked again
            return web.json_response({"error": {"message": "busy"}}, status=503)
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    with serving(app) as url, found.within(endpoint) as places:

        def scene(loop: asyncio.AbstractEventLoop) -> list[Trajectory]:
            options = EndpointOptions(f"{url}/v1", str(id(loop)), attempts=3, pause_s=0.01)
            return play(Once(), Endpoint((), Limits(3, 100), options), 2, loop)

        broken = tried(found, places, scene)
    for (place, kind), rows in broken.items():
        assert len(rows) == (0 if "close" in place else 1), (place, kind)
        waits_for = "environment" if "env." in place else "agent" if "self._act(" in place else "endpoint"
        assert all(row.error.endswith(f"; waiting for the {waits_for}") for row in rows), place


# ====================================================================== engines


@pytest.fixture(scope="module")
def engines() -> Iterator[Replicas]:
    """Two, of a policy of random weights."""
    config = tiny.config(vocab_size=PLAIN.vocab_size, layers=1)
    options = EngineOptions(
        slots=2, slot_tokens=64, chunk=64, decode_tokens=3, append_rows=1, append_tokens=(8,), constraint_states=64, exact=True
    )
    places = tiny.mesh(data=2).replicas()
    made = Replicas([Engine(config, options, place, PLAIN.vocabulary()) for place in places])
    made.publish(tiny.params(config), version=0)
    made.warm_up()
    yield made
    made.close()


def test_every_wait_for_an_engine_may_fail_and_the_other_episodes_go_on(engines: Replicas) -> None:
    """One after the other, for all scenes have the same engines: the same draws, whoever else is broken."""
    found, schema = Faults(), {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    sampling = Sampling(max_tokens=12, constraint=Constraint(Json(json.dumps(schema))))

    def scene(loop: asyncio.AbstractEventLoop) -> list[Trajectory]:
        player = Agent(PLAIN, (), engines, Limits(max_turns=3, max_tokens=60))
        rows = play(Once(), player, 2, loop, sampling=sampling)
        for one in engines.engines:
            one.run(lambda: None)  # whose thread has then done what was posted before
            assert one.table.rows == {} and not one.table.waiting
        assert not engines._home and not +engines._load
        return rows

    with found.within(engine, replicas) as places:
        broken = tried(found, places, scene, at_once=1)
    for (place, kind), rows in broken.items():
        assert len(rows) == 1, (place, kind)
        assert rows[0].error.endswith("; waiting for the engine"), place


# ====================================================================== scorers


@pytest.fixture(scope="module")
def isolated() -> Iterator[EmbeddedServer]:
    try:
        with EmbeddedServer(functions=(), code="require", min_isolation="L2") as running:
            yield running
    except SandboxStartError as error:
        pytest.skip(f"no isolation here: {error}")


class Scored(Lone):
    """Task n is scored by scorer n."""

    def __init__(self, scorers: Sequence[Any], question: str):
        self.scorers, self.question = scorers, question

    def task(self, split: str, index: int) -> Task:
        rubric, tests = [{"criterion": "is right"}], [{"stdin": "", "stdout": "2"}]
        task = {"id": f"scored/{index}", "seed": index, "difficulty": "", "question": self.question, "answer": "x+1"}
        return {**task, "rubric": rubric, "tests": tests}

    def episode(self, name: str, sandbox: Any) -> Env:
        return Scoring(self, name, sandbox)


class Scoring(Lone):
    def __init__(self, world: Scored, name: str, sandbox: Any):
        self.world, self.name, self.sandbox = world, name, sandbox

    async def reset(self, task: Task, seed: int) -> Step:
        self.asked = task
        return Step([Message("user", "q")])

    async def step(self, action: Message) -> Step:
        case = Case(self.asked, action.content, session=lambda: self.sandbox.open_session(self.name))
        value, reason = await self.world.scorers[self.asked["seed"]](case)
        return Step(terminated=True, answered=True, reward=value, reason=reason)


def test_every_wait_of_a_scorer_may_fail_and_the_other_episodes_go_on(isolated: EmbeddedServer) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    found, asked = Faults(), set[str]()

    def say(prompt: str) -> str | int:
        (question,) = re.findall(r"number \d+", prompt)
        if question not in asked:  # so that the judge is asked again
            asked.add(question)
            return 500
        return "verdict: yes"

    with judging(say) as served, found.within(compose, judge, mathematics, tests_of_programs) as places:
        shared = [scorer_of(name, {}) for name in ("math_match", "code_tests")]

        def scene(loop: asyncio.AbstractEventLoop) -> list[Trajectory]:
            options = {"url": served.url, "model": "m", "timeout_s": 1.0, "pause_s": 0.01}
            judges = [scorer_of(name, {name: options}) for name in ("judge", "rubric")]
            world = Scored([*judges, *shared], f"number {id(loop)}")
            sampler = ScriptedSampler(PLAIN, lambda text, request: PLAIN.turn(Message("assistant", "1+x")))
            player = Agent(PLAIN, (), sampler, Limits(max_turns=2, max_tokens=60))
            return play(world, player, 2, loop, lambda: SandboxClient(isolated.url, isolated.token), tasks=4)

        broken = tried(found, places, scene, at_once=4)
    for (place, kind), rows in broken.items():
        assert len({row.group for row in rows}) <= 1, (place, kind)  # who asks the same at once breaks with who asked
        assert all("; waiting for the environment" in row.error for row in rows), place
        if "_say" in place:
            assert not rows or kind != "hang", place  # the judge's own deadline, after which it asks again
