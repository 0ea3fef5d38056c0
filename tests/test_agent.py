"""One episode, token by token, with a policy that follows a script and toy worlds that need no sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted import ScriptedSampler, episode, script
from toys import TASK, Lone

from jaxagent.agent import Agent, Limits
from jaxagent.chat.plain import CALL, END_CALL, EOS, RESULT, TURN, USER, PlainTemplate
from jaxagent.data.store import audit
from jaxagent.envs.env import Step, Task
from jaxagent.tools import Tool, dispatch, tool
from jaxagent.types import Message, SampleRequest, Sampling, StopReason, ToolCall, ToolSpec, Trajectory, by_rollout

PLAIN = PlainTemplate()


@dataclass
class Told(Lone):
    """A world that gives the steps it was made of, one after another, and remembers what was done."""

    steps: Sequence[Step]
    tools: Sequence[ToolSpec] = (ToolSpec("A", "", {"type": "object", "properties": {"key": {}}}),)
    actions: list[Message] = field(default_factory=list)

    async def reset(self, task: Task, seed: int) -> Step:
        return self.steps[0]

    async def step(self, action: Message) -> Step:
        self.actions.append(action)
        return self.steps[len(self.actions)]


def play(world: Any, sampler: ScriptedSampler, **options: Any) -> list[Trajectory]:
    return asyncio.run(episode(world, TASK, sampler, **options))


def user(text: str, **more: Any) -> Step:
    return Step([Message("user", text)], **more)


def result(text: str, **more: Any) -> Step:
    return Step([Message("tool", text, name="A")], **more)


def look(key: str) -> Message:
    return Message("assistant", calls=(ToolCall("A", {"key": key}),))


def answer(text: str) -> Message:
    return Message("assistant", text)


END = Step(terminated=True, answered=True, reward=1.0, reason="right")

# ====================================================================== the row


def test_the_row_holds_exactly_what_was_fed_and_sampled() -> None:
    world = Told([user("q", state="s0"), result("52", reward=0.5, reason="found", state="s1"), END])
    sampler = script(PLAIN, look("3"), answer("52"))
    (row,) = play(world, sampler)
    fed, call, observed, said = [USER, *b"q", TURN], [CALL, *b"A3", END_CALL], [RESULT, *b"52", TURN], [*b"52", EOS]
    assert row.tokens == [*fed, *call, *observed, *said]
    assert row.mask == [False] * 3 + [True] * 4 + [False] * 4 + [True] * 3
    assert row.turn == [-1] * 3 + [0] * 4 + [-1] * 4 + [1] * 3
    assert row.version == [-1] * 3 + [7] * 4 + [-1] * 4 + [7] * 3
    assert row.logprob == [0.0] * 3 + [-0.25, -0.5, -0.75, -1.0] + [0.0] * 4 + [-0.25, -0.5, -0.75]
    assert (row.stop, row.error, row.waiting) == (StopReason.ANSWERED, "", "")
    assert [(t.reward, t.reason, t.state, t.text) for t in row.turns] == [
        (0.5, "found", "s0", "<call>A3</call>"),
        (1.0, "right", "s1", "52<eos>"),
    ]
    assert world.actions == [look("3"), answer("52")]


def test_the_sampler_is_asked_only_for_what_it_does_not_hold_and_let_go_in_the_end() -> None:
    sampler = script(PLAIN, look("3"), answer("52"))
    sampling = Sampling(temperature=0.5, max_tokens=9)
    play(Told([user("q"), result("52"), END]), sampler, sampling=sampling)
    first, second = sampler.requests
    assert (first.start, first.tokens) == (0, (USER, *b"q", TURN))
    assert (second.start, second.tokens) == (7, (RESULT, *b"52", TURN))
    assert {(r.trajectory, r.key, r.stop, r.group, r.sampling) for r in (first, second)} == {
        ("group#0.1/agent", (1, 2), PLAIN.stop, "group", sampling)
    }
    assert sampler.released == ["group#0.1/agent"]


# ====================================================================== why an episode ends


def test_the_world_may_end_an_episode_that_was_not_answered() -> None:
    (row,) = play(Told([user("q"), Step(terminated=True, reward=1.0)]), script(PLAIN, look("3")))
    assert (row.stop, row.reward) == (StopReason.ENV_TERMINATED, 1.0)


def test_the_budget_of_turns_ends_an_episode_before_the_next_observation_is_fed() -> None:
    (row,) = play(Told([user("q"), *[result("52")] * 9]), script(PLAIN, look("3")), limits=Limits(3, 400))
    assert (row.stop, len(row.turns)) == (StopReason.MAX_TURNS, 3)
    assert row.tokens[-1] == END_CALL


@pytest.mark.parametrize(("max_tokens", "turns"), [(3 + 6, 1), (3 + 4 + 4 + 6, 2), (3 + 4 + 4 + 6 - 1, 1), (3 + 6 - 1, 0)])
def test_the_budget_of_tokens_always_leaves_room_for_a_whole_turn(max_tokens: int, turns: int) -> None:
    world = Told([user("q"), *[result("52")] * 9])
    (row,) = play(world, script(PLAIN, look("3")), limits=Limits(9, max_tokens), sampling=Sampling(max_tokens=6))
    assert (row.stop, len(row.turns)) == (StopReason.MAX_TOKENS, turns)
    assert len(row.tokens) <= max_tokens


@pytest.mark.parametrize("when", [0, 1])
def test_a_world_that_says_it_broke_truncates_the_episode(when: int) -> None:
    broken = Step(truncated=True, error="the database is gone")
    (row,) = play(Told([user("q"), broken][1 - when :] if when == 0 else [user("q"), broken]), script(PLAIN, look("3")))
    assert (row.stop, row.error, len(row.turns)) == (StopReason.ENV_TRUNCATED, "the database is gone", when)
    assert not row.stop.counts


# ====================================================================== malformed turns


def test_a_malformed_call_is_told_to_the_policy_and_the_episode_goes_on() -> None:
    world = Told([user("q"), result("??"), END])
    (row,) = play(world, script(PLAIN, [CALL, *b"nope", END_CALL], answer("52")))
    assert row.turns[0].error == world.actions[0].error == "no tool 'nope'; there are A"
    assert row.turns[1].error == ""
    assert (row.stop, row.reward) == (StopReason.ANSWERED, 1.0)
    assert PLAIN.text(row.tokens) == "<user>q<turn><call>nope</call><result>??<turn>52<eos>"


def test_a_turn_that_runs_out_of_its_budget_is_an_error_and_the_episode_goes_on() -> None:
    world = Told([user("q"), result("??"), END])
    (row,) = play(world, script(PLAIN, [*b"never ending"], answer("5")), sampling=Sampling(max_tokens=5))
    assert row.turns[0].error == "the turn did not end within its token budget"
    assert PLAIN.text(row.tokens) == "<user>q<turn>never<result>??<turn>5<eos>"
    assert row.mask == [False] * 3 + [True] * 5 + [False] * 4 + [True] * 2


# ====================================================================== tools


class Workshop(Lone):
    """A world of Python tools: every call of a turn is answered, and a text ends the episode."""

    def __init__(self, *tools: Tool):
        self.bench = tools
        self.tools = tuple(t.spec for t in tools)

    async def step(self, action: Message) -> Step:
        if action.error:
            return result(action.error)
        if not action.calls:
            return END
        records = [await dispatch(self.bench, call) for call in action.calls]
        return Step([Message("tool", record.result, name=record.name) for record in records], tools=records)


class Lines(PlainTemplate):
    """The plain template for turns of several calls, one per line."""

    def turn(self, message: Message) -> list[int]:
        lines = "\n".join(f"{call.name} {call.arguments['key']}" for call in message.calls)
        return [CALL, *lines.encode(), END_CALL] if lines else super().turn(message)

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> Message:
        if ids[0] != CALL:
            return super().parse(ids, tools)
        calls = [line.split(" ", 1) for line in bytes(ids[1:-1]).decode().split("\n")]
        return Message("assistant", calls=tuple(ToolCall(name, {"key": key}) for name, key in calls))


def double(key: str) -> str:
    """Says it twice."""
    return key * 2


def crash(key: str) -> str:
    """Never works."""
    raise LookupError(f"no {key}")


def test_several_calls_of_a_turn_are_all_run_and_all_observed() -> None:
    template = Lines()
    calls = Message("assistant", calls=(ToolCall("double", {"key": "x"}), ToolCall("double", {"key": "y"})))
    (row,) = play(Workshop(tool(double)), script(template, calls, answer("done")))
    assert [(r.name, r.arguments, r.outcome, r.result) for r in row.turns[0].tools] == [
        ("double", {"key": "x"}, "ok", "xx"),
        ("double", {"key": "y"}, "ok", "yy"),
    ]
    assert "<result>xx<result>yy<turn>done<eos>" in template.text(row.tokens)
    assert len(row.turns) == 2


def test_a_tool_that_fails_is_an_observation_and_the_others_of_its_turn_still_run() -> None:
    template = Lines()
    calls = Message(
        "assistant", calls=(ToolCall("crash", {"key": "x"}), ToolCall("lost", {"key": "x"}), ToolCall("double", {"key": "y"}))
    )
    (row,) = play(Workshop(tool(crash), tool(double)), script(template, calls, answer("done")))
    assert [record.outcome for record in row.turns[0].tools] == ["error", "unknown_tool", "ok"]
    text = template.text(row.tokens)
    assert "<result>error: LookupError: no x<result>error: no tool 'lost'; there are crash, double<result>yy<turn>" in text
    assert row.stop is StopReason.ANSWERED


# ====================================================================== several seats


class Bargain(Lone):
    """Two seats: a buyer opens, a seller answers, and so on; the buyer's fourth word ends it, and each gets a share."""

    def __init__(self, ending: str = "agent"):
        self.ending = ending
        self.said: list[str] = []

    async def reset(self, task: Task, seed: int) -> Step:
        return user("buy", agent="buyer")

    async def step(self, action: Message) -> Step:
        self.said.append(action.content)
        if len(self.said) == 3:
            return Step(terminated=True, reward=0.75, reason="bought", rewards={"seller": 0.25}, agent=self.ending)
        other = "seller" if len(self.said) % 2 else "buyer"
        return user(f"{action.content}?", agent=other, reward=0.125)


@pytest.mark.parametrize("ending", ["agent", "buyer", "seller"])
def test_every_seat_has_a_row_of_its_own_and_the_end_makes_no_other(ending: str) -> None:
    def write(text: str, request: SampleRequest) -> Sequence[int]:
        return PLAIN.turn(answer({"buyer": "b", "seller": "s"}[request.trajectory.split("/")[1]]))

    sampler = ScriptedSampler(PLAIN, write)
    buyer, seller = play(Bargain(ending), sampler)
    assert (buyer.role, seller.role) == ("buyer", "seller")
    assert PLAIN.text(buyer.tokens) == "<user>buy<turn>b<eos><user>s?<turn>b<eos>"
    assert PLAIN.text(seller.tokens) == "<user>b?<turn>s<eos>"
    assert [turn.reward for turn in buyer.turns] == [0.125, 0.75]
    assert [turn.reward for turn in seller.turns] == [0.125 + 0.25]
    assert {row.stop for row in (buyer, seller)} == {StopReason.ENV_TERMINATED}
    assert {(row.task, row.seed, row.group, row.rollout) for row in (buyer, seller)} == {("toy/0", 3, "group", 0)}
    assert sampler.released == ["group#0.1/buyer", "group#0.1/seller"]


def test_seats_draw_independently_of_each_other() -> None:
    sampler = script(PLAIN, answer("x"))
    play(Bargain(), sampler)
    keys = {request.trajectory: request.key for request in sampler.requests}
    assert len(set(keys.values())) == 2


def test_a_reward_for_a_seat_that_never_acted_is_not_a_failure() -> None:
    (row,) = play(Told([user("q", agent="white"), Step(terminated=True, rewards={"black": -1.0})]), script(PLAIN, answer("x")))
    assert (row.stop, row.reward) == (StopReason.ENV_TERMINATED, 0.0)


# ====================================================================== several segments


class Forgetful(PlainTemplate):
    """The plain template, which here forgets all but what users say once one speaks again."""

    def restart(self, told: Sequence[Message], messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        if all(message.role != "user" for message in messages):
            return []
        return self.prompt([message for message in (*told, *messages) if message.role == "user"], tools)


def taking(*turns: Message) -> ScriptedSampler:
    """A policy that takes these turns one after another, whatever row they are in."""
    left = list(turns)
    return ScriptedSampler(Forgetful(), lambda text, request: PLAIN.turn(left.pop(0)))


def test_a_conversation_that_is_begun_anew_goes_on_in_a_further_row_of_its_rollout() -> None:
    world = Told([user("p", state="s0"), result("52", reward=0.25), user("q", reward=0.5), result("8", reward=0.125), END])
    sampler = taking(look("3"), answer("52"), look("4"), answer("8"))
    first, second = play(world, sampler)
    assert PLAIN.text(first.tokens) == "<user>p<turn><call>A3</call><result>52<turn>52<eos>"
    assert PLAIN.text(second.tokens) == "<user>p<user>q<turn><call>A4</call><result>8<turn>8<eos>"
    assert second.mask == [False] * 5 + [True] * 4 + [False] * 3 + [True] * 2
    assert (first.segment, second.segment) == (0, 1)
    assert (first.group, first.rollout, first.role) == (second.group, second.rollout, second.role)
    assert [turn.reward for turn in first.turns + second.turns] == [0.25, 0.5, 0.125, 1.0]
    assert (first.reward, second.reward, first.elsewhere, second.elsewhere) == (1.875, 1.875, 1.125, 0.75)
    assert (first.stop, second.stop) == (StopReason.ANSWERED, StopReason.ANSWERED)
    assert by_rollout([first, second]) == [[first, second]]


def test_the_sampler_lets_the_old_row_go_and_draws_anew_in_the_next() -> None:
    sampler = taking(answer("a"), answer("b"), answer("c"))
    play(Told([user("p"), user("q"), user("r"), END]), sampler)
    names = ["group#0.1/agent", "group#0.1/agent+1", "group#0.1/agent+2"]
    assert [request.trajectory for request in sampler.requests] == names
    assert sampler.released == names
    assert [request.start for request in sampler.requests] == [0, 0, 0]
    assert len({request.key for request in sampler.requests}) == 3
    assert [request.group for request in sampler.requests] == ["group", "", ""]  # nobody else has these prompts


def test_the_budget_of_turns_is_of_all_segments_and_that_of_tokens_of_each() -> None:
    endless = Told([user("p"), *[user("q")] * 9])
    rows = play(endless, taking(*[answer("a")] * 9), limits=Limits(3, 400))
    assert [(row.stop, len(row.turns)) for row in rows] == [(StopReason.MAX_TURNS, 1)] * 3
    rows = play(
        Told([user("p"), *[user("q")] * 9]), taking(*[answer("a")] * 9), limits=Limits(9, 7), sampling=Sampling(max_tokens=2)
    )
    # <user>p<turn> and <user>p<user>q<turn> leave room for two more tokens, <user>p<user>q<user>q<turn> does not
    assert [(row.stop, len(row.tokens)) for row in rows] == [(StopReason.MAX_TOKENS, 5), (StopReason.MAX_TOKENS, 7)]


def test_a_turn_that_could_not_be_read_is_told_as_it_was_written() -> None:
    told: list[Message] = []

    class Listening(Forgetful):
        def restart(self, known: Sequence[Message], messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
            told[:] = known
            return []

    sampler = script(Listening(), [CALL, *b"nope", END_CALL], answer("52"))
    play(Told([user("q"), result("??"), END]), sampler)
    assert told == [Message("user", "q"), Message("assistant", "<call>nope")]


def test_seats_and_segments_keep_their_rows_apart() -> None:
    class Crossed(Bargain):
        async def step(self, action: Message) -> Step:
            self.said.append(action.content)
            if len(self.said) == 4:
                return Step(terminated=True, reward=1.0, rewards={"buyer": 0.5})
            return user(f"{len(self.said)}", agent="seller" if len(self.said) % 2 else "buyer", reward=0.125)

    rows = play(Crossed(), taking(*[answer("x")] * 4))
    assert [(row.role, row.segment, row.reward) for row in rows] == [
        ("buyer", 0, 0.75),
        ("seller", 0, 1.125),
        ("buyer", 1, 0.75),
        ("seller", 1, 1.125),
    ]
    assert [[row.segment for row in segments] for segments in by_rollout(rows)] == [[0, 1], [0, 1]]


# ====================================================================== failures are passed on


def test_what_the_world_raises_is_passed_on_and_the_sampler_is_let_go() -> None:
    class Broken(Told):
        async def step(self, action: Message) -> Step:
            raise ConnectionError("gone")

    sampler, rows = script(PLAIN, look("3")), [Trajectory("toy/0", 3, "group", 0)]
    agent = Agent(PLAIN, (), sampler, Limits())
    with pytest.raises(ConnectionError):
        asyncio.run(agent.play(Broken([user("q")]), TASK, rows, (1, 2), Sampling()))
    assert (rows[0].waiting, audit(rows[0])) == ("environment", "")
    assert sampler.released == ["group#0.1/agent"]


@pytest.mark.parametrize(
    ("parts", "outcome"), [({}, None), ({"style": 0.25}, 1.0), ({"outcome": 0.5, "style": 0.25, "speed": 0.5}, 0.5)]
)
def test_the_outcome_of_a_turn_is_the_part_of_that_name_or_what_the_parts_leave(
    parts: dict[str, float], outcome: float | None
) -> None:
    class Paying(Lone):
        async def step(self, action: Message) -> Step:
            return Step(reward=1.25, parts=parts, checks={"other": 0.5}, terminated=True, answered=True)

    (row,) = asyncio.run(episode(Paying(), TASK, script(PLAIN, Message("assistant", "a"))))
    assert (row.turns[0].outcome, row.turns[0].parts, row.turns[0].checks) == (outcome, parts, {"other": 0.5})
    assert row.outcome == (1.25 if outcome is None else outcome)
    assert row.solved == (row.outcome >= 1)
