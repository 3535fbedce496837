"""How often the work of a compiled program is done, where XLA counts a loop once."""

import math
import re
from typing import NamedTuple

from shardmap.explain.read.hlo.text import Instruction, Module

_TRANSCENDENTAL = frozenset(
    "atan2 cbrt cosine erf exponential exponential-minus-one log log-plus-one logistic "
    "power rsqrt sine sqrt tan tanh".split()
)
_ELEMENTWISE = frozenset(
    "abs add and ceil clamp compare convert divide floor maximum minimum multiply "
    "negate not or remainder round-nearest-afz round-nearest-even select shift-left "
    "shift-right-arithmetic shift-right-logical sign subtract xor".split()
)
POINTWISE = _TRANSCENDENTAL | _ELEMENTWISE
_NO_MEMORY = frozenset(
    "bitcast call conditional constant get-tuple-element parameter tuple while".split()
)


class CostAnalysis(NamedTuple):
    """What is done, in the same units as XLA's, about.

    Attributes:
      flops: arithmetic operations.
      transcendentals: of functions such as the exponential.
      bytes: read and written by what is not inside a fusion.
    """

    flops: float = 0
    transcendentals: float = 0
    bytes: float = 0


class Loops(NamedTuple):
    """What loops make of the work.

    Attributes:
      factors: by what each number grows where every step of a loop counts.
      all_known: whether the number of steps of each loop is known; those of which it
        is not count once.
    """

    factors: CostAnalysis
    all_known: bool


def loops_of(module: Module) -> Loops:
    """How much more is done than XLA counts, which takes each loop as one step."""
    once, often = [0.0] * 3, [0.0] * 3
    all_known = True

    def visit(name: str, count: int, is_fused: bool) -> None:
        nonlocal all_known
        instructions = module.computations.get(name, [])
        by_name = {each.name: each for each in instructions}
        for each in instructions:
            for k, work in enumerate(_work(each, by_name, is_fused, module)):
                once[k] += work
                often[k] += count * work
            steps = each.trips if each.opcode == "while" else 1
            all_known &= steps is not None
            for how, inner in each.called:
                # What a reduction applies is a part of its own work.
                if how != "to_apply" or each.opcode == "call":
                    fused = is_fused or each.opcode == "fusion"
                    visit(inner, count * (1 if steps is None else steps), fused)

    visit(module.entry, 1, False)
    factors = (b / a if a else 1.0 for a, b in zip(once, often, strict=True))
    return Loops(CostAnalysis(*factors), all_known)


def _work(
    each: Instruction,
    by_name: dict[str, Instruction],
    is_fused: bool,
    module: Module,
) -> CostAnalysis:
    moved = 0
    if not is_fused and each.opcode not in _NO_MEMORY:
        moved = _moved(each, by_name, module)
    count = sum(math.prod(shape) for _, shape in each.shapes)
    if each.opcode in _TRANSCENDENTAL:
        return CostAnalysis(0, count, moved)
    if each.opcode in _ELEMENTWISE:
        return CostAnalysis(count, 0, moved)
    if each.opcode in ("dot", "convolution", "reduce", "reduce-window"):
        return CostAnalysis(count * _depth(each, by_name), 0, moved)
    return CostAnalysis(0, 0, moved)


def _moved(each: Instruction, by_name: dict[str, Instruction], module: Module) -> int:
    """What it reads and writes: of what is only sliced, or updated, that part."""
    if each.opcode != "fusion":
        used = [
            _touched(each, k, by_name)
            for k, name in enumerate(each.operands)
            if name in by_name
        ]
        return _written(each, by_name) + sum(used)
    inside = [i for _, name in each.called for i in module.computations[name]]
    names = {i.name: i for i in inside}
    total = sum(_written(i, names) for i in inside if i.is_root)
    for parameter in inside:
        if parameter.opcode == "parameter":
            parts = [
                _touched(i, k, names)
                for i in inside
                for k, name in enumerate(i.operands)
                if name == parameter.name
            ]
            total += min(parameter.bytes, sum(parts))
    return total


def _touched(each: Instruction, k: int, by_name: dict[str, Instruction]) -> int:
    """How many bytes of its operand number ``k`` an operation reads."""
    if each.opcode in ("dynamic-slice", "slice", "gather") and k == 0:
        return each.bytes
    if each.opcode == "dynamic-update-slice" and k == 0:
        return 0
    return by_name[each.operands[k]].bytes


def _written(each: Instruction, by_name: dict[str, Instruction]) -> int:
    """How many bytes of its result an operation writes: an update, in place."""
    if each.opcode == "dynamic-update-slice":
        update = by_name.get(each.operands[1])
        return each.bytes if update is None else update.bytes
    if each.opcode in ("tuple", "bitcast"):
        made = [by_name[name] for name in each.operands if name in by_name]
        return sum(_written(other, by_name) for other in made)
    return each.bytes


def _depth(each: Instruction, by_name: dict[str, Instruction]) -> float:
    """The operations for each number of a product or a reduction."""
    known = [by_name[name] for name in each.operands if name in by_name]
    shapes = [operand.shapes[0][1] for operand in known if operand.shapes]
    if not shapes:
        return 1
    if each.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.line)
        dims = contracted[1].split(",") if contracted else []
        return 2 * math.prod(shapes[0][int(dim)] for dim in dims if dim)
    if each.opcode == "convolution":
        return 2 * math.prod(shapes[-1]) / max(1, max(shapes[-1], default=1))
    if each.opcode == "reduce":
        return math.prod(shapes[0]) / max(1, math.prod(each.shapes[0][1]))
    window = re.search(r"window=\{size=([\dx]+)", each.line)
    return math.prod(map(int, window[1].split("x"))) if window else 1
