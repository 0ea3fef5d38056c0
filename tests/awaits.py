"""Every place where modules wait, found in their source, and faults put there: a hang, an exception, a cancellation.

The functions of a module get code in which `await x` is `await Faults.at(place, x)`; `async with x` and `async for y in x` wait
by the same way. So no module has to know of it, and a place that is added is found.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import types
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Injected(Exception):
    """What a fault raises."""


class Faults:
    """Which place is to fail, how, and at which time that it is come by; and how often each was come by.

    What is tried side by side, in event loops of its own, has faults of its own in `apart`.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.apart: dict[asyncio.AbstractEventLoop, Faults] = {}
        self.place, self.kind, self.number = "", "", 1

    def arm(self, place: str = "", kind: str = "", number: int = 1) -> None:
        """Kind: hang, raise or cancel, before what is waited for has begun."""
        self.seen.clear()
        self.place, self.kind, self.number = place, kind, number

    async def at(self, place: str, awaited: Awaitable[Any]) -> Any:
        mine = self.apart.get(asyncio.get_running_loop())
        return await (mine or self)._at(place, awaited)

    async def _at(self, place: str, awaited: Awaitable[Any]) -> Any:
        self.seen[place] += 1
        if place == self.place and self.seen[place] == self.number:
            if inspect.iscoroutine(awaited):
                awaited.close()
            elif asyncio.isfuture(awaited):
                awaited.add_done_callback(lambda done: done.cancelled() or done.exception())  # asked for, as a wait does
            if self.kind == "hang":
                await asyncio.Event().wait()
            raise asyncio.CancelledError if self.kind == "cancel" else Injected(place)
        return await awaited

    @contextmanager
    def within(self, *modules: types.ModuleType) -> Iterator[list[str]]:
        """The functions of these modules wait through `at`; their places."""
        kept: list[tuple[types.FunctionType, types.CodeType]] = []
        places: list[str] = []
        for module in modules:
            marked = _Marked(module.__name__.rpartition(".")[2])
            tree = ast.fix_missing_locations(marked.visit(ast.parse(inspect.getsource(module))))
            places += marked.places
            codes = dict(_codes(compile(tree, str(module.__file__), "exec")))
            for function in (one for one in _functions(module) if one.__code__.co_qualname in codes):
                kept.append((function, function.__code__))
                function.__code__ = codes[function.__code__.co_qualname]
            vars(module).update({"_at": self.at, "_with": _Through, "_each": _each})
        try:
            yield places
        finally:
            for function, code in kept:
                function.__code__ = code
            for module in modules:
                del vars(module)["_at"], vars(module)["_with"], vars(module)["_each"]


class _Through:
    """An asynchronous context whose two waits go through `at`."""

    def __init__(self, at: Any, place: str, context: Any):
        self.at, self.place, self.context = at, place, context

    async def __aenter__(self) -> Any:
        try:
            return await self.at(self.place, self.context.__aenter__())
        except BaseException:
            if isinstance(self.context, Coroutine):  # it may wrap one that has not begun
                self.context.close()
            raise

    async def __aexit__(self, *raised: Any) -> Any:
        return await self.context.__aexit__(*raised)  # a context that is not left at all is no fault of who waits


async def _each(at: Any, place: str, pieces: AsyncIterable[Any]) -> AsyncIterator[Any]:
    found = aiter(pieces)
    while True:
        try:
            piece = await at(place, anext(found))
        except StopAsyncIteration:
            return
        yield piece


class _Marked(ast.NodeTransformer):
    """Every `await x` becomes `await _at(place, x)`."""

    def __init__(self, module: str):
        self.scope, self.places = [module], list[str]()

    def _inside(self, node: Any) -> Any:
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _inside

    def _place(self, node: ast.expr) -> str:
        place = f"{'.'.join(self.scope)}: {ast.unparse(node)}"
        again = sum(one.partition(" #")[0] == place for one in self.places)
        self.places.append(f"{place} #{again + 1}" if again else place)
        return self.places[-1]

    def visit_Await(self, node: ast.Await) -> ast.Await:
        place = self._place(node.value)
        self.generic_visit(node)
        return ast.Await(ast.Call(ast.Name("_at", ast.Load()), [ast.Constant(place), node.value], []))

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AsyncWith:
        for item in node.items:
            place = self._place(item.context_expr)
            names = [ast.Name("_at", ast.Load()), ast.Constant(place), item.context_expr]
            item.context_expr = ast.Call(ast.Name("_with", ast.Load()), names, [])  # type: ignore[arg-type]
        node.body = [self.visit(inner) for inner in node.body]
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AsyncFor:
        names = [ast.Name("_at", ast.Load()), ast.Constant(self._place(node.iter)), node.iter]
        node.iter = ast.Call(ast.Name("_each", ast.Load()), names, [])  # type: ignore[arg-type]
        node.body = [self.visit(inner) for inner in node.body]
        return node


def _codes(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)


def _functions(module: types.ModuleType) -> Sequence[types.FunctionType]:
    """The asynchronous functions and methods that a module defines, and those that make such ones."""
    owners = [module, *(one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__)]
    found = [inspect.unwrap(one) for owner in owners for one in vars(owner).values() if callable(one)]
    return [one for one in found if isinstance(one, types.FunctionType) and one.__module__ == module.__name__]
