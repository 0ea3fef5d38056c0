"""`webshop`: pages and clicks as in WebShop's protocol, and what a purchase is worth, worked out by hand."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from growing import growth

from jaxagent.envs.check import check
from jaxagent.envs.shops.catalogue import Catalogue, Goal, Product, score, token_set_ratio, type_score
from jaxagent.envs.webshop import FOUND, PAGE, Visit, WebShop
from jaxagent.types import Message

WORLD = WebShop(products=256, observation="text", rules=False)


def visit(index: int = 0, rich: bool = False) -> tuple[Visit, str]:
    made = Visit(WORLD.shop, rich)
    task = WORLD.task("test", index)
    return made, made.reset(task, task["seed"])["text"]


def buy(made: Visit) -> dict[str, Any]:
    for _ in range(30):
        said = made.step(made.oracle())
        if said.get("done"):
            return said
    raise AssertionError("nothing was bought")


# ---------------------------------------------------------------------- the reward, by hand

SHOE = Product(
    asin="B000000001",
    title="Nikufe Running Shoes, Rubber Sole",
    nouns=("nikufe", "running", "shoes"),
    query="running shoes",
    categories=("Clothing", "Shoes", "Running Shoes"),
    attributes=("rubber sole", "arch support", "non slip", "quick drying"),
    options={"color": ("black", "navy"), "size": ("8", "9")},
    price=40.0,
    features=("arch support and made to be used every day", "non slip: more than you expect"),
    description="It is quick drying. It comes in navy.",
)
LAMP = replace(SHOE, nouns=("polube", "desk", "lamp"), query="desk lamp", categories=("Home", "Lighting", "Desk Lamp"))
GOAL = Goal(SHOE, ("rubber sole", "non slip"), {"color": "black", "size": "8"}, 50.0)


@pytest.mark.parametrize(
    ("bought", "options", "goal", "wanted"),
    [
        (SHOE, {"color": "black", "size": "8"}, GOAL, 1.0),  # 2 + 2 + 1 of 5
        (SHOE, {"color": "black", "size": "9"}, GOAL, 4 / 5),
        (SHOE, {}, GOAL, 3 / 5),
        (replace(SHOE, price=50.01), {"color": "black", "size": "8"}, GOAL, 4 / 5),
        (replace(SHOE, price=50.0), {"color": "black", "size": "8"}, GOAL, 1.0),  # the limit is within
        (SHOE, {"color": "navy"}, GOAL, 4 / 5),  # not wanted, but it stands in the description: the rule counts it
        (SHOE, {"color": "coral"}, GOAL, 3 / 5),
        (replace(SHOE, attributes=("sole of rubber", "x")), {}, GOAL, 3 / 5),  # the title has it; the features the other
        (replace(SHOE, attributes=(), title="x", features=(), description=""), {}, GOAL, 1 / 5),
        (
            replace(SHOE, attributes=("non-slip rubber sole",), title="", features=()),
            {},
            GOAL,
            3 / 5,
        ),  # both have their words in it
        (LAMP, {"color": "black", "size": "8"}, GOAL, 0.0),  # no noun is shared
        (replace(LAMP, nouns=("polube", "shoes")), {"color": "black", "size": "8"}, GOAL, 1.0),  # a third of the nouns
    ],
)
def test_purchases_by_hand(bought: Product, options: Mapping[str, str], goal: Goal, wanted: float) -> None:
    assert score(bought, options, goal)[0] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("shared", "of", "same_query", "categories", "wanted"),
    [
        (0, 3, True, 3, 0.0),  # no noun: nothing else counts
        (1, 11, True, 3, 0.1),
        (1, 10, False, 0, 0.5),
        (1, 10, True, 0, 1.0),
        (1, 10, False, 1, 0.5),
        (1, 10, False, 2, 1.0),
        (2, 10, False, 0, 0.5),  # a fifth is not more than a fifth
        (3, 10, False, 0, 1.0),
    ],
)
def test_types_by_hand(shared: int, of: int, same_query: bool, categories: int, wanted: float) -> None:
    nouns = tuple(f"n{i}" for i in range(of))
    goal = replace(SHOE, nouns=nouns)
    bought = replace(SHOE, nouns=(*nouns[:shared], "other"), query="running shoes" if same_query else "socks")
    bought = replace(bought, categories=(*SHOE.categories[:categories], "x"))
    assert type_score(bought, goal) == wanted


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ("rubber sole", "sole rubber", 100.0),
        ("rubber sole", "Rubber  SOLE thick", 100.0),  # one is in the other
        ("abcd", "abce", 75.0),  # 2 * 3 / 8
        ("red cat", "red car", 86.0),  # 2 * 6 / 14
        ("x-large", "-large", 100.0),  # words are letters and digits
        ("x-large", "xlarge", 77.0),  # 2 * 5 / 13, of "large x"
        ("abc", "xyz", 0.0),
        ("", "x", 0.0),
    ],
)
def test_likeness_of_words_by_hand(one: str, other: str, wanted: float) -> None:
    assert token_set_ratio(one, other) == pytest.approx(wanted)
    assert token_set_ratio(other, one) == pytest.approx(wanted)


# ---------------------------------------------------------------------- pages and clicks


def test_the_oracle_buys_what_is_worth_everything_for_every_kind_of_product() -> None:
    made = [visit(i)[0] for i in range(100)]
    said = [buy(one) for one in made]
    assert {one["reward"] for one in said} == {1.0}
    assert len({one.goal.product.query for one in made}) > 20
    assert said[0]["text"].startswith("Thank you for shopping with us! [SEP] Your code: [SEP] None")
    assert said[0]["text"].endswith("Your score (min 0.0, max 1.0) [SEP] 1.0")


def test_the_pages_are_those_of_the_protocol() -> None:
    made, first = visit(3)
    goal, product = made.goal, made.goal.product
    instruction = f"Instruction: [SEP] {goal.instruction}"
    assert first == f"WebShop [SEP] {instruction} [SEP] Search"
    results = made.step(f"search[{product.title} {product.query}]")["text"].split(" [SEP] ")
    assert results[2] == "Back to Search"
    assert re.fullmatch(r"Page 1 \(Total results: \d+\)", results[3])
    assert results[results.index(product.asin) + 1 :][:2] == [product.title, f"${product.price}"]
    item = made.step(f"click[{product.asin.lower()}]")["text"]
    options = " [SEP] ".join(f"{name} [SEP] {' [SEP] '.join(values)}" for name, values in product.options.items())
    end = "Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    head = f"{instruction} [SEP] Back to Search [SEP] < Prev"
    assert item == f"{head} [SEP] {options} [SEP] {product.title} [SEP] Price: ${product.price} [SEP] {end}"
    assert made.step("click[description]")["text"] == f"{head} [SEP] {product.description}"
    assert made.step("click[< prev]")["text"] == item
    assert made.step("click[< Prev]")["text"] == " [SEP] ".join(results)
    assert made.step("click[Back to Search]")["text"] == first


def test_the_rich_form_says_what_can_be_clicked_and_what_was() -> None:
    made, first = visit(3, rich=True)
    assert first.endswith("\n[button] Search [button_]")
    made.step(f"search[{made.goal.product.title}]")
    made.step(f"click[{made.goal.product.asin}]")
    name, value = next(iter(made.goal.options.items()))
    assert f"\n[button] {value} [button_]\n" in made.step("click[Reviews]")["text"] + made.step("click[< Prev]")["text"]
    assert f"\n[clicked button] {value} [clicked button_]\n" in made.step(f"click[{value}]")["text"]
    assert made.options == {name: value}
    assert f"[clicked button] {made.goal.product.asin} [clicked button_]" in made.step("click[< Prev]")["text"]
    assert made.options == {}  # who leaves a product chooses anew


def test_results_have_pages_of_ten_and_end() -> None:
    made, _ = visit()
    text = made.step("search[made to be used every day]")["text"]
    seen = list[str]()
    for page in range(1, FOUND // PAGE + 1):
        assert ("< Prev" in text, "Next >" in text) == (page > 1, page < FOUND // PAGE)
        seen += re.findall(r"\bB0\w{8}\b", text)
        text = made.step("click[Next >]")["text"]
    assert len(set(seen)) == FOUND
    assert f"Page {FOUND // PAGE} " in text


@pytest.mark.parametrize(
    "action", ["", "buy", "click[Buy Now]", "click[nothing]", "click[Search]", "search[]", "search[ ]", "click[search[x]"]
)
def test_what_cannot_be_done_shows_the_same_page(action: str) -> None:
    made, first = visit()
    said = made.step(action)
    assert (said.get("text"), said.get("invalid")) == (first, True) or "Total results: 0" in said["text"]
    assert not said.get("done")
    assert not said.get("reward")


def test_of_a_turn_with_several_actions_the_last_counts() -> None:
    made, _ = visit()
    assert "Page 1" in made.step("I could click[Buy Now], but first: search[shoes]")["text"]


def test_who_buys_the_first_thing_found_is_paid_in_part() -> None:
    paid = []
    for i in range(60):
        made, _ = visit(i)
        made.step(f"search[{made.goal.instruction}]")
        made.step(f"click[{made.found[0].asin}]")
        paid.append(made.step("click[Buy Now]")["reward"])
    assert 0 < sum(paid) / len(paid) < 0.8
    assert max(paid) < 1.0  # all goals want options


def test_a_random_visitor_is_paid_little_and_nobody_more_than_one() -> None:
    rng, paid = random.Random(0), []
    for i in range(40):
        made, _ = visit(i)
        said: dict[str, Any] = made.step("search[shoes lamp table]")
        for _ in range(15):
            said = made.step(f"click[{rng.choice(sorted(made._clickable()) or ['x'])}]")
            if said.get("done"):
                break
        paid.append(said.get("reward", 0.0))
    assert max(paid) <= 1.0
    assert sum(paid) / len(paid) < 0.3


# ---------------------------------------------------------------------- the world as others


def test_the_contract_is_kept() -> None:
    assert [(finding.question, finding.said) for finding in check(WORLD) if finding.ok is False] == []


def test_a_copy_goes_its_own_way_and_shares_the_catalogue() -> None:
    async def play() -> tuple[Any, Any]:
        env = WORLD.episode("", None)
        task = WORLD.task("train", 0)
        await env.reset(task, 0)
        await env.step(Message("assistant", "search[shoes]"))
        other = await env.fork("copy")  # type: ignore[attr-defined]
        assert other.venue.world.shop is WORLD.shop
        await other.step(Message("assistant", "click[Back to Search]"))
        return await env.step(Message("assistant", "x")), await other.step(Message("assistant", "x"))

    one, copied = asyncio.run(play())
    assert "Page 1" in one.messages[0].content
    assert "Page 1" not in copied.messages[0].content


def test_a_catalogue_is_its_seeds_and_names_differ() -> None:
    assert Catalogue(64, 1).products == Catalogue(64, 1).products
    assert Catalogue(64, 1).products != Catalogue(64, 2).products
    assert len({product.asin for product in WORLD.shop.products}) == 256


@pytest.mark.parametrize("piece", ["click[", "search[a", "[", "click]"])
def test_hostile_turns_are_read_in_linear_time(piece: str) -> None:
    made, _ = visit()
    assert growth(made.step, piece, 50_000, 200_000) < 10


@pytest.mark.parametrize(
    ("options", "said"), [({"products": 5}, "at least 32"), ({"observation": "html"}, "text, text_rich; got 'html'")]
)
def test_options_that_make_no_world_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WebShop(**options)
