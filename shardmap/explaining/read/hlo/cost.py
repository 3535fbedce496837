"""The cost of a compiled program: operations, bytes, memory and cycles."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardmap.explaining.read.hlo.instructions import SUMS, inside, operation_of
from shardmap.explaining.read.hlo.loops import origin, runs, steps_of
from shardmap.explaining.read.hlo.module import (
    Computation,
    Instruction,
    Message,
    Module,
    Shape,
    Window,
)
from shardmap.explaining.read.hlo.sources import Sources
from shardmap.explaining.report import Cost, Held

MOST_HELD, MOST_LINES = 5, 5
_TRANSCENDENTAL = frozenset(
    "atan2 cbrt cosine erf exponential exponential-minus-one log log-plus-one logistic "
    "power rsqrt sine sqrt tan tanh".split()
)
_ARITHMETIC = frozenset(
    "abs add and ceil clamp compare complex convert count-leading-zeros divide floor "
    "imag is-finite maximum minimum multiply negate not or popcnt real "
    "reduce-precision remainder round-nearest-afz round-nearest-even select shift-left "
    "shift-right-arithmetic shift-right-logical sign subtract xor".split()
)
POINTWISE = _TRANSCENDENTAL | _ARITHMETIC
_PRECISIONS = {1: " high", 2: " highest", "HIGH": " high", "HIGHEST": " highest"}
_APPLY = ("reduce", "reduce-window", "scatter", "select-and-scatter", "map")


def cost_of(
    compiled: jax.stages.Compiled | None, module: Module, peak: int | None
) -> Cost:
    """The cost of a call on one device, of which all is known if it is compiled."""
    flops = flops_of(module.entry)
    if compiled is None:
        return Cost(flops=flops, peak_bytes=peak)
    accessed = (compiled.cost_analysis() or {}).get("bytes accessed", -1)
    sizes = compiled.memory_analysis()
    argument, output, temporary, donated = _sizes(sizes)
    host_argument, host_output, host_temporary, host_donated = _sizes(sizes, "host_")
    peak = peak or getattr(sizes, "total_allocation_bytes", None)
    if argument is not None:
        before = argument + output - donated
        # What the compilers call temporary may lack values, or have some twice.
        temporary = temporary if peak is None else max(0, peak - before)
        peak = before + temporary
    host = None
    if host_argument is not None:
        host = host_argument + host_output + host_temporary - host_donated
    return Cost(
        flops=flops,
        bytes_accessed=accessed if accessed >= 0 else None,  # -1 stands for unknown.
        peak_bytes=peak,
        argument_bytes=argument,
        output_bytes=output,
        temporary_bytes=temporary,
        donated_bytes=donated,
        host_bytes=host or None,
    )


def _sizes(sizes: Any, where: str = "") -> list[Any]:
    """Bytes of arguments, results, temporary values and donated ones."""
    parts = ("argument", "output", "temp", "alias")
    return [getattr(sizes, f"{where}{each}_size_in_bytes", None) for each in parts]


def busiest_lines(module: Module, sources: Sources) -> tuple[tuple[str, float], ...]:
    """The lines with most of the cycles that the compiler estimates; their shares.

    XLA for TPU has estimates of most instructions, but not of collectives, gathers of
    rows and library calls.
    """
    cycles: Counter[str | None] = Counter()
    for each, count in runs(module.entry):
        window = each.config.get("window_config") or {}
        if estimate := int(window.get("estimated_cycles", 0)):
            cycles[sources.of(each)] += estimate * (count or 1)
    total = cycles.total()
    most = cycles.most_common(MOST_LINES)
    return tuple((line, n / total) for line, n in most if line is not None)


def loops_of(module: Module) -> list[Instruction]:
    """The loops of a program. XLA counts the bytes of each body once."""
    return [each for each in module.instructions if each.opcode == "while"]


def read_bytes(entry: Computation) -> int:
    """The bytes of arguments that a program reads at least.

    Of one that only indices or slices are taken from, such as an embedding, it reads
    these. A donated cache that is updated in place is read whole.
    """
    return sum(min(_read(each), each.shape.bytes) for each in entry.parameters)


def _read(value: Instruction) -> int:
    return sum(_read_by(user, value) for user in value.users)


def _read_by(user: Instruction, value: Instruction) -> int:
    if user.opcode in ("gather", "dynamic-slice") and user.operands[0] is value:
        return user.shape.bytes
    if user.opcode == "bitcast":
        return _read(user)
    if user.opcode == "fusion":
        return sum(map(_read, inside(user, value)))
    return value.shape.bytes


# Operations


def flops_of(entry: Computation) -> int:
    """The operations of a program, by the rules of XLA's cost analysis.

    They are those in all steps of loops of known length, without exponentials, sines
    and the like. Of branches, the longest counts.
    """
    return _total(entry, lambda each: {"": _own(each)}, max).total()


def products_of(entry: Computation) -> Mapping[str, int]:
    """The flops of products and convolutions that a program does at least.

    They are by type: "bf16", "int8", "fp8", "f32", "f32 high", "f32 highest" and so on.
    Of branches, the shortest counts.
    """
    return _total(entry, _product, min)


def _total(
    computation: Computation,
    of: Callable[[Instruction], Mapping[str, int]],
    branch: Callable[..., Counter[str]],
) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in computation.instructions:
        total.update(of(each))
        if not each.called or each.opcode == "sort" or _is_sum(each):
            continue
        parts = [_total(called, of, branch) for called in each.called]
        if each.opcode == "conditional":
            parts = [branch(parts, key=Counter.total)]
        for part in parts:
            total.update({type_: _times(each) * n for type_, n in part.items()})
    return total


def _times(each: Instruction) -> int:
    """How often an instruction does what it calls."""
    if each.opcode == "while":
        return max(1, steps_of(each) or 1)
    if each.opcode not in _APPLY:
        return 1
    given = _elements(each.shape)
    if each.opcode == "reduce":
        return max(0, _elements(each.operands[0].shape) - given)
    if each.opcode == "scatter":
        return _elements(each.operands[-1].shape)
    windows = math.prod(window.size for window in each.windows)
    if each.opcode == "reduce-window":
        return given * (windows - 1)
    return windows * given


def _is_sum(each: Instruction) -> bool:
    return each.opcode.removesuffix("-start") in SUMS


def _own(each: Instruction) -> int:
    """The flops of an instruction itself."""
    if each.opcode in _ARITHMETIC or _is_sum(each):
        return sum(_elements(array) for array in each.shape.arrays())
    if each.opcode == "sort":
        count = _elements(each.shape)
        return count * (count - 1).bit_length()
    return product_flops(each)


def _elements(shape: Shape) -> int:
    """The elements of the first array."""
    return next((math.prod(array.sizes) for array in shape.arrays()), 0)


def product_flops(each: Instruction) -> int:
    """Two flops per multiplication, without those of padding; 0 for other operations.

    XLA for GPUs calls a library for some products.
    """
    if each.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    result = next(each.shape.arrays(), each.shape)
    if each.opcode == "dot" or each.target.startswith("__cublas"):
        contracted: Sequence[int] = each.contracted
        if each.opcode != "dot":
            dims = each.config["gemm_backend_config"]["dot_dimension_numbers"]
            contracted = [*map(int, dims.get("lhs_contracting_dimensions", ()))]
        left = each.operands[0].shape.sizes
        return 2 * math.prod(result.sizes) * math.prod(left[d] for d in contracted)
    if each.opcode != "convolution" and not each.target.startswith("__cudnn$conv"):
        return 0
    (first, *_), (second, *_) = (x.shape.arrays() for x in each.operands[:2])
    taken, kernel, given = first.sizes, second.sizes, result.sizes
    if each.target == "__cudnn$convBackwardInput":
        taken, given = given, taken
    if each.target == "__cudnn$convBackwardFilter":
        kernel, given = given, kernel
    spatial, depth, spatial_given = each.convolved
    valid = 1
    for window, a, b in zip(each.windows, spatial, spatial_given, strict=True):
        valid *= valid_positions(window, taken[a], given[b])
        given = (*given[:b], 1, *given[b + 1 :])
    return 2 * math.prod(given) * kernel[depth] * valid


@functools.lru_cache(maxsize=1024)
def valid_positions(window: Window, taken: int, given: int) -> int:
    """The pairs of results and places in the window that meet an operand, not padding.

    >>> valid_positions(Window(3, 1, 1, 1, 1, 1), 4, 4)
    10
    """
    size, stride, low, _, dilation, base = window
    common = math.gcd(stride, base)
    period = base // common
    pairs = 0
    for place in range(size):
        # Of the result k, the operand is at (k * stride - shift) / base.
        shift = low - place * dilation
        if shift % common:
            continue
        first = max(0, -(-shift // stride))
        last = min(given - 1, ((taken - 1) * base + shift) // stride)
        residue = shift // common * pow(stride // common, -1, period) % period
        pairs += (last - residue) // period - (first - 1 - residue) // period
    return pairs


def _product(each: Instruction) -> dict[str, int]:
    """The flops of a product by the wider type of its operands."""
    flops = product_flops(each)
    if not flops:
        return {}
    arrays = [next(operand.shape.arrays()) for operand in each.operands[:2]]
    type_ = max(arrays, key=lambda array: array.bits).dtype
    if type_ == "f32":
        of_library = each.config.get("gemm_backend_config", {})
        asked = of_library.get("precision_config", {}).get("operand_precision")
        given = asked or each.record.message(51).numbers(1)
        # With different precisions, XLA takes the higher one.
        type_ += max((_PRECISIONS.get(k, "") for k in given), default="")
    names = {"f8": "fp8", "s8": "int8", "u8": "int8", "f1": "bf16"}
    return {names.get(type_[:2], type_): flops}


# What is in memory at the peak, by the compiler's own record

_NAMELESS = frozenset(
    "copy copy-start copy-done custom-call parameter while tuple bitcast".split()
)
"""Instructions that say little of what a value is."""


class Memory(NamedTuple):
    """The memory of a device.

    Attributes:
      peak: the bytes of all allocations; None if the compiler has no record.
      largest: the largest values at the peak, except arguments.
    """

    peak: int | None = None
    largest: tuple[Held, ...] = ()


class Buffer(NamedTuple):
    """A value in memory.

    Attributes:
      size: its bytes.
      instruction, path: what defines it, and the place in the tuple.
    """

    size: int
    instruction: Instruction
    path: tuple[int, ...]


def memory_of(record: bytes, module: Module, sources: Sources, platform: str) -> Memory:
    """The memory of a program, by the ``HloProto`` of it, if there is one.

    TPUs have memories on the chip and of the host beside the main one; the numbers of
    those of GPUs are of parts of the main one.
    """
    if not record:
        return Memory()
    assignment = Message(record).message(3)
    buffers = {}
    for each in assignment.messages(1):
        place = each.message(3)
        instruction = module.by_id[place.number(4)]
        path = tuple(place.numbers(3))
        buffers[each.number(1)] = Buffer(each.number(2), instruction, path)
    peak, held, temporary = 0, [], set[int]()
    for each in assignment.messages(3):
        size, numbers = each.number(2), [part.number(1) for part in each.messages(9)]
        is_of_thread, space = each.number(3), each.number(8)
        if is_of_thread or (space and platform == "tpu"):
            continue
        peak += size
        is_parameter, is_result, is_constant = map(each.number, (5, 7, 12))
        if not (is_parameter or is_result or is_constant):
            temporary.update(numbers)
        elif not is_parameter:
            whole = [buffers[k] for k in numbers if buffers[k].size == size]
            held.append((size, whole))
    for trace in assignment.messages(4):
        events = [(e.number(1), e.number(2), e.number(5)) for e in trace.messages(1)]
        held += _alive([each for each in events if each[1] in temporary], buffers)
    held.sort(key=lambda each: -each[0])
    told = [_held(size, there, sources) for size, there in held[:MOST_HELD]]
    return Memory(peak, tuple(filter(None, told)))


def _alive(
    events: Iterable[tuple[int, int, int]], buffers: dict[int, Buffer]
) -> Iterator[tuple[int, list[Buffer]]]:
    """The bytes of each place that is taken at the peak, and what is put there.

    Args:
      events: what happens, the buffer, and another one. 0: it is allocated, 1: freed,
        2: put into the place of the other.
      buffers: by number.
    """
    first: dict[int, int] = {}  # The buffer that took the place of each.
    sharing: Counter[int] = Counter()
    put: dict[int, list[Buffer]] = {}
    now = most = 0
    peak: dict[int, None] = {}
    for kind, number, other in events:
        place = first[number] = first.get(other if kind == 2 else number, number)
        size = buffers[place].size
        if kind == 1:
            sharing[place] -= 1
            now -= size if not sharing[place] else 0
            continue
        now += size if not sharing[place] else 0
        sharing[place] += 1
        put.setdefault(place, []).append(buffers[number])
        if now > most:
            most, peak = now, dict.fromkeys(k for k in sharing if sharing[k])
    for place in peak:
        yield buffers[place].size, put[place]


def _held(size: int, buffers: list[Buffer], sources: Sources) -> Held | None:
    """The value in a place, by the last of what is put there that has a name."""
    if not size or not buffers:
        return None
    buffer, maker = max(
        ((each, _maker(each)) for each in reversed(buffers)),
        key=lambda each: (each[1].opcode not in _NAMELESS) + bool(each[1].op_name),
    )
    shape = buffer.instruction.shape
    for place in buffer.path:
        shape = shape.parts[place]
    return Held(str(shape), size, operation_of(maker), sources.of(maker))


def _maker(buffer: Buffer) -> Instruction:
    """What makes a value; for an element of a loop's state, in its steps."""
    each, callers = buffer.instruction, buffer.instruction.computation.callers
    if each.opcode == "parameter" and callers and callers[0].opcode == "while":
        each = callers[0]
    if each.opcode != "while":
        return each
    each, _, calls = origin(each.called[0].root, buffer.path, ())
    if each.opcode == "dynamic-update-slice":  # Into the results of all steps.
        each, _, _ = origin(each.operands[1], (), calls)
    return each
