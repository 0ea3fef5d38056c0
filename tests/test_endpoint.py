"""A model behind an endpoint plays the same worlds by the same rules, and its faults are data."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from asking import NAME, served
from scripted import ScriptedSampler
from serving import serving
from toys import Lone

from jaxagent.__main__ import main
from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import CALL, EOS, PlainTemplate
from jaxagent.data.store import Store
from jaxagent.endpoint import Endpoint, EndpointFailed, EndpointOptions, read_answer
from jaxagent.envs.chain import Chain
from jaxagent.envs.env import Step, World
from jaxagent.journal import read
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, ToolCall, ToolSpec, Trajectory
from sandbox_client import EmbeddedServer, SandboxClient

PLAIN = PlainTemplate()
LOOK = ToolSpec("look", "", {"type": "object", "properties": {"key": {"type": "string"}}})
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.py"


def looks_up(text: str, request: SampleRequest) -> Sequence[int]:
    """A policy that knows `chain`, but stutters first where the question begins with an even digit, and guesses after 9s."""
    question = re.findall(r"<user>(\d\d)([AB]+)", text)[-1]
    results = re.findall(r"<result>(..)", text)
    found = [question[0], *(result for result in results if result.isdigit())]
    if int(question[0]) % 2 == 0 and not results:
        return [CALL, *b"A1", EOS]  # a call that is closed as an answer is
    if len(found) > len(question[1]) or found[-1].startswith("9"):
        return [*found[-1].encode(), EOS]
    return PLAIN.turn(Message("assistant", calls=(ToolCall(question[1][len(found) - 1], {"key": found[-1]}),)))


def play(world: World, player: Any, server: EmbeddedServer | None, tasks: int, **options: Any) -> list[Trajectory]:
    def sandbox() -> SandboxClient | None:
        return SandboxClient(server.url, server.token) if server else None

    rollouts = Rollouts(world, player, sandbox, 5, RolloutOptions(**{"attempts": 1, **options}))
    try:
        named = [(f"valid/{i}", world.task("valid", i)) for i in range(tasks)]
        return [row for group in rollouts.play(named, 1, Sampling(max_tokens=9)) for f in group for row in f.result(60)]
    finally:
        rollouts.close()


def told(row: Trajectory) -> tuple[Any, ...]:
    turns = [
        (t.reward, t.error, t.state, t.parts, t.checks, [(r.name, r.arguments, r.result) for r in t.tools]) for t in row.turns
    ]
    return row.task, row.stop, row.reward, turns


@pytest.fixture(scope="module")
def sandbox() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(functions=(Chain.functions,), code="off") as running:
        yield running


def test_a_served_policy_scores_what_it_scores_here_turn_for_turn(sandbox: EmbeddedServer) -> None:
    world, limits = Chain(), Limits(8, 200)
    here = play(world, Agent(PLAIN, world.tools, ScriptedSampler(PLAIN, looks_up), limits), sandbox, 24)

    async def there() -> list[Trajectory]:
        async with served(PLAIN, ScriptedSampler(PLAIN, looks_up), capacity=64) as (client, _):
            endpoint = Endpoint(world.tools, limits, EndpointOptions(f"{client.url}/v1", NAME))
            return await asyncio.to_thread(play, world, endpoint, sandbox, 24)

    assert [told(row) for row in asyncio.run(there())] == [told(row) for row in here]
    assert 0 < sum(row.solved for row in here) < 24
    assert any(turn.error for row in here for turn in row.turns) and any(row.turns[0].tools for row in here)


# ====================================================================== faults


class Once(Lone):
    """Asks once; the answer is worth 1."""

    tools = (LOOK,)

    async def step(self, action: Message) -> Step:
        return Step(terminated=True, answered=True, reward=1.0)


def reply(said: dict[str, Any] | None = None, finish: str = "stop") -> web.Response:
    message = said or {"role": "assistant", "content": "hi"}
    return web.json_response({"choices": [{"message": message, "finish_reason": finish}]})


def fault(status: int, **error: str) -> web.Response:
    return web.json_response({"error": {"message": "so it is", **error}}, status=status)


def against(
    answers: Callable[[int], web.Response], world: Any = None, tasks: int = 1, key: str = "secret"
) -> tuple[list[Trajectory], Any, Any]:
    """Plays against an endpoint that answers its n-th request so. Returns (rows, the requests' bodies, the player)."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append({**await request.json(), "authorization": request.headers.get("Authorization")})
        return answers(len(bodies) - 1)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    with serving(app) as url:
        options = EndpointOptions(f"{url}/v1", "m", key, {"max_tokens": None, "effort": "low"}, attempts=3, pause_s=0.001)
        player = Endpoint((LOOK,), Limits(3, 100), options)
        return play(world or Once(), player, None, tasks), bodies, player


def test_what_passes_is_tried_again_and_a_request_says_what_was_asked_for() -> None:
    rows, bodies, _ = against(lambda n: (fault(429), web.Response(text="<html>"), reply())[n])
    assert [(row.stop, row.reward) for row in rows] == [(StopReason.ANSWERED, 1.0)] and len(bodies) == 3
    assert bodies[0] == bodies[2]
    assert bodies[0]["effort"] == "low" and "max_tokens" not in bodies[0] and bodies[0]["authorization"] == "Bearer secret"
    assert (bodies[0]["model"], bodies[0]["temperature"], bodies[0]["tools"][0]["function"]["name"]) == ("m", 1.0, "look")


@pytest.mark.parametrize("key", ["secret", ""])
def test_no_login_of_the_machine_is_sent(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password private\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    rows, bodies, _ = against(lambda n: reply(), key=key)
    assert [row.stop for row in rows] == [StopReason.ANSWERED]
    assert [body["authorization"] for body in bodies] == [f"Bearer {key}" if key else None]


def test_the_proxy_of_the_environment_is_asked_and_left_out_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []

    async def proxy(request: web.Request) -> web.Response:
        hosts.append(f"{request.host} {request.headers.get('Proxy-Authorization', '')[:5]}")
        return reply()

    app = web.Application()
    app.router.add_post("/{any:.*}", proxy)
    with serving(app) as url:
        monkeypatch.setenv("http_proxy", url.replace("//", "//me:word@"))
        monkeypatch.setenv("no_proxy", "elsewhere.test")
        options = EndpointOptions("http://policy.test/v1", "m", attempts=1)
        assert play(Once(), Endpoint((LOOK,), Limits(3, 100), options), None, 1)[0].stop is StopReason.ANSWERED
        assert hosts == ["policy.test Basic"]
        rows, *_ = play(Once(), Endpoint((LOOK,), Limits(3, 100), replace(options, url="http://elsewhere.test/v1")), None, 1)
        assert rows.stop is StopReason.INFRA_FAILURE and len(hosts) == 1


def test_what_stays_broke_the_episode_and_is_not_asked_for_ever() -> None:
    rows, bodies, _ = against(lambda n: fault(500), tasks=2)
    assert {row.stop for row in rows} == {StopReason.INFRA_FAILURE} and len(bodies) == 6
    assert "3 attempts: status 500: so it is" in rows[0].error and "secret" not in rows[0].error


def test_an_endpoint_that_does_not_know_the_key_is_asked_no_more() -> None:
    rows, bodies, player = against(lambda n: fault(401), tasks=9)
    assert {row.stop for row in rows} == {StopReason.INFRA_FAILURE} and len(bodies) <= 9
    assert "status 401" in player.fault


def test_a_dialogue_that_is_too_long_has_used_up_its_budget_and_another_refusal_is_a_fault() -> None:
    rows, *_ = against(lambda n: fault(400, code="context_length_exceeded"))
    assert (rows[0].stop, rows[0].turns) == (StopReason.MAX_TOKENS, [])
    rows, bodies, _ = against(lambda n: fault(400, code="bad"))
    assert rows[0].stop is StopReason.INFRA_FAILURE and len(bodies) == 1


# ====================================================================== what is said


def called(*calls: tuple[str, str]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {
        "content": None,
        "tool_calls": [{"id": f"c{i}", "type": "function", "function": f} for i, f in enumerate(functions)],
    }


class Talk(Lone):
    """Answers the first of two calls, the second not; then says what it thinks of turns that cannot be read."""

    tools = (LOOK,)

    def __init__(self) -> None:
        self.heard: list[Message] = []

    async def step(self, action: Message) -> Step:
        self.heard.append(action)
        results = [Message("tool", "52", name="look")] if action.calls else [Message("tool", "??")]
        return Step([*results, Message("user", "go on")], terminated=len(self.heard) == 3)


def test_every_call_has_a_result_and_a_turn_that_cannot_be_read_goes_back_as_text() -> None:
    world = Talk()
    both, wrong = called(("look", '{"key": "1"}'), ("look", "{}")), called(("look", "[1"))
    rows, bodies, _ = against(lambda n: (reply(both, "tool_calls"), reply(wrong), reply())[n], world)
    assert [len(message.calls) for message in world.heard] == [2, 0, 0]
    assert world.heard[1].error == "the arguments of 'look' are no JSON object" == rows[0].turns[1].error
    said = bodies[2]["messages"]
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "tool", "user", "assistant", "user", "user"]
    assert [(m["tool_call_id"], m["content"]) for m in said if m["role"] == "tool"] == [("c0", "52"), ("c1", "")]
    assert "tool_calls" not in said[5] and said[5]["content"] == "look [1"
    assert len({body["seed"] for body in bodies}) == 3  # a turn is not drawn as the one before


@pytest.mark.parametrize(
    ("said", "finish", "error"),
    [
        (called(("find", "{}")), "stop", "no tool 'find'; there are look"),
        ({"content": "and then"}, "length", "the turn did not end within its token budget"),
        ({"content": [{"type": "text", "text": "hi"}]}, "stop", ""),
        ({"content": None, "refusal": "no"}, "stop", ""),
    ],
)
def test_answers_are_read_as_turns_of_a_policy_here_would_be(said: dict[str, Any], finish: str, error: str) -> None:
    action, _ = read_answer({"choices": [{"message": said, "finish_reason": finish}]}, (LOOK,))
    assert action.error == error and not action.calls


def test_an_answer_of_another_shape_is_a_fault() -> None:
    with pytest.raises(EndpointFailed, match="no chat completion"):
        read_answer({"choices": [{"text": "hi"}]}, ())


# ====================================================================== the command


def evaluated(url: str, *more: str) -> int:
    where = [f"--config={QUICKSTART}", f"--endpoint={url}/v1", f"--model={NAME}", "--attempts=1", "--json"]
    return main(["eval", *where, "--tasks=6", "--rollouts=2", "--concurrency=3", "--config.rollout.attempts=1", *more])


def test_an_evaluation_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def write(text: str, request: SampleRequest) -> Sequence[int]:
        asked.append(text)
        if len(asked) == 9:
            raise RuntimeError("the machine goes down")
        return looks_up(text, request)

    async def twice() -> tuple[int, int]:
        async with served(PLAIN, ScriptedSampler(PLAIN, write), capacity=64) as (client, _):
            assert await asyncio.to_thread(evaluated, client.url) == 0
            before = len(asked)
            assert await asyncio.to_thread(evaluated, client.url) == 0
            between = len(asked)
            assert (
                await asyncio.to_thread(evaluated, client.url, f"--to={tmp_path / 'to'}", "--config.rollout.deadline_s=99") == 0
            )
            return between - before, len(asked) - between

    again, other = asyncio.run(twice())
    printed = capsys.readouterr()
    first, second, _ = (json.loads("{" + text) for text in re.split(r"(?m)^\{", printed.out)[1:])
    assert (first["broken"], second["broken"]) == (1, 0) and second["n"] == 6
    assert 0 < again <= 8 < other  # only what broke; with another setting, everything
    assert "11 episodes are there already" in printed.err and "1 episodes broke" in printed.err
    (folder,), (other_folder,) = (tmp_path / "evals").iterdir(), (tmp_path / "to").iterdir()
    assert json.loads((folder / "table.json").read_text()) == second and folder.name != other_folder.name
    kept = [record for path in (folder / "journal").iterdir() for record in read(path)]
    assert len(kept) == 12 and all(StopReason(row["stop"]).counts for record in kept for row in record["rows"])
    assert len(Store(folder).read("episodes")) == 12
    assert json.loads((folder / "settings.json").read_text())["policy"]["model"] == NAME


def test_the_flags_of_an_endpoint_belong_together(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    faults = {
        ("--endpoint=http://x/v1",): "--endpoint and --model belong together",
        ("--endpoint=x", "--model=m"): "a URL is wanted",
        ("--endpoint=http://x/v1", "--model=m", "--key-env=NOT_SET"): "not set",
        ("--endpoint=http://x/v1", "--model=m", "--fields=[1]"): "a JSON object is wanted",
        (): "give --endpoint and --model too, or --workdir",
    }
    for flags, words in faults.items():
        assert main(["eval", f"--config={QUICKSTART}", *flags]) == 2
        assert words in capsys.readouterr().err
