"""Another reading of XLA's text, to compare with; no code of it is the package's."""

import collections
import math
import re
from typing import NamedTuple

import numpy as np

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
WIDTHS = {
    "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "bf16": 2, "f16": 2,
    "pred": 1, "c64": 8, "c128": 16, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
}  # fmt: skip


class Moved(NamedTuple):
    """A value that is sent.

    Attributes:
      kind: as XLA calls it.
      bytes_in, bytes_out: of one device.
      groups: the devices that take part, together; those that a permutation joins.
    """

    kind: str
    bytes_in: int
    bytes_out: int
    groups: frozenset


def moved(text):
    """What is sent, with how often.

    A loop's steps are counted by walking from each computation up to its callers.
    """
    callers, inside, name = {}, collections.defaultdict(list), ""
    partitions = re.search(r"num_partitions=(\d+)", text)
    devices = int(partitions[1]) if partitions else 1
    for line in text.splitlines():
        if line.endswith("{") and (
            header := re.match(r"(?:ENTRY )?%([\w.\-]+) ", line)
        ):
            name = header[1]
        inside[name].append(line)
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        lists = re.findall(r"(?:body|calls|to_apply|computations?)=\{?([^={}]+)", line)
        for called in re.findall(r"%([\w.\-]+)", " ".join(lists)):
            callers[called] = (name, int(trips[1]) if trips else 1)
    counts = collections.Counter()
    for name, lines in inside.items():
        times, at = 1, name
        while at in callers:
            at, trips = callers[at]
            times *= trips
        for line in lines:
            for value in _values(line, devices):
                counts[value] += times
    return counts


def _values(line, devices):
    sent = re.match(rf".* = (.*) ({KINDS})(-start)?\(", line)
    if sent is None:
        return
    kind = sent[2]
    groups = _groups(line, kind, devices)
    if max(map(len, groups), default=1) == 1:
        return
    sizes = [
        WIDTHS[dtype] * math.prod(int(n) for n in sizes.split(",") if n)
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", sent[1])
    ]
    if kind == "all-to-all":  # One piece of one value for each device.
        sizes = [sum(sizes)]
    count = max(map(len, groups))
    for size in sizes:
        taken = {"all-gather": size // count, "reduce-scatter": size * count}
        yield Moved(kind, taken.get(kind, size), size, frozenset(groups))


def _groups(line, kind, devices):
    """The sets of devices that send to each other."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{([{}\d,]*)\}", line)[1]
        return _joined(re.findall(r"\{(\d+),(\d+)\}", pairs))
    if match := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
        return [
            frozenset(map(int, group.split(",")))
            for group in re.findall(r"\{([\d,]+)\}", match[1])
        ]
    if match := re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](T\(\S+?\))?", line
    ):
        shape = [int(n) for n in match[1].split(",")]
        ids = np.arange(math.prod(shape)).reshape([int(n) for n in match[2].split(",")])
        if match[3]:
            ids = ids.transpose([int(n) for n in re.findall(r"\d+", match[3])])
        return [frozenset(row) for row in ids.reshape(shape).tolist()]
    if match := re.search(r"replica_groups=mesh\[(.*?)\](.*?)\{(.*?)\}", line):
        return _of_mesh(*match.groups())
    return [frozenset(range(devices))]


def _of_mesh(sizes, order, names):
    """The groups of ``mesh['a'=4,'b'=2] {'a':(1)2}``: of parts of the axes of a mesh.

    Of each axis the digits of a part, ``:(before)size``, run; the others stay.
    """
    mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    runs = {
        name: (int(before or 1), int(size or mesh[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", names)
    }
    ids = list(range(math.prod(mesh.values())))
    if shape := re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order):
        ids = np.reshape(ids, [int(n) for n in shape[1].split(",")])
        axes = [int(n) for n in shape[2].split(",")] if shape[2] else None
        ids = ids.transpose(axes).ravel().tolist()
    groups = collections.defaultdict(set)
    for at, place in enumerate(np.ndindex(*mesh.values())):
        fixed = []
        for name, k in zip(mesh, place, strict=True):
            before, size = runs.get(name, (1, 1))
            inner = mesh[name] // before // size
            fixed.append((k // (inner * size), k % inner))
        groups[tuple(fixed)].add(ids[at])
    return [frozenset(group) for group in groups.values()]


def _joined(pairs):
    last = max((int(end) for pair in pairs for end in pair), default=-1)
    groups = [{k} for k in range(1 + last)]
    for a, b in pairs:
        one = next(group for group in groups if int(a) in group)
        other = next(group for group in groups if int(b) in group)
        if one is not other:
            groups.remove(other)
            one |= other
    return [frozenset(group) for group in groups]


def along(mesh, names):
    """The sets of devices of a mesh that differ only along some of its axes."""
    ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    groups = collections.defaultdict(set)
    for place in np.ndindex(*ids.shape):
        rest = tuple(
            k for k, name in zip(place, mesh, strict=True) if name not in names
        )
        groups[rest].add(int(ids[place]))
    return {frozenset(group) for group in groups.values()}
