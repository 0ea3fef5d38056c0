"""Constraints as automata over tokens: which tokens may be drawn in a state, and where their symbols lead.

A constraint is compiled on the host, once, against the bytes of a vocabulary. The device then needs two tables: a bit per
state and token, and the next state per state and symbol, so that a row's state advances inside a decode call. Any cut of the
text into tokens is allowed, of tokens of at most TOKEN_BYTES bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int, UInt32

from jaxagent.engine import schema
from jaxagent.engine.automaton import Network, determine
from jaxagent.types import Again, Constraint, Either, Form, Json, Vocabulary

TOKEN_BYTES = 16  # longer tokens are not drawn where a form must follow; their text can be spelled with shorter ones
BYTES = 256
COMPILED = 64  # automata that are kept on the host


@dataclass(frozen=True, eq=False)
class Automaton:
    """A constraint over one vocabulary; states count from 0."""

    next_GA: Int[np.ndarray, "G A"]  # the state after a symbol, -1 for none
    mask_GW: UInt32[np.ndarray, "G W"]  # bit i of word w: token 32 w + i may be drawn
    start: int

    @property
    def states(self) -> int:
        return len(self.next_GA)


class Pieces:
    """The tokens of a vocabulary as a tree of their bytes, so that a state is tried on all of them at once."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int):
        """Args: vocab_size: of the model, which may have ids that no token has."""
        if len(vocabulary.pieces) > vocab_size:
            raise ValueError(f"the vocabulary has {len(vocabulary.pieces)} ids, the model's only {vocab_size}")
        self.vocab_size = vocab_size
        control = sorted(vocabulary.control)
        self.symbol_of = {token: BYTES + i for i, token in enumerate(control)}
        self.symbols = BYTES + len(control)
        self.symbol_VM = np.full((vocab_size, TOKEN_BYTES), -1, np.int16)
        for token, symbol in self.symbol_of.items():
            self.symbol_VM[token, 0] = symbol
        spelled: dict[bytes, list[int]] = {}
        for token, piece in enumerate(vocabulary.pieces):
            if token not in self.symbol_of and piece:
                head = np.frombuffer(piece[:TOKEN_BYTES], np.uint8)  # what is longer is drawn in free text only
                self.symbol_VM[token, : len(head)] = head
                if len(piece) <= TOKEN_BYTES:
                    spelled.setdefault(piece, []).append(token)
        self._control = np.asarray(control, np.int64)
        self._grow(spelled)

    def _grow(self, spelled: dict[bytes, list[int]]) -> None:
        """Per depth: where the children of every node begin, every node's byte, and which tokens end there."""
        words = sorted(spelled)
        tokens = [np.asarray(spelled[word]) for word in words]
        width = np.asarray([len(word) for word in words])
        letters = np.zeros((len(words), TOKEN_BYTES), np.int32)
        for i, word in enumerate(words):
            letters[i, : len(word)] = np.frombuffer(word, np.uint8)
        self._levels: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        inside, node, parents = np.arange(len(words)), np.zeros(len(words), np.int64), 1
        for depth in range(TOKEN_BYTES):
            longer = width[inside] > depth
            inside, node = inside[longer], node[longer]
            if not len(inside):
                break
            letter = letters[inside, depth]
            new = np.ones(len(inside), bool)
            new[1:] = (node[1:] != node[:-1]) | (letter[1:] != letter[:-1])
            first_child = np.searchsorted(node[new], np.arange(parents + 1))
            byte = letter[new]
            node = np.cumsum(new) - 1
            ending = width[inside] == depth + 1
            ends, ids = node[ending], [tokens[i] for i in inside[ending]]
            at = np.repeat(ends, [len(several) for several in ids])
            self._levels.append((first_child, byte, at, np.concatenate(ids) if ids else np.zeros(0, np.int64)))
            parents = len(byte)

    def allowed(self, table: np.ndarray, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens whose symbols lead somewhere from a state, and the states that they lead to."""
        after = table[state, BYTES:]
        tokens, reached = [self._control[after >= 0]], [after[after >= 0]]
        alive, states = np.zeros(1, np.int64), np.asarray([state])
        for first_child, byte, at, ids in self._levels:
            count = first_child[alive + 1] - first_child[alive]
            shift = np.repeat(first_child[alive] - (np.cumsum(count) - count), count)
            child = np.arange(count.sum()) + shift
            states = table[np.repeat(states, count), byte[child]]
            going = states >= 0
            alive, states = child[going], states[going]
            if not len(alive):
                break
            where = np.full(len(byte), -1, np.int64)
            where[alive] = states
            ended = where[at]
            tokens.append(ids[ended >= 0])
            reached.append(ended[ended >= 0])
        return np.concatenate(tokens), np.concatenate(reached)


class Compiler:
    """Compiles constraints against a vocabulary; what was compiled is kept."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, most_states: int):
        self.pieces = Pieces(vocabulary, vocab_size)
        self.most_states = most_states
        self.compile = lru_cache(COMPILED)(self._compile)

    def _compile(self, constraint: Constraint, stop: tuple[int, ...]) -> Automaton:
        """Raises ValueError for a form that cannot be written, or not with this vocabulary or in so many states."""
        network = Network()
        start = network.state() if constraint.after else 0
        end = self._form(network, start, constraint.form)
        if constraint.after:
            network.link(end, 0)
            self._free(network, start, constraint.after)
        else:
            if not stop:
                raise ValueError("a turn of a given form ends with a stop token: give some (stop)")
            done = network.state()
            for token in stop:
                network.move(end, done, self._symbol(token))
        table, start = determine(network, self.pieces.symbols)
        if len(table) > self.most_states:
            raise ValueError(
                f"a constraint of {len(table)} states does not fit: engine.constraint_states is {self.most_states}; "
                "raise it, or ask for less"
            )
        return Automaton(table, self._masks(table, start, free=bool(constraint.after)), start)

    def _free(self, network: Network, form: int, after: tuple[int, ...]) -> None:
        """Makes state 0 that of free text, which `after` leaves for the form."""
        low = 0
        for symbol in sorted(self._symbol(token) for token in after):
            if symbol > low:
                network.move(0, 0, low, symbol - 1)
            network.move(0, form, symbol)
            low = symbol + 1
        if low < self.pieces.symbols:
            network.move(0, 0, low, self.pieces.symbols - 1)

    def _form(self, network: Network, start: int, form: Form) -> int:
        if isinstance(form, str):
            return network.text(start, form.encode())
        if isinstance(form, int):
            return network.symbol(start, self._symbol(form))
        if isinstance(form, Json):
            return schema.value(network, start, json.loads(form.schema))
        if isinstance(form, Either):
            if not form.forms:
                raise ValueError("a constraint must leave something to write: Either() has no forms")
            return network.join([self._form(network, start, one) for one in form.forms])
        if isinstance(form, Again):
            around = network.join([start])
            network.link(self._form(network, around, form.form), around)
            return around
        for one in form:
            start = self._form(network, start, one)
        return start

    def _symbol(self, token: int) -> int:
        if token not in self.pieces.symbol_of:
            raise ValueError(
                f"token {token} stands in a constraint or ends a constrained turn, but is no control token of the vocabulary"
            )
        return self.pieces.symbol_of[token]

    def _masks(self, table: np.ndarray, start: int, free: bool) -> np.ndarray:
        """The tokens of every state that whole tokens can reach. Free text is all tokens, those without a name too."""
        words = -(-self.pieces.vocab_size // 32)
        masks = np.zeros((len(table), words), np.uint32)
        seen, ahead = {start}, [start]
        while ahead:
            state = ahead.pop()
            tokens, reached = self.pieces.allowed(table, state)
            if not len(tokens) and np.any(table[state] >= 0):  # the state behind a stop token needs none
                wanted = np.flatnonzero(table[state] >= 0)[:4].tolist()
                raise ValueError(f"the vocabulary has no token with which this constraint goes on: symbols {wanted} are wanted")
            bits = np.zeros(words * 32, bool)
            bits[tokens] = True
            if free and state == start:
                bits[:] = True
            masks[state] = np.packbits(bits, bitorder="little").view(np.uint32)
            new = set(np.unique(reached).tolist()) - seen
            seen |= new
            ahead += sorted(new)
        return masks
