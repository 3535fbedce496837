"""`sharded_jit` and `with_sharding_constraint`: values cut into partitions.

The partitioner splits the program; the function stays written for whole values. Alone
it is `jax.jit` with a NamedSharding for each argument and result, on as many devices as
there are partitions. As a part of another program, and inside `spmap`, it is a
sharding constraint around the arguments and the results.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardmap._jax.errors import explained_errors
from shardmap._jax.types import Aval, PyTree, Value, without_sharding
from shardmap.api import options
from shardmap.api.arguments import Arguments
from shardmap.api.function import Mapped, P, R
from shardmap.api.transformed import (
    Call,
    Transformed,
    bind_without_types,
    types_of_mesh_around,
)
from shardmap.arrays import array_likes, placement, trees
from shardmap.map import tracing
from shardmap.map.constraint import (
    CONSTRAINT,
    constrain,
    in_order,
    partition_devices,
    partition_mesh,
    total_partitions,
)
from shardmap.map.layout import MapShardings
from shardmap.units import decorator_with_options, is_integer, shown

Counts = tuple[int, ...] | None
"""Partitions along each dimension; None: every device has the whole value."""


# Counts


def _is_leaf(value: object) -> bool:
    """Whether ``value`` is a leaf of parts, not a container of leaves."""
    if value is None or isinstance(value, PartitionSpec):
        return True
    return type(value) is tuple and bool(value) and all(map(is_integer, value))


def _checked(name: str, parts: PyTree) -> PyTree:
    """Parts, each leaf a tuple of counts of at least 1, or None."""
    leaves, tree = jax.tree.flatten(parts, is_leaf=_is_leaf)
    checked: list[Counts] = []
    for leaf in leaves:
        counts: Any = () if leaf is None else leaf
        if not _is_leaf(leaf) or not all(
            count is None or is_integer(count) for count in counts
        ):
            raise TypeError(
                f"{name} must be a tuple of ints, None, or a (nested) container with "
                f"these as leaves, but got {shown(parts)}. These count the parts of "
                "each dimension; for names of mesh axes, use jax.jit and "
                "jax.lax.with_sharding_constraint."
            )
        if any(count is not None and count < 1 for count in counts):
            raise ValueError(f"{name} must be counts of at least 1, but got {parts}.")
        checked.append(tuple(int(count or 1) for count in counts) or None)
    return jax.tree.unflatten(tree, checked)


def _check_shapes(
    what: str,
    names: Callable[[], Sequence[str]],
    avals: Sequence[Aval],
    all_parts: Sequence[Counts],
) -> None:
    """Checks that there is a count for each dimension, which divides its size."""
    for k, (aval, parts) in enumerate(zip(avals, all_parts, strict=True)):
        if parts is not None and (
            len(parts) != aval.ndim or any(map(operator.mod, aval.shape, parts))
        ):
            raise ValueError(
                f"{what} cannot cut {names()[k]}, {aval.str_short()}, into parts "
                f"{parts}. Give a count for each dimension, which divides its size, or "
                "None for the whole value."
            )


def _agreed_total(all_parts: Mapping[str, PyTree]) -> int | None:
    """The total of all parts, which have these names; None if none of them has one."""
    totals: dict[int, str] = {}
    for name, parts in all_parts.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(parts, is_leaf=_is_leaf):
            if leaf is not None:
                where = name + jax.tree_util.keystr(path)
                totals.setdefault(total_partitions(leaf), where)
    if len(totals) > 1:
        (one, first), (other, second), *_ = totals.items()
        raise ValueError(
            f"sharded_jit: {second} has {other} total partitions but {one} are "
            f"expected, as {first} has. All parts must have the same product, or be "
            "None."
        )
    return next(iter(totals), None)


def with_sharding_constraint(x: PyTree, parts: PyTree) -> PyTree:
    """Partitions a value over devices.

    Inside `sharded_jit` or `spmap`, it is a constraint for the partitioner. Outside, it
    shards ``x`` over the first local devices. It changes neither values nor gradients.

    Args:
      x: a pytree of arrays.
      parts: the partitions, as a pytree prefix of ``x``. A leaf is a tuple with a count
        for each dimension, such as ``(2, 1)``; a `jax.sharding.PartitionSpec` of
        counts, ``P(2, 1)``; or None: every device has the whole value.

    Returns:
      ``x``, partitioned.

    Raises:
      TypeError: ``parts`` has other leaves.
      ValueError: counts do not fit or divide an array, or there are too few devices.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> x = sm.with_sharding_constraint(np.ones((4, 6)), (2, 1))
      >>> sm.spec_of(x)
      ShardingSpec((Chunked((2,)), None), (ShardedAxis(0),))
    """
    parts = _checked(f"{CONSTRAINT} parts", parts)
    leaves, tree = jax.tree.flatten(x)
    each = trees.broadcast_axes("parts", parts, x, "the value", _is_leaf, CONSTRAINT)
    avals = list(map(array_likes.abstract_value, leaves))
    names = functools.partial(trees.leaf_paths, "x", x)
    _check_shapes(CONSTRAINT, names, avals, each)
    return jax.tree.unflatten(tree, list(map(constrain, leaves, each)))


# Calls


class ShardedJitOptions(NamedTuple):
    """The arguments of `sharded_jit` but the function."""

    in_parts: PyTree
    out_parts: PyTree
    num_partitions: int | None
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]


class PartitionedFunction(Transformed):
    """A function under `sharded_jit`."""

    what = "sharded_jit"
    is_leaf = staticmethod(_is_leaf)

    def is_on_set_mesh(self) -> bool:
        return True

    def trace_call(self, arguments: Arguments, is_top_level: bool = True) -> Call:
        options = self.options
        avals = self.leaf_avals(arguments)
        in_parts = self.broadcast_in("in_parts", options.in_parts, arguments, None)
        in_names = functools.partial(self.leaf_names, arguments)
        _check_shapes(self.full_name, in_names, avals, in_parts)
        flat = self.flat_function(arguments)
        with types_of_mesh_around(), explained_errors():
            traced: Any = jax.make_jaxpr(flat, return_shape=True)(
                *map(without_sharding, avals)
            )
        closed, out_tree = traced[0], traced[1].tree
        tracing.check_constants(closed.consts)
        out_parts = self.broadcast_out("out_parts", options.out_parts, out_tree)
        out_names = functools.partial(trees.result_names, out_tree)
        _check_shapes(self.full_name, out_names, closed.out_avals, out_parts)
        total = options.num_partitions
        devices: Sequence[jax.Device] = ()
        if is_top_level:
            devices = partition_devices(total or 1, "sharded_jit")

        run = functools.partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts)

        def cut(values: Sequence[Value], all_parts: Sequence[Counts]) -> list[Value]:
            return [
                constrain(value, parts, total, "sharded_jit")
                for value, parts in zip(values, all_parts, strict=True)
            ]

        def run_as_part(*leaves: Value) -> list[Value]:
            return cut(run(*cut(leaves, in_parts)), out_parts)

        def shardings() -> MapShardings:
            sharding = functools.partial(_sharding, devices=devices)
            return MapShardings(
                tuple(map(sharding, avals, in_parts)),
                tuple(map(sharding, closed.out_avals, out_parts)),
            )

        return Call(
            arguments,
            avals,
            out_tree,
            closed.out_avals,
            partition_mesh((), devices) if is_top_level else None,
            closed.jaxpr,
            run if is_top_level else functools.partial(bind_without_types, run_as_part),
            shardings,
        )


def _sharding(
    aval: Aval, parts: Counts, devices: Sequence[jax.Device]
) -> NamedSharding:
    """The sharding of a value over devices, one for each partition."""
    sharding = in_order(parts or (), devices)
    return placement.array_sharding(sharding.mesh, sharding.spec, aval)


class ShardedFunction(Mapped[P, R]):
    """A function compiled for partitions; what `sharded_jit` returns."""

    _kind = PartitionedFunction


@overload
def sharded_jit(
    fun: Callable[P, R],
    in_parts: PyTree,
    out_parts: PyTree,
    num_partitions: int | None = None,
    static_argnums: int | Iterable[int] = (),
    *,
    donate_argnums: int | Iterable[int] = (),
) -> ShardedFunction[P, R]: ...


@overload
def sharded_jit(
    fun: None = None,
    *,
    in_parts: PyTree,
    out_parts: PyTree,
    num_partitions: int | None = None,
    static_argnums: int | Iterable[int] = (),
    donate_argnums: int | Iterable[int] = (),
) -> Callable[[Callable[P, R]], ShardedFunction[P, R]]: ...


@decorator_with_options
def sharded_jit(
    fun: Any = None,
    in_parts: PyTree = None,
    out_parts: PyTree = None,
    num_partitions: int | None = None,
    static_argnums: int | Iterable[int] = (),
    *,
    donate_argnums: int | Iterable[int] = (),
) -> Any:
    """Compiles a function of arrays that are partitioned over several devices.

    XLA's partitioner splits the function and adds the communication. Partitions are
    counts for each dimension. Partition k, in row-major order, is on the k-th device;
    inside `spmap`, on the k-th device of each element.

    It runs on as many devices as there are partitions, the first ones of this process.
    With more partitions than this process has devices, those are the first of
    `jax.devices()`, and arguments and results are global arrays, as for `jax.jit`.
    As a part of another program, and under `jax.set_mesh`, it needs as many partitions
    as that has devices.

    Args:
      fun: a function of whole arrays. If omitted, ``sharded_jit(...)`` is a decorator.
      in_parts: the partitions of positional arguments, as a pytree prefix. A leaf is a
        tuple with a count for each dimension, such as ``(2, 1)``; a
        `jax.sharding.PartitionSpec` of counts, ``P(2, 1)``; or None: every device has
        the whole argument. Keyword arguments are whole too. An entry for a static
        argument is optional.
      out_parts: the same for the result.
      num_partitions: the number of partitions over all processes, also of the maps and
        constraints in ``fun``. Default: that of the parts, or 1.
      static_argnums: positions of arguments that are compile-time constants.
      donate_argnums: as for `spmap`.

    Returns:
      The compiled function. It has ``lower`` and ``trace``, like a `jax.jit` function,
      and ``explain``. It works under `jax.jit`, `jax.grad` and `jax.vmap`, and inside
      `spmap`.

    Raises:
      TypeError: leaves or positions have other types. When called: JAX does not accept
        an argument.
      ValueError: a count is below 1. When called: parts do not fit or divide an array,
        totals differ, or there are too few devices.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> product = sm.sharded_jit(lambda x, y: x @ y, ((2, 1), None), (2, 1))
      >>> y = product(np.ones((4, 3)), np.ones((3, 6)))
      >>> [shard.data.shape for shard in y.addressable_shards]
      [(2, 6), (2, 6)]
    """
    options.check_callable("sharded_jit", fun)
    in_parts = _checked("sharded_jit in_parts", in_parts)
    out_parts = _checked("sharded_jit out_parts", out_parts)
    given = None if num_partitions is None else (num_partitions,)
    count = _checked("sharded_jit num_partitions", given)
    given_static = "static_argnums", static_argnums
    static, donated = options.positions(
        "sharded_jit", fun, given_static, donate_argnums
    )
    if isinstance(in_parts, list):
        in_parts = tuple(in_parts)
    total = _agreed_total(
        {
            "num_partitions": count,
            "in_parts": in_parts,
            "out_parts": out_parts,
        }
    )
    return ShardedFunction(
        fun, ShardedJitOptions(in_parts, out_parts, total, static, donated)
    )
