"""The collectives of a compiled program, read from XLA's text of it."""

import dataclasses
import math
import re
from collections.abc import Iterator

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(
    rf"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\("
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"\b(?P<how>body|condition|calls|to_apply|true_computation|false_computation|"
    r"branch_computations|called_computations)="
    r"\{?(?P<names>%?[\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_BITS = re.compile(r"^[a-z]+?(\d+)")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One value that a compiled program sends between devices.

    Attributes:
      kind: as XLA calls it.
      group_size: how many devices are in a group.
      count: how often it runs; None: XLA does not know.
      bytes_in, bytes_out: of one device, each time.
      operation: the last part of what XLA says about where it comes from.
      instruction: the number of the instruction; one may send several values.
    """

    kind: str
    group_size: int
    count: int | None
    bytes_in: int
    bytes_out: int
    operation: str
    instruction: int


def compiled_collectives(text: str) -> list[Compiled]:
    """The collectives of a program between different devices, in XLA's order.

    Args:
      text: what ``as_text()`` of a `jax.stages.Compiled` gives.
    """
    partitions = re.search(r"num_partitions=(\d+)", text)
    num_devices = int(partitions[1]) if partitions else 1
    computations: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            current = header["name"]
            computations[current] = []
            entry = current if header["entry"] else entry
        elif current:
            computations[current].append(line)
    found: list[Compiled] = []
    for line, count in _lines(computations, entry, 1):
        found += _read(line, count, num_devices, len(found))
    return [each for each in found if each.group_size > 1]


def _lines(
    computations: dict[str, list[str]], name: str, count: int | None
) -> Iterator[tuple[str, int | None]]:
    """The lines of a computation and of all that it calls, with how often each runs."""
    for line in computations.get(name, ()):
        yield line, count
        trips = _TRIPS.search(line)
        for called in _CALLED.finditer(line):
            times = count
            if called["how"] in ("body", "condition"):
                known = trips is not None and count is not None
                times = count * int(trips[1]) if known else None  # type: ignore[operator, index]
            for inner in called["names"].replace("%", "").split(","):
                yield from _lines(computations, inner.strip(), times)


def _read(
    line: str, count: int | None, num_devices: int, number: int
) -> list[Compiled]:
    match = _COLLECTIVE.match(line)
    if match is None:
        return []
    kind = match["kind"]
    given = _SHAPE.findall(match["type"])
    if match["start"] and kind in ("all-gather", "collective-permute"):
        # Operands, as many results, and for a permutation two flags.
        given = [shape for shape in given if shape != ("u32", "")]
        given = given[len(given) // 2 :]
    shapes = [_bytes(*shape) for shape in given]
    if kind == "all-to-all":
        # One piece for each device.
        shapes = [sum(shapes)]
    group_size = _group_size(line, kind, num_devices)
    result = []
    for size, operation in zip(shapes, _operations(line, len(shapes)), strict=True):
        taken = size
        if kind == "all-gather":
            taken = size // group_size
        elif kind == "reduce-scatter":
            taken = size * group_size
        result.append(Compiled(kind, group_size, count, taken, size, operation, number))
    return result


def _operations(line: str, count: int) -> list[str]:
    """Where each value of an instruction is from.

    >>> _operations('metadata={op_name="jit(f)/shard_map/psum"}', 1)
    ['psum']
    >>> _operations('metadata={op_name="jit(f)/(shard_map/psum:pad)"}', 2)
    ['psum', 'pad']
    """
    name = _OP_NAME.search(line)
    last = name[1].rsplit("/", 1)[-1].rstrip(")") if name else ""
    operations = last.split(":")
    return operations if len(operations) == count else operations[:1] * count


def _bytes(dtype: str, dimensions: str) -> int:
    bits = 8 if dtype == "pred" else int(_BITS.match(dtype)[1])  # type: ignore[index]
    count = math.prod(int(size) for size in dimensions.split(",") if size)
    return -(-count * bits // 8)


def _group_size(line: str, kind: str, num_devices: int) -> int:
    """How many devices are in one group.

    >>> _group_size("replica_groups={{0,1,2},{3,4,5}}", "all-reduce", 6)
    3
    >>> _group_size("replica_groups=[2,3]<=[6]", "all-reduce", 6)
    3
    >>> _group_size("replica_groups=mesh['i'=2,'j'=3] {'j'}", "all-reduce", 6)
    3
    """
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
        ends = set(re.findall(r"\d+", pairs[1])) if pairs else set()
        moves = re.findall(r"(\d+),(\d+)", pairs[1]) if pairs else []
        return len(ends) if any(a != b for a, b in moves) else 1
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed is not None:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if iota is not None:
        return int(iota[1])
    named = re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", line)
    if named is None:
        return num_devices
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
    group = 1
    for axis, part in re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2]):
        group *= int(part or sizes[axis])
    return group
