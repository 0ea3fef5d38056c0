"""The tasks of `chain` as an environment of `verifiers` (`pip install verifiers`): its taskset, its reward, its rollout.

A command: the model is the endpoint that OPENAI_BASE_URL and OPENAI_API_KEY name, as in any evaluation of that library, whose
interception server stands between its harness and our door. The reward is the trace's.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI

from jaxagent.envs.chain import session_functions, tables_of

__all__ = ["LookUp", "Loop"]
KEY = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TOOLS = [{"type": "function", "function": {"name": name, "description": "", "parameters": KEY}} for name in "AB"]


class Question(vf.TaskData):
    seed: int


class LookUp(vf.Task[Question]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        value, tables = self.data.prompt[:2], tables_of("AB", self.data.seed)
        for name in self.data.prompt[2:]:
            value = tables[name][int(value)]
        return float(trace.last_reply == value)


class Loop(vf.Harness[vf.HarnessConfig]):
    """Asks, calls, asks again, in this process; every model call goes through the endpoint that the rollout gives it."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        tools = session_functions({"tools": "AB", "seed": data.seed, "flaky": 0.15})
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(8):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=TOOLS)
                messages.append(reply.choices[0].message.model_dump(exclude_none=True))
                for call in reply.choices[0].message.tool_calls or ():
                    found = tools[call.function.name](json.loads(call.function.arguments).get("key", ""))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
                if messages[-1]["role"] == "assistant":
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def main(task):
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    harness, here = vf.HarnessConfig(id="look_up_verifiers"), vf.SubprocessConfig()
    config = vf.AgentConfig(model="policy", client=client, harness=harness, runtime=here)
    async with vf.Agent(config) as agent:
        trace = await agent.run(LookUp(Question(prompt=task["question"], seed=task["seed"])))
    if trace.has_error:
        sys.exit(f"the rollout failed: {trace.last_error}")
    return {"reward": trace.reward, "reason": f"answered {trace.last_reply!r} in {len(trace.assistant_messages)} turns"}


if __name__ == "__main__":
    said = asyncio.run(main(json.loads(sys.stdin.readline())))
    Path(os.environ["JAXAGENT_RESULT"]).write_text(json.dumps(said))
