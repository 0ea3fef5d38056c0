"""An agent program for the tasks of `chain`, with nothing but the standard library: the loop that every tool user has.

As a command it reads the task from its standard input and writes what it earned to a file.
As a function it is `agent(task, base_url, api_key)`.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

from jaxagent.envs.chain import session_functions, tables_of

KEY = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TOOLS = [{"type": "function", "function": {"name": name, "description": "", "parameters": KEY}} for name in "AB"]


def ask(base_url, api_key, messages):
    body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


def agent(task, base_url, api_key):
    tools = session_functions({"tools": "AB", "seed": task["seed"], "flaky": 0.15})
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(8):
        said = ask(base_url, api_key, messages)
        messages.append(said)
        if not said.get("tool_calls"):
            break
        for call in said["tool_calls"]:
            key = json.loads(call["function"]["arguments"]).get("key", "")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": tools[call["function"]["name"]](key)})
    right, tables = task["question"][:2], tables_of("AB", task["seed"])
    for name in task["question"][2:]:
        right = tables[name][int(right)]
    answer = messages[-1].get("content")
    return {"reward": float(answer == right), "reason": f"answered {answer!r}, right was {right!r}"}


if __name__ == "__main__":
    said = agent(json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    Path(os.environ["JAXAGENT_RESULT"]).write_text(json.dumps(said))
