"""Episodes that are runs of programs: what is sampled behind the door becomes rows, and weighs the same however it is split."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import result, user
from judging import judging
from scripted import ScriptedSampler, script

from jaxagent.agent import Limits
from jaxagent.algos.table import choose
from jaxagent.chat.plain import EOS, PlainTemplate
from jaxagent.credit import training_rows
from jaxagent.data.pack import pack
from jaxagent.data.store import audit
from jaxagent.door.session import Slots
from jaxagent.envs.env import Ablated, Task
from jaxagent.envs.program import Door, ProgramEpisode, ProgramFailed, ProgramWorld, outcome_of, result_in
from jaxagent.objective import PolicyObjective
from jaxagent.programs import Programs
from jaxagent.rollout import RolloutOptions, Rollouts
from jaxagent.types import Group, Message, Sample, Sampling, StopReason, ToolCall, Trajectory
from sandbox_client import InfrastructureError

TEMPLATE = PlainTemplate()
LOOK_UP = Path(__file__).parents[1] / "configs" / "programs" / "look_up.py"
CALL = Message("assistant", calls=(ToolCall("A", {"key": "37"}),))
TOOLS = [{"type": "function", "function": {"name": "A", "parameters": {"type": "object", "properties": {"key": {}}}}}]
TASK: Task = {"id": "chain/train/5", "seed": 5, "difficulty": "", "question": "37A"}

Program = Callable[[Any, str, str], Any]


def ask(url: str, key: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = json.dumps({"messages": messages, "tools": TOOLS, **more}).encode()
    headers = {"Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as reply:
        return dict(json.load(reply)["choices"][0]["message"])


def world_of(program: Program) -> ProgramWorld:
    """The world of a function of this file; by name, as users give it, in another test."""
    world = ProgramWorld(function=f"{LOOK_UP}:agent")
    world.function = program
    return world


def play(
    world: ProgramWorld,
    sampler: ScriptedSampler,
    *,
    capacity: int = 8,
    ablated: bool = False,
    task: Task = TASK,
    **limits: int,
) -> list[Trajectory]:
    """One episode; what is true of every row is checked."""

    async def whole() -> list[Trajectory]:
        programs = Programs(Slots(TEMPLATE, sampler, capacity), Limits(**{"max_turns": 8, "max_tokens": 300, **limits}))
        rows = [Trajectory(task["id"], task["seed"], "group", 0)]
        episode = world.episode("", None)
        try:
            await programs.play(Ablated(episode) if ablated else episode, task, rows, (1, 2), Sampling(max_tokens=30))
        finally:
            await episode.close()
            await programs.close()
        return rows

    rows = asyncio.run(whole())
    assert [audit(row) for row in rows] == [""] * len(rows)
    assert sampler.rows == {}
    return rows


def linear(task: Any, url: str, key: str) -> float:
    """Two calls of a tool and an answer, in one conversation."""
    messages = [user("37A")]
    for _ in range(3):
        messages.append(ask(url, key, messages))
        messages += [result(call["id"], "52") for call in messages[-1].get("tool_calls") or ()]
    return 1.0


def words(*said: Message) -> ScriptedSampler:
    """A policy that takes these turns in the order in which it is asked, in whatever rows."""
    turns = iter(said)
    return ScriptedSampler(TEMPLATE, lambda text, request: TEMPLATE.turn(next(turns)))


def test_calls_of_one_conversation_are_one_row_exactly_as_an_agent_would_have_it() -> None:
    sampler = words(CALL, CALL, Message("assistant", "52"))
    (row,) = play(world_of(linear), sampler)
    first = TEMPLATE.prompt([user_message("37A")], ())
    told = [*first, *TEMPLATE.turn(CALL), *TEMPLATE.extend([Message("tool", "52")]), *TEMPLATE.turn(CALL)]
    told += [*TEMPLATE.extend([Message("tool", "52")]), *b"52", EOS]
    assert row.tokens == told
    assert (len(row.turns), row.stop, row.reward) == (3, StopReason.ANSWERED, 1.0)
    assert [turn.reward for turn in row.turns] == [0.0, 0.0, 1.0]
    assert [(t.name, t.arguments, t.result) for t in row.turns[0].tools] == [("A", {"key": "37"}, "52")]
    assert {version for version, sampled in zip(row.version, row.mask, strict=True) if sampled} == {7}
    assert [r.start for r in sampler.requests] == [0, *(turn.fed_start for turn in row.turns[1:])]
    assert len({request.key for request in sampler.requests}) == 1  # a row's draws differ by position


def user_message(text: str) -> Message:
    return Message("user", text)


def test_a_row_that_the_sampler_let_go_is_still_one_row() -> None:
    def busy(task: Any, url: str, key: str) -> float:
        first = ask(url, key, [user("a")])
        ask(url, key, [user("b")])  # with room for one row only, this takes the first one's
        ask(url, key, [user("a"), first, user("c")])
        return 1.0

    sampler = words(*(Message("assistant", word) for word in ("one", "two", "three")))
    rows = play(world_of(busy), sampler, capacity=1)
    assert [len(row.turns) for row in rows] == [2, 1]
    assert sampler.requests[2].start == 0  # all of it was fed again
    assert rows[0].turns[1].fed_start == rows[0].turns[0].end


def test_a_rewritten_context_and_a_sub_agent_are_segments_of_one_rollout() -> None:
    def compacting(task: Any, url: str, key: str) -> dict[str, Any]:
        first = ask(url, key, [user("long"), {"role": "assistant", "content": "x"}, user("37A")])
        ask(url, key, [user("a sub-agent's question")])
        ask(url, key, [user("in short: " + str(first["content"]))])
        return {"reward": 1.5, "parts": {"outcome": 1.0, "form": 0.5}, "reason": "so"}

    rows = play(world_of(compacting), words(*(Message("assistant", word) for word in ("one", "two", "three"))))
    assert [row.segment for row in rows] == [0, 1, 2]
    assert [row.reward for row in rows] == [1.5] * 3 and [row.outcome for row in rows] == [1.0] * 3
    assert rows[2].turns[0].reason == "so" and rows[2].turns[0].parts == {"outcome": 1.0, "form": 0.5}
    assert not any(rows[0].mask[: rows[0].turns[0].start])  # the turn of another assistant is context


def test_draws_do_not_depend_on_the_order_of_calls_side_by_side() -> None:
    def keys(order: str) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
        def program(task: Any, url: str, key: str) -> float:
            for word in order:
                ask(url, key, [user(word)])
            return 0.0

        sampler = words(*[Message("assistant", "x")] * 3)
        play(world_of(program), sampler)
        return sorted((request.tokens, request.key) for request in sampler.requests)

    assert keys("ab") == keys("ba")
    assert len({key for _, key in keys("aba")}) == 3  # the same question again is drawn anew


@pytest.mark.parametrize("fault", [ProgramFailed("no more calls"), PermissionError("as clients have it")])
def test_a_program_that_asks_too_much_is_refused_and_what_it_had_counts(fault: Exception) -> None:
    def endless(task: Any, url: str, key: str) -> float:
        while True:
            ask(url, key, [user("again")])

    def stubborn(task: Any, url: str, key: str) -> float:
        try:
            return endless(task, url, key)
        except urllib.error.HTTPError as error:
            assert json.load(error)["error"]["code"] == "budget"
            raise fault from None

    rows = play(world_of(stubborn), words(*[Message("assistant", "x")] * 9), max_turns=2)
    assert {row.stop for row in rows} == {StopReason.MAX_TURNS}
    assert sum(len(row.turns) for row in rows) == 2 and rows[0].reward == 0.0


def test_training_samples_as_the_run_says_and_holds_nothing_to_a_form() -> None:
    def wishful(task: Any, url: str, key: str) -> float:
        ask(url, key, [user("q")], temperature=0.1, top_p=0.5, max_tokens=7, stop=["zz"])
        said = ask(url, key, [user("q")], tool_choice="required")
        assert said["content"] == "x" and "tool_calls" not in said  # a call is wished for, and not forced
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(url, key, [user("q")], response_format={"type": "json_schema", "json_schema": {"name": "f", "schema": {}}})
        return 0.0

    sampler = words(*[Message("assistant", "x")] * 2)
    play(world_of(wishful), sampler)
    assert sampler.requests[0].sampling == Sampling(max_tokens=7, stop_strings=("zz",))
    assert sampler.requests[1].sampling == Sampling(max_tokens=30)


def test_what_tools_say_is_hidden_from_an_ablated_policy() -> None:
    sampler = words(CALL, CALL, Message("assistant", "52"))
    play(world_of(linear), sampler, ablated=True)
    assert TEMPLATE.text(sampler.requests[1].tokens) == "<result>..<turn>"


WRITE = "import os, pathlib; pathlib.Path(os.environ['JAXAGENT_RESULT']).write_text('{\"reward\": 1}')"


def played(world: ProgramWorld, *, turn: Message = Message("assistant", "52"), **options: Any) -> list[Trajectory]:  # noqa: B008
    programs = Programs(Slots(TEMPLATE, script(TEMPLATE, turn), 4), Limits(8, 300))
    rollouts = Rollouts(world, programs, lambda: None, 0, RolloutOptions(attempts=1, **options))
    try:
        futures: list[list[Future[list[Trajectory]]]] = rollouts.play([("g", TASK)], 2, Sampling(max_tokens=9))
        return [row for future in futures[0] for row in future.result()]
    finally:
        rollouts.close()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example imports the tables of its world, as from an installed jaxagent."""
    monkeypatch.setenv("PYTHONPATH", str(LOOK_UP.parents[2]))


@pytest.mark.usefixtures("installed")
def test_a_command_plays_through_its_environment_and_what_it_writes_counts() -> None:
    rows = played(ProgramWorld(command=(sys.executable, str(LOOK_UP))))
    assert [(row.stop, row.error) for row in rows] == [(StopReason.ANSWERED, "")] * 2
    assert all(row.turns[0].reason.startswith("answered '52', right was") for row in rows)


@pytest.mark.usefixtures("installed")
def test_a_verifier_has_the_last_word() -> None:
    world = ProgramWorld(command=(sys.executable, str(LOOK_UP)))
    world.verifier = lambda task, said: {"reward": 0.25, "reason": f"{task['id']} {said['exit_code']} {said['reward']:g}"}
    assert {row.reward for row in played(world)} == {0.25}


TOWNS = """
class Towns:
    tools, functions = (), ""
    def task(self, split, index):
        return {"id": f"towns/{split}/{index}", "seed": index, "difficulty": "", "question": "37A", "answer": "Ulm"}
make_world = Towns
"""


@pytest.fixture
def towns(tmp_path: Path) -> str:
    """A world of the user's, whose tasks have questions and answers and which plays nothing."""
    (tmp_path / "towns.py").write_text(TOWNS)
    return str(tmp_path / "towns.py")


def scored(reward: str, program: Program, *said: Message, **options: Any) -> Trajectory:
    """The only row of an episode that env.options.reward pays; the program is believed nothing."""
    world = ProgramWorld(function=f"{LOOK_UP}:agent", reward=reward, **options)
    world.function = program
    (row,) = play(world, words(*said), task=world.task("train", 0))
    return row


def once(task: Any, url: str, key: str) -> Any:
    """Asks once, and claims to have earned much."""
    ask(url, key, [user("37A")])
    return {"reward": 9.0}


def test_a_scorer_pays_for_what_the_policy_said_last_or_for_the_answer_that_the_program_names(towns: str) -> None:
    row = scored("min(exact_match, f1_match)", once, Message("assistant", "ulm."), world=towns)
    assert (row.reward, row.outcome, row.stop) == (1.0, 1.0, StopReason.ANSWERED)
    assert row.turns[0].reason.startswith("exact_match 1: ")
    assert scored("exact_match", once, Message("assistant", "Bonn"), world=towns).reward == 0.0
    named = [lambda *door: (once(*door), "Ulm")[1], lambda *door: {**once(*door), "answer": "Ulm"}]
    for program in named:
        assert scored("exact_match", program, Message("assistant", "Bonn"), world=towns).reward == 1.0


def test_a_judge_pays_a_program_and_one_that_is_silent_breaks_the_episode(towns: str) -> None:
    with judging() as endpoint:
        options = {"judge": {"url": endpoint.url, "model": "m", "attempts": 1}}
        for answer, reward in (("ULM", 1.0), ("Bonn", 0.0)):
            row = scored("judge", once, Message("assistant", answer), world=towns, reward_options=options)
            assert row.reward == reward and row.turns[0].reason.startswith("judged ")
        endpoint.say = lambda prompt: 500
        with pytest.raises(InfrastructureError, match="status 500"):
            scored("judge", once, Message("assistant", "Berlin"), world=towns, reward_options=options)


def test_the_world_whose_tasks_are_played_scores_the_answer() -> None:
    world = ProgramWorld(command=("true",), reward="world")
    task = world.task("train", 0)
    gold = world.inner.gold(task)
    assert world.functions == world.inner.functions  # the sandbox has them, should the world want them for its score
    row = scored("world", once, Message("assistant", gold))
    assert (row.reward, row.turns[0].reason, row.turns[0].checks) == (1.0, "right answer", {})
    assert scored("world", once, Message("assistant", "x")).reward == 0.0
    assert scored("world", once, CALL).turns[0].reason == "no answer: the last turn was a call"


def test_a_world_that_does_not_score_an_answer_alone_breaks_the_episode() -> None:
    with pytest.raises(ProgramFailed, match="does not score an answer alone"):
        scored("world", once, Message("assistant", "left"), world="frozen_lake")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reward": "exact_mach"}, "env.options.reward must be made of exact_match, .* got 'exact_mach'; 'world' is that of"),
        ({"reward": "exact_match"}, "the tasks of train do not fit it: exact_match wants the task's `answer`"),
        ({"reward": "judge"}, "judge: .*missing 2 required positional arguments: 'url' and 'model'"),
        ({"reward": "world", "verifier": f"{LOOK_UP}:agent"}, "of which one can pay"),
        ({"reward": "world", "reward_options": {"judge": {}}}, "has none of"),
    ],
)
def test_a_reward_that_cannot_be_paid_is_refused_before_anything_runs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ProgramWorld(command=("true",), **options)


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.usefixtures("installed")
def test_a_command_that_others_score_need_say_nothing_and_still_must_not_fail(code: int) -> None:
    asks = f"import os, sys; sys.path.insert(0, {str(LOOK_UP.parent)!r}); from look_up import ask; "
    asks += (
        f"ask(os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'], [dict(role='user', content='q')]); sys.exit({code})"
    )
    rows = played(ProgramWorld(command=(sys.executable, "-c", asks), reward="world"))
    stop, error = (StopReason.INFRA_FAILURE, " ended with 3: ") if code else (StopReason.ANSWERED, "")
    assert {row.stop for row in rows} == {stop} and all(error in row.error for row in rows)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('no luck')", "ended with 1 and said no reward: no luck"),
        ("print('{\"reward\": 1}')", "ended with 0 and said no reward"),  # it may be the policy's words that are printed
        (f"{WRITE}; import sys; sys.exit('late')", "ended with 1: late"),
        (WRITE, "ended without asking the policy anything"),
        ("import time; time.sleep(99)", "no end within 1 s"),
    ],
)
def test_a_program_that_fails_teaches_nothing(program: str, words: str) -> None:
    rows = played(ProgramWorld(command=(sys.executable, "-c", program)), deadline_s=1.0 if "sleep" in program else 60.0)
    assert {row.stop for row in rows} == {StopReason.INFRA_FAILURE}
    assert all(words in row.error for row in rows)


def sampled(row: Trajectory, fed: list[int], tokens: list[int], reward: float = 0.0) -> None:
    before = len(row.tokens)
    row.feed(fed)
    logprobs = [-1.0 - 0.1 * token for token in tokens]
    row.sampled(Sample(tokens, logprobs, [0] * len(tokens), True, before, fed), "", "").reward = reward


def rollout(number: int, *segments: list[tuple[list[int], list[int]]]) -> list[Trajectory]:
    """Rows of turns (fed, sampled); the first rollout's last turn earns 1."""
    rows = [Trajectory("t", 0, "g", number, segment=i, stop=StopReason.ANSWERED) for i, _ in enumerate(segments)]
    for row, turns in zip(rows, segments, strict=True):
        for fed, tokens in turns:
            sampled(row, fed, tokens)
    rows[-1].turns[-1].reward = 1.0 - number
    for row in rows[:-1]:
        row.elsewhere = 1.0 - number
    return rows


@jax.jit
def outputs_of(weights: dict[str, jax.Array], tokens: jax.Array, segment: jax.Array) -> dict[str, jax.Array]:
    """A model in which every token depends on all before it in its row."""
    t = jnp.arange(tokens.shape[1])
    seen = (segment[:, :, None] == segment[:, None, :]) & (t[:, None] > t)
    hidden = jnp.tanh(jnp.where(seen, 0.7 ** (t[:, None] - t), 0.0) @ weights["embed"][tokens])
    logp = jax.nn.log_softmax(hidden @ weights["head"])
    logprob = jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0]
    return {"logprob": logprob, "entropy": -(jnp.exp(logp) * logp).sum(-1)}


def gradient(rows: list[Trajectory], aggregate: str) -> np.ndarray:
    algorithm = choose(name="grpo", aggregate=aggregate, **({"length": 10.0} if aggregate == "sequence_sum_norm" else {}))
    (batch,), idle = (lambda found: (pack(found[0], batch_rows=2, row_tokens=20), found[1]))(
        training_rows([Group("g", rows)], algorithm, keep_idle=True)
    )
    objective = PolicyObjective(algorithm)
    arrays = {name: jnp.asarray(batch.arrays()[name]) for name in objective.reads}
    rng = np.random.default_rng(0)
    weights = {"embed": jnp.asarray(rng.normal(size=(10, 6))), "head": jnp.asarray(rng.normal(size=(6, 10)))}

    @jax.jit
    def loss(weights: dict[str, jax.Array], arrays: dict[str, jax.Array]) -> jax.Array:
        total, sums = objective.loss(outputs_of(weights, arrays["tokens"], arrays["segment"]), arrays, jnp.bool_(False))
        return total / (sums["share"] + idle)

    grads = jax.grad(loss)(weights, arrays)
    return np.concatenate([np.asarray(g).ravel() for g in jax.tree.leaves(grads)])


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm", "turn_mean"])
def test_a_rollout_has_the_same_gradient_however_it_is_split(aggregate: str) -> None:
    """Three turns in one row, or in rows of which the later ones repeat the earlier turns as context."""
    turns = [([1, 2], [3, 4]), ([5], [6]), ([7, 8], [9, 1, 2])]
    before = [token for fed, tokens in turns[:1] for token in (*fed, *tokens)]
    other = rollout(1, [([2, 1], [5, 6, 7, 8])])
    whole = gradient([*rollout(0, turns), *other], aggregate)
    split = gradient([*rollout(0, turns[:1], [([*before, 5], [6]), turns[2]]), *other], aggregate)
    assert np.abs(whole).max() > 1e-3
    np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-6)


def test_a_program_ends_when_it_does_whatever_it_leaves_running() -> None:
    left = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    episode = ProgramEpisode(ProgramWorld(command=(sys.executable, "-c", f"{left}; {WRITE}")))
    task = {"id": "x" * (1 << 20)}  # more than a pipe holds, and the program does not read it
    episode.world.verifier = lambda task, said: {"reward": said["reward"], "reason": said["output"]}
    said = asyncio.run(asyncio.wait_for(episode.run(task, Door("http://127.0.0.1:9", "k")), 30.0))
    outcome = asyncio.run(episode.earned(task, said, Message("assistant")))
    assert outcome.reward == 1.0
    stat, until = Path(f"/proc/{outcome.reason.strip()}/stat"), time.monotonic() + 60.0
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":  # killed, and not gone yet
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_words_of_programs_are_read_or_refused(tmp_path: Path) -> None:
    for text, found in (('{"reward": 1}', {"reward": 1}), ("[2]", None), ("{oops", None), ("[" * 100_000, None), ("", None)):
        (tmp_path / "result").write_text(text)
        assert result_in(tmp_path / "result") == found
    assert result_in(tmp_path / "nothing") is None
    assert outcome_of(0.5).reward == 0.5
    with pytest.raises(ProgramFailed, match="a number or"):
        outcome_of({"score": 1})
    with pytest.raises(ValueError, match="give command or function"):
        ProgramWorld()
    with pytest.raises(ValueError, match=r"file\.py:name is wanted"):
        ProgramWorld(function="nowhere:agent")
    step = asyncio.run(ProgramEpisode(world_of(linear)).reset(TASK, 0))
    assert step.truncated and "run by its program" in step.error
