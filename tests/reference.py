"""Slow oracles: plain loops that say what the fast code must give.

They read only the fields of a spec and share no code with `shardmap`.
"""

import itertools
import math

import jax
import numpy as np

from shardmap import Chunked, ShardedAxis, Unstacked


def loop_indices(shape, spec):
    """What each device holds: a dict from mesh coordinates to an index.

    For every device and every array dimension, the device's chunk coordinates are
    looked up one by one along the mesh and turned into the number of a piece.
    """
    mesh_sizes = []
    for assignment in spec.mesh_mapping:
        if isinstance(assignment, ShardedAxis):
            sizes = []
            for entry in spec.sharding:
                if isinstance(entry, Chunked):
                    sizes.extend(entry.chunks)
                elif isinstance(entry, Unstacked):
                    sizes.append(entry.size)
            mesh_sizes.append(sizes[assignment.axis])
        else:
            mesh_sizes.append(assignment.replicas)

    held = {}
    for coordinates in itertools.product(*(range(size) for size in mesh_sizes)):
        position_on_axis = {}
        for assignment, coordinate in zip(spec.mesh_mapping, coordinates, strict=True):
            if isinstance(assignment, ShardedAxis):
                position_on_axis[assignment.axis] = coordinate
        index = []
        axis = 0
        for size, entry in zip(shape, spec.sharding, strict=True):
            if entry is None:
                index.append(slice(None))
            elif isinstance(entry, Unstacked):
                index.append(position_on_axis[axis])
                axis += 1
            else:
                piece, pieces = 0, 1
                for chunks in entry.chunks:
                    piece = piece * chunks + position_on_axis[axis]
                    pieces *= chunks
                    axis += 1
                length = size // pieces
                index.append(slice(piece * length, piece * length + length))
        held[coordinates] = tuple(index)
    return held


def tiles_of_devices(hlo_sharding, ndim, num_devices):
    """Which tile each device holds, read from XLA's own list of devices.

    Returns one tuple of tile coordinates per device, and the number of tiles of each
    array dimension.
    """
    if hlo_sharding.is_replicated():
        return [(0,) * ndim] * num_devices, (1,) * ndim
    counts = tuple(hlo_sharding.tile_assignment_dimensions())
    tiles = [None] * num_devices
    every_place = itertools.product(*(range(count) for count in counts))
    devices = hlo_sharding.tile_assignment_devices()
    for device, place in zip(devices, every_place, strict=True):
        tiles[device] = place[:ndim]
    return tiles, counts[:ndim]


def index_of_tile(shape, counts, tile):
    """The (start, stop) of a tile in every dimension."""
    return tuple(
        (coordinate * (size // count), (coordinate + 1) * (size // count))
        for size, count, coordinate in zip(shape, counts, tile, strict=True)
    )


def plain(index, shape):
    """An index as (start, stop) pairs: `slice(None)` and a whole range are the same."""
    pairs = []
    for item, size in zip(index, shape, strict=True):
        if isinstance(item, slice):
            pairs.append(item.indices(size)[:2])
        else:
            pairs.append((item, item + 1))
    return tuple(pairs)


def same_layout(first, second):
    """Whether each device holds the same part, tried on a shape that both can cut."""
    shape = [
        math.lcm(a, b)
        for a, b in zip(first.tile_counts, second.tile_counts, strict=True)
    ]
    held = [
        [plain(index, shape) for index in loop_indices(shape, spec).values()]
        for spec in (first, second)
    ]
    return held[0] == held[1]


def loop_map(fun, axis_size, in_axes, out_axes):
    """`fun` on one element after another; for functions without collectives.

    `in_axes` has an entry for each argument, `out_axes` one for the result: an int,
    None, or a dict, list or tuple of these that is a prefix.
    """

    def mapped(*args):
        results = []
        for k in range(axis_size):
            results.append(
                fun(*(_take(a, x, k) for a, x in zip(in_axes, args, strict=True)))
            )
        return _stack(out_axes, results)

    return mapped


def _take(axes, tree, k):
    """The k-th element of every array that has an axis."""
    if axes is None:
        return tree
    if isinstance(axes, int):
        return jax.tree.map(lambda array: np.moveaxis(array, axes, 0)[k], tree)
    if isinstance(axes, dict):
        return {key: _take(axes[key], tree[key], k) for key in tree}
    return type(tree)(_take(a, t, k) for a, t in zip(axes, tree, strict=True))


def _stack(axes, results):
    """Puts results together; where there is no axis, the first stands for all."""
    if axes is None:
        return results[0]
    if isinstance(axes, int):
        return jax.tree.map(lambda *arrays: np.stack(arrays, axes), *results)
    if isinstance(axes, dict):
        return {key: _stack(axes[key], [r[key] for r in results]) for key in axes}
    whole = [
        _stack(a, list(r))
        for a, r in zip(axes, zip(*results, strict=True), strict=True)
    ]
    return type(results[0])(whole)
