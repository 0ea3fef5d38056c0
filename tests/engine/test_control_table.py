"""The host's side of a request's settings: which need the device's help, and where automata lie in its tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny

from jaxagent.engine.control_table import BLOCK, ControlTable, wants_controls
from jaxagent.engine.controls import ControlSizes
from jaxagent.engine.slots import Row
from jaxagent.types import Constraint, SampleRequest, Sampling, Vocabulary

PIECES = (*(bytes([letter]) for letter in b"abcdef"), b"<end>")
END = 6
VOCABULARY = Vocabulary(PIECES, frozenset({END}))
SIZES = ControlSizes(slot_tokens=8, bias_entries=2, stop_sequences=2, stop_sequence_tokens=3, constraint_states=3 * BLOCK)


def ask(text: str) -> SampleRequest:
    return SampleRequest(text[:1], (1,), 0, (0, 0), (END,), Sampling(constraint=Constraint(text)))


def begun(request: SampleRequest, **known: Any) -> Row:
    return Row(request.trajectory, "", 2, request=request, **known)


def where(table: ControlTable, request: SampleRequest, using: list[SampleRequest]) -> int:
    """The state, counted on the device, in which a turn of this request begins."""
    return int(table.controls([begun(request)], 2, using)[1]["state"][0])


def spelled(table: ControlTable, state: int, length: int) -> str:
    """What the device's tables let be written from a state on."""
    assert table.grammars is not None
    masks, after = np.asarray(table.grammars.mask_GW), np.asarray(table.grammars.next_GA)
    symbols, text = np.asarray(table.grammars.symbol_VM), ""
    for _ in range(length):
        (token,) = [i for i in range(len(PIECES)) if masks[state, 0] >> i & 1]
        text, state = text + PIECES[token].decode(), after[state, symbols[token, 0]]
    return text


def test_an_automaton_stays_while_a_turn_uses_it_and_the_longest_unused_goes_first() -> None:
    table = ControlTable(SIZES, len(PIECES), tiny.mesh(), VOCABULARY)
    table.warm_up()
    long = "ab" * 40  # two blocks, which need not lie behind each other
    used, old, new = ask("c" * 9), ask("d" * 9), ask(long)
    place = where(table, used, [used])
    where(table, old, [used, old])
    start = where(table, new, [used, new])  # the old one gives way, though the used one has been there for longer
    assert spelled(table, start, 81) == long + "<end>"
    assert spelled(table, place, 10) == "c" * 9 + "<end>"
    assert where(table, used, [used, new]) == place
    again = where(table, old, [old])
    assert spelled(table, again, 10) == "d" * 9 + "<end>"


def test_what_does_not_fit_beside_the_turns_in_progress_is_said() -> None:
    table = ControlTable(SIZES, len(PIECES), tiny.mesh(), VOCABULARY)
    long, short, other = ask("ab" * 40), ask("c"), ask("d")
    assert table.shortage(long, [short, short, long]) == ""
    assert "need 256 states, engine.constraint_states is 192" in table.shortage(long, [short, other])
    plain = SampleRequest("p", (1,), 0, (0, 0), ())
    assert table.shortage(plain, [long, short, other]) == ""


def test_the_controls_of_rows_stand_in_their_places_and_the_rest_is_for_nobody() -> None:
    table = ControlTable(SIZES, len(PIECES), tiny.mesh())
    asked = Sampling(min_p=0.5, logit_bias=((3, 1.5),), stop_sequences=((4, 5),), top_logprobs=1, presence_penalty=0.25)
    row = begun(SampleRequest("a", (1, 2), 0, (0, 0), (), asked), held=[1, 2])
    slots, controls = table.controls([row], 2, [])
    assert slots[0] == 2
    assert slots[1] > 1000
    first = {name: value[0].tolist() for name, value in controls.items()}
    assert (first["min_p"], first["presence"], first["repetition"], first["frequency"]) == (0.5, 0.25, 1.0, 0.0)
    assert (first["bias_id"][0], first["bias"]) == (3, [1.5, 0.0])
    assert first["pattern"] == [[-1, 4, 5], [-1, -1, -1]]
    assert (first["history"], first["began"], first["state"], first["top"]) == ([1, 2, 0, 0, 0, 0, 0, 0], 2, -1, True)
    assert controls["min_p"][1] == 0


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "max_tokens": 3}, False),
        ({"stop_strings": ("a",), "prompt_logprobs": True}, False),
        ({"min_p": 0.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": ((1, 0.0),)}, True),
        ({"stop_sequences": ((1,),)}, True),
        ({"top_logprobs": 1}, True),
        ({"constraint": Constraint("a")}, True),
    ],
    ids=str,
)
def test_only_what_the_plain_program_lacks_wants_controls(settings: dict[str, Any], wanted: bool) -> None:
    assert wants_controls(Sampling(**settings)) == wanted
