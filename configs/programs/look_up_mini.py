"""The tasks of `chain` played by mini-swe-agent (`pip install mini-swe-agent`): its loop, its one tool, its messages.

What the policy takes for a shell are the tables: `A37` looks up 37 in table A, `=52` submits 52. No shell runs anywhere; one
that does belongs into a sandbox session. As a command it finds the policy by OPENAI_BASE_URL and OPENAI_API_KEY.

As a world (`env.options.world=look_up_mini.py`) it is `chain` in these words, for the warm-up.
"""

import json
import os
import sys
from pathlib import Path

from jaxagent.envs.chain import Chain, session_functions, tables_of
from jaxagent.types import Message, ToolCall, ToolSpec

# Before it is imported: no price list from the network, no prices of a model that has none, no banner.
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", MSWEA_COST_TRACKING="ignore_errors", MSWEA_SILENT_STARTUP="1")

from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import Submitted
from minisweagent.models.litellm_model import LitellmModel

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


class make_world(Chain):
    """`chain`, whose demonstrator speaks as mini-swe-agent has it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.tools = (ToolSpec("bash", "Execute a bash command", SCHEMA),)

    def demonstrate(self, task, rng):
        said = [Message("system", "look up"), *super().demonstrate(task, rng)]
        spoken = [f"{m.calls[0].name}{m.calls[0].arguments['key']}" if m.calls else f"={m.content}" for m in said]
        return [
            Message("assistant", calls=(ToolCall("bash", {"command": command}),)) if m.role == "assistant" else m
            for m, command in zip(said, spoken, strict=True)
        ]


def agent(task, base_url, api_key):
    functions = session_functions({"tools": "AB", "seed": task["seed"], "flaky": 0.15})

    class Tables:
        def execute(self, action, cwd=""):
            name, key = action["command"][:1], action["command"][1:]
            if name == "=":
                raise Submitted({"role": "exit", "content": key, "extra": {"exit_status": "Submitted", "submission": key}})
            return {"output": functions[name](key) if name in functions else "??", "returncode": 0}

        def get_template_vars(self, **more):
            return more

        def serialize(self):
            return {}

    where = {"api_base": base_url, "api_key": api_key, "num_retries": 0, "max_retries": 0}
    model = LitellmModel(
        model_name="openai/policy", model_kwargs=where, observation_template="{{output.output}}", format_error_template="??"
    )
    words = {"system_template": "look up", "instance_template": "{{task}}"}
    said = DefaultAgent(model, Tables(), step_limit=8, **words).run(task["question"])
    right, tables = task["question"][:2], tables_of("AB", task["seed"])
    for name in task["question"][2:]:
        right = tables[name][int(right)]
    answer = said["submission"]
    return {"reward": float(answer == right), "reason": f"{said['exit_status']} {answer!r}, right was {right!r}"}


if __name__ == "__main__":
    said = agent(json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    Path(os.environ["JAXAGENT_RESULT"]).write_text(json.dumps(said))
