"""The chunks of arrays that are stored in chunks."""

import numpy as np


def borders(array: object, axis: int) -> tuple[int, ...] | None:
    """The starts of the chunks along an axis, except the first; None without chunks.

    The chunks of a zarr shard count as one.

    >>> import types
    >>> borders(types.SimpleNamespace(shape=(10,), chunks=(4,)), 0)
    (4, 8)
    """
    chunks = getattr(array, "shards", None) or getattr(array, "chunks", None)
    shape = getattr(array, "shape", ())
    if not isinstance(chunks, tuple | list) or len(chunks) != len(shape):
        return None
    length = chunks[axis]
    if isinstance(length, tuple | list):  # Of Dask: the lengths of all of them.
        return tuple(np.cumsum(length, dtype=int).tolist()[:-1])
    return tuple(range(int(length), shape[axis], int(length)))
