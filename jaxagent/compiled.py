"""What a compiled program moves, read from its text: between devices, which collectives, how large, in which loop; and how
many bytes to and from a device's memory.

The text is XLA's (`jax.stages.Compiled.as_text`), of any back end. Nothing here knows JAX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

STEP = "collective-permute"
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}  # others end in their number of bits
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?[\])}]) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|called_computations|branch_computations)=(%[\w.\-]+|\{[^}]*\})")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"^\s+%?([\w.\-]+) = [su]\d+\[\]\S* constant\((\d+)\)")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_COST = re.compile(r'"bytes_accessed":"?(\d+)')
_ALIASES = re.compile(r'"aliasing_operands":\{"lists":\[(.*?\})\]\}')
_BRANCH = re.compile(r"(?:true|false)_computation=%([\w.\-]+)")
_TYPED = re.compile(r"\b([a-z]+\d*\w*\[[\d,]*\])(\{[^}]*\})?")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "optimization-barrier"}
_CHANGES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is what they put into the first
_PARTIAL = {"dynamic-slice", "slice", "gather"}  # read of their operand what they give


@dataclass(frozen=True)
class Collective:
    """A collective as one device runs it."""

    kind: str  # one of KINDS
    arrays: tuple[str, ...]  # the larger side of it: what is gathered, or what is reduced, as in "bf16[512,1024]"
    loop: str  # the name that tracing gave to the innermost loop around it; "" outside of loops
    body: str  # that loop's own name in the text
    source: str  # the name that tracing gave to itself
    overlapped: bool  # whether the device computes meanwhile
    runs: int = 1  # how often, by the trip counts of the loops around it that the compiler knows

    @property
    def size_bytes(self) -> int:
        return sum(_size_bytes(array) for array in self.arrays)


def collectives(text: str) -> list[Collective]:
    """All collectives of a program. One that is carried out in steps (a chain of fusions) is one."""
    computations = dict(_computations(text))
    loops = _loops(computations)
    found: list[Collective] = []
    chains: set[str] = set()
    for name, lines in computations.items():
        if name not in loops:
            continue  # dead
        for line in lines:
            if (one := _collective(name, line, lines, loops[name])) is None:
                continue
            chain = _CHAIN.search(line)
            if chain and chain[1] in chains:
                continue
            chains |= {chain[1]} if chain else set()
            found.append(one)
    return found


def summary(found: Iterable[Collective], smallest_bytes: int = 0) -> str:
    """Kind, number and size of collectives, those of a kind together: "7 all-gather 92.6 MB (6 overlapped)".

    What is gathered or reduced while a matrix product goes on, from neighbour to neighbour, counts by its steps in the text.
    """
    several = [one for one in found if one.size_bytes >= smallest_bytes]
    names = [f"{one.kind} of products" if "dot_general" in one.source and one.kind == STEP else one.kind for one in several]
    parts = []
    for name in dict.fromkeys(sorted(names)):
        mine = [one for one, its in zip(several, names, strict=True) if its == name]
        overlapped = sum(one.overlapped for one in mine)
        size = sum(one.size_bytes for one in mine)
        parts.append(f"{len(mine)} {name} {size / 1e6:.1f} MB" + (f" ({overlapped} overlapped)" if overlapped else ""))
    return ", ".join(parts) or "none"


def totals(found: Iterable[Collective]) -> dict[str, dict[str, int]]:
    """How often a device runs collectives of each kind while the program runs once, loops included, and of how many bytes."""
    counted: dict[str, dict[str, int]] = {}
    for one in found:
        of_kind = counted.setdefault(one.kind, {"runs": 0, "bytes": 0})
        of_kind["runs"] += one.runs
        of_kind["bytes"] += one.runs * one.size_bytes
    return dict(sorted(counted.items()))


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, lines = ("ENTRY" if header[1] else header[2]), []
        elif line == "}":
            yield name, lines
        else:
            lines.append(line)


def _loops(computations: dict[str, list[str]]) -> dict[str, tuple[str, str, int]]:
    """Every living computation's innermost loop: the name that tracing gave to it, its body, and how often that runs."""
    loops, ahead = {"ENTRY": ("", "", 1)}, ["ENTRY"]
    while ahead:
        name = ahead.pop()
        for line in computations[name]:
            for how, callees in _CALLED.findall(line):
                for callee in re.findall(r"[\w.\-]+", callees):
                    if callee in computations and callee not in loops:
                        op_name, runs = _OP_NAME.search(line), loops[name][2] * (_trips(line, computations) or 1)
                        loops[callee] = (op_name[1] if op_name else callee, callee, runs) if how == "body" else loops[name]
                        ahead.append(callee)
    return loops


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """How often a loop runs; 0 where that is not known before it runs.

    For GPUs the compiler says so. For TPUs its condition does, which compares a counter with a constant: it is taken to
    count from 0 in steps of one, as JAX does.
    """
    if said := _TRIPS.search(line):
        return int(said[1])
    condition = computations.get(_called(line).get("condition", [""])[0], [])
    last = next((i for one in condition if "ROOT" in one and (i := _INSTRUCTION.match(one))), None)
    if not last or last[3] != "compare" or "direction=LT" not in last[4]:
        return 0
    bound = (_names(last[4]) or [""])[-1]
    constants = (_CONSTANT.match(one) for one in condition)
    return next((int(found[2]) for found in constants if found and found[1] == bound), 0)


def _collective(computation: str, line: str, lines: list[str], loop: tuple[str, str, int]) -> Collective | None:
    instruction = _INSTRUCTION.match(line)
    if not instruction:
        return None
    _, result, opcode, _ = instruction.groups()
    kind = opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    arrays = _arrays(result)
    if opcode.endswith("-start") and kind == "collective-permute":
        arrays = arrays[1:2]  # operand, result, and two flags
    elif opcode.endswith("-start") and kind != "all-reduce" and len(arrays) > 1:
        arrays = arrays[len(arrays) // 2 :]  # operands and results
    if kind == "reduce-scatter":
        arrays = [array for operand in _operands(line, opcode) for array in _arrays_of(operand, lines)] or arrays
    elif kind == "all-reduce" and "all-reduce-scatter" in computation:
        kind = "reduce-scatter"  # as a TPU writes it: a fusion of an all-reduce and a slice
    overlapped = opcode.endswith("-start") or "async_collective" in computation or "async_collective_name" in line
    source = _OP_NAME.search(line)
    overlapped |= bool(_CHAIN.search(line))
    return Collective(kind, tuple(arrays), loop[0], loop[1], source[1] if source else "", overlapped, loop[2])


def moved_bytes(text: str, trips: int = 1) -> float:
    """Bytes that a TPU program reads from and writes to a chip's main memory, by the text of all it runs.

    Every instruction reads its operands and writes its result, but for what lies in the chip's fast memory, for what it
    changes in place, of which only the change counts, and for operands of which it reads slices. A kernel counts as it says
    of itself. Of alternatives the cheapest counts, which is what rows without settings take.

    Args:
        trips: of loops whose number of runs the compiler does not know.
    """
    computations = dict(_computations(text))
    types = {i[1]: i[2] for lines in computations.values() for line in lines if (i := _INSTRUCTION.match(line))}

    def moved(line: str, result: str, opcode: str) -> float:
        if opcode == "custom-call":
            return int(cost[1]) if (cost := _COST.search(line)) else 0
        if opcode.endswith("-start") and opcode != "all-reduce-start":
            return _size_bytes(_TYPED.findall(result)[1][0])  # into fast memory or out of it; what it is made of comes first
        operands = [types[name] for name in _operands(line, opcode) if name in types]
        fused = computations.get(_called(line).get("calls", [""])[0], [])
        return _of_operation(result, operands, opcode, _shared(line), fused)

    return _total(computations, trips, moved)


def kernels(text: str, trips: int = 1) -> int:
    """How many operations a GPU is sent while a program runs, by its text; of alternatives the fewest.

    Args:
        trips: of loops whose number of runs the compiler does not know.
    """
    return round(_total(dict(_computations(text)), trips, lambda *_: 1))


def _called(line: str) -> dict[str, list[str]]:
    return {how: re.findall(r"[\w.\-]+", names) for how, names in _CALLED.findall(line)}


def _total(computations: dict[str, list[str]], trips: int, of_one: Callable[[str, str, str], float]) -> float:
    """The sum over all operations that run, each by its line, result and opcode; of alternatives the least."""

    def of(computation: str) -> float:
        found = ((line, _INSTRUCTION.match(line)) for line in computations[computation])
        return sum(of_line(line, i[2], i[3]) for line, i in found if i)

    def of_line(line: str, result: str, opcode: str) -> float:
        if opcode in _FREE or opcode.endswith("-done"):
            return 0
        if opcode == "while":
            return (_trips(line, computations) or trips) * of(_called(line)["body"][0])
        if opcode == "conditional":
            return min(of(name) for name in _called(line).get("branch_computations", _BRANCH.findall(line)))
        return of(_called(line)["to_apply"][0]) if opcode == "call" else of_one(line, result, opcode)

    return of("ENTRY")


def _shared(line: str) -> set[int]:
    """Operands whose memory is the result's too, by their number."""
    found = _ALIASES.search(line)
    return {int(first) for first in re.findall(r'\["(\d+)"', found[1])} if found else set()


def _of_operation(result: str, operands: list[str], opcode: str, shared: set[int], fused: list[str]) -> float:
    read: list[float] = [_main_bytes(type_) for type_ in operands]
    for number in range(len(operands)):
        used = _sliced(fused, number) if fused else _main_bytes(result) if opcode in _PARTIAL and number == 0 else None
        read[number] = read[number] if used is None else min(read[number], used)
    if opcode in _CHANGES:
        shared, changed = {0}, [operands[_CHANGES[opcode]]] if len(operands) > 1 else []
    else:
        within = {i[1]: i for line in fused if (i := _INSTRUCTION.match(line))}
        into = [_names(i[4])[_CHANGES[i[3]]] for i in within.values() if i[3] in _CHANGES]
        changed = [within[name][2] for name in into if name in within]
    if not shared or not changed:
        return sum(read) + _main_bytes(result)
    written = sum(_size_bytes(array) for type_ in changed for array in _arrays(type_)) if _main_bytes(result) else 0
    return sum(size for number, size in enumerate(read) if number not in shared) + written


def _names(arguments: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", arguments.split("), ")[0])


def _sliced(fused: list[str], number: int) -> float | None:
    """Bytes that a fusion takes of an operand, where it takes nothing but slices of it, which may be cast as they are read."""
    instructions = [i for line in fused if (i := _INSTRUCTION.match(line))]
    parameter = next((i for i in instructions if i[3] == "parameter" and i[4].startswith(f"{number})")), None)
    if parameter is None:
        return None
    users = [i for i in instructions if re.search(rf"%{re.escape(parameter[1])}\b", i[4])]
    if not users or not all(i[3] in _PARTIAL and i[4].startswith(f"%{parameter[1]}") for i in users):
        return None
    dtype = _arrays(parameter[2])[0].partition("[")[0]
    return sum(_size_bytes(f"{dtype}[{array.partition('[')[2]}") for i in users for array in _arrays(i[2]))


def _main_bytes(type_: str) -> int:
    return sum(_size_bytes(array) for array, layout in _TYPED.findall(type_) if "S(" not in layout)


def _operands(line: str, opcode: str) -> list[str]:
    return _names(line.split(f" {opcode}(", 1)[1])


def _arrays_of(name: str, lines: list[str]) -> list[str]:
    for line in lines:
        instruction = _INSTRUCTION.match(line)
        if instruction and instruction[1] == name:
            return _arrays(instruction[2])
    return []


def _arrays(types: str) -> list[str]:
    return [f"{dtype}[{shape}]" for dtype, shape in _ARRAY.findall(types)]


def _size_bytes(array: str) -> int:
    dtype, shape = array.removesuffix("]").split("[")
    bits = _BITS.get(dtype) or int((re.search(r"\d+", dtype) or ["8"])[0])
    return math.prod(int(n) for n in shape.split(",") if n) * bits // 8
