"""`jaxagent eval` against a server that others wrote: `transformers serve` with a checkpoint of ours (extra: servers)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxagent.__main__ import main
from jaxagent.data.store import Store
from jaxagent.models import hf
from jaxagent.models.transformer import params_of
from jaxagent.types import StopReason

sys.path.insert(0, str(Path(__file__).parent / "chat"))
from made import make_tokenizer

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.py"
READY_S = 300
BEGIN, END, STOP = "<tool_call>", "</tool_call>", "<|im_end|>"
CALL, UNKNOWN, BROKEN = '{"name": "A", "arguments": {"key": "37"}}', '{"name": "Z", "arguments": {}}', '{"name": "A", "arg'
AT_LENGTH = " and so on"
# What may follow what, each as likely as the others; "" begins a turn.
FOLLOWS = {
    "": ("37", BEGIN, AT_LENGTH),
    "37": (STOP,),
    BEGIN: (CALL, CALL, UNKNOWN, BROKEN),
    **dict.fromkeys((CALL, UNKNOWN, BROKEN), (END,)),
    END: (STOP, STOP, BEGIN),
    AT_LENGTH: (AT_LENGTH,),
}


def checkpoint(folder: Path) -> str:
    """A policy that knows nothing but the table above: its weights are that."""
    tokenizer = make_tokenizer("chatml")
    tokenizer.add_tokens([text for text in FOLLOWS if text not in tokenizer.get_vocab()])
    begins = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], add_generation_prompt=True, return_dict=False)[
        -1
    ]
    size = len(tokenizer)
    head = np.full((size, size), -30.0, np.float32)  # to, from
    for before, several in FOLLOWS.items():
        for after in several:
            to, at = tokenizer.convert_tokens_to_ids(after), tokenizer.convert_tokens_to_ids(before) if before else begins
            head[to, at] = np.log(several.count(after))
    graph, params = params_of(tiny.policy(tiny.config(vocab_size=size, width=size, tied_head=False)))
    params = jax.tree.map(jnp.zeros_like, params)
    params |= {"embed": jnp.eye(size), "norm": jnp.full(size, size**-0.5), "head": jnp.asarray(head)}
    hf.save(nnx.merge(graph, params), folder)
    tokenizer.save_pretrained(folder)
    said = {"do_sample": True, "top_k": 0, "eos_token_id": tokenizer.convert_tokens_to_ids([STOP])}  # as `jaxagent export` does
    (folder / "generation_config.json").write_text(json.dumps(said))
    return str(folder)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of the server and the name of its model."""
    for module in ("torch", "fastapi", "openai"):
        pytest.importorskip(module, reason=f"{module} is not installed (extra: servers)")
    folder = tmp_path_factory.mktemp("foreign")
    name = checkpoint(folder / "policy")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", name, "--device=cpu", "--host=127.0.0.1"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--port={port}"], env=environment, stdout=log, stderr=log)
    try:
        until = time.monotonic() + READY_S
        while process.poll() is None and time.monotonic() < until and not is_there(f"http://127.0.0.1:{port}/health"):
            time.sleep(0.5)
        assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()[-3000:]
        yield f"http://127.0.0.1:{port}", name
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def is_there(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
        return bool(reply.status == 200)
    return False


def test_a_checkpoint_of_ours_plays_a_world_of_ours_behind_a_server_of_others(
    foreign: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, name = foreign
    asked = [f"--config={QUICKSTART}", f"--endpoint={url}/v1", f"--model={name}", f"--to={tmp_path}", "--max-tokens=12"]
    asked += ["--tasks=4", "--rollouts=2", "--concurrency=1", "--attempts=2", "--config.rollout.attempts=1"]
    tables, said = [], []
    for _ in range(2):
        assert main(["eval", *asked, "--json", "--config.agent.max_turns=2"]) == 0
        printed = capsys.readouterr()
        tables.append(json.loads(printed.out))
        said.append(printed.err)
    (folder,) = tmp_path.iterdir()
    rows = Store(folder).read("episodes")
    broken = [row for row in rows if not row.stop.counts]
    assert len(rows) == 8 and tables[0] == tables[1]
    assert tables[0]["broken"] == len(broken) < 4
    assert all("status 500" in row.error for row in broken)  # so the server answers to a call that is no JSON
    assert f"{8 - len(broken)} episodes are there already" in said[1] and said[0].count("episodes are there") == 0

    turns = [turn for row in rows if row.stop.counts for turn in row.turns]
    calls = [turn for turn in turns if turn.tools and not turn.error]
    assert calls and all(call.outcome == "ok" for turn in calls for call in turn.tools)
    faults = {turn.error for turn in turns}
    assert faults == {"", "the turn did not end within its token budget", "no tool 'Z'; there are A, B"}
    answers = [turn for turn in turns if turn.text == "37"]
    assert answers and all(row.stop == StopReason.ANSWERED for row in rows if row.turns and row.turns[-1].text == "37")
