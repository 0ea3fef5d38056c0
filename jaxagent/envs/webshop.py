"""`webshop`: to find and buy what an instruction asks for, in WebShop's text protocol, on a catalogue of invented products.

Actions are texts, `search[words]` and `click[what can be clicked]`; a page is its texts with [SEP] between them, or in the rich
form a line each with [button] around what can be clicked. What cannot be done shows the same page again.

    search -> results, ten a page -> an item, its options -> its description, features, reviews -> Buy Now

The reward of a purchase, between 0 and 1, is WebShop's (shops/catalogue.py). Search is BM25 of ours over titles, features and
descriptions; WebShop's own products and instructions are elsewhere, so figures of the two are not comparable. For the
original behind its server see the world `agentgym`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jaxagent.envs.env import Env, Task
from jaxagent.envs.shops.catalogue import Catalogue, Product, score
from jaxagent.envs.synchronous import Here, Said, SynchronousEpisode, seed_of
from jaxagent.types import Message, ToolSpec

FOUND, PAGE = 50, 10  # products of a search, and on one page
PARTS = ("Description", "Features", "Reviews")
BUY, BACK, NEXT, PREVIOUS, SEARCH = "Buy Now", "Back to Search", "Next >", "< Prev", "Search"
RULES = (
    "You shop on a web site for what the instruction asks. Act with search[words] or click[value], one action a turn, where a "
    "value is something that the page shows to be clicked. Choose every option that is asked for, then click[Buy Now]."
)
_ACTION = re.compile(r"\b(search|click)\[([^\[\]]+)\]")
_SHOWN = ("text", "text_rich")


class WebShop:
    """The world.

    Args:
        products: of the catalogue.
        catalogue: its seed.
        observation: text or text_rich, see above.
        rules: are told at the beginning.
    """

    functions = ""
    forks = True
    tools: Sequence[ToolSpec] = ()

    def __init__(self, products: int = 512, catalogue: int = 0, observation: str = "text_rich", rules: bool = True):
        if products < 32:
            raise ValueError(f"env.options.products must be at least 32, one of every kind, got {products}")
        if observation not in _SHOWN:
            raise ValueError(f"env.options.observation must be one of {', '.join(_SHOWN)}; got {observation!r}")
        self.shop = _catalogue(products, catalogue)
        self.rich, self.rules = observation == "text_rich", rules

    def task(self, split: str, index: int) -> Task:
        seed = seed_of(split, index)
        goal = self.shop.goal(seed)
        wanted = len(goal.attributes) + len(goal.options)
        return {"id": f"webshop/{split}/{index}", "seed": seed, "difficulty": f"{wanted} wanted", "goal": goal.instruction}

    def episode(self, name: str, sandbox: Any) -> Env:
        return SynchronousEpisode(Here(Visit(self.shop, self.rich)), rules=RULES if self.rules else "")

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Who knows the product searches for its kind, turns pages until it is there, chooses and buys."""
        visit = Visit(self.shop, self.rich)
        said = visit.reset(task, task["seed"])
        messages = [Message("user", f"{RULES}\n\n{said['text']}" if self.rules else said["text"])]
        while not said.get("done"):
            action = visit.oracle()
            said = visit.step(action)
            messages += [Message("assistant", action), *([] if said.get("done") else [Message("user", said["text"])])]
        return messages


@lru_cache(maxsize=4)
def _catalogue(products: int, seed: int) -> Catalogue:
    return Catalogue(products, seed)


class Visit:
    """One visitor: the page, the product, the chosen options."""

    def __init__(self, shop: Catalogue, rich: bool):
        self.shop, self.rich = shop, rich

    def __deepcopy__(self, memo: dict[int, Any]) -> Visit:
        """The catalogue never changes, and is shared."""
        other = Visit(self.shop, self.rich)
        other.__dict__.update({**self.__dict__, "options": dict(self.options), "seen": set(self.seen)})
        return other

    def reset(self, task: Task, seed: int) -> Said:
        self.goal = self.shop.goal(task["seed"])
        self.seen: set[str] = set()  # products whose pages were open
        self._start()
        return self._said()

    def _start(self) -> None:
        self.page, self.words, self.found = 0, "", list[Product]()
        self._leave()

    def _leave(self) -> None:
        """From a product back to the results."""
        self.product: Product | None = None
        self.part = ""
        self.options: dict[str, str] = {}

    def step(self, action: str) -> Said:
        actions = _ACTION.findall(action)
        name, value = actions[-1] if actions else ("", "")
        value = value.strip()
        if name == "search" and value:
            self._start()
            self.words, self.page = value, 1
            self.found = self.shop.search(value, FOUND)
        elif name == "click" and value.lower() in self._clickable():
            if value.lower() == BUY.lower():
                return self._bought()
            self._click(value.lower())
        else:
            return {**self._said(), "invalid": True, "reason": "nothing here is called so"}
        return self._said()

    def _clickable(self) -> set[str]:
        return {text.lower() for text, kind in self._page() if kind != "text"} - {SEARCH.lower()}

    def _click(self, value: str) -> None:
        if value == BACK.lower():
            self._start()
        elif self.product is None and value in (NEXT.lower(), PREVIOUS.lower()):
            self.page += 1 if value == NEXT.lower() else -1
        elif self.product is None:
            self.product = self.shop.by_asin[value.upper()]
            self.seen.add(value.upper())
        elif value == PREVIOUS.lower():
            if self.part:
                self.part = ""
            else:
                self._leave()
        elif value in (part.lower() for part in PARTS):
            self.part = value
        else:
            name = next(name for name, values in self.product.options.items() if value in values)
            self.options[name] = value

    def _bought(self) -> Said:
        assert self.product is not None  # only a product's page has the button
        reward, why = score(self.product, self.options, self.goal)
        told = ["Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)", "Purchased"]
        told += ["asin", self.product.asin, "options", json.dumps(self.options), "Reward", "Your score (min 0.0, max 1.0)"]
        text = self._shown([(one, "text") for one in (*told, str(round(reward, 4)))])
        return {"text": text, "reward": reward, "reason": why, "done": True, "answered": True}

    def _said(self) -> Said:
        chosen = (
            f"{self.words}/{self.page}/{self.product.asin if self.product else ''}/{self.part}/{sorted(self.options.items())}"
        )
        return {"text": self._shown(self._page()), "state": chosen}

    def _shown(self, page: list[tuple[str, str]]) -> str:
        if not self.rich:
            return " [SEP] ".join(text for text, _ in page)
        marks = {"button": "[button] {} [button_]", "clicked": "[clicked button] {} [clicked button_]", "text": "{}"}
        return "\n".join(marks[kind].format(text) for text, kind in page)

    def _page(self) -> list[tuple[str, str]]:
        """The texts of a page, and whether each is text, a button, or one that was clicked."""
        head = [("Instruction:", "text"), (self.goal.instruction, "text")]
        if not self.page:
            return [("WebShop", "text"), *head, (SEARCH, "button")]
        page = [*head, (BACK, "button")]
        if self.product is None:
            page.append((f"Page {self.page} (Total results: {len(self.found)})", "text"))
            page += [(PREVIOUS, "button")] if self.page > 1 else []
            page += [(NEXT, "button")] if self.page * PAGE < len(self.found) else []
            for one in self.found[(self.page - 1) * PAGE : self.page * PAGE]:
                page += [(one.asin, "clicked" if one.asin in self.seen else "button")]
                page += [(one.title, "text"), (f"${one.price}", "text")]
            return page
        page.append((PREVIOUS, "button"))
        if self.part:
            parts = {"description": (self.product.description,), "features": self.product.features, "reviews": ("none yet",)}
            return [*page, *((text, "text") for text in parts[self.part])]
        for name, values in self.product.options.items():
            page.append((name, "text"))
            page += [(value, "clicked" if self.options.get(name) == value else "button") for value in values]
        page += [(self.product.title, "text"), (f"Price: ${self.product.price}", "text"), ("Rating: N.A.", "text")]
        return [*page, *((part, "button") for part in PARTS), (BUY, "button")]

    def oracle(self) -> str:
        """What leads to the goal's own product from any page."""
        wanted = self.goal.product
        if self.product is not None:
            missing = [value for name, value in self.goal.options.items() if self.options.get(name) != value]
            if self.product != wanted or self.part:
                return f"click[{PREVIOUS}]"
            return f"click[{missing[0]}]" if missing else f"click[{BUY}]"
        if wanted in self.found[(self.page - 1) * PAGE : self.page * PAGE] and self.page:
            return f"click[{wanted.asin}]"
        if wanted in self.found[self.page * PAGE :] and self.page:
            return f"click[{NEXT}]"
        return f"search[{wanted.query} {' '.join(self.goal.attributes)}{f' {wanted.title}' if self.page else ''}]"

    def close(self) -> None:
        """Nothing is held."""


make_world = WebShop
