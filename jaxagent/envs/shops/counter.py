"""The tools of a shop's clerk, over one store. Names, arguments and results are those of tau-bench's retail tools.

They refuse what the shop's system cannot do: to cancel what is on its way, to send an item that is sold out, to charge a card
that is not the customer's. Other rules stand only in the policy that a clerk is told (`retail.POLICY`), and no tool keeps them.
"""

from __future__ import annotations

import json
from typing import Any

from jaxagent.envs.shops.store import Store, dollars
from jaxagent.tools import Tool, ToolFailed, fault_of, tool
from jaxagent.types import ToolCall, ToolRecord

REASONS = ("no longer needed", "ordered by mistake")
ITEMS_CHANGED = "pending (item modified)"
FIND = ("find_user_id_by_email", "find_user_id_by_name_zip")
READ = ("get_user_details", "get_order_details")
WRITE = (
    "cancel_pending_order",
    "return_delivered_order_items",
    "exchange_delivered_order_items",
    "modify_pending_order_items",
    "modify_pending_order_address",
    "modify_pending_order_payment",
    "modify_user_address",
)
TRANSFER = "transfer_to_human_agents"
_PLACE = "address1 = ?, address2 = ?, city = ?, state = ?, country = ?, zip = ?"


class Counter:
    """The tools of one episode. Every one raises ToolFailed for what it refuses, and then has changed nothing."""

    def __init__(self, store: Store):
        self.store = store

    def find_user_id_by_email(self, email: str) -> str:
        """Finds a customer's user id by their e-mail address."""
        user = self.store.row("SELECT user_id FROM users WHERE email = ?", email.strip().lower())
        return str(_there(user, "user")["user_id"])

    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Finds a customer's user id by first name, last name and zip code."""
        query = "SELECT user_id FROM users WHERE lower(first_name) = ? AND lower(last_name) = ? AND zip = ?"
        return str(_there(self.store.row(query, first_name.lower(), last_name.lower(), zip), "user")["user_id"])

    def get_user_details(self, user_id: str) -> str:
        """Shows a customer: address, e-mail, payment methods and the ids of their orders."""
        user = _there(self.store.row("SELECT * FROM users WHERE user_id = ?", user_id), "user")
        cards = self.store.rows("SELECT payment_method_id AS id, source, balance FROM cards WHERE user_id = ?", user_id)
        orders = self.store.rows("SELECT order_id FROM orders WHERE user_id = ? ORDER BY rowid", user_id)
        methods = [
            {"id": card["id"], "source": card["source"]} | ({} if card["balance"] is None else _money("balance", card))
            for card in cards
        ]
        return json.dumps({**user, "payment_methods": methods, "orders": [order["order_id"] for order in orders]})

    def get_order_details(self, order_id: str) -> str:
        """Shows an order: whose it is, its status, address, items with their ids and options, and payments."""
        order = self._order(order_id)
        items = self.store.rows(
            "SELECT p.name, i.item_id, p.product_id, v.options, i.price FROM items i JOIN variants v USING (item_id) "
            "JOIN products p USING (product_id) WHERE i.order_id = ? ORDER BY i.place",
            order_id,
        )
        for item in items:
            item |= {"options": json.loads(item["options"]), **_money("price", item)}
        paid = self.store.rows(
            "SELECT kind, amount, payment_method_id FROM payments WHERE order_id = ? ORDER BY number", order_id
        )
        shown = {key: value for key, value in order.items() if value or key not in ("delivered", "reason")}
        return json.dumps({**shown, "items": items, "payment_history": [{**one, **_money("amount", one)} for one in paid]})

    def get_product_details(self, product_id: str) -> str:
        """Shows a product: all its variants with their item ids, options, prices, and whether they can be had."""
        product = _there(self.store.row("SELECT * FROM products WHERE product_id = ?", product_id), "product")
        variants = self.store.rows("SELECT item_id, options, price, available FROM variants WHERE product_id = ?", product_id)
        for one in variants:
            one |= {"options": json.loads(one["options"]), "available": bool(one["available"]), **_money("price", one)}
        return json.dumps({**product, "variants": variants})

    def list_all_product_types(self) -> str:
        """Lists the names and ids of all products."""
        products = self.store.rows("SELECT name, product_id FROM products ORDER BY name")
        return json.dumps({product["name"]: product["product_id"] for product in products})

    def cancel_pending_order(self, order_id: str, reason: str) -> str:
        """Cancels a pending order and pays it back. The reason is 'no longer needed' or 'ordered by mistake'."""
        self._order(order_id, "pending")
        if reason not in REASONS:
            raise ToolFailed(f"error: the reason must be one of {', '.join(map(repr, REASONS))}, got {reason!r}")
        for paid in self.store.rows("SELECT * FROM payments WHERE order_id = ? ORDER BY number", order_id):
            back = paid["amount"] if paid["kind"] == "payment" else -paid["amount"]
            self._pay(order_id, paid["payment_method_id"], -back)
        self.store.write("UPDATE orders SET status = 'cancelled', reason = ? WHERE order_id = ?", reason, order_id)
        return self.get_order_details(order_id)

    def return_delivered_order_items(self, order_id: str, item_ids: list[str], payment_method_id: str) -> str:
        """Takes items of a delivered order back, once for an order; the money goes to the payment method."""
        order = self._order(order_id, "delivered")
        self._card(order["user_id"], payment_method_id)
        self._items(order_id, item_ids)
        for item in sorted(item_ids):
            self.store.write("INSERT INTO changes VALUES (?, 'return', ?, NULL, ?)", order_id, item, payment_method_id)
        self.store.write("UPDATE orders SET status = 'return requested' WHERE order_id = ?", order_id)
        return self.get_order_details(order_id)

    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> str:
        """Exchanges items of a delivered order for other variants, once for an order; the method settles the difference."""
        order = self._order(order_id, "delivered")
        self._pairs(order, item_ids, new_item_ids, payment_method_id)
        for item, new in sorted(zip(item_ids, new_item_ids, strict=True)):
            self.store.write("INSERT INTO changes VALUES (?, 'exchange', ?, ?, ?)", order_id, item, new, payment_method_id)
        self.store.write("UPDATE orders SET status = 'exchange requested' WHERE order_id = ?", order_id)
        return self.get_order_details(order_id)

    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> str:
        """Changes items of a pending order into other variants, once for an order; the method pays or gets the difference."""
        order = self._order(order_id, "pending")
        owed = self._pairs(order, item_ids, new_item_ids, payment_method_id)
        for item, new in zip(item_ids, new_item_ids, strict=True):
            place = self.store.row("SELECT min(place) AS place FROM items WHERE order_id = ? AND item_id = ?", order_id, item)
            query = "UPDATE items SET item_id = ?, price = ? WHERE order_id = ? AND place = ?"
            self.store.write(query, new, self._variant(new)["price"], order_id, place["place"] if place else None)
        if owed:
            self._pay(order_id, payment_method_id, owed)
        self.store.write("UPDATE orders SET status = ? WHERE order_id = ?", ITEMS_CHANGED, order_id)
        return self.get_order_details(order_id)

    def modify_pending_order_address(
        self, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> str:
        """Changes where a pending order is sent."""
        self._order(order_id, "pending")
        query = f"UPDATE orders SET {_PLACE} WHERE order_id = ?"
        self.store.write(query, address1, address2, city, state, country, zip, order_id)
        return self.get_order_details(order_id)

    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> str:
        """Changes what a pending order is paid with; the former method gets its money back."""
        order = self._order(order_id, "pending")
        paid = self.store.rows("SELECT * FROM payments WHERE order_id = ? ORDER BY number", order_id)
        if len(paid) > 1:
            raise ToolFailed(f"error: the payment of {order_id} was changed before")
        card, amount = self._card(order["user_id"], payment_method_id), paid[0]["amount"]
        if payment_method_id == paid[0]["payment_method_id"]:
            raise ToolFailed(f"error: {order_id} is paid with {payment_method_id} already")
        self._covers(card, amount)
        self._pay(order_id, payment_method_id, amount)
        self._pay(order_id, paid[0]["payment_method_id"], -amount)
        return self.get_order_details(order_id)

    def modify_user_address(
        self, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> str:
        """Changes a customer's own address; orders keep theirs."""
        _there(self.store.row("SELECT user_id FROM users WHERE user_id = ?", user_id), "user")
        query = f"UPDATE users SET {_PLACE} WHERE user_id = ?"
        self.store.write(query, address1, address2, city, state, country, zip, user_id)
        return self.get_user_details(user_id)

    def transfer_to_human_agents(self, summary: str) -> str:
        """Hands the customer over to a person, which ends the conversation."""
        self.store.write("INSERT INTO transfers DEFAULT VALUES")
        return "transferred"

    def _order(self, order_id: str, status: str = "") -> dict[str, Any]:
        order = _there(self.store.row("SELECT * FROM orders WHERE order_id = ?", order_id), "order")
        if status and order["status"] != status:
            raise ToolFailed(f"error: {order_id} is {order['status']}, and this is for orders that are {status}")
        return order

    def _card(self, user_id: str, payment_method_id: str) -> dict[str, Any]:
        query = "SELECT * FROM cards WHERE payment_method_id = ? AND user_id = ?"
        return _there(self.store.row(query, payment_method_id, user_id), "payment method of this customer")

    def _variant(self, item_id: str) -> dict[str, Any]:
        return _there(self.store.row("SELECT * FROM variants WHERE item_id = ?", item_id), "item")

    def _items(self, order_id: str, item_ids: list[str]) -> None:
        left = [row["item_id"] for row in self.store.rows("SELECT item_id FROM items WHERE order_id = ?", order_id)]
        if not item_ids:
            raise ToolFailed("error: no item is named")
        for item in item_ids:
            if item not in left:
                raise ToolFailed(f"error: {item!r} is not among the items of {order_id}")
            left.remove(item)

    def _pairs(self, order: dict[str, Any], item_ids: list[str], new_item_ids: list[str], payment_method_id: str) -> int:
        """What is owed for new items in place of others. Raises ToolFailed where they cannot take it."""
        self._items(order["order_id"], item_ids)
        if len(item_ids) != len(new_item_ids):
            raise ToolFailed(f"error: {len(item_ids)} items and {len(new_item_ids)} new items, as many are wanted")
        owed = 0
        for item, new in zip(item_ids, new_item_ids, strict=True):
            old, variant = self._variant(item), self._variant(str(new))
            if old["product_id"] != variant["product_id"]:
                raise ToolFailed(f"error: {new} is another product than {item}")
            if item == new or not variant["available"]:
                raise ToolFailed(f"error: {new} {'is what was bought' if item == new else 'cannot be had'}")
            held = self.store.row("SELECT price FROM items WHERE order_id = ? AND item_id = ?", order["order_id"], item)
            owed += variant["price"] - (held or old)["price"]
        self._covers(self._card(order["user_id"], payment_method_id), owed)
        return owed

    def _covers(self, card: dict[str, Any], owed: int) -> None:
        if card["balance"] is not None and card["balance"] < owed:
            raise ToolFailed(f"error: {card['payment_method_id']} holds less than {dollars(owed)}")

    def _pay(self, order_id: str, payment_method_id: str, amount: int) -> None:
        """Charges a payment method, or pays it back where the amount is negative."""
        number = self.store.row("SELECT count(*) AS number FROM payments WHERE order_id = ?", order_id)
        row = (order_id, (number or {})["number"], "payment" if amount > 0 else "refund", abs(amount), payment_method_id)
        self.store.write("INSERT INTO payments VALUES (?, ?, ?, ?, ?)", *row)
        query = "UPDATE cards SET balance = balance - ? WHERE payment_method_id = ? AND balance IS NOT NULL"
        self.store.write(query, amount, payment_method_id)

    def call(self, call: ToolCall) -> ToolRecord:
        """Runs one call; what is wrong with it is a result that the policy reads."""
        record = ToolRecord(call.name, call.arguments, "ok", "")
        spec = next((one for one in SPECS if one.name == call.name), None)
        if spec is None:
            known = ", ".join(one.name for one in SPECS)
            record.outcome, record.result = "unknown_tool", f"error: no tool {call.name!r}; there are {known}"
        elif fault := fault_of(spec, call.arguments) or _fault_of_ids(call.arguments):
            record.outcome, record.result = "bad_arguments", f"error: {fault}"
        else:
            try:
                record.result = getattr(self, call.name)(**call.arguments)
            except ToolFailed as error:
                record.outcome, record.result = "error", str(error)
        record.size_bytes = len(record.result.encode(errors="replace"))
        return record


def _there(row: dict[str, Any] | None, what: str) -> dict[str, Any]:
    if row is None:
        raise ToolFailed(f"error: there is no such {what}")
    return row


def _money(name: str, row: dict[str, Any]) -> dict[str, float]:
    return {name: dollars(row[name])}


def _fault_of_ids(arguments: dict[str, Any]) -> str:
    """SQLite takes texts of Unicode only, and lists here are of ids."""
    for name, value in arguments.items():
        several = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str) for one in several):
            return f"{name!r} must be {'ids, which are texts' if isinstance(value, list) else 'a text'}"
        if any("\ud800" <= letter <= "\udfff" for one in several for letter in one):
            return f"{name!r} is no text: half a surrogate pair is in it"
    return ""


def _tools() -> tuple[Tool, ...]:
    shown = Counter(Store(0))
    names = (*FIND, *READ, "get_product_details", "list_all_product_types", *WRITE, TRANSFER)
    return tuple(tool(getattr(shown, name)) for name in names)


SPECS = tuple(one.spec for one in _tools())
