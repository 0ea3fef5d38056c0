"""A shop of three pages as tasks of BrowserGym: log in, list of items, item with basket. An example of a site of one's own.

`register()` is what the world `browsergym` calls in its workers (`env.options.register`): it starts the shop on the loopback
interface, makes the tasks known and returns which hosts the browser may reach, and where they are. Every worker has a shop of
its own, and every episode begins with one that is stocked anew from the task's seed. A task's `advise` reads a page and says
what to do next: demonstrations are made by it. Tasks:

    browsergym/shop.order       log in and order so many of an item, and nothing else
    browsergym/shop.price       log in and tell what an item costs
    browsergym/shop.cheapest    log in and tell which item of a kind is the cheapest

Rewards are read from the shop and from the answer, never from the page.
"""

from __future__ import annotations

import html
import http.cookies
import http.server
import random
import re
import threading
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

HOST = "shop.test"
KINDS = ("order", "price", "cheapest")
_COLOURS = ("blue", "red", "green", "black", "white", "yellow")
_THINGS = {
    "lamps": ("desk lamp", "floor lamp", "lantern"),
    "chairs": ("stool", "armchair", "bench"),
    "clocks": ("alarm clock",),
}
_NAMES = ("ann", "bob", "cleo", "dan")


@dataclass
class Item:
    number: int
    name: str
    kind: str
    cents: int

    @property
    def price(self) -> str:
        return f"{self.cents // 100}.{self.cents % 100:02d}"


@dataclass
class Shop:
    """What the shop has and what was done in it, from a seed."""

    seed: int
    items: list[Item] = field(default_factory=list)
    basket: dict[int, int] = field(default_factory=dict)
    orders: list[dict[int, int]] = field(default_factory=list)
    session: str = ""

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.user, self.password = rng.choice(_NAMES), f"{rng.choice(_COLOURS)}-{rng.randrange(100, 1000)}"
        cents = rng.sample(range(100, 10_000), 3 * len(_THINGS))
        for kind, things in _THINGS.items():
            for name in rng.sample([f"{colour} {thing}" for colour in _COLOURS for thing in things], 3):
                self.items.append(Item(len(self.items) + 1, name, kind, cents.pop()))
        self.wanted, self.count = rng.choice(self.items), rng.randint(1, 3)
        self.secret = f"{rng.getrandbits(64):x}"

    def goal(self, kind: str) -> str:
        login = f"Log in as {self.user} with the password {self.password}. "
        return (
            login
            + {
                "order": f"Order {self.count} of the {self.wanted.name}, and nothing else.",
                "price": f"Tell me what one {self.wanted.name} costs, as a number.",
                "cheapest": f"Tell me the name of the cheapest of the {self.wanted.kind}.",
            }[kind]
        )

    def judge(self, kind: str, answers: list[str]) -> tuple[float, bool, str]:
        """The reward, whether the task is over, and why. An order or an answer ends it."""
        if kind == "order":
            if not self.orders:
                return 0.0, bool(answers), "nothing was ordered" if answers else ""
            right = self.orders == [{self.wanted.number: self.count}]
            return float(right), True, f"ordered {self.orders[0]}, wanted { ({self.wanted.number: self.count}) }"
        if not answers:
            return 0.0, bool(self.orders), "ordered without being asked" if self.orders else ""
        if kind == "price":
            told = re.findall(r"\d+(?:\.\d+)?", answers[0])
            return (
                float(len(told) == 1 and float(told[0]) == self.wanted.cents / 100),
                True,
                f"the price is {self.wanted.price}",
            )
        best = self.cheapest()
        named = {item.number for item in self.items if re.search(rf"\b{item.name}\b", answers[0].lower())}
        return float(named == {best.number}), True, f"the cheapest is the {best.name}"

    def cheapest(self) -> Item:
        return min((item for item in self.items if item.kind == self.wanted.kind), key=lambda item: item.cents)


class Page(http.server.BaseHTTPRequestHandler):
    """The three pages. The server's `shop` is the one of this episode."""

    shop: Shop

    def do_GET(self) -> None:
        shop, parts = self.server.shop, urllib.parse.urlsplit(self.path)  # type: ignore[attr-defined]
        if parts.path == "/favicon.ico":
            return self.answer("", 404)
        if not self.known(shop):
            return self.answer(_login("")) if parts.path == "/" else self.move("/")
        if parts.path in ("/", "/items"):
            return self.answer(_list(shop, urllib.parse.parse_qs(parts.query).get("kind", [""])[0]))
        found = next((item for item in shop.items if parts.path == f"/items/{item.number}"), None)
        return self.answer(_item(shop, found)) if found else self.answer("<h1>There is no such page</h1>", 404)

    def do_POST(self) -> None:
        shop, path = self.server.shop, self.path  # type: ignore[attr-defined]
        size = min(int(self.headers.get("Content-Length") or 0), 1 << 16)
        sent = {key: values[0] for key, values in urllib.parse.parse_qs(self.rfile.read(size).decode(errors="replace")).items()}
        if path == "/login":
            if (sent.get("name"), sent.get("password")) != (shop.user, shop.password):
                return self.answer(_login("The name or the password is wrong."))
            shop.session = shop.secret
            return self.move("/items", cookie=f"session={shop.session}; HttpOnly")
        if not self.known(shop):
            return self.move("/")
        number = int(sent["item"]) if sent.get("item", "").isdecimal() else 0
        found = next((item for item in shop.items if item.number == number), None)
        count = int(sent["count"]) if re.fullmatch(r"[1-9]\d?", sent.get("count", "")) else 0
        if path == "/add" and found and count:
            shop.basket[number] = shop.basket.get(number, 0) + count
        elif path == "/empty":
            shop.basket.clear()
        elif path == "/order" and shop.basket:
            shop.orders.append(dict(shop.basket))
            shop.basket.clear()
            return self.answer("<h1>Thank you for your order</h1>")
        return self.move(f"/items/{number}" if found else "/items")

    def known(self, shop: Shop) -> bool:
        cookie = http.cookies.SimpleCookie(self.headers.get("Cookie", ""))
        return bool(shop.session) and "session" in cookie and cookie["session"].value == shop.session

    def move(self, where: str, cookie: str = "") -> None:
        self.send_response(303)
        self.send_header("Location", where)
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, body: str, status: int = 200) -> None:
        page = f'<!doctype html><html lang="en"><title>Shop</title><body>{body}</body></html>'.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *ignored: Any) -> None:
        pass


def _login(fault: str) -> str:
    told = f'<p role="alert">{html.escape(fault)}</p>' if fault else ""
    return f"""<h1>Welcome to the shop</h1>{told}<form method="post" action="/login">
<label>Name <input name="name"></label> <label>Password <input name="password" type="password"></label>
<button>Log in</button></form>"""


def _list(shop: Shop, kind: str) -> str:
    kinds = " ".join(f'<a href="/items?kind={name}">{name}</a>' for name in _THINGS)
    rows = "".join(
        f'<li><a href="/items/{item.number}">{html.escape(item.name)}</a></li>'
        for item in shop.items
        if kind in ("", item.kind)
    )
    return f'<h1>Items</h1><nav><a href="/items">all</a> {kinds}</nav><ul>{rows}</ul>'


def _item(shop: Shop, item: Item) -> str:
    names = {other.number: other.name for other in shop.items}
    lines = "".join(f"<li>{count} x {html.escape(names[number])}</li>" for number, count in shop.basket.items())
    hidden = f'<input type="hidden" name="item" value="{item.number}">'
    basket = f"<ul>{lines}</ul>" if lines else "<p>The basket is empty.</p>"
    return f"""<a href="/items">back to the list</a><h1>{html.escape(item.name)}</h1><p>Price: {item.price}</p>
<form method="post" action="/add">{hidden}<label>How many <input name="count" value="1"></label>
<button>Add to basket</button></form><h2>Basket</h2>{basket}
<form method="post" action="/empty">{hidden}<button>Empty the basket</button></form>
<form method="post" action="/order"><button>Order</button></form>"""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.shop = Shop(0)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Advisor:
    """Does a task by what it reads: the text of a page to the next action."""

    def __init__(self, shop: Shop, kind: str):
        self.shop, self.kind = shop, kind
        self.prices: dict[str, float] = {}
        self.filled: set[str] = set()

    def advise(self, text: str) -> str:
        shop = self.shop
        if found := _bid(text, "button", "Log in"):
            for name, value in (("Name", shop.user), ("Password", shop.password)):
                if name not in self.filled:
                    self.filled.add(name)
                    return f"fill('{_bid(text, 'textbox', name)}', '{value}')"
            return f"click('{found}')"
        if price := re.search(r"Price: (\d+\.\d\d)", text):
            title = re.findall(r"heading '([^']+)'", text)[0]
            return self.at(text, title, float(price[1]))
        if self.kind != "cheapest":
            return f"click('{_bid(text, 'link', shop.wanted.name)}')"
        kin = [item.name for item in shop.items if item.kind == shop.wanted.kind]
        unseen = [name for name in kin if name not in self.prices]
        if unseen:
            return f"click('{_bid(text, 'link', unseen[0])}')"
        return f"send_msg_to_user('the {min(self.prices, key=lambda name: self.prices[name])}')"

    def at(self, text: str, title: str, price: float) -> str:
        """On the page of an item."""
        self.prices[title] = price
        if self.kind == "price":
            return f"send_msg_to_user('{price:.2f}')"
        if self.kind == "cheapest":
            return f"click('{_bid(text, 'link', 'back to the list')}')"
        if f"{self.shop.count} x {title}" in text:
            return f"click('{_bid(text, 'button', 'Order')}')"
        if "count" not in self.filled:
            self.filled.add("count")
            return f"fill('{_bid(text, 'textbox', 'How many')}', '{self.shop.count}')"
        return f"click('{_bid(text, 'button', 'Add to basket')}')"


def _bid(text: str, role: str, name: str) -> str:
    found = re.search(rf"\[(\w+)\] {role} '{re.escape(name)}'", text)
    return found[1] if found else ""


def register() -> dict[str, str]:
    """Starts the shop and makes its tasks known; returns its host and where that is."""
    # The library is there only where this is called.
    from browsergym.core.registration import register_task
    from browsergym.core.task import AbstractBrowserTask

    server = Server()

    class ShopTask(AbstractBrowserTask):  # type: ignore[misc]
        def __init__(self, seed: int, kind: str):
            super().__init__(seed)
            self.seed, self.kind = seed, kind

        def setup(self, page: Any) -> tuple[str, dict[str, Any]]:
            server.shop = self.shop = Shop(self.seed)
            self.advise = Advisor(self.shop, self.kind).advise
            page.goto(f"http://{HOST}/")
            return self.shop.goal(self.kind), {}

        def validate(self, page: Any, chat_messages: list[dict[str, Any]]) -> tuple[float, bool, str, dict[str, Any]]:
            answers = [said["message"] for said in chat_messages[1:] if said["role"] == "assistant"]  # the first is a greeting
            reward, done, why = self.shop.judge(self.kind, answers)
            return reward, done, "", {"reason": why}

    for kind in KINDS:
        register_task(f"shop.{kind}", ShopTask, task_kwargs={"kind": kind})
    return {HOST: server.address}
