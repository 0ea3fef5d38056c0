"""A store of one episode: customers, what they can pay with, products, orders, in SQLite and in memory, the same for a seed.

Prices are whole cents. What a change leaves behind is rows and nothing else, so two stores that were treated alike are equal
table by table; that is what `retail` pays for.
"""

from __future__ import annotations

import json
import random
import sqlite3
from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from typing import Any

TODAY = date(2024, 5, 15)
RETURN_DAYS = 30
USERS = 4
_TABLES = ("users", "cards", "products", "variants", "orders", "items", "payments", "changes", "transfers")
_PLACE = "address1, address2, city, state, country, zip"
_SCHEMA = f"""
CREATE TABLE users (user_id TEXT PRIMARY KEY, first_name, last_name, email, {_PLACE});
CREATE TABLE cards (payment_method_id TEXT PRIMARY KEY, user_id, source, balance INTEGER);
CREATE TABLE products (product_id TEXT PRIMARY KEY, name);
CREATE TABLE variants (item_id TEXT PRIMARY KEY, product_id, options, price INTEGER, available INTEGER);
CREATE TABLE orders (order_id TEXT PRIMARY KEY, user_id, status, delivered, reason, {_PLACE});
CREATE TABLE items (order_id, place INTEGER, item_id, price INTEGER, PRIMARY KEY (order_id, place));
CREATE TABLE payments (order_id, number INTEGER, kind, amount INTEGER, payment_method_id, PRIMARY KEY (order_id, number));
CREATE TABLE changes (order_id, kind, item_id, new_item_id, payment_method_id);
CREATE TABLE transfers (number INTEGER PRIMARY KEY);
"""
_FIRST = ("Ada", "Ben", "Chloe", "Dario", "Emre", "Fatima", "Greta", "Hana", "Ivan", "Juno", "Kofi", "Lena", "Mei", "Noah")
_LAST = ("Alves", "Brandt", "Costa", "Dietz", "Evans", "Fischer", "Gomez", "Huang", "Ito", "Jansen", "Khan", "Lopez", "Moreau")
_STREETS = ("Oak Street", "Maple Drive", "Hill Road", "Cedar Avenue", "Lake View", "Elm Court", "Sunset Boulevard")
_CITIES = (
    ("Denver", "CO", "80203"),
    ("Austin", "TX", "78701"),
    ("Seattle", "WA", "98101"),
    ("Chicago", "IL", "60601"),
    ("Phoenix", "AZ", "85001"),
    ("Boston", "MA", "02108"),
)
_PRODUCTS: dict[str, dict[str, tuple[str, ...]]] = {
    "T-Shirt": {"colour": ("blue", "red", "black", "green"), "size": ("S", "M", "L")},
    "Desk Lamp": {"colour": ("white", "black"), "power source": ("battery", "USB", "mains")},
    "Water Bottle": {"capacity": ("500 ml", "750 ml", "1000 ml"), "material": ("steel", "glass", "plastic")},
    "Backpack": {"colour": ("grey", "navy", "green"), "size": ("small", "medium", "large")},
    "Headphones": {"type": ("in-ear", "on-ear", "over-ear"), "connectivity": ("wired", "wireless")},
    "Keyboard": {"switch": ("linear", "tactile", "clicky"), "layout": ("full size", "compact")},
    "Running Shoes": {"colour": ("yellow", "white", "black"), "size": ("8", "9", "10")},
    "Coffee Maker": {"capacity": ("4 cups", "8 cups", "12 cups"), "filter": ("paper", "metal")},
}
# Of every customer: two orders to change, two to send back, one too old for that, one on its way.
_ORDERS = ("pending", "pending", "delivered", "delivered", "delivered long ago", "processed")


@dataclass(frozen=True)
class Place:
    """An address."""

    address1: str
    address2: str
    city: str
    state: str
    country: str
    zip: str

    @classmethod
    def draw(cls, rng: random.Random) -> Place:
        city, state, code = rng.choice(_CITIES)
        return cls(f"{rng.randrange(1, 999)} {rng.choice(_STREETS)}", f"Suite {rng.randrange(1, 99)}", city, state, "USA", code)

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(self.__dict__.values())


class Store:
    """One store. Args: seed: what is in it."""

    def __init__(self, seed: int):
        self._open(_image(seed))

    def _open(self, image: bytes) -> None:
        self.database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.database.deserialize(image)
        self.database.row_factory = sqlite3.Row

    def copy(self) -> Store:
        """A store of the same rows, which goes its own way."""
        other = object.__new__(Store)
        other._open(self.database.serialize())
        return other

    def close(self) -> None:
        self.database.close()

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in self.database.execute(query, values)]

    def row(self, query: str, *values: Any) -> dict[str, Any] | None:
        return next(iter(self.rows(query, *values)), None)

    def write(self, query: str, *values: Any) -> None:
        self.database.execute(query, values)

    def dump(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every table's rows, sorted."""
        return {name: sorted(tuple(map(_sortable, row)) for row in self._all(name)) for name in _TABLES}

    def _all(self, table: str) -> list[Any]:
        return self.database.execute(f"SELECT * FROM {table}").fetchall()


def difference(found: Store, wanted: Store) -> str:
    """The first row that only one of two stores has, or nothing."""
    one, other = found.dump(), wanted.dump()
    for name in _TABLES:
        for row in other[name]:
            if row not in one[name]:
                return f"{name} lacks {row}"
        for row in one[name]:
            if row not in other[name]:
                return f"{name} should not have {row}"
    return "" if one == other else "a row stands there more than once"


def dollars(cents: int) -> float:
    return round(cents / 100, 2)


def _sortable(value: Any) -> Any:
    return "" if value is None else str(value)


@lru_cache(maxsize=64)
def _image(seed: int) -> bytes:
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(_SCHEMA)
        _fill(database, random.Random(f"{seed}/store"))
        database.commit()
        return database.serialize()
    finally:
        database.close()


def _fill(database: sqlite3.Connection, rng: random.Random) -> None:
    variants: dict[str, list[tuple[str, int]]] = {}  # ids and prices of a product, those that can be had
    item_ids = iter(rng.sample(range(10**6, 10**7), 200))
    for name, options in _PRODUCTS.items():
        product, base = str(next(item_ids)), rng.randrange(1500, 15000)
        database.execute("INSERT INTO products VALUES (?, ?)", (product, name))
        combined: list[dict[str, str]] = [{}]
        for option, values in options.items():
            combined = [{**one, option: value} for one in combined for value in values]
        known = []
        for number, chosen in enumerate(rng.sample(combined, min(6, len(combined)))):
            item, price, there = str(next(item_ids)), base + rng.randrange(-500, 1500), number < 2 or rng.random() < 0.7
            database.execute("INSERT INTO variants VALUES (?, ?, ?, ?, ?)", (item, product, json.dumps(chosen), price, there))
            known.append((item, price))
        variants[name] = known
    names = rng.sample([(first, last) for first in _FIRST for last in _LAST], USERS)
    order_ids = iter(rng.sample(range(10**6, 10**7), USERS * len(_ORDERS)))
    card_ids = iter(rng.sample(range(10**6, 10**7), USERS * 3))
    for first, last in names:
        user, home = f"{first}_{last}_{rng.randrange(1000, 9999)}".lower(), Place.draw(rng)
        email = f"{first}.{last}{rng.randrange(100, 999)}@example.com".lower()
        database.execute(f"INSERT INTO users VALUES ({', '.join('?' * 10)})", (user, first, last, email, *home.values))
        cards = []
        for source in ("credit_card", "paypal", "gift_card"):
            cards.append(f"{source}_{next(card_ids)}")
            balance = rng.randrange(20000, 40000) if source == "gift_card" else None
            database.execute("INSERT INTO cards VALUES (?, ?, ?, ?)", (cards[-1], user, source, balance))
        for kind in rng.sample(_ORDERS, len(_ORDERS)):
            _order(database, rng, (f"#W{next(order_ids)}", user, kind, rng.choice(cards[:2])), home, variants)


def _order(
    database: sqlite3.Connection,
    rng: random.Random,
    about: tuple[str, str, str, str],
    home: Place,
    variants: dict[str, list[tuple[str, int]]],
) -> None:
    id_, user, kind, card = about
    ago = rng.randrange(RETURN_DAYS + 5, 90) if kind == "delivered long ago" else rng.randrange(2, RETURN_DAYS - 5)
    delivered = str(TODAY - timedelta(days=ago)) if kind.startswith("delivered") else ""
    status = kind.partition(" ")[0]
    row = (id_, user, status, delivered, "", *home.values)
    database.execute(f"INSERT INTO orders VALUES ({', '.join('?' * 11)})", row)
    bought = [rng.choice(variants[name]) for name in rng.sample(list(variants), rng.randrange(2, 4))]
    for place, (item, price) in enumerate(bought):
        database.execute("INSERT INTO items VALUES (?, ?, ?, ?)", (id_, place, item, price))
    paid = (id_, 0, "payment", sum(price for _, price in bought), card)
    database.execute("INSERT INTO payments VALUES (?, ?, ?, ?, ?)", paid)
