"""The words that every floor shares: messages, sampling requests, turns, trajectories, groups. Standard library only.

One time rule holds everywhere. `logprob[t]` belongs to `tokens[t]`, the token itself and not its successor. `mask[t]` is
true exactly where the policy sampled `tokens[t]`. The stop token that closes a tool call is the policy's; the header that
opens the tool result is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

SUCCESS = 1.0  # the outcome of an episode that did all it was asked for


class StopReason(StrEnum):
    """Why an episode ended. `counts` says whether its reward may be learnt from."""

    ANSWERED = "answered"  # the policy gave its final answer
    ENV_TERMINATED = "env_terminated"  # the world ended the episode
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    ENV_TRUNCATED = "env_truncated"  # the world broke and said so
    POLICY_TIMEOUT = "policy_timeout"  # the episode's deadline passed while the policy's own code was running
    INFRA_FAILURE = "infra_failure"  # sandbox, harness or network failed, after all retries
    STRAGGLER = "straggler"  # its group went on without it: see feed.min_group
    CANCELLED = "cancelled"

    @property
    def counts(self) -> bool:
        """False for faults of the infrastructure, and for what was not waited for: they leave the loss and the group's mean."""
        return self not in (StopReason.ENV_TRUNCATED, StopReason.INFRA_FAILURE, StopReason.STRAGGLER, StopReason.CANCELLED)


@dataclass(frozen=True)
class ToolSpec:
    """What a model is told about a tool; `parameters` is a JSON schema of type object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return tuple(self.parameters.get("properties", {}))


@dataclass(frozen=True)
class ToolCall:
    """A call. `id` is what the policy named it, in families whose results must repeat that; it says nothing about equality."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = field(default="", compare=False)


@dataclass(frozen=True)
class Message:
    """One message of a dialogue. `error` says what was wrong with a sampled turn that could not be parsed."""

    role: str  # system | user | assistant | tool
    content: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    name: str = ""  # for role tool: which tool answered
    error: str = ""


# What is to be written: a text, the id of a control token, a JSON value; a tuple of forms, in a row; one of several; or one
# again and again.
Form: TypeAlias = "str | int | Json | Either | Again | tuple[Form, ...]"


@dataclass(frozen=True)
class Json:
    """A JSON value in a `Form`, by its schema as JSON text. What of JSON Schema is known stands in engine/schema.py."""

    schema: str


@dataclass(frozen=True)
class Either:
    """One of several forms."""

    forms: tuple[Form, ...]


@dataclass(frozen=True)
class Again:
    """A form any number of times, or not at all."""

    form: Form


@dataclass(frozen=True)
class Constraint:
    """What a turn must look like, whatever its tokens' boundaries.

    With `after`, the turn is free until one of these control tokens is drawn; then `form` must follow, and the turn is free
    again. Without, the turn is `form` and then a stop token, nothing else. A turn whose budget ends first is cut short.
    """

    form: Form
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Vocabulary:
    """What every token id says: its bytes, and which ids are control tokens, whose bytes are only their name.

    An id without bytes that is no control token belongs to nothing and is never drawn where a constraint stands.
    """

    pieces: tuple[bytes, ...]
    control: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Sampling:
    """How a turn is sampled. All of it reaches the device as data, so that no setting causes a compilation.

    From logits l to scores z, in this order, each step as the LogitsProcessor of that name in transformers, where there is one:

        l <- l + logit_bias
        l <- l / repetition_penalty where l > 0, else l * repetition_penalty, for every token of the trajectory so far
        l <- l - presence_penalty [n > 0] - frequency_penalty n, for tokens that were sampled n times in this turn
        l <- -inf where the constraint forbids
        z <- l / temperature, then top_k, top_p of what is left, min_p; what ties with the last one kept is kept

    A sample's log-probs are those of softmax(z), the distribution that was drawn from; temperature 0 takes the likeliest token
    with log-prob 0. The learner's are those of softmax(logits / learner.temperature): the same where nothing but a temperature
    is set, and to the same value. With anything else (`restricted`) they differ. The sampler's are then still those of the
    behaviour policy, as an importance weight pi_learner / pi_behaviour wants them, but ratios between two policies of the
    learner count tokens that could not be drawn, and the gap between sampler and learner measures the restriction.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    max_tokens: int = 256  # per turn
    min_p: float = 0.0  # least probability, as a share of the likeliest token's
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    stop_sequences: tuple[tuple[int, ...], ...] = ()  # tokens in a row that end the turn and belong to it
    stop_strings: tuple[str, ...] = ()  # a turn ends with the token that completes one
    constraint: Constraint | None = None
    top_logprobs: int = 0  # that many likeliest tokens are told with every sampled one; of temperature 1 where greedy
    prompt_logprobs: bool = (
        False  # log p of every fed token, under softmax(logits / temperature); of temperature 1 where greedy
    )

    @property
    def restricted(self) -> bool:
        """Whether tokens are drawn from another distribution than softmax(logits / temperature)."""
        truncated = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return truncated or penalised or bool(self.logit_bias) or self.constraint is not None


Rank: TypeAlias = tuple[int, float]  # the higher one first


@dataclass(frozen=True)
class SampleRequest:
    """Asks for one turn of trajectory `trajectory`.

    Args:
        tokens: the new tokens to feed, which extend what the sampler already holds.
        start: position of `tokens[0]` in the trajectory; the sampler refuses a gap or an overlap.
        key: two uint32; the draw for position p is folded from it and p, so it depends on nothing else.
        stop: token ids that end the turn; the stop token belongs to the turn.
        group: trajectories of one group share their first request's tokens, which are prefilled once.
        hear: called in the caller's loop with all tokens of the turn so far, whenever there are more.
        rank: asked, in any thread, when not all who wait can be served: the highest goes first. It changes no token.
        begun: called in any thread when the request has its slot; some samplers have none, and do not call.
    """

    trajectory: str
    tokens: tuple[int, ...]
    start: int
    key: tuple[int, int]
    stop: tuple[int, ...]
    sampling: Sampling = Sampling()
    group: str = ""
    hear: Callable[[list[int]], None] | None = field(default=None, compare=False, repr=False)
    rank: Callable[[], Rank] | None = field(default=None, compare=False, repr=False)
    begun: Callable[[], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Sample:
    """One sampled turn. `fed_start` and `fed` are the sampler's own record of what it was fed, for the auditor.

    `routing` holds the experts of every token that went through the model since the last sample, an int16 array [tokens, L,
    k]: the pending token of the turn before, the fed ones, and the sampled ones but the last. None where none is recorded.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stopped: bool  # by a stop token, sequence or string; otherwise the budget ran out
    fed_start: int
    fed: list[int]
    routing: Any = None
    fed_logprobs: list[float | None] = field(default_factory=list)  # None for a trajectory's first token; empty if not asked
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # per sampled token, the likeliest first


class Sampler(Protocol):
    """What an agent sees of an engine: turns out, tokens in. A trajectory's cache is held until `release`."""

    async def generate(self, request: SampleRequest) -> Sample: ...

    def release(self, trajectory: str) -> None: ...


class Peers(Protocol):
    """The processes of a run, as one of them sees them: what is its own, and what each has to tell all."""

    def owns(self, number: int) -> bool: ...

    def gather(self, value: Any) -> list[Any]: ...


@dataclass
class ToolRecord:
    """One executed tool call, as evidence: what was asked, how it ended, how long it took."""

    name: str
    arguments: dict[str, Any]
    outcome: str  # ok | error | timeout | unknown_tool | bad_arguments
    result: str
    latency_s: float = 0.0
    size_bytes: int = 0
    began_s: float = field(default=0.0, compare=False)  # of the monotonic clock; not stored, 0 where nobody noted it


@dataclass
class Turn:
    """One decision of the policy: tokens[start:end] were sampled after tokens[fed_start:start] had been fed."""

    fed_start: int
    start: int
    end: int
    state: str  # key of the environment state in which the turn was taken (anchor-state credit)
    fed: list[int] = field(default_factory=list)  # the sampler's own record of what it was fed
    text: str = ""
    reward: float = 0.0
    reason: str = ""  # of the reward
    advantage: float | None = None  # mean of its tokens; None until the group is complete, and for turns that do not count
    error: str = ""  # what was wrong with the turn's syntax
    tools: list[ToolRecord] = field(default_factory=list)
    outcome: float | None = None  # the part of the reward that says whether the task was done; None where that is all of it
    parts: dict[str, float] = field(default_factory=dict)  # of the reward, by name; the rest of it is one more, the outcome
    checks: dict[str, float] = field(default_factory=dict)  # scores that nothing is trained on
    asked_s: float = field(default=0.0, compare=False)  # when the sampler was asked, of the monotonic clock; not stored
    sampled_s: float = field(default=0.0, compare=False)  # and when it answered

    def earn(self, reward: float) -> None:
        """Adds what the turn brought in later, as at the end of a game; it counts as outcome."""
        self.reward += reward
        if self.outcome is not None:
            self.outcome += reward
        if "outcome" in self.parts:
            self.parts["outcome"] += reward


@dataclass
class Trajectory:
    """One token row of one rollout, and everything that was true of it. All per-token lists have the length of `tokens`."""

    task: str
    seed: int
    group: str
    rollout: int  # index in the group
    role: str = "agent"
    seat: int = 0  # its place at the table of a world of several agents; several seats may have one role
    past: bool = False  # sampled by an earlier version of the policy: nothing is learnt from it
    segment: int = 0  # counts the rows of one rollout and seat, where its conversation was begun anew
    trunk: int = -1  # the rollout of its group that a continuation shares its first turns with; see stem.py
    trunk_turns: int = 0  # how many: they are its prompt, not its own turns
    elsewhere: float = 0.0  # rewards of the turns in its other segments, once the episode has ended
    outcome_elsewhere: float | None = None  # their outcomes; None where those are all of their rewards
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)  # -1 where the policy did not sample
    turn: list[int] = field(default_factory=list)  # -1 where the policy did not sample
    turns: list[Turn] = field(default_factory=list)
    stop: StopReason = StopReason.CANCELLED
    error: str = ""
    waiting: str = ""  # what the episode waits for while it is played, for the message of a missed deadline
    attempts: int = 1
    difficulty: str = ""
    seconds: float = 0.0
    began_s: float = field(default=0.0, compare=False)  # of the monotonic clock; not stored, 0 where nobody noted it
    routing: list[Any] = field(default_factory=list)  # of each turn's sample; joined, of all tokens but the last; not stored

    @property
    def reward(self) -> float:
        """The return of the episode: the sum of its turns' rewards, those of its other segments included."""
        return sum(turn.reward for turn in self.turns) + self.elsewhere

    @property
    def outcome(self) -> float:
        """The return without what shaping added to it."""
        own = sum(turn.reward if turn.outcome is None else turn.outcome for turn in self.turns)
        return own + (self.elsewhere if self.outcome_elsewhere is None else self.outcome_elsewhere)

    @property
    def solved(self) -> bool:
        """Whether the episode counts and its outcome reached SUCCESS, up to the rounding of sums of rewards."""
        return self.stop.counts and self.outcome >= SUCCESS - 1e-6

    def feed(self, ids: list[int]) -> None:
        """Appends tokens that the policy did not sample."""
        n = len(ids)
        self.tokens += ids
        self.mask += [False] * n
        self.logprob += [0.0] * n
        self.version += [-1] * n
        self.turn += [-1] * n

    def sampled(self, sample: Sample, state: str, text: str) -> Turn:
        """Appends a sampled turn and returns its record."""
        start, n = len(self.tokens), len(sample.tokens)
        turn = Turn(sample.fed_start, start, start + n, state, list(sample.fed), text)
        self.tokens += sample.tokens
        self.mask += [True] * n
        self.logprob += sample.logprobs
        self.version += sample.versions
        self.turn += [len(self.turns)] * n
        self.turns.append(turn)
        if sample.routing is not None:
            self.routing.append(sample.routing)
        return turn

    def to_json(self) -> dict[str, Any]:
        """What is stored: all but the experts, and when it was."""
        kept = {name: value for name, value in self.__dict__.items() if name not in ("routing", "began_s")}
        turns = [asdict(turn) for turn in self.turns]
        for turn in turns:
            del turn["asked_s"], turn["sampled_s"]
            for tool in turn["tools"]:
                del tool["began_s"]
        return {**kept, "turns": turns}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Trajectory:
        turns = [Turn(**{**turn, "tools": [ToolRecord(**tool) for tool in turn["tools"]]}) for turn in record["turns"]]
        return cls(**{**record, "turns": turns, "stop": StopReason(record["stop"])})


@dataclass
class Group:
    """The rollouts of one (task, seed), which are compared with each other.

    `branches` are continuations of some of their turns. `others` are rows that earlier versions of the policy played beside
    them: they are kept, and count nowhere.
    """

    key: str
    trajectories: list[Trajectory]
    branches: list[Trajectory] = field(default_factory=list)
    others: list[Trajectory] = field(default_factory=list)

    @classmethod
    def of(cls, key: str, rows: Iterable[Trajectory]) -> Group:
        """A group from all rows of its episodes. What the infrastructure broke is never among the others: it is told."""
        group = cls(key, [])
        for row in rows:
            aside = row.past and row.stop.counts
            (group.others if aside else group.branches if row.trunk >= 0 else group.trajectories).append(row)
        return group

    @property
    def rows(self) -> list[Trajectory]:
        """Everything that was played."""
        return [*self.trajectories, *self.branches, *self.others]


def by_rollout(rows: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The rows of every rollout and seat together: one, or its segments in their order."""
    found: list[list[Trajectory]] = []
    last: dict[tuple[str, int, str, int], list[Trajectory]] = {}
    for row in rows:
        key = row.group, row.rollout, row.role, row.seat
        if row.segment and key in last:
            last[key].append(row)
        else:
            last[key] = [row]
            found.append(last[key])
    return found


def sampling_key(seed: int, group: str, rollout: int) -> tuple[int, int]:
    """Two uint32 that depend on the run's seed, the group and the rollout only: never on scheduling."""
    digest = hashlib.blake2b(f"{seed}/{group}/{rollout}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
