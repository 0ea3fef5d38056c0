"""The tasks of `chain` played by the OpenAI Agents SDK (`pip install openai-agents`): its agent, its loop, its tools.

As a command it finds the policy by OPENAI_BASE_URL and OPENAI_API_KEY, as any program of that SDK does; as a function it is
`agent(task, base_url, api_key)`, and `responses` asks /v1/responses where that one asks /v1/chat/completions.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI

from jaxagent.envs.chain import session_functions, tables_of

set_tracing_disabled(True)


async def agent(task, base_url, api_key, model=OpenAIChatCompletionsModel):
    functions = session_functions({"tools": "AB", "seed": task["seed"], "flaky": 0.15})
    history = []

    @function_tool
    def A(key: str) -> str:
        """Looks up a two-digit key in table A."""
        history.append(functions["A"](key))
        return history[-1]

    @function_tool
    def B(key: str) -> str:
        """Looks up a two-digit key in table B."""
        history.append(functions["B"](key))
        return history[-1]

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=600.0) as client:
        player = Agent("look-up", tools=[A, B], model=model("policy", client))
        try:
            answer = (await Runner.run(player, task["question"], max_turns=8)).final_output
        except (MaxTurnsExceeded, ModelBehaviorError) as error:
            answer = f"nothing: {error}"
    right, tables = task["question"][:2], tables_of("AB", task["seed"])
    for name in task["question"][2:]:
        right = tables[name][int(right)]
    looked_up = float(answer == right and right in history)
    return {
        "reward": float(answer == right),
        "reason": f"answered {answer!r}, right was {right!r}",
        "checks": {"looked_up": looked_up},
    }


async def responses(task, base_url, api_key):
    return await agent(task, base_url, api_key, OpenAIResponsesModel)


if __name__ == "__main__":
    said = asyncio.run(agent(json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
    Path(os.environ["JAXAGENT_RESULT"]).write_text(json.dumps(said))
