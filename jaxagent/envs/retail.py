"""`retail`: a clerk's dialogue with a customer of a shop, in the manner of tau-bench (arXiv:2406.12045), on data of ours.

A turn with calls goes to the shop's tools, any other is said to the customer, who answers until all is settled, patience ends,
or a person takes over. The outcome is 1 where the database is then, row by row, what it becomes when the right calls are made
in a fresh copy; the customer has had every answer and every refusal that was due; and the clerk kept what no database
shows: nobody's data before it is known who asks, no change before it was agreed to. Otherwise it is 0.

    policy -> customer    Which order is it, and what is the reason?
    customer -> policy    The order is #W2013773. I ordered it by mistake.

tau-bench's customer is a language model; this one is a script (shops/customer.py), so figures of the two are not comparable.
Questions and refusals pay only together with a change, so that a clerk who does nothing, or refuses everything, earns nothing.
A seed fixes store, customer and wishes; the seed of an episode only how the customer puts things.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from jaxagent.envs.env import Env, Step, Task
from jaxagent.envs.shops.counter import FIND, READ, SPECS, TRANSFER, WRITE, Counter
from jaxagent.envs.shops.customer import Customer
from jaxagent.envs.shops.store import RETURN_DAYS, TODAY, Store, difference
from jaxagent.envs.shops.wishes import PLANS, Wish, customer_of
from jaxagent.envs.synchronous import seed_of
from jaxagent.types import Message, ToolCall, ToolRecord

POLICY = f"""You are a clerk of a web shop. Today is {TODAY}. Use the tools for what a customer wants, and keep these rules.
1. Find out who the customer is before anything else, by e-mail or by name and zip code, even if they name an order.
2. Serve one customer only. Change nothing of anybody else's.
3. Before every change, tell the customer all of it (order, items, new options or address, reason, payment method) and ask for a
yes. Make the change only after that yes.
4. Pending orders can be cancelled if they are no longer needed or were ordered by mistake, and for no other reason.
5. Items of a pending order can become other available variants of the same product, once. Its address and its payment method
can be changed.
6. Delivered items can be returned or exchanged within {RETURN_DAYS} days of delivery, once for an order. An exchange is for
another available variant of the same product.
7. Money for a return goes to the payment method that paid, or to a gift card of the customer, and to nothing else.
8. Look things up and never guess. Refuse what the rules forbid, and say that you cannot do it.
9. If the customer wants compensation, transfer them to a human agent; for nothing else."""
EARLY = "a customer's data was used before it was known who asks"
UNASKED = "a change was made that nobody had agreed to"
_SHOWN_CHARS = 200


class Retail:
    """The world.

    Args:
        rules: the policy stands at the beginning.
        plans: of shops/wishes.py, as in "refuse+change", that are drawn; empty for all.
    """

    functions = ""
    forks = True
    tools = SPECS

    def __init__(self, rules: bool = True, plans: Sequence[str] = ()):
        known = ["+".join(plan) for plan in PLANS]
        if strange := [plan for plan in plans if plan not in known]:
            raise ValueError(f"env.options.plans must be of {', '.join(known)}; got {strange[0]!r}")
        self.rules, self.plans = rules, tuple(plans) or tuple(known)

    def task(self, split: str, index: int) -> Task:
        seed = seed_of(split, index)
        plan = random.Random(f"{seed}/plan").choice(self.plans)
        return {"id": f"retail/{split}/{index}", "seed": seed, "difficulty": plan, "plan": plan}

    def episode(self, name: str, sandbox: Any) -> Env:
        return RetailEpisode(self)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A clerk who keeps the policy: asks, looks up, says what will be done, does it after the yes."""
        env = RetailEpisode(self)
        try:
            messages = [*env.begin(task, rng.randrange(10**6)).messages]
            for turn in clerk(env):
                step = env.take(turn)
                messages += [turn, *step.messages]
        finally:
            env.end()
        return messages


def clerk(env: RetailEpisode) -> Iterator[Message]:
    """The turns of an oracle: it knows what is wanted, and still asks for all of it, since nothing else is agreed to."""
    user = env.customer.user
    yield _say("May I have your e-mail address?")
    yield _call(FIND[0], email=user["email"])
    yield _call("get_user_details", user_id=user["user_id"])
    for wish in env.customer.wishes:
        yield _say(_question(wish))
        for name, id_ in wish.reads or (("get_order_details", _order_of(wish)),):
            if id_:
                yield _call(name, **{"product_id" if "product" in name else "order_id": id_})
        if wish.answer:
            yield _say(f"It is {wish.answer}.")
        elif wish.call is None:
            yield _say("I am sorry, I cannot do that: our rules forbid it.")
        elif wish.call.name == TRANSFER:
            yield Message("assistant", calls=(wish.call,))
        else:
            what = wish.call.name.replace("_", " ")
            yield _say(f"I will {what}: {', '.join(ways[0] for ways in wish.named)}. Do I have your yes?")
            yield Message("assistant", calls=(wish.call,))
            yield _say("It is done.")


def _question(wish: Wish) -> str:
    """Asks for every fact of a wish."""
    asked = ["version" if topic == "option" else topic for topic in wish.facts]
    return f"Please tell me more: {', '.join(asked)}?"


def _order_of(wish: Wish) -> str:
    return str(wish.call.arguments.get("order_id", "")) if wish.call else ""


def _say(text: str) -> Message:
    return Message("assistant", text)


def _call(name: str, **arguments: str) -> Message:
    return Message("assistant", calls=(ToolCall(name, arguments),))


class RetailEpisode:
    """One episode. The store lives in this process: no program of the policy runs, and its words are arguments only."""

    def __init__(self, world: Retail):
        self.world = world
        self.store: Store | None = None

    async def reset(self, task: Task, seed: int) -> Step:
        return self.begin(task, seed)

    async def step(self, action: Message) -> Step:
        return self.take(action)

    async def close(self) -> None:
        self.end()

    async def fork(self, name: str) -> RetailEpisode:
        """A copy that goes on from here."""
        other = RetailEpisode(self.world)
        other.seed, other.known, other.fault, other.written = self.seed, self.known, self.fault, self.written
        other.read, other.customer = set(self.read), copy.deepcopy(self.customer)
        other.store = self._store().copy()
        other.counter = Counter(other.store)
        return other

    def begin(self, task: Task, seed: int) -> Step:
        self.end()
        self.seed = task["seed"]
        self.store = Store(self.seed)
        self.counter = Counter(self.store)
        user, wishes = customer_of(self.seed, task["plan"].split("+"), self.store)
        self.customer = Customer(user, wishes, random.Random(f"{self.seed}/{seed}/voice"))
        self.known = False  # who asks
        self.fault = ""  # the first rule that was broken, which no database shows
        self.read: set[tuple[str, str]] = set()
        self.written: tuple[ToolCall, ...] = ()
        rules = [Message("system", POLICY)] if self.world.rules else []
        return Step([*rules, Message("user", self.customer.open())], state=self._state())

    def take(self, action: Message) -> Step:
        if action.error:
            return Step([Message("tool", f"error: {action.error}")], state=self._state())
        if action.calls:
            return self._called(action.calls)
        said = self.customer.hear(action.content, self.read)
        if not said:
            return self._score()
        return Step([Message("user", said)], state=self._state())

    def end(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def _store(self) -> Store:
        if self.store is None:
            raise RuntimeError("this episode has not begun, or is closed")
        return self.store

    def _called(self, calls: Sequence[ToolCall]) -> Step:
        records: list[ToolRecord] = []
        for call in calls:
            records.append(self.counter.call(call))
            if records[-1].outcome == "ok":
                self._note(call, records[-1].result)
            if records[-1].outcome == "ok" and call.name == TRANSFER:
                step = self._score()
                step.tools = records
                return step
        messages = [Message("tool", record.result, name=record.name) for record in records]
        return Step(messages, tools=records, state=self._state())

    def _note(self, call: ToolCall, result: str) -> None:
        """What a call that worked means for the rules."""
        if call.name in FIND:
            self.known = self.known or result == self.customer.user["user_id"]
        elif call.name in (*READ, *WRITE, TRANSFER) and not self.known:
            self.fault = self.fault or EARLY
        if call.name in WRITE:
            if not self.customer.agreed:
                self.fault = self.fault or UNASKED
            self.customer.changed, self.written = True, (*self.written, call)
        elif call.name == TRANSFER:
            wish = self.customer.wish
            self.customer.met += wish.call is not None and wish.call.name == TRANSFER
        else:
            self.read |= {(call.name, str(value)) for value in call.arguments.values()}

    def _score(self) -> Step:
        """The end: the outcome, and why."""
        store, right = self._store(), Store(self.seed)
        try:
            counter = Counter(right)
            for wish in self.customer.wishes:
                if wish.call and (refused := counter.call(wish.call)).outcome != "ok":
                    raise RuntimeError(f"seed {self.seed}: {wish.kind} cannot be done: {refused.result}")
            differs = difference(store, right)
        finally:
            right.close()
        met, wanted = self.customer.met, len(self.customer.wishes)
        outcome = float(not differs and not self.fault and met == wanted)
        reason = self.fault or differs[:_SHOWN_CHARS] or f"{met} of {wanted} wishes were met"
        checks = {"database": float(not differs)}
        return Step(reward=outcome, reason=reason, terminated=True, answered=True, checks=checks, state=self._state())

    def _state(self) -> str:
        customer = self.customer
        seen = (customer.number, customer.agreed, customer.changed, customer.misses, sorted(customer.told), self.known)
        text = f"{seen}{sorted(self.read)}{self.fault}{self.written}"
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


make_world = Retail
