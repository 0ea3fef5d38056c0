"""`retail`: who asks, looks up and keeps the policy is paid by the database; who skips any of it is not."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from growing import growth
from scripted import episode, script

from jaxagent.agent import Limits
from jaxagent.chat.plain import PlainTemplate
from jaxagent.envs.check import check
from jaxagent.envs.env import Step, Task
from jaxagent.envs.retail import EARLY, UNASKED, Retail, RetailEpisode, clerk
from jaxagent.envs.shops.counter import ITEMS_CHANGED, REASONS, SPECS, TRANSFER, WRITE, Counter
from jaxagent.envs.shops.customer import PATIENCE, Customer
from jaxagent.envs.shops.store import Store, difference
from jaxagent.envs.shops.wishes import CHANGES, PLANS, QUESTIONS, REFUSED, Wish
from jaxagent.types import Message, Sampling, StopReason, ToolCall

WORLD = Retail()
TASKS = [WORLD.task("test", i) for i in range(64)]
Clerk = Callable[[RetailEpisode], Iterator[Message]]


def play(task: Task, serve: Clerk, seed: int = 0) -> tuple[Step, RetailEpisode]:
    env = RetailEpisode(WORLD)
    env.begin(task, seed)
    step = Step()
    for turn in serve(env):
        step = env.take(turn)
        if step.terminated:
            break
    return step, env


def earned(serve: Clerk, tasks: list[Task] = TASKS) -> float:
    return sum(play(task, serve)[0].reward for task in tasks) / len(tasks)


def say(text: str) -> Message:
    return Message("assistant", text)


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", calls=(ToolCall(name, arguments),))


def without(dropped: Callable[[Message], bool]) -> Clerk:
    return lambda env: (turn for turn in clerk(env) if not dropped(turn))


# ---------------------------------------------------------------------- who is paid


def test_the_oracle_solves_every_kind_of_task_with_every_way_of_putting_things() -> None:
    assert {task["difficulty"] for task in TASKS} == {"+".join(plan) for plan in PLANS}
    kinds = set()
    for task in TASKS:
        step, env = play(task, clerk, seed=random.Random(task["seed"]).randrange(100))
        assert step.reward == 1.0, (task, step.reason)
        assert step.checks == {"database": 1.0}
        kinds |= {wish.kind for wish in env.customer.wishes}
    assert kinds == {*CHANGES, *QUESTIONS, *REFUSED, "damaged"}


def silent(env: RetailEpisode) -> Iterator[Message]:
    yield from [say("")] * 10


def refusing(env: RetailEpisode) -> Iterator[Message]:
    """Looks everything up and refuses everything."""
    for turn in clerk(env):
        if turn.calls and turn.calls[0].name in (*WRITE, TRANSFER):
            continue
        yield turn if turn.calls or "?" in turn.content else say("I am sorry, I cannot do that.")
    yield from [say("I am sorry, I cannot do that.")] * 5


def handing_over(env: RetailEpisode) -> Iterator[Message]:
    yield call("find_user_id_by_email", email=env.customer.user["email"])
    yield call(TRANSFER, summary="too hard")


def compliant(env: RetailEpisode) -> Iterator[Message]:
    """Asks, and does all that is wanted: to what must be refused it gets a yes, and cancels or returns."""
    for turn in clerk(env):
        if turn.content.startswith("I am sorry"):
            wish = env.customer.wish
            order = wish.reads[0][1]
            items = [item["item_id"] for item in env.store.rows("SELECT item_id FROM items WHERE order_id = ?", order)]
            yield say(f"I will do that with {order}. Shall I proceed?")
            yield call("cancel_pending_order", order_id=order, reason=REASONS[0])
            other = "SELECT payment_method_id AS id FROM cards WHERE user_id = ? AND source != 'gift_card'"
            for card in env.store.rows(other, env.customer.user["user_id"]):
                yield call("return_delivered_order_items", order_id=order, item_ids=items[:1], payment_method_id=card["id"])
            yield say("It is done.")
            yield say("I am sorry, I cannot do that.")
        else:
            yield turn


def drawing(env: RetailEpisode) -> Iterator[Message]:
    """Any of the oracle's turns, in any order."""
    turns, rng = list(clerk(env)), random.Random(env.seed)
    yield from (rng.choice(turns) for _ in range(25))


@pytest.mark.parametrize(
    ("serve", "most"),
    [(silent, 0.0), (refusing, 0.0), (handing_over, 0.2), (drawing, 0.1)],
    ids=["silent", "refusing", "handing over", "drawing"],
)
def test_a_naive_clerk_is_paid_next_to_nothing(serve: Clerk, most: float) -> None:
    """Handing over is the right thing in one plan of eight, for a clerk who knows who asks."""
    assert earned(serve) <= most


def test_who_does_all_that_is_wanted_fails_wherever_something_must_be_refused() -> None:
    refusals = [task for task in TASKS if "refuse" in task["plan"]]
    others = [task for task in TASKS if "refuse" not in task["plan"]]
    assert earned(compliant, refusals) < 0.5  # what the tools refuse costs nothing
    assert earned(compliant, others) == 1.0
    for task in refusals:
        step, env = play(task, compliant)
        if env.customer.wishes[0].kind in ("cancel_cheaper", "send_back_late", "send_back_elsewhere", "anothers_order"):
            assert step.reward == 0.0


# ---------------------------------------------------------------------- what no database shows


def test_a_change_that_nobody_agreed_to_is_worth_nothing_though_the_database_is_right() -> None:
    step, _ = play(task_of("change"), without(lambda turn: turn.content.endswith("yes?")))
    assert (step.reward, step.reason, step.checks) == (0.0, UNASKED, {"database": 1.0})


def test_data_of_a_customer_who_is_not_known_yet_cost_the_reward() -> None:
    step, _ = play(task_of("change"), without(lambda turn: bool(turn.calls) and turn.calls[0].name.startswith("find")))
    assert (step.reward, step.reason) == (0.0, EARLY)


def test_to_know_another_customer_is_not_to_know_this_one() -> None:
    def serve(env: RetailEpisode) -> Iterator[Message]:
        other = env.store.row("SELECT * FROM users WHERE user_id != ?", env.customer.user["user_id"])
        for turn in clerk(env):
            found = bool(turn.calls) and turn.calls[0].name == "find_user_id_by_email"
            yield call("find_user_id_by_email", email=other["email"]) if found else turn

    assert play(task_of("change"), serve)[0].reason == EARLY


def test_a_refusal_or_an_answer_without_a_look_does_not_count() -> None:
    blind = without(lambda turn: bool(turn.calls) and turn.calls[0].name in ("get_order_details", "get_product_details"))
    for plan in ("refuse+change", "ask+change"):
        step, env = play(task_of(plan), blind)
        assert step.reward == 0.0
        assert env.customer.met == 0


def test_a_number_among_many_is_no_answer() -> None:
    task = task_of("ask+change")

    def serve(env: RetailEpisode) -> Iterator[Message]:
        for turn in clerk(env):
            number = turn.content.startswith("It is ") and turn.content != "It is done."
            yield say(f"{turn.content} Or 1, 2, 3, 4 or 5.") if number else turn

    assert play(task, serve)[0].reward == 0.0


def task_of(plan: str) -> Task:
    return next(task for task in TASKS if task["plan"] == plan)


# ---------------------------------------------------------------------- the customer

USER = {"user_id": "ada_1", "first_name": "Ada", "last_name": "Ito", "zip": "02108", "email": "ada@example.com"}
BACK = Wish(
    "send_back",
    ("I want to send something back.",),
    {"order": "The order is #W1.", "item": "It is about the Desk Lamp.", "payment": "To my PayPal."},
    (("#W1", "W1"), ("Desk Lamp", "77"), ("PayPal",)),
    ToolCall("return_delivered_order_items", {}),
)
LATE = Wish("send_back_late", ("Send it back.",), {"reason": "Broken."}, (), None, (("get_order_details", "#W1"),), ("reason",))


def customer(*wishes: Wish) -> Customer:
    return Customer(USER, list(wishes), random.Random(0))


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("What is your e-mail?", "I am Ada Ito, zip 02108, e-mail ada@example.com."),
        ("Which order is it, and which item?", "The order is #W1. It is about the Desk Lamp."),
        ("Please tell me how we should refund you.", "To my PayPal."),
        ("I need your name and zip code.", "I am Ada Ito, zip 02108, e-mail ada@example.com."),
        ("Thank you for your order.", "I want to send something back."),  # nothing is asked
        ("I will take the desk lamp of order W1 back and pay to PayPal. Do you confirm (yes/no)?", "Yes"),
        ("I will return item 77 of #W1, refund to paypal_123. Shall I proceed?", "Yes"),
        ("I will take order #W1 back. Shall I go ahead?", "I do not know yet what exactly you will do."),
        ("Shall I go ahead?", "I do not know yet what exactly you will do."),
        ("I can't do that.", "Have you really looked at it? I want it all the same."),
    ],
)
def test_the_customer_tells_what_is_asked_for_and_agrees_to_what_is_whole(said: str, answer: str) -> None:
    assert customer(BACK).hear(said, set()).startswith(answer)


@pytest.mark.parametrize(
    ("option", "said", "answer"),
    [
        ("S", "I will send it; let's use a smaller size. Shall I proceed?", "I do not know yet"),
        ("S", "I will exchange it, size S. Shall I proceed?", "Yes"),
        ("S", "I will exchange it, size 's'. Shall I proceed?", "Yes"),
        ("8", "I will exchange it for 18, that is $8.50. Shall I proceed?", "I do not know yet"),
        ("8", "I will exchange it for size 8. Shall I proceed?", "Yes"),
        ("red", "I will have it delivered in a covered box. Shall I proceed?", "I do not know yet"),
        ("#W1", "I will cancel #W12. Shall I proceed?", "I do not know yet"),
        ("#W1", "I will cancel (#W1). Shall I proceed?", "Yes"),
    ],
)
def test_an_option_is_said_where_it_is_a_word_of_its_own(option: str, said: str, answer: str) -> None:
    assert customer(replace(BACK, named=((option,),))).hear(said, set()).startswith(answer)


@pytest.mark.parametrize(
    ("kind", "said", "met"),
    [
        ("how_many", "There are 4.", True),
        ("how_many", "There are 4 or 5.", False),
        ("how_many", "It is not 4.", False),
        ("how_many", "There aren't exactly 4.", False),
        ("how_many", "I cannot say more: there are 4.", True),
        ("how_much", "2 items, $4.00 in all.", True),
        ("how_much", "It is not $4.00.", False),
        ("how_much", "It is $4.00, not $5.00.", True),
    ],
)
def test_an_answer_that_is_hedged_is_none(kind: str, said: str, met: bool) -> None:
    one = customer(Wish(kind, ("Tell me.",), {}, answer="4"), BACK)
    one.hear(said, set())
    assert one.met == int(met)


def test_a_fact_is_not_told_before_it_is_asked_for() -> None:
    one = customer(BACK)
    assert not any(fact in one.open() for fact in BACK.facts.values())
    assert "Lamp" not in one.hear("Which order is it?", set())


def test_a_refusal_counts_after_what_it_rests_on_was_read_and_asked() -> None:
    one = customer(LATE, BACK)
    assert "looked" in one.hear("I cannot do that.", set())
    one.hear("What is the reason?", set())
    assert "looked" in one.hear("I cannot do that.", set())
    assert "send something back" in one.hear("I am afraid that is not possible.", set(LATE.reads))
    assert one.met == 1


def test_patience_ends_where_nothing_moves_and_begins_anew_where_something_does() -> None:
    one = customer(BACK)
    for _ in range(PATIENCE - 1):
        assert one.hear("Hm.", set())
    assert one.hear("Which order?", set())
    for _ in range(PATIENCE - 1):
        assert one.hear("Which order?", set())
    assert not one.hear("Which order?", set())


@pytest.mark.parametrize("piece", ["1,", "yes ", "please? ", "can ", "9.9", "\n"])
def test_hostile_messages_are_read_in_linear_time(piece: str) -> None:
    assert growth(lambda text: customer(BACK).hear(text, set()), piece, 20_000, 80_000) < 10


# ---------------------------------------------------------------------- the tools


@pytest.fixture
def counter() -> Counter:
    return Counter(Store(7))


def order_of(counter: Counter, status: str) -> dict[str, Any]:
    row = counter.store.row("SELECT order_id FROM orders WHERE status = ? ORDER BY order_id", status)
    shown: dict[str, Any] = json.loads(counter.get_order_details((row or {})["order_id"]))
    return shown


def test_a_cancelled_order_is_paid_back_to_the_cent_and_cannot_be_cancelled_again(counter: Counter) -> None:
    order = order_of(counter, "pending")
    about = ToolCall("cancel_pending_order", {"order_id": order["order_id"], "reason": REASONS[1]})
    after = json.loads(counter.call(about).result)
    assert (after["status"], after["reason"]) == ("cancelled", REASONS[1])
    assert after["payment_history"] == [order["payment_history"][0], {**order["payment_history"][0], "kind": "refund"}]
    assert order["payment_history"][0]["amount"] == pytest.approx(sum(item["price"] for item in order["items"]))
    again = counter.call(about)
    assert again.outcome == "error"
    assert again.result == f"error: {order['order_id']} is cancelled, and this is for orders that are pending"


def test_other_items_are_paid_by_the_difference_once(counter: Counter) -> None:
    order = order_of(counter, "pending")
    item = order["items"][0]
    variants = json.loads(counter.get_product_details(item["product_id"]))["variants"]
    new = next(one for one in variants if one["available"] and one["item_id"] != item["item_id"])
    gift = counter.store.row("SELECT * FROM cards WHERE user_id = ? AND source = 'gift_card'", order["user_id"]) or {}
    arguments = {"order_id": order["order_id"], "item_ids": [item["item_id"]], "new_item_ids": [new["item_id"]]}
    about = ToolCall("modify_pending_order_items", {**arguments, "payment_method_id": gift["payment_method_id"]})
    after = json.loads(counter.call(about).result)
    owed = round(100 * new["price"]) - round(100 * item["price"])
    left = counter.store.row("SELECT balance FROM cards WHERE payment_method_id = ?", gift["payment_method_id"]) or {}
    assert left["balance"] == gift["balance"] - owed
    assert (after["status"], after["items"][0]["item_id"]) == (ITEMS_CHANGED, new["item_id"])
    assert counter.call(about).outcome == "error"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("get_order_details", {"order_id": "#W0"}, "no such order"),
        ("get_order_details", {}, "'order_id' is missing"),
        ("get_order_details", {"order_id": 5}, "must be of type string"),
        ("get_order_details", {"order_id": "\ud800"}, "half a surrogate pair"),
        ("find_user_id_by_email", {"email": "' OR 1=1 --"}, "no such user"),
        ("cancel_pending_order", {"order_id": "P", "reason": "cheaper"}, "the reason must be one of"),
        ("return_delivered_order_items", {"order_id": "D", "item_ids": [], "payment_method_id": "OWN"}, "no item"),
        ("return_delivered_order_items", {"order_id": "D", "item_ids": ["1"], "payment_method_id": "OWN"}, "is not among"),
        ("return_delivered_order_items", {"order_id": "D", "item_ids": [{}], "payment_method_id": "OWN"}, "which are texts"),
        ("return_delivered_order_items", {"order_id": "D", "item_ids": ["1"], "payment_method_id": "x"}, "of this customer"),
        ("steal", {}, "no tool 'steal'"),
    ],
)
def test_what_a_tool_refuses_is_said_and_changes_nothing(
    name: str, arguments: dict[str, Any], said: str, counter: Counter
) -> None:
    orders = {"P": order_of(counter, "pending"), "D": order_of(counter, "delivered")}
    given = {**arguments}
    if given.get("order_id") in ("P", "D"):
        order = orders[given["order_id"]]
        given["order_id"] = order["order_id"]
        if given.get("payment_method_id") == "OWN":
            given["payment_method_id"] = order["payment_history"][0]["payment_method_id"]
    record = counter.call(ToolCall(name, given))
    assert record.outcome != "ok"
    assert said in record.result
    assert difference(counter.store, Store(7)) == ""


def test_an_exchange_for_another_product_or_what_is_sold_out_is_refused(counter: Counter) -> None:
    order = order_of(counter, "delivered")
    own = order["payment_history"][0]["payment_method_id"]
    query = "SELECT * FROM variants WHERE product_id {} ? AND available = ?"
    other = counter.store.row(query.format("!="), order["items"][0]["product_id"], 1) or {}
    query = "SELECT o.order_id, i.item_id AS item, new.item_id AS new, m.payment_method_id AS card FROM orders o "
    query += "JOIN items i USING (order_id) JOIN variants v ON v.item_id = i.item_id JOIN payments m USING (order_id) "
    query += "JOIN variants new ON new.product_id = v.product_id AND new.item_id != i.item_id "
    sold = counter.store.row(query + "WHERE o.status = 'delivered' AND NOT new.available ORDER BY o.order_id, new.item_id")
    assert sold
    for order_id, item, new, card, said in (
        (order["order_id"], order["items"][0]["item_id"], other["item_id"], own, "is another product than"),
        (sold["order_id"], sold["item"], sold["new"], sold["card"], f"{sold['new']} cannot be had"),
    ):
        about = {"order_id": order_id, "item_ids": [item], "new_item_ids": [new], "payment_method_id": card}
        record = counter.call(ToolCall("exchange_delivered_order_items", about))
        assert record.outcome == "error"
        assert said in record.result


def test_the_order_in_which_items_are_named_is_nothing() -> None:
    one, other = Counter(Store(7)), Counter(Store(7))
    order = order_of(one, "delivered")
    ids = [item["item_id"] for item in order["items"]]
    for counter, named in ((one, ids), (other, ids[::-1])):
        card = order["payment_history"][0]["payment_method_id"]
        counter.return_delivered_order_items(order["order_id"], named, card)
    assert difference(one.store, other.store) == ""


# ---------------------------------------------------------------------- the world as others


def test_a_whole_episode_through_the_agent() -> None:
    """As a policy plays it: the right turns for a task without lists, byte by byte."""
    world = Retail(rules=False, plans=("change",))
    task = next(task for i in range(99) if wishes_of(task := world.task("test", i))[0].kind == "cancel")
    env = RetailEpisode(world)
    env.begin(task, task["seed"])
    turns = list(clerk(env))
    limits, sampling = Limits(max_turns=12, max_tokens=8000), Sampling(max_tokens=300)
    (row,) = asyncio.run(episode(world, task, script(PlainTemplate(), *turns), limits=limits, sampling=sampling))
    assert (row.reward, row.stop) == (1.0, StopReason.ANSWERED)
    assert row.solved


def wishes_of(task: Task) -> list[Wish]:
    env = RetailEpisode(WORLD)
    env.begin(task, 0)
    return env.customer.wishes


def test_seeds_of_episodes_change_the_customers_words_and_nothing_else() -> None:
    task = TASKS[0]
    said = {play(task, silent, seed)[1].begin(task, seed).messages[-1].content for seed in range(20)}
    assert len(said) > 1
    assert {play(task, clerk, seed)[0].reward for seed in range(20)} == {1.0}


def test_the_contract_is_kept() -> None:
    assert [(finding.question, finding.said) for finding in check(Retail()) if finding.ok is False] == []


def test_a_copy_goes_its_own_way_from_the_same_state() -> None:
    env = RetailEpisode(WORLD)
    env.begin(task_of("change"), 0)
    turns = list(clerk(env))
    for turn in turns[:4]:
        env.take(turn)
    other = asyncio.run(env.fork("copy"))
    for turn in turns[4:]:
        last, same = env.take(turn), other.take(turn)
        assert (last.messages, last.reward, last.state) == (same.messages, same.reward, same.state)
    assert last.reward == 1.0
    env.end()
    assert "orders" in other._store().dump()


def test_plans_that_are_not_known_are_told_and_known_ones_are_all_that_is_drawn() -> None:
    with pytest.raises(ValueError, match=r"env\.options\.plans must be of change, .*; got 'steal'"):
        Retail(plans=("steal",))
    world = Retail(plans=("refuse+change",))
    assert {world.task("train", i)["difficulty"] for i in range(20)} == {"refuse+change"}


def test_the_tools_are_those_of_tau_bench_by_name() -> None:
    assert {"find_user_id_by_email", "get_order_details", TRANSFER, *WRITE} <= {spec.name for spec in SPECS}
    assert all(spec.description for spec in SPECS)
