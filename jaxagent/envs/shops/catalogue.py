"""Invented products of a web shop, goals to buy one of them, and what a purchase is worth by WebShop's rule.

    r = r_type * (attributes matched + options matched + [price <= limit]) / (attributes + options wanted + 1)

(WebShop, arXiv:2207.01206, equation 1, as its code computes it.) r_type is 1 where the search word is the goal's, or two
categories are shared, or more than a fifth of the nouns of the goal's title are in the bought one's; else 0.5; but 0.1 where
less than a tenth of the nouns are shared, and 0 where none is. An attribute matches where it is like one of the product's
(token set ratio above 85) or stands in its texts; so does an option, but a size must be equal.

We differ twice. Nouns are known of invented titles and need no tagger. Colours here have one name each, so none is mapped.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxagent.toolbox.retrieval import Bm25, Document

_WORD = re.compile(r"\w+")
LIKE = 85.0  # of 100: a token set ratio above it is a match
_EXACT = ("size",)

# Department, group, kinds; what its things can be; which options they have.
_SHELVES: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("Clothing", "Shoes", ("running shoes", "hiking boots", "ballet flats", "sandals"), ("wear", "shoe"), ("color", "size")),
    ("Clothing", "Tops", ("t-shirt", "hooded sweater", "rain jacket", "tank top"), ("wear", "cloth"), ("color", "size")),
    ("Home", "Lighting", ("desk lamp", "floor lamp", "string lights", "ceiling light"), ("home", "power"), ("color", "style")),
    ("Home", "Furniture", ("office chair", "coffee table", "bookcase", "bed frame"), ("home", "wood"), ("color", "size")),
    (
        "Electronics",
        "Audio",
        ("headphones", "bluetooth speaker", "soundbar", "microphone"),
        ("power", "sound"),
        ("color", "style"),
    ),
    (
        "Electronics",
        "Accessories",
        ("phone case", "charging cable", "screen protector", "tripod"),
        ("power", "home"),
        ("color", "size"),
    ),
    ("Food", "Snacks", ("trail mix", "protein bars", "potato chips", "dried mango"), ("food", "diet"), ("flavor name", "size")),
    ("Beauty", "Hair", ("shampoo", "hair brush", "curling iron", "hair mask"), ("care", "diet"), ("scent", "size")),
)
_QUALITIES = {
    "wear": ("machine washable", "quick drying", "long lasting", "day comfort"),
    "shoe": ("rubber sole", "arch support", "non slip", "steel toe"),
    "cloth": ("long sleeve", "cotton spandex", "slim fit", "drawstring closure"),
    "home": ("easy assemble", "easy clean", "space saving", "heavy duty"),
    "power": ("fast charging", "battery powered", "usb port", "energy efficient"),
    "wood": ("solid wood", "mid century", "white finish", "steel frame"),
    "sound": ("noise cancelling", "hands free", "stereo sound", "water resistant"),
    "food": ("individually wrapped", "resealable bag", "dairy free", "low sodium"),
    "diet": ("gluten free", "cruelty free", "sugar free", "non gmo"),
    "care": ("sulfate free", "tea tree", "dry scalp", "natural ingredients"),
}
_VALUES = {
    "color": ("black", "white", "navy", "olive", "coral", "teal"),
    "style": ("classic", "modern", "rustic", "compact"),
    "flavor name": ("original", "sea salt", "honey", "chili lime"),
    "scent": ("lavender", "citrus", "coconut", "unscented"),
}
_SIZES = {
    "Shoes": ("7", "8", "9", "10", "11"),
    "Tops": ("small", "medium", "large", "x-large"),
    "Furniture": ("twin", "full", "queen", "king"),
    "Accessories": ("3 feet", "6 feet", "10 feet"),
    "Snacks": ("8 ounce", "16 ounce", "pack of 6", "pack of 12"),
    "Hair": ("6 ounce", "12 ounce", "travel size"),
}
_LETTERS = "ABCDEFGHJKLMNPQRSTVWXYZ0123456789"


@dataclass(frozen=True)
class Product:
    """One product. Args: query: the word that a shop would list it under; nouns: of its title."""

    asin: str
    title: str
    nouns: tuple[str, ...]
    query: str
    categories: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float
    features: tuple[str, ...]
    description: str

    @property
    def texts(self) -> str:
        return "\n".join((self.title, " ".join(self.features), self.description)).lower()


@dataclass(frozen=True)
class Goal:
    """What is to be bought: a product like `product`, with these attributes and options, for at most `limit`."""

    product: Product
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    limit: float

    @property
    def instruction(self) -> str:
        wanted = [f"i need a {self.product.query} that is {' and '.join(self.attributes)}"]
        wanted += [f"{name}: {value}" for name, value in self.options.items()]
        return f"{', and '.join(wanted)}, and price lower than {self.limit:.2f} dollars"


class Catalogue:
    """Products, drawn by seed, and the index that finds them."""

    def __init__(self, products: int, seed: int):
        rng = random.Random(f"{seed}/catalogue")
        asins: dict[str, None] = {}
        while len(asins) < products:
            asins["B0" + "".join(rng.choices(_LETTERS, k=8))] = None
        self.products = [_product(rng, asin, number) for number, asin in enumerate(asins)]
        self.by_asin = {product.asin: product for product in self.products}
        self.index = Bm25(Document(one.asin, one.title, f"{' '.join(one.features)} {one.description}") for one in self.products)

    def goal(self, seed: int) -> Goal:
        """A goal that one product of the catalogue meets. Its limit is one of the next tens above the price."""
        rng = random.Random(f"{seed}/goal")
        product = rng.choice(self.products)
        attributes = tuple(rng.sample(product.attributes, rng.randrange(1, 3)))
        options = {name: rng.choice(values) for name, values in product.options.items()}
        return Goal(product, attributes, options, 10.0 * (int(product.price // 10) + rng.randrange(2, 5)))

    def search(self, words: str, top: int) -> list[Product]:
        return [self.by_asin[document.id] for document, _ in self.index.search(words, top)]


def _product(rng: random.Random, asin: str, number: int) -> Product:
    department, group, kinds, qualities, options = _SHELVES[number % len(_SHELVES)]
    kind = kinds[number // len(_SHELVES) % len(kinds)]
    brand = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
    attributes = tuple(rng.sample([one for name in qualities for one in _QUALITIES[name]], 4))
    values = {
        name: tuple(rng.sample(known, rng.randrange(2, len(known) + 1)))
        for name in options
        for known in (_SIZES[group] if name == "size" else _VALUES[name],)
    }
    title = f"{brand.capitalize()} {kind.title()}, {attributes[0].title()}"
    features = (f"{attributes[1]} and made to be used every day", f"{attributes[2]}: more than you expect of a {kind}")
    description = f"The {kind} by {brand.capitalize()}. It is {attributes[3]}. From our {group.lower()}."
    nouns = (brand, *kind.split())
    categories = (department, group, kind.title())
    price = round(rng.uniform(5, 95), 2)
    return Product(asin, title, nouns, kind, categories, attributes, values, price, features, description)


def score(bought: Product, options: Mapping[str, str], goal: Goal) -> tuple[float, str]:
    """What a purchase is worth for a goal, in [0, 1], by the rule above; and why."""
    kind = type_score(bought, goal.product)
    attributes = sum(_has(bought, wanted, bought.attributes) for wanted in goal.attributes)
    chosen = sum(_option_fits(bought, name, value, list(goal.options.values())) for name, value in options.items())
    cheap = bought.price <= goal.limit
    total = len(goal.attributes) + len(goal.options) + 1
    why = f"type {kind:g}, {attributes} of {len(goal.attributes)} attributes, {chosen} of {len(goal.options)} options"
    return kind * (attributes + chosen + cheap) / total, f"{why}, {'within' if cheap else 'above'} the limit"


def type_score(bought: Product, wanted: Product) -> float:
    """r_type of the rule above: 0, 0.1, 0.5 or 1."""
    shared = len(set(bought.nouns) & set(wanted.nouns)) / len(wanted.nouns) if wanted.nouns else 0.2
    if shared < 0.1:
        return 0.1 if shared else 0.0
    same = bought.query == wanted.query or len(set(bought.categories) & set(wanted.categories)) >= 2
    return 1.0 if same or shared > 0.2 else 0.5


def _has(bought: Product, wanted: str, known: Sequence[str]) -> bool:
    return any(token_set_ratio(one, wanted) > LIKE for one in known) or wanted in bought.texts


def _option_fits(bought: Product, name: str, value: str, wanted: list[str]) -> bool:
    if name in _EXACT:
        return value in wanted or value in bought.texts
    return any(token_set_ratio(one, value) > LIKE for one in wanted) or value in bought.texts


def token_set_ratio(one: str, other: str) -> float:
    """How alike the sets of words of two texts are, a whole number in [0, 100], as in the package thefuzz.

    With c the words of both, a and b those of one alone, all sorted: 100 where c is not empty and a or b is; else the best
    similarity of c, c + a and c + b in pairs, where the similarity of two texts is 2 common / (letters of both) and common
    the length of their longest common subsequence.
    """
    left, right = set(_WORD.findall(one.lower())), set(_WORD.findall(other.lower()))
    common = sorted(left & right)
    if not left or not right:
        return 0.0
    if common and (left <= right or right <= left):
        return 100.0
    c, a, b = " ".join(common), " ".join([*common, *sorted(left - right)]), " ".join([*common, *sorted(right - left)])
    pairs = ((c, a), (c, b), (a, b)) if common else ((a, b),)
    return float(round(100 * max(2 * _subsequence(x, y) / (len(x) + len(y)) for x, y in pairs)))


def _subsequence(one: str, other: str) -> int:
    row = [0] * (len(other) + 1)
    for letter in one:
        before = 0
        for place, letter_of_other in enumerate(other, 1):
            before, row[place] = row[place], before + 1 if letter == letter_of_other else max(row[place], row[place - 1])
    return row[-1]
