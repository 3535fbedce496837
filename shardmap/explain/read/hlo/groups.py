"""The devices of a collective, and the mesh axes along which they differ."""

import re
from collections.abc import Sequence

import numpy as np

Groups = list[tuple[int, ...]]
Mesh = Sequence[tuple[str, int]]
"""The names and sizes of the axes."""


def groups_of(line: str, num_devices: int) -> Groups:
    """The groups of devices of a collective.

    >>> groups_of("replica_groups={{0,1},{2,3}}", 4)
    [(0, 1), (2, 3)]
    >>> groups_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    [(0, 2), (1, 3)]
    >>> groups_of("replica_groups=mesh['i'=2,'j'=2] {'i'}", 4)
    [(0, 2), (1, 3)]
    >>> groups_of("replica_groups={}", 4)
    [(0, 1, 2, 3)]
    """
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if listed is not None:
        return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])]
    iota = re.search(r"replica_groups=\[(\d+,\d+)\](<=\S*?)?(?:, |\s|$)", line)
    if iota is not None:
        shape = _numbers(iota[1])
        ids = _iota(iota[2] or "", shape[0] * shape[1])
        return [tuple(row) for row in ids.reshape(shape).tolist()]
    named = re.search(r"replica_groups=mesh\[(.*?)\]([^{]*)\{(.*?)\}", line)
    if named is not None:
        return _along_names(named[1], named[2], named[3])
    return [tuple(range(num_devices))]


def pairs_of(line: str) -> list[tuple[int, int]]:
    """The pairs of sender and receiver of a permutation that are two devices."""
    listed = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    pairs = re.findall(r"\{(\d+),(\d+)\}", listed[1]) if listed else []
    return [(int(a), int(b)) for a, b in pairs if a != b]


def axes_of_groups(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ.

    A group may have all places along them, or some, as the partitioner sees fit.

    >>> axes_of_groups([(0, 2), (1, 3)], [("i", 2), ("j", 2)])
    ('i',)
    """
    return axes_of_pairs(
        [(group[0], other) for group in groups for other in group], mesh
    )


def axes_of_pairs(pairs: Sequence[tuple[int, int]], mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which the devices of a pair differ.

    >>> axes_of_pairs([(0, 1), (1, 0)], [("i", 2), ("j", 2)])
    ('j',)
    """
    shape = [size for _, size in mesh]
    if not pairs or max(map(max, pairs)) >= np.prod(shape, dtype=int):
        return ()
    sources, targets = (
        np.array(np.unravel_index(ends, shape)) for ends in zip(*pairs, strict=True)
    )
    differ = (sources != targets).any(axis=1)
    return tuple(name for (name, _), other in zip(mesh, differ, strict=True) if other)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text))


def _iota(text: str, count: int) -> np.ndarray:
    """Numbers from 0, reshaped and transposed as ``<=[2,4]T(1,0)`` says."""
    found = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        return np.arange(count)
    ids = np.arange(count).reshape(_numbers(found[1]))
    return ids.transpose(_numbers(found[2])) if found[2] else ids


def _along_names(sizes: str, order: str, names: str) -> Groups:
    """The groups along named axes of XLA's own mesh, or parts of them."""
    mesh = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)]
    ids = _iota(order, int(np.prod([size for _, size in mesh], dtype=int))).ravel()
    # A part ``'i':(2)4`` of an axis has 2 before it, and 4 itself.
    parts = {
        name: (int(before or 1), int(size or dict(mesh)[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", names)
    }
    shape: list[int] = []
    grouped: list[int] = []
    for name, size in mesh:
        before, length = parts.get(name, (size, 1))
        if name in parts:
            grouped.append(len(shape) + 1)
        shape += [before, length, size // before // length]
    ids = ids.reshape(shape)
    rest = [d for d in range(ids.ndim) if d not in grouped]
    ids = ids.transpose([*rest, *grouped])
    group = int(np.prod(ids.shape[len(rest) :], dtype=int))
    return [tuple(row) for row in ids.reshape(-1, group).tolist()]
