"""Policies behind agent frameworks learn: a table of logits, the frameworks as they come, their doors, real credit.

The task is to press the button that is asked for, once, and to say so. `configs/program_agents.py` trains a decoder so.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from tabular import PLAIN, Table, rows_of, success
from test_programs_frameworks import PROGRAMS

from jaxagent.agent import Limits
from jaxagent.algos.table import TABLE
from jaxagent.chat.plain import CALL, END_CALL
from jaxagent.credit import assign
from jaxagent.door.session import Slots
from jaxagent.envs.program import ProgramWorld
from jaxagent.programs import Programs
from jaxagent.types import Group, Sampling, Trajectory

pytestmark = [pytest.mark.learning, pytest.mark.filterwarnings("ignore")]
QUESTIONS = ("A", "B")
PATIENCE_S = 600.0  # of clients, on a machine that has other things to do
Program = Callable[[Any, str, str], Any]


def call(text: str) -> list[int]:
    return [CALL, *text.encode(), END_CALL]


def openai_agents() -> tuple[Program, list[Any], str]:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed (extra: agents)")
    openai = pytest.importorskip("openai", reason="openai is not installed (extra: agents)")
    agents.set_tracing_disabled(True)

    async def program(task: Any, url: str, key: str) -> float:
        pressed: list[str] = []

        @agents.function_tool
        def A() -> str:
            pressed.append("A")
            return "A"

        @agents.function_tool
        def B() -> str:
            pressed.append("B")
            return "B"

        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE_S) as client:
            model = agents.OpenAIResponsesModel("policy", client)
            await agents.Runner.run(agents.Agent("presses", tools=[A, B], model=model), task["question"], max_turns=9)
        return float("".join(pressed) == task["question"])

    return program, [call("A"), call("B"), "ok"], r"<result>([AB])<turn>"


def mini_swe_agent() -> tuple[Program, list[Any], str]:
    pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed (extra: agents)")
    names = ProgramWorld(function=f"{PROGRAMS / 'look_up_mini.py'}:agent").function.__globals__  # type: ignore[union-attr]

    class Buttons:
        def __init__(self) -> None:
            self.pressed = ""

        def execute(self, action: dict[str, str], cwd: str = "") -> dict[str, Any]:
            if action["command"] == "=":
                raise names["Submitted"]({"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}})
            self.pressed += action["command"]
            return {"output": action["command"]}

        def get_template_vars(self, **more: Any) -> dict[str, Any]:
            return more

        def serialize(self) -> dict[str, Any]:
            return {}

    def program(task: Any, url: str, key: str) -> float:
        where = {"api_base": url, "api_key": key, "num_retries": 0, "max_retries": 0, "timeout": PATIENCE_S}
        model = names["LitellmModel"](model_name="openai/policy", model_kwargs=where, observation_template="{{output.output}}")
        buttons, words = Buttons(), {"system_template": "press", "instance_template": "{{task}}"}
        names["DefaultAgent"](model, buttons, step_limit=3, **words).run(task["question"])
        return float(buttons.pressed == task["question"])

    return program, [call("bash A"), call("bash B"), call("bash=")], r"<result>([AB])<turn>"


def smolagents() -> tuple[Program, list[Any], str]:
    smol = pytest.importorskip("smolagents", reason="smolagents is not installed (extra: agents)")

    def program(task: Any, url: str, key: str) -> float:
        pressed: list[str] = []

        def button(label: str) -> Any:
            class Button(smol.Tool):
                name, description, output_type = label, "A button.", "string"
                inputs: dict[str, Any] = {}  # noqa: RUF012

                def forward(self) -> str:
                    pressed.append(label)
                    return label

            return Button()

        model = smol.OpenAIModel("policy", api_base=url, api_key=key, client_kwargs={"max_retries": 0, "timeout": PATIENCE_S})
        agent = smol.ToolCallingAgent([button("A"), button("B")], model, max_steps=3, verbosity_level=0)
        agent.run(task["question"])
        return float("".join(pressed) == task["question"])

    return program, [call("A"), call("B"), call("final_answer ok")], r"Observation:\n([AB])<"


def episodes(program: Program, policy: Table, step: int, rollouts: int) -> list[Group]:
    """A group for every question, by way of HTTP."""
    world = ProgramWorld(function=f"{PROGRAMS / 'look_up.py'}:agent")
    world.function = program

    async def whole() -> list[Group]:
        programs = Programs(Slots(PLAIN, policy, 64), Limits(max_turns=3, max_tokens=30_000))

        async def one(question: str, number: int) -> list[Trajectory]:
            rows = [Trajectory(question, 0, f"{step}/{question}", number)]
            task = {"id": question, "seed": 0, "difficulty": "", "question": question}
            await programs.play(world.episode("", None), task, rows, (step, number), Sampling(max_tokens=30))
            return rows

        try:
            played = await asyncio.gather(*(one(question, i) for question in QUESTIONS for i in range(rollouts)))
        finally:
            await programs.close()
        names = [f"{step}/{question}" for question in QUESTIONS]
        return [Group.of(name, [row for rows in played for row in rows if row.group == name]) for name in names]

    return asyncio.run(whole())


@pytest.mark.parametrize("framework", [openai_agents, mini_swe_agent, smolagents])
def test_a_policy_behind_a_framework_learns_what_it_is_asked_for(framework: Callable[[], Any]) -> None:
    program, turns, result = framework()

    def state_of(text: str) -> str:
        """The question and what has been pressed since."""
        asked = re.findall(r"\b([AB])\b", text.rpartition("<user>New task:\n")[2] if "New task" in text else text)[0]
        return asked + "".join(re.findall(result, text))

    policy = Table(turns, state_of, seed=0)
    curve = []
    for step in range(6):
        groups = episodes(program, policy, step, rollouts=12)
        assert all(row.stop.counts for row in rows_of(groups))
        curve.append(success(groups))
        assign(groups, TABLE["rloo"])
        policy.learn(rows_of(groups), 30.0)
    assert curve[0] < 0.4 and curve[-1] > 0.7, curve  # at random it is 1/9
