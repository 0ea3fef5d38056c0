"""A policy for tests: it stands where the engine stands, and a function says what it writes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence

from jaxagent.agent import Agent, Limits
from jaxagent.chat.template import Template
from jaxagent.data.store import audit
from jaxagent.envs.env import Ablated, Task, World
from jaxagent.types import Message, Sample, SampleRequest, Sampling, Trajectory
from sandbox_client import SandboxClient

Ids = Sequence[int]
LIMITS = Limits(max_turns=8, max_tokens=400)
SAMPLING = Sampling(max_tokens=30)


class ScriptedSampler:
    """Implements `types.Sampler`. It refuses gaps and overlaps as the engine does, and remembers what was asked of it."""

    def __init__(self, template: Template, write: Callable[[str, SampleRequest], Ids | Awaitable[Ids]]):
        """Args: write: from what the policy has read so far, as text, and the request, to the tokens of its turn."""
        self.template, self.write = template, write
        self.rows: dict[str, list[int]] = {}
        self.requests: list[SampleRequest] = []
        self.released: list[str] = []

    async def generate(self, request: SampleRequest) -> Sample:
        row = self.rows.setdefault(request.trajectory, [])
        if request.start != len(row):
            raise ValueError(f"{request.trajectory}: {len(row)} tokens are held, got tokens from {request.start} on")
        self.requests.append(request)
        row += request.tokens
        turn = self.write(self.template.text(row), request)
        tokens = list(await turn if inspect.isawaitable(turn) else turn)[: request.sampling.max_tokens]
        for n in range(len(tokens)) if request.hear else ():
            request.hear(tokens[: n + 1])
            await asyncio.sleep(0)
        row += tokens
        logprobs = [-0.25 * (i + 1) for i in range(len(tokens))]
        stopped = bool(tokens) and tokens[-1] in request.stop
        return Sample(tokens, logprobs, [7] * len(tokens), stopped, request.start, list(request.tokens))

    def release(self, trajectory: str) -> None:
        self.rows.pop(trajectory, None)  # unknown names are fine, as with the engine
        self.released.append(trajectory)


def script(template: Template, *turns: Message | Ids) -> ScriptedSampler:
    """A policy that takes these turns, in every trajectory, and repeats the last one."""
    taken: dict[str, int] = {}

    def write(text: str, request: SampleRequest) -> Ids:
        number = taken[request.trajectory] = taken.get(request.trajectory, -1) + 1
        turn = turns[min(number, len(turns) - 1)]
        return template.turn(turn) if isinstance(turn, Message) else turn

    return ScriptedSampler(template, write)


async def never() -> Ids:
    """What a sampler returns that does not answer."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


async def episode(
    world: World,
    task: Task,
    sampler: ScriptedSampler,
    *,
    limits: Limits = LIMITS,
    sampling: Sampling = SAMPLING,
    sandbox: SandboxClient | None = None,
    ablated: bool = False,
) -> list[Trajectory]:
    """Plays one episode of a world, and checks what is true of every row."""
    agent = Agent(sampler.template, world.tools, sampler, limits)
    rows = [Trajectory(task["id"], task["seed"], "group", 0)]
    env = world.episode(f"{task['id']}/{len(sampler.requests)}", sandbox)
    try:
        await agent.play(Ablated(env) if ablated else env, task, rows, (1, 2), sampling)
    finally:
        await env.close()
    assert [audit(row) for row in rows] == [""] * len(rows)
    assert sampler.rows == {}
    return rows
