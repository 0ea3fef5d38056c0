"""What a customer wants of a shop, drawn by seed: changes, questions, what must be refused, and what only a person may settle.

A wish knows what fulfils it, as one call of the clerk's tools, and every fact that the clerk must ask for. One that must be
refused has no such call; it names what must have been read and asked before a refusal is one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from jaxagent.envs.shops.counter import REASONS, TRANSFER
from jaxagent.envs.shops.store import RETURN_DAYS, TODAY, Place, Store, dollars
from jaxagent.types import ToolCall

PLANS = (
    ("change",),
    ("change", "change"),
    ("ask", "change"),
    ("refuse", "change"),
    ("refuse", "instead"),
    ("transfer",),
    ("change", "transfer"),
    ("refuse", "transfer"),
)
CHANGES = ("cancel", "send_back", "exchange", "other_items", "other_address", "move", "other_payment")
QUESTIONS = ("how_many", "how_much")
REFUSED = ("cancel_sent", "cancel_cheaper", "send_back_late", "send_back_elsewhere", "exchange_product", "anothers_order")
WITH_INSTEAD = ("send_back_elsewhere", "exchange_product")
_SOURCES = {"credit_card": "credit card", "paypal": "PayPal", "gift_card": "gift card"}


@dataclass(frozen=True)
class Wish:
    """One wish.

    Args:
        kind: one of the names above.
        openings: ways to bring it up; none tells more than that it is there.
        facts: what is told when it is asked for, by topic.
        named: what a proposal must say before it is agreed to, each in one of several ways.
        call: what fulfils it, or nothing where it must be refused or is a question.
        reads: calls, as name and id, that one must look at; without them neither an answer nor a refusal counts.
        needs: topics that must have been told before a refusal.
        answer: the number that a question wants.
    """

    kind: str
    openings: tuple[str, ...]
    facts: Mapping[str, str]
    named: tuple[tuple[str, ...], ...] = ()
    call: ToolCall | None = None
    reads: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    answer: str = ""


def customer_of(seed: int, plan: Sequence[str], store: Store) -> tuple[dict[str, Any], list[Wish]]:
    """Who comes, as a row of `users`, and what they want of a store as the seed made it. Args: plan: one of PLANS."""
    rng = random.Random(f"{seed}/wishes")
    draw = _Draw(rng, store, rng.choice(store.rows("SELECT * FROM users ORDER BY user_id")))
    wishes, used = list[Wish](), set[str]()
    for number, kind in enumerate(plan):
        if kind == "instead":
            wishes.append(draw.instead())
            continue
        if kind == "refuse":
            choices: tuple[str, ...] = WITH_INSTEAD if "instead" in plan[number:] else REFUSED
        else:
            choices = {"change": CHANGES, "ask": QUESTIONS, "transfer": ("damaged",)}[kind]
        chosen = rng.choice([name for name in choices if name not in used])
        used.add(chosen)
        wishes.append(getattr(draw, chosen)())
    return draw.user, wishes


@dataclass
class _Draw:
    """Draws wishes of one customer, no two about the same order."""

    rng: random.Random
    store: Store
    user: dict[str, Any]
    orders: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for order in self.store.rows("SELECT * FROM orders WHERE user_id = ? ORDER BY order_id", self.user["user_id"]):
            late = order["status"] == "delivered" and order["delivered"] < str(TODAY - timedelta(days=RETURN_DAYS))
            self.orders.setdefault("late" if late else order["status"], []).append(order)

    def _take(self, kind: str) -> dict[str, Any]:
        taken = self.orders[kind].pop(self.rng.randrange(len(self.orders[kind])))
        query = "SELECT i.item_id, i.price, v.product_id, v.options, p.name FROM items i JOIN variants v USING (item_id) "
        query += "JOIN products p USING (product_id) WHERE order_id = ? ORDER BY place"
        self.last = {**taken, "items": self.store.rows(query, taken["order_id"])}
        paid = self.store.row("SELECT * FROM payments WHERE order_id = ?", taken["order_id"])
        self.last |= {"paid_with": paid["payment_method_id"], "amount": paid["amount"]} if paid else {}
        return self.last

    def _cards(self) -> list[dict[str, Any]]:
        return self.store.rows("SELECT * FROM cards WHERE user_id = ? ORDER BY payment_method_id", self.user["user_id"])

    # Changes.

    def cancel(self) -> Wish:
        order, reason = self._take("pending"), self.rng.choice(REASONS)
        why = "I do not need it any more, it is no longer needed." if reason == REASONS[0] else "I ordered it by mistake."
        call = ToolCall("cancel_pending_order", {"order_id": order["order_id"], "reason": reason})
        return Wish("cancel", _CANCEL, {**_about(order), "reason": why}, (_id(order), (reason.split(" ", 1)[1],)), call)

    def send_back(self) -> Wish:
        order = self._take("delivered")
        return self._send_back(order, self.rng.sample(order["items"], self.rng.randrange(1, len(order["items"]))))

    def _send_back(self, order: dict[str, Any], items: list[dict[str, Any]]) -> Wish:
        gift = next(card["payment_method_id"] for card in self._cards() if card["source"] == "gift_card")
        card = self.rng.choice((order["paid_with"], gift))
        arguments = {"order_id": order["order_id"], "item_ids": _ids(items), "payment_method_id": card}
        facts = {**_about(order, items), "payment": f"The money should go to my {_source(card)}."}
        named = (_id(order), *_names(items), (_source(card),))
        return Wish("send_back", _SEND_BACK, facts, named, ToolCall("return_delivered_order_items", arguments))

    def exchange(self) -> Wish:
        return self._variants("exchange", self._take("delivered"), "exchange_delivered_order_items", _EXCHANGE)

    def other_items(self) -> Wish:
        return self._variants("other_items", self._take("pending"), "modify_pending_order_items", _OTHER_ITEMS)

    def _variants(self, kind: str, order: dict[str, Any], tool: str, openings: tuple[str, ...]) -> Wish:
        item, card = self.rng.choice(order["items"]), order["paid_with"]
        query = "SELECT * FROM variants WHERE product_id = ? AND available AND item_id != ? ORDER BY item_id"
        new = self.rng.choice(self.store.rows(query, item["product_id"], item["item_id"]))
        values = list(json.loads(new["options"]).values())
        arguments = {"order_id": order["order_id"], "item_ids": _ids([item]), "new_item_ids": [new["item_id"]]}
        call = ToolCall(tool, {**arguments, "payment_method_id": card})
        facts = {**_about(order, [item]), "option": f"I would like the one with {' and '.join(values)}."}
        facts["payment"] = f"Use my {_source(card)} for the difference."
        named = (_id(order), *_names([item]), *((value,) for value in values), (_source(card),))
        reads = (("get_order_details", order["order_id"]), ("get_product_details", item["product_id"]))
        return Wish(kind, openings, facts, named, call, reads)

    def other_address(self) -> Wish:
        order, place = self._take("pending"), Place.draw(self.rng)
        call = ToolCall("modify_pending_order_address", {"order_id": order["order_id"], **place.__dict__})
        named = (_id(order), (place.address1,))
        return Wish("other_address", _OTHER_ADDRESS, {**_about(order), "address": _spoken(place)}, named, call)

    def move(self) -> Wish:
        place = Place.draw(self.rng)
        call = ToolCall("modify_user_address", {"user_id": self.user["user_id"], **place.__dict__})
        facts = {"order": "It is about no order, I mean my own address.", "address": _spoken(place)}
        return Wish("move", _MOVE, facts, ((place.address1,),), call)

    def other_payment(self) -> Wish:
        order = self._take("pending")
        others = [card for card in self._cards() if card["payment_method_id"] != order["paid_with"]]
        card = self.rng.choice([c for c in others if c["balance"] is None or c["balance"] >= order["amount"]])[
            "payment_method_id"
        ]
        call = ToolCall("modify_pending_order_payment", {"order_id": order["order_id"], "payment_method_id": card})
        facts = {**_about(order), "payment": f"I want to pay with my {_source(card)}."}
        return Wish("other_payment", _OTHER_PAYMENT, facts, (_id(order), (_source(card),)), call)

    # Questions.

    def how_many(self) -> Wish:
        product = self.rng.choice(self.store.rows("SELECT * FROM products ORDER BY product_id"))
        found = self.store.row("SELECT sum(available) AS n FROM variants WHERE product_id = ?", product["product_id"])
        facts = {"item": f"I mean the {product['name']}.", "option": "Any, I only want to know how many there are."}
        reads = (("get_product_details", product["product_id"]),)
        return Wish("how_many", _HOW_MANY, facts, reads=reads, answer=str((found or {})["n"]))

    def how_much(self) -> Wish:
        order = self._take(self.rng.choice(("processed", "late")))
        reads = (("get_order_details", order["order_id"]),)
        return Wish("how_much", _HOW_MUCH, _about(order), reads=reads, answer=f"{dollars(order['amount']):.2f}")

    # What must be refused.

    def _refused(self, kind: str, openings: tuple[str, ...], order: dict[str, Any], **more: Any) -> Wish:
        facts, needs = more.pop("facts", {}), more.pop("needs", ())
        named = (_id(order), *more.pop("named", ()))
        reads = (("get_order_details", order["order_id"]),)
        return Wish(kind, openings, {**_about(order, more.pop("items", ())), **facts}, named, None, reads, needs)

    def cancel_sent(self) -> Wish:
        facts = {"reason": "It is no longer needed."}
        return self._refused("cancel_sent", _CANCEL, self._take("processed"), facts=facts)

    def cancel_cheaper(self) -> Wish:
        facts = {"reason": "I found it cheaper elsewhere."}
        return self._refused("cancel_cheaper", _CANCEL, self._take("pending"), facts=facts, needs=("reason",))

    def send_back_late(self) -> Wish:
        order = self._take("late")
        facts = {"payment": f"The money should go to my {_source(order['paid_with'])}."}
        return self._refused("send_back_late", _SEND_BACK, order, items=order["items"][:1], facts=facts)

    def send_back_elsewhere(self) -> Wish:
        order = self._take("delivered")
        other = "paypal" if order["paid_with"].startswith("credit_card") else "credit_card"
        facts = {"payment": f"The money should go to my {_SOURCES[other]}, not to what I paid with."}
        more = {"items": order["items"][:1], "facts": facts, "needs": ("payment",)}
        return self._refused("send_back_elsewhere", _SEND_BACK, order, **more)

    def exchange_product(self) -> Wish:
        order = self._take("delivered")
        held = {item["name"] for item in order["items"]}
        other = self.rng.choice(
            [row["name"] for row in self.store.rows("SELECT name FROM products") if row["name"] not in held]
        )
        facts = {"option": f"I would like a {other} in its place.", "payment": f"Use my {_source(order['paid_with'])}."}
        more = {"items": order["items"][:1], "facts": facts, "needs": ("option",)}
        return self._refused("exchange_product", _EXCHANGE, order, **more)

    def anothers_order(self) -> Wish:
        query = "SELECT * FROM orders WHERE user_id != ? AND status = 'pending' ORDER BY order_id"
        order = self.rng.choice(self.store.rows(query, self.user["user_id"]))
        return self._refused("anothers_order", _ANOTHERS, order, facts={"reason": "It is no longer needed."})

    # What comes after a refusal, about the same order, and what is for a person.

    def instead(self) -> Wish:
        if self.rng.random() < 0.5:
            made = self._send_back(self.last, self.last["items"][:1])
            return Wish("send_back", _INSTEAD, made.facts, made.named, made.call)
        return self._variants("exchange", self.last, "exchange_delivered_order_items", _INSTEAD_OTHER)

    def damaged(self) -> Wish:
        order = self._take("delivered" if self.orders["delivered"] else "late")
        facts = {**_about(order, order["items"][:1]), "reason": "It came broken and ruined my evening.", "payment": "In cash."}
        return Wish("damaged", _DAMAGED, facts, call=ToolCall(TRANSFER, {"summary": "wants compensation for damage"}))


def _about(order: dict[str, Any], items: Any = ()) -> dict[str, str]:
    facts = {"order": f"The order is {order['order_id']}."}
    if items:
        facts["item"] = f"It is about the {' and the '.join(item['name'] for item in items)}."
    return facts


def _id(order: dict[str, Any]) -> tuple[str, ...]:
    return (order["order_id"], order["order_id"].lstrip("#"))


def _ids(items: list[dict[str, Any]]) -> list[str]:
    return sorted(item["item_id"] for item in items)


def _names(items: list[dict[str, Any]]) -> tuple[tuple[str, ...], ...]:
    return tuple((item["name"], item["item_id"]) for item in items)


def _source(card: str) -> str:
    return _SOURCES[card.rpartition("_")[0]]


def _spoken(place: Place) -> str:
    return f"It is {', '.join(place.values)}."


_CANCEL = ("I want to cancel an order.", "Please cancel something that I ordered.", "There is an order that I want to cancel.")
_SEND_BACK = ("I want to send something back.", "I would like to return part of an order.", "I need to make a return.")
_EXCHANGE = ("I want to exchange something that came.", "What I got is not quite right, I want to swap it.")
_OTHER_ITEMS = ("I want another version of something that I ordered and that is not sent yet.", "I chose wrongly in an order.")
_OTHER_ADDRESS = ("An order of mine must go to another address.", "Please send an order somewhere else.")
_MOVE = ("I have moved, please change my address.", "My own address has changed.")
_OTHER_PAYMENT = ("I want to pay for an order in another way.", "Please take another payment for an order.")
_HOW_MANY = (
    "How many versions of a product can I get right now?",
    "I want to know how many kinds of something you have there.",
)
_HOW_MUCH = ("How much did I pay for an order in all?", "I want to know what an order cost me in all.")
_ANOTHERS = ("My neighbour asked me to cancel an order of theirs.", "Please cancel an order of a friend of mine.")
_INSTEAD = ("Then take it back in the way that you can, please.", "All right, then I want to return it as it is possible.")
_INSTEAD_OTHER = (
    "Then give me another version of something in that order.",
    "All right, then swap something for its other version.",
)
_DAMAGED = ("Something came broken, and I want to be compensated.", "I demand compensation for what you sent me.")
