"""The cost of a compiled program: operations, bytes and memory."""

import math
import re
from typing import Any

import jax

from shardmap.explaining.read.hlo.sources import Sources
from shardmap.explaining.read.hlo.text import (
    HOST,
    Instruction,
    Module,
    arrays_in,
    nbytes,
    shapes_in,
)
from shardmap.explaining.report import Cost, Held

_NO_MEMORY = frozenset(
    "bitcast call conditional constant get-tuple-element parameter send tuple "
    "while".split()
)
# For a dot, and for a call of cuBLAS, whose configuration has the same text.
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_SPREAD = re.compile(r"lhs_dilate=([\dx]+)")
MOST_HELD = 5


def cost_of(compiled: jax.stages.Compiled, module: Module) -> Cost:
    """The compiler's numbers, with the products in every step of a loop.

    XLA for GPUs that are not here counts nothing: then flops are those of products.

    Args:
      compiled: the program.
      module: its text.
    """
    analysis = compiled.cost_analysis() or {}
    keys = ("flops", "transcendentals", "bytes accessed")
    # The compiler gives -1 for unknown.
    flops, transcendentals, accessed = (
        number if (number := analysis.get(key, -1)) >= 0 else None for key in keys
    )
    memory = compiled.memory_analysis()
    argument, output, temporary, donated, peak = _sizes(memory)
    *_, host = _sizes(memory, "host_")
    products = flops_of(module)
    later = products - flops_of(module, once=True)
    return Cost(
        flops=(products or None) if flops is None else flops + later,
        transcendentals=transcendentals,
        bytes_accessed=accessed,
        peak_bytes=peak,
        argument_bytes=argument,
        output_bytes=output,
        temporary_bytes=temporary,
        donated_bytes=donated,
        later_flops=later,
        is_lower_bound=flops is None and products > 0,
        host_bytes=host or None,
    )


def _sizes(memory: Any, where: str = "") -> list[Any]:
    """Bytes of arguments, results, temporary values and donated ones; all together.

    Args:
      memory: the compiler's numbers.
      where: "host_" for the memory of the host.
    """
    parts = ("argument", "output", "temp", "alias")
    sizes: list[Any] = [
        getattr(memory, f"{where}{each}_size_in_bytes", None) for each in parts
    ]
    if None in sizes:
        return [*sizes, None]
    argument, output, temporary, alias = sizes
    # Temporary values are one block, which is allocated during the whole call.
    return [*sizes, argument + output + temporary - alias]


def loops_of(module: Module) -> list[Instruction]:
    """The loops of a program. XLA counts each body once."""
    return [each for each in module.by_name.values() if each.opcode == "while"]


def flops_of(module: Module, name: str | None = None, once: bool = False) -> int:
    """The flops of products and convolutions in a computation and those it calls.

    Args:
      module: the program.
      name: the name of the computation; None for the one that a call runs.
      once: whether to count one step of each loop instead of all known steps.
    """
    total = 0
    for each in module.computations.get(name or module.entry, ()):
        inside = [flops_of(module, called, once) for _, called in each.called]
        together = max if each.opcode == "conditional" else sum
        steps = 1
        if each.opcode == "while" and not once:
            steps = max(1, module.trips(each) or 1)
        total += flops_of_product(each, module) + steps * together(inside or [0])
    return total


def flops_of_product(each: Instruction, module: Module) -> int:
    """Two flops per multiplication, also with padding; 0 for other operations."""
    contracted = _CONTRACTED.search(each.line)
    labels = _KERNEL_LABELS.search(each.line) if each.opcode == "convolution" else None
    if not contracted and not labels:
        return 0
    left, right = [operand.shapes[0][1] for operand in module.operands_of(each)[:2]]
    depth = 1
    if contracted:
        dims = contracted[1].replace('"', "").split(",")
        depth = math.prod(left[int(dim)] for dim in dims if dim)
    elif labels:
        spread = _SPREAD.search(each.line)
        zeros = math.prod(map(int, spread[1].split("x"))) if spread else 1
        depth = math.prod(right) // right[labels[1].index("o")] // zeros
    return 2 * depth * math.prod(each.shapes[0][1])


def largest_at_peak(module: Module, sources: Sources) -> tuple[Held, ...]:
    """The largest values, except arguments, at the peak of a device's memory.

    A value is live from the instruction that makes it to the last that uses it, in
    XLA's order. XLA may let values share memory, which is not visible here.
    """
    _, alive = _peak(module, module.entry)
    alive.sort(key=lambda each: -_held(module, each))
    return tuple(
        Held(_type(module, each), _held(module, each), each.operation, sources.of(each))
        for each in alive[:MOST_HELD]
        if _held(module, each)
    )


def _in_memory(module: Module, each: Instruction) -> list[str]:
    """The types of the arrays of a result that are in the main memory of a device.

    Others are on the host, or in a TPU's memories on the chip. All other numbers are
    of parts of the main memory of a GPU.
    """
    return [
        type_
        for type_, space in arrays_in(each.result_type)
        if space == 0 or (space != HOST and not module.is_for_tpu)
    ]


def _held(module: Module, each: Instruction) -> int:
    """The bytes of a device's memory that a result takes."""
    types = _in_memory(module, each)
    return sum(nbytes(*shape) for type_ in types for shape in shapes_in(type_))


def _type(module: Module, each: Instruction) -> str:
    """The types of its arrays in memory, the first few."""
    shapes = [type_.partition("{")[0] for type_ in _in_memory(module, each)]
    if len(shapes) > MOST_HELD:
        shapes[MOST_HELD - 1 :] = [f"{len(shapes) - MOST_HELD + 1:,} more"]
    return ", ".join(shapes)


def _peak(module: Module, name: str) -> tuple[int, list[Instruction]]:
    """The values live at the peak of a computation and those it calls; their bytes."""
    instructions = module.computations.get(name, [])
    last = _last_uses(instructions)
    alive: dict[str, Instruction] = {}
    now, most = 0, (0, list[Instruction]())
    for k, each in enumerate(instructions):
        if not _is_view(each):
            alive[each.name] = each
            now += _held(module, each)
        inside = (0, list[Instruction]())
        if each.opcode in ("while", "conditional", "call"):
            peaks = [_peak(module, called) for _, called in each.called]
            inside = max(peaks, key=lambda peak: peak[0], default=inside)
        if now + inside[0] > most[0]:
            most = (now + inside[0], [*alive.values(), *inside[1]])
        for done in [name for name in alive if last.get(name, k) <= k]:
            now -= _held(module, alive.pop(done))
    return most


def _is_view(each: Instruction) -> bool:
    """Whether its result is in the memory of another one, or in none."""
    return each.opcode in _NO_MEMORY or each.opcode.endswith("-done")


def _last_uses(instructions: list[Instruction]) -> dict[str, int]:
    """The last instruction that needs each value, also through tuples and views."""
    last: dict[str, int] = {}
    for k in reversed(range(len(instructions))):
        each = instructions[k]
        end = len(instructions) if each.is_root else k
        if _is_view(each):
            end = max(end, last.get(each.name, k))
        for name in each.operands:
            last[name] = max(last.get(name, 0), end)
        if each.is_root:
            last[each.name] = len(instructions)
    return last


def library_bytes(module: Module) -> int:
    """An upper bound on the memory of XLA's CPU library inside one fusion.

    XLA's buffers do not include the values inside. The library may hold each of them,
    or compute them in parts.
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
