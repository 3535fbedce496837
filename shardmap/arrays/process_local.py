"""A process's rows and the whole array that the rows of all processes make.

Both are the same buffers: neither way copies any.
"""

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap._jax.types import Aval, Param, Value
from shardmap.arrays import placement
from shardmap.sharding.mesh import local_mesh


class Rows(NamedTuple):
    """How an array lies, as one process has it and as a whole.

    Attributes:
      own: the layout of the part on this process, over its own devices.
      whole: the layout over the devices of all processes.
      factors: how many times longer the whole is along the first dimensions; None for
        what is not mapped, of which each process has the whole.
      devices: how many devices of this process have a shard.
      is_copied: whether all of them have the same.
    """

    own: NamedSharding
    whole: NamedSharding
    factors: tuple[int, ...] | None
    devices: int
    is_copied: bool

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self._scaled(shape, operator.mul)

    def own_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self._scaled(shape, operator.floordiv)

    def _scaled(
        self, shape: Sequence[int], scale: Callable[[int, int], int]
    ) -> tuple[int, ...]:
        pairs = itertools.zip_longest(shape, self.factors or (), fillvalue=1)
        return tuple(scale(size, factor) for size, factor in pairs)

    def batched(self, dim: int) -> "Rows":
        """The same with one more dimension, at ``dim``, that is not cut."""

        def insert(sharding: NamedSharding) -> NamedSharding:
            entries = list(sharding.spec)
            if dim < len(entries):
                entries.insert(dim, None)
            return NamedSharding(sharding.mesh, PartitionSpec(*entries))

        factors = self.factors
        if factors is not None and dim < len(factors):
            factors = (*factors[:dim], 1, *factors[dim:])
        return self._replace(
            own=insert(self.own), whole=insert(self.whole), factors=factors
        )

    def shards(self, array: jax.Array) -> list[jax.Array]:
        """What the devices of this process hold of an array that lies so."""
        if self.is_copied:  # Of such, JAX gives one device's data only.
            return [shard.data for shard in array.addressable_shards]
        return [array.addressable_data(k) for k in range(self.devices)]


@functools.lru_cache(maxsize=4096)
def rows_for(whole: NamedSharding, axis: int | None, parts: int) -> Rows:
    """How this process's part of an array lies, whose whole lies as ``whole`` says.

    Args:
      whole: the layout of the global array.
      axis: the mapped axis; None: the array is not mapped.
      parts: how many times longer the whole is along it.

    Raises:
      ValueError: the array is cut between processes along another axis too.
    """
    made = pieces_for(whole)
    cuts = made.factors or ()
    others = [k for k, count in enumerate(cuts) if count > 1 and k != axis]
    if others:
        raise ValueError(
            f"a map inside cuts dimension {others[0]} of an array between processes, "
            "of which each passes its own rows only. Pass global arrays, or put the "
            "mesh axes of maps inside on the devices of one process."
        )
    return made._replace(factors=None if axis is None else (*(1,) * axis, parts))


@functools.lru_cache(maxsize=4096)
def pieces_for(whole: NamedSharding) -> Rows:
    """The same where every dimension may be cut between processes."""
    own = NamedSharding(_local_mesh(whole.mesh), whole.spec)
    factors = tuple(
        math.prod(whole.mesh.shape[name] // own.mesh.shape[name] for name in names)
        for names in map(_names, whole.spec)
    )
    devices = own.mesh.size
    is_copied = devices > 1 and own.is_fully_replicated
    return Rows(own, whole, factors, devices, is_copied)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@functools.lru_cache(maxsize=1024)
def _local_mesh(mesh: Mesh) -> Mesh:
    return local_mesh(mesh)


def parts_along(mesh: Mesh, mesh_axes: Sequence[str]) -> int:
    """How many times more devices there are along the axes than this process has."""
    own = _local_mesh(mesh)
    return math.prod(mesh.shape[name] // own.shape[name] for name in mesh_axes)


# Concrete arrays


def is_whole(value: Value) -> bool:
    """Whether this is a global array, of which other processes hold parts."""
    if isinstance(value, jax.core.Tracer):
        return False
    if isinstance(value, jax.Array):
        return not value.is_fully_addressable
    sharding = value.sharding if isinstance(value, jax.ShapeDtypeStruct) else None
    return sharding is not None and not sharding.is_fully_addressable


def to_whole(value: Value, rows: Rows, donate: bool = False) -> Any:
    """The global array that this process's rows are a part of.

    Args:
      value: this process's rows, an array of any kind; a global array is laid out.
      rows: how they shall lie.
      donate: frees the memory of ``value`` if it had to be moved.

    Returns:
      The global array; or a Python scalar, which `jax.jit` takes as it is. A scalar of
      weak type becomes one, as arrays that are made of shards have none.
    """
    if placement.has_no_bytes(value):
        return np.zeros(rows.whole_shape(value.shape), value.dtype)
    made_of = _wholes.get(value)
    if donate:
        _wholes.forget(value)
    if made_of is not None and not placement.is_misplaced(made_of, rows.whole, True):
        return made_of
    if is_whole(value):
        if placement.is_misplaced(value, rows.whole, True):
            return placement.move(value, rows.whole, donate)
        return value
    if isinstance(value, bool | int | float | complex):
        return value
    if not value.shape and getattr(value, "weak_type", False):
        return value.item()
    if placement.is_misplaced(value, rows.own, True):
        value = placement.move(value, rows.own, donate)
    return jax.make_array_from_single_device_arrays(
        rows.whole_shape(value.shape), rows.whole, rows.shards(value)
    )


def to_own(array: Value, rows: Rows) -> Any:
    """This process's rows of a global array that lies as ``rows`` says."""
    shape = rows.own_shape(array.shape)
    if placement.has_no_bytes(array):
        return np.zeros(shape, array.dtype)
    if not math.prod(shape):
        return jax.device_put(np.zeros(shape, array.dtype), rows.own)
    own = jax.make_array_from_single_device_arrays(shape, rows.own, rows.shards(array))
    _wholes.keep(own, array)
    return own


class _Wholes:
    """The global arrays that arrays of this process are of.

    The results of one call are mostly the arguments of the next: as long as this
    process's rows live and have not been donated, so does the global array. Arrays are
    known by their identity, as they have no hash and no attributes of ours.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[jax.Array], jax.Array]] = {}

    def keep(self, own: jax.Array, whole: jax.Array) -> None:
        """Keeps ``whole`` as long as ``own`` lives."""
        key = id(own)
        gone = weakref.ref(own, lambda _: self._kept.pop(key, None))
        self._kept[key] = gone, whole

    def get(self, value: Value) -> jax.Array | None:
        """The global array of this one; None if there is none or it was deleted."""
        if id(value) not in self._kept:
            return None
        own, whole = self._kept[id(value)]
        if own() is not value:
            return None
        if whole.is_deleted():
            self.forget(value)
            return None
        return whole

    def forget(self, value: Value) -> None:
        """Lets go of the memory that is the array's own."""
        self._kept.pop(id(value), None)


_wholes = _Wholes()


# While JAX differentiates or vectorises


def look(leaves: Sequence[Any]) -> list[bool] | None:
    """Which of the values that are being computed with are global arrays.

    Returns:
      For each leaf whether it is; None where there are no values, as they are traced.
    """
    seen = _Seen()
    tracers = [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
    look_p.bind(*tracers, seen=seen)
    if seen.values is None:
        return None
    values = iter(seen.values)
    return [
        is_whole(next(values) if isinstance(leaf, jax.core.Tracer) else leaf)
        for leaf in leaves
    ]


class _Seen:
    """The values behind tracers; none if there are no values yet."""

    values: Sequence[Any] | None = None


look_p = jex_core.Primitive("look")
look_p.multiple_results = True


@look_p.def_impl
def _look(*leaves: Value, seen: _Seen) -> list[Any]:
    seen.values = leaves
    return []


@look_p.def_abstract_eval
def _look_abstract(*_: object, seen: _Seen) -> list[Any]:
    return []


def _look_jvp(
    primals: Sequence[Value], _: object, **params: Param
) -> tuple[list[Any], list[Any]]:
    return look_p.bind(*primals, **params), []


def _look_batching(
    leaves: Sequence[Value], _: object, **params: Param
) -> tuple[list[Any], list[Any]]:
    return look_p.bind(*leaves, **params), []


ad.primitive_jvps[look_p] = _look_jvp
batching.primitive_batchers[look_p] = _look_batching
mlir.register_lowering(look_p, lambda ctx, *leaves, seen: [])

convert_p = jex_core.Primitive("convert_rows")
"""`to_whole`, or `to_own`, of an array that JAX traces."""


@convert_p.def_impl
def _convert(value: Value, *, rows: Rows, to: str) -> jax.Array:
    if to == "whole":
        return to_whole(value, rows)
    if not is_whole(value):
        # Such as the zeros that differentiation makes, equal on all processes.
        value = placement.move(value, rows.whole)
    elif placement.is_misplaced(value, rows.whole, True):
        value = placement.move(value, rows.whole)
    return to_own(value, rows)


@convert_p.def_abstract_eval
def _convert_abstract(aval: Aval, *, rows: Rows, to: str) -> Any:
    convert = rows.whole_shape if to == "whole" else rows.own_shape
    return jax.core.ShapedArray(
        convert(aval.shape), aval.dtype, weak_type=aval.weak_type
    )


def _convert_transpose(ct: Value, _: object, *, rows: Rows, to: str) -> list[Any]:
    back = "own" if to == "whole" else "whole"
    return [convert_p.bind(ct, rows=rows, to=back)]


def _convert_batching(
    values: Sequence[Value], dims: Sequence[int], *, rows: Rows, to: str
) -> tuple[Any, int]:
    (value,), (dim,) = values, dims
    return convert_p.bind(value, rows=rows.batched(dim), to=to), dim


ad.deflinear2(convert_p, _convert_transpose)
batching.primitive_batchers[convert_p] = _convert_batching


def as_global(leaves: Sequence[Any], shardings: Iterable[NamedSharding]) -> list[Any]:
    """Global arrays of what JAX computes with now, step by step; else the leaves.

    Args:
      leaves: global arrays, or what is equal on all processes.
      shardings: how each shall lie.
    """
    if jax.process_count() == 1:
        return list(leaves)
    shardings = list(shardings)
    if all(s.is_fully_addressable for s in shardings) or look(leaves) is None:
        return list(leaves)
    return [
        convert_p.bind(leaf, rows=_same_everywhere(sharding), to="whole")
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]


def _same_everywhere(whole: NamedSharding) -> Rows:
    devices = len(whole.addressable_devices)
    is_copied = devices > 1 and whole.is_fully_replicated
    return Rows(whole, whole, None, devices, is_copied)
