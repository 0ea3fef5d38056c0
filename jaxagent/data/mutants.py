"""Bugs for a Python file, by the positions of its syntax tree: one span of the source is replaced, the rest stays as it is.

Eight kinds, in the spirit of SWE-smith's procedural ones: a comparison, an operator of arithmetic or logic turned into another,
a condition negated, a number off by one, a result lost, two arguments swapped, a statement left out.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "is": "is not"}
_COMPARED |= {"not in": "in", "is not": "is"}
_COMPUTED = {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "//", "<<": ">>", ">>": "<<", "&": "|", "|": "&"}
_JOINED = {"and": "or", "or": "and"}


@dataclass(frozen=True)
class Mutant:
    """A bug: bytes `start` to `end` of a file become `text`."""

    kind: str
    line: int
    start: int
    end: int
    text: bytes

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text + source[self.end :]


def mutants(source: bytes) -> list[Mutant]:
    """Every bug of the eight kinds whose result still compiles, in the order of the source."""
    found = _Finder(source).all()
    return sorted((one for one in found if _compiles(one.apply(source))), key=lambda one: (one.start, one.kind))


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _leaves_no_gap(node: ast.stmt) -> bool:
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    return called or isinstance(node, ast.Assign | ast.AugAssign)


class _Finder:
    """Reads one file."""

    def __init__(self, source: bytes):
        self.source = source
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def all(self) -> Iterator[Mutant]:
        for node in ast.walk(self.tree):
            yield from self.of(node)

    def of(self, node: ast.AST) -> Iterator[Mutant]:
        """The bugs that can be made of one node."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._operator("comparison", node.left, node.comparators[0], _COMPARED)
        if isinstance(node, ast.BinOp):
            yield from self._operator("arithmetic", node.left, node.right, _COMPUTED)
        if isinstance(node, ast.BoolOp):
            yield from self._operator("logic", node.values[0], node.values[1], _JOINED)
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield self._replaced("condition", node.test, b"not (" + self._text(node.test) + b")")
        if isinstance(node, ast.Constant) and type(node.value) is int and self._text(node).isdigit():
            yield self._replaced("off by one", node, str(node.value + 1).encode())
        if isinstance(node, ast.Return) and node.value is not None and self._text(node.value) != b"None":
            yield self._replaced("lost result", node.value, b"None")
        if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            yield from self._swapped(node.args[0], node.args[1])
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and len(body) > 1:
                yield from (self._without(one) for one in body if _leaves_no_gap(one))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset  # columns count bytes
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> bytes:
        start, end = self._span(node)
        return self.source[start:end]

    def _replaced(self, kind: str, node: ast.expr | ast.stmt, text: bytes) -> Mutant:
        return Mutant(kind, node.lineno, *self._span(node), text)

    def _without(self, node: ast.stmt) -> Mutant:
        """Leaves out the lines of a statement."""
        assert node.end_lineno is not None
        return Mutant("left out", node.lineno, self.starts[node.lineno - 1], self.starts[node.end_lineno], b"")

    def _operator(self, kind: str, left: ast.expr, right: ast.expr, others: dict[str, str]) -> Iterator[Mutant]:
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self.source[start:end].decode(errors="replace")
        words = re.fullmatch(r"[\s)]*(not\s+in|is\s+not|[a-z]+|[^\s()\w]+)[\s(]*", gap)
        if words and (other := others.get(" ".join(words[1].split()))):
            at = start + len(gap[: words.start(1)].encode())
            yield Mutant(kind, left.lineno, at, at + len(words[1].encode()), other.encode())

    def _swapped(self, one: ast.expr, other: ast.expr) -> Iterator[Mutant]:
        (start, middle), (again, end) = self._span(one), self._span(other)
        if self._text(one) != self._text(other):
            text = self._text(other) + self.source[middle:again] + self._text(one)
            yield Mutant("swapped arguments", one.lineno, start, end, text)


def patch(path: str, before: str, after: str) -> str:
    """The unified diff that makes one text of a file from another, as git writes it."""
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)
