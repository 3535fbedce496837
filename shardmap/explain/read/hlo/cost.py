"""What a compiled program costs: operations, bytes, and the memory that it holds.

XLA counts the body of a loop once, so that its numbers are scaled by how much more is
done where every step counts.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax

from shardmap.explain.read.hlo.sources import Sources
from shardmap.explain.read.hlo.text import Instruction, Module
from shardmap.explain.report import Cost, Held

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
MOST_HELD = 5


def cost_of(compiled: jax.stages.Compiled, module: Module | None) -> Cost:
    """The compiler's numbers, with every step of a loop of known length.

    Args:
      compiled: the program.
      module: its text; None where the platform gives none.
    """
    analysis = compiled.cost_analysis() or {}
    keys = ("flops", "transcendentals", "bytes accessed")
    # The compiler says -1 where it does not know.
    numbers = [n if (n := analysis.get(key, -1)) >= 0 else None for key in keys]
    if module is not None:
        numbers = [
            None if n is None else n * factor
            for n, factor in zip(numbers, _loop_factors(module), strict=True)
        ]
    memory = compiled.memory_analysis()
    sizes: list[Any] = [
        getattr(memory, f"{part}_size_in_bytes", None)
        for part in ("argument", "output", "temp", "alias")
    ]
    argument, output, temporary, alias = sizes
    return Cost(
        flops=numbers[0],
        transcendentals=numbers[1],
        bytes_accessed=numbers[2],
        # Temporary values are one block, which is there as long as the call runs.
        peak_bytes=None if None in sizes else argument + output + temporary - alias,
        argument_bytes=argument,
        output_bytes=output,
        temporary_bytes=temporary,
        donated_bytes=alias,
    )


def steps_are_known(module: Module) -> bool:
    """Whether XLA knows how often each loop runs."""
    loops = (each for each in module.by_name.values() if each.opcode == "while")
    return all(each.trips is not None for each in loops)


def _loop_factors(module: Module) -> Iterator[float]:
    """Flops, transcendentals and bytes, relative to what XLA counts."""
    once, often = [0.0] * 3, [0.0] * 3

    def visit(name: str, count: int, is_fused: bool) -> None:
        for each in module.computations.get(name, []):
            moved = 0 if is_fused else _moved(each, module)
            for k, work in enumerate((*_operations(each, module), moved)):
                once[k] += work
                often[k] += count * work
            steps = (each.trips or 1) if each.opcode == "while" else 1
            for how, inner in each.called:
                # What a reduction applies is a part of its own work.
                if how != "to_apply" or each.opcode == "call":
                    visit(inner, count * steps, is_fused or each.opcode == "fusion")

    visit(module.entry, 1, False)
    return (b / a if a else 1.0 for a, b in zip(once, often, strict=True))


def _operations(each: Instruction, module: Module) -> tuple[float, float]:
    """Arithmetic operations, and functions such as the exponential."""
    count = sum(math.prod(shape) for _, shape in each.shapes)
    if each.opcode in _TRANSCENDENTAL:
        return 0, count
    if each.opcode in _ELEMENTWISE:
        return count, 0
    if each.opcode in ("dot", "convolution", "reduce", "reduce-window"):
        return count * _depth(each, module), 0
    return 0, 0


def _depth(each: Instruction, module: Module) -> float:
    """The operations for each number of a product or a reduction."""
    known = module.operands_of(each)
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


def _moved(each: Instruction, module: Module) -> int:
    """Bytes written, and as many read: of an update in place, the update."""
    if each.opcode in _NO_MEMORY:
        return 0
    inside = module.parts_of(each) or [each]
    written = 0
    for part in inside:
        if part.opcode == "dynamic-update-slice":
            operands = module.operands_of(part)
            written += operands[1].bytes if len(operands) > 1 else 0
    return written or each.bytes


def largest_at_peak(module: Module, sources: Sources) -> tuple[Held, ...]:
    """The largest values alive where a device holds most, but arguments.

    A value is alive from the instruction that makes it to the last that takes it, in
    the order in which XLA runs them. XLA may let values share memory, which is not
    visible here.
    """
    alive = _peak(module, module.entry)
    alive.sort(key=lambda each: -each.bytes)
    return tuple(
        Held(_type(each), each.bytes, each.operation, sources.of(each))
        for each in alive[:MOST_HELD]
    )


def _type(each: Instruction) -> str:
    """The types of its arrays, the first few."""
    shapes = [f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in each.shapes]
    if len(shapes) > MOST_HELD:
        shapes[MOST_HELD - 1 :] = [f"{len(shapes) - MOST_HELD + 1:,} more"]
    return ", ".join(shapes)


def _peak(module: Module, name: str) -> list[Instruction]:
    """The values alive at the peak of a computation and those it calls."""
    instructions = module.computations.get(name, [])
    last = _last_uses(instructions)
    alive: dict[str, Instruction] = {}
    best: list[Instruction] = []
    for k, each in enumerate(instructions):
        if each.opcode not in _NO_MEMORY:
            alive[each.name] = each
        inside: list[Instruction] = []
        if each.opcode in ("while", "conditional", "call"):
            peaks = [_peak(module, called) for how, called in each.called]
            inside = max(peaks, key=_total, default=[])
        best = max(best, [*alive.values(), *inside], key=_total)
        for done in [name for name in alive if last.get(name, k) <= k]:
            del alive[done]
    return best


def _last_uses(instructions: list[Instruction]) -> dict[str, int]:
    """The last instruction that needs each; tuples and views pass it on."""
    last: dict[str, int] = {}
    for k in reversed(range(len(instructions))):
        each = instructions[k]
        end = len(instructions) if each.is_root else k
        if each.opcode in _NO_MEMORY:
            end = max(end, last.get(each.name, k))
        for name in each.operands:
            last[name] = max(last.get(name, 0), end)
        if each.is_root:
            last[each.name] = len(instructions)
    return last


def _total(held: list[Instruction]) -> int:
    return sum(each.bytes for each in held)


def library_bytes(module: Module) -> int:
    """The most bytes that XLA's library on CPU holds of values inside one fusion.

    The buffers that XLA assigns leave them out. The library may hold each of them, or
    compute them in parts.
    """
    no_values = ("bitcast", "broadcast", "constant", "parameter")
    held = [
        sum(
            part.bytes
            for part in module.parts_of(each)
            if part.opcode not in no_values and not part.is_root
        )
        for each in module.by_name.values()
        if each.opcode == "fusion" and "__ynn_fusion" in each.line
    ]
    return max(held, default=0)
