"""Keys of our own desktops, by the names that their X server knows."""

from __future__ import annotations

from jaxagent.envs.desktop import actions, machine


def test_every_key_that_the_grammar_takes_is_one_of_the_machine() -> None:
    named = {name: machine.key(name) for name in actions.KEYS}
    assert len(set(named.values())) == len(named)
    assert not any("+" in name for name in named.values())  # which stands between keys
    assert (named["/"], named["+"], named["win"], named["insert"]) == ("slash", "plus", "Super_L", "Insert")
