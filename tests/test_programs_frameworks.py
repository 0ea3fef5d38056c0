"""Agent frameworks as they come from the package index, behind the door of training: what they have sampled is recorded.

Each test runs where its package is installed (`pip install jaxagent[agents]`).
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made import make
from scripted import ScriptedSampler

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.chat.template import Template
from jaxagent.data.store import audit
from jaxagent.door.session import Slots
from jaxagent.envs.program import ProgramWorld
from jaxagent.programs import Programs
from jaxagent.types import Message, Sampling, StopReason, ToolCall, Trajectory
from sandbox_client import EmbeddedServer
from sandbox_client.blocking import BlockingClient

HOME = Path(__file__).parents[1]
PROGRAMS = HOME / "configs" / "programs"
CHATML, PLAIN = make("chatml"), PlainTemplate()
TASK = {"id": "chain/train/5", "seed": 5, "difficulty": "", "question": "37A"}
RIGHT = "48"  # in table A of this task, at 37
FIRST, SECOND = (Message("assistant", calls=(ToolCall("A", {"key": key}),)) for key in ("37", "38"))

# Packages warn of what they do among themselves; some leave their clients for the garbage collector to close.
pytestmark = pytest.mark.filterwarnings("ignore")


def play(world: ProgramWorld, template: Template, *turns: Message) -> tuple[list[Trajectory], ScriptedSampler]:
    """One episode by a policy that takes these turns; what is true of every row is checked."""
    said = iter(turns)
    sampler = ScriptedSampler(template, lambda text, request: template.turn(next(said)))

    async def whole() -> list[Trajectory]:
        programs = Programs(Slots(template, sampler, 8), Limits(max_turns=8, max_tokens=20_000))
        rows = [Trajectory(TASK["id"], 5, "group", 0)]
        episode = world.episode("", None)
        try:
            await programs.play(episode, TASK, rows, (1, 2), Sampling(max_tokens=200))
        finally:
            await episode.close()
            await programs.close()
        return rows

    rows = asyncio.run(whole())
    assert next(said, None) is None
    assert [audit(row) for row in rows] == [""] * len(rows) and sampler.rows == {}
    recorded = sorted(row.tokens[turn.start : turn.end] for row in rows for turn in row.turns)
    assert recorded == sorted(template.turn(turn) for turn in turns)
    for row in rows:
        assert row.stop is StopReason.ANSWERED
        told = zip(row.mask, row.logprob, row.version, strict=True)
        assert all((logprob < 0, version == 7) == (sampled, sampled) for sampled, logprob, version in told)
    return rows, sampler


def of(function: Any) -> ProgramWorld:
    """The world of a function of this file."""
    world = ProgramWorld(function=f"{PROGRAMS / 'look_up.py'}:agent")
    world.function = function
    return world


# ====================================================================== OpenAI Agents SDK


@pytest.mark.parametrize("dialect", ["agent", "responses"])
def test_the_openai_agents_sdk_is_one_row_in_both_of_its_dialects(dialect: str) -> None:
    pytest.importorskip("agents", reason="openai-agents is not installed (extra: agents)")
    world = ProgramWorld(function=f"{PROGRAMS / 'look_up_sdk.py'}:{dialect}")
    (row,), sampler = play(world, PLAIN, FIRST, SECOND, Message("assistant", RIGHT))
    assert row.reward == 1.0 and row.turns[-1].checks == {"looked_up": 1.0}
    assert [(t.name, t.arguments, t.result) for t in row.turns[0].tools] == [("A", {"key": "37"}, RIGHT)]
    assert [request.start for request in sampler.requests] == [0, *(turn.fed_start for turn in row.turns[1:])]


def test_the_openai_agents_sdk_streams_calls_in_parallel_hands_over_and_asks_for_forms() -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed (extra: agents)")
    openai = pytest.importorskip("openai", reason="openai is not installed (extra: agents)")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def A(key: str) -> str:
        return f"<{key}>"

    async def program(task: Any, url: str, key: str) -> float:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=600.0) as client:
            for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
                model, wish = (
                    kind("policy", client),
                    agents.ModelSettings(tool_choice="required", parallel_tool_calls=True, include_usage=True),
                )
                other = agents.Agent("other", instructions="Be short.", model=model)
                first = agents.Agent("first", tools=[A], handoffs=[other], model=model, model_settings=wish)
                run = agents.Runner.run_streamed(first, task["question"], max_turns=5)
                async for _ in run.stream_events():
                    pass
                assert (run.final_output, run.last_agent.name) == ("52", "other")
                used = run.context_wrapper.usage
                assert used.requests == 3 and used.input_tokens_details.cached_tokens > 0
        return 1.0

    over = Message("assistant", calls=(ToolCall("transfer_to_other", {}),))
    both = Message("assistant", "Two.", calls=(*FIRST.calls, *SECOND.calls))
    rows, _ = play(of(program), CHATML, *(both, over, Message("assistant", "52")) * 2)
    assert [len(row.turns) for row in rows] == [2, 1, 2, 1]  # the other agent has other instructions: a segment of its own
    assert [tool.result for tool in rows[0].turns[0].tools] == ["<37>", "<38>"]


# ====================================================================== smolagents


def test_smolagents_is_trained_though_it_rewrites_its_calls_as_text() -> None:
    smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed (extra: agents)")

    class A(smolagents.Tool):
        name, description, output_type = "A", "Looks up a key.", "string"
        inputs = {"key": {"type": "string", "description": "two digits"}}  # noqa: RUF012

        def forward(self, key: str) -> str:
            return "52"

    def program(task: Any, url: str, key: str) -> dict[str, Any]:
        model = smolagents.OpenAIModel("policy", api_base=url, api_key=key)
        agent = smolagents.ToolCallingAgent(tools=[A()], model=model, max_steps=4, verbosity_level=0)
        said = agent.run(task["question"])
        return {"reward": float(said == "52"), "reason": said}

    final = Message("assistant", calls=(ToolCall("final_answer", {"answer": "52"}),))
    rows, sampler = play(of(program), CHATML, FIRST, Message("assistant", "I forgot to call"), final)
    assert [len(row.turns) for row in rows] == [1, 2] and {row.reward for row in rows} == {1.0}
    assert "Calling tools" in CHATML.text(sampler.requests[1].tokens)  # so it stands in its next prompt, as nobody sampled it


# ====================================================================== mini-swe-agent


def bash(command: str) -> Message:
    return Message("assistant", calls=(ToolCall("bash", {"command": command}),))


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    return pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed (extra: agents)")


@pytest.mark.usefixtures("mini")
def test_mini_swe_agent_is_one_row_and_begins_another_where_it_drops_a_turn() -> None:
    world = ProgramWorld(function=f"{PROGRAMS / 'look_up_mini.py'}:agent", world=str(PROGRAMS / "look_up_mini.py"))
    assert [tool.name for tool in world.tools] == ["bash"]
    (row,), _ = play(world, PLAIN, bash("A37"), bash("A38"), bash(f"={RIGHT}"))
    assert (row.reward, len(row.turns)) == (1.0, 3)
    rows, _ = play(world, PLAIN, bash("A37"), Message("assistant", "no call"), bash("=00"))
    assert [len(row.turns) for row in rows] == [2, 1] and {row.reward for row in rows} == {0.0}


@pytest.fixture
def shell() -> Iterator[Any]:
    with EmbeddedServer((), code="require") as server, BlockingClient(server.url, server.token) as client:
        session = client.open_session(secrets.token_hex(8))
        yield session
        session.close()


@pytest.mark.usefixtures("mini")
def test_what_mini_swe_agent_runs_is_run_in_the_sandbox(shell: Any) -> None:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    class Boxed(LocalEnvironment):
        """Its own environment, whose commands go to a session."""

        def execute(self, action: dict[str, Any], cwd: str = "", **options: Any) -> dict[str, Any]:
            done = shell.exec(action["command"], language="bash")
            output = {"output": done.stdout + done.stderr, "returncode": done.exit_code, "exception_info": ""}
            self._check_finished(output)
            return output

    def program(task: Any, url: str, key: str) -> float:
        where = {"api_base": url, "api_key": key}
        model = LitellmModel(model_name="openai/policy", model_kwargs=where, cost_tracking="ignore_errors")
        agent = DefaultAgent(model, Boxed(), system_template="You fix things.", instance_template="{{task}}", step_limit=4)
        return float(agent.run(task["question"])["submission"] == "mine\n")

    last = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat it"
    (row,), _ = play(of(program), CHATML, bash("echo mine > it; ls /root /home"), bash(last))
    assert row.reward == 1.0 and not Path("it").exists()
    assert "<returncode>" in row.turns[0].tools[0].result


# ====================================================================== verifiers


def test_an_environment_of_verifiers_drives_the_policy_through_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="verifiers is not installed (extra: agents)")
    monkeypatch.setenv("PYTHONPATH", str(HOME))  # the example imports the tables of its world, as from an installed jaxagent
    world = ProgramWorld(command=(sys.executable, str(PROGRAMS / "look_up_verifiers.py")))
    (row,), _ = play(world, PLAIN, FIRST, SECOND, Message("assistant", RIGHT))
    assert row.reward == 1.0 and row.turns[-1].reason == f"answered '{RIGHT}' in 3 turns"
    assert row.turns[0].tools[0].result == RIGHT
