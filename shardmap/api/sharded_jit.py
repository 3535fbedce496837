"""`sharded_jit` and `with_sharding_constraint`: values cut into partitions.

The partitioner splits the program; the function stays written for whole values. Alone
it runs on as many devices as there are partitions. Inside `spmap` each element of the
mapped axis has that many devices.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, overload

import jax

from shardmap._jax.types import PyTree
from shardmap.api.calls import options
from shardmap.api.function import Mapped, P, R
from shardmap.api.partitions.calls import Options
from shardmap.api.partitions.parts import broadcast_parts, check_leaves, check_shapes
from shardmap.api.partitions.programs import PartitionPrograms
from shardmap.arrays import array_likes
from shardmap.arrays.trees import leaf_paths
from shardmap.map.constraint import constrain
from shardmap.units import WithOptions


class ShardedFunction(Mapped[P, R]):
    """A function compiled for partitions; what `sharded_jit` returns."""

    _kind = PartitionPrograms


def with_sharding_constraint(x: PyTree, parts: PyTree) -> PyTree:
    """Says into how many partitions each dimension of a value is cut.

    Inside `sharded_jit` or `spmap` it directs the partitioner. Alone it lays out ``x``
    over the first local devices. The values stay the same, and so does the gradient.

    Args:
      x: a pytree of arrays.
      parts: a tuple with a count for each dimension, such as ``(2, 1)``; None for what
        every device has whole; or a pytree prefix of ``x`` with these as leaves. A
        tuple of ints is always one leaf. A `jax.sharding.PartitionSpec` of counts,
        ``P(2, 1)``, is taken too.

    Returns:
      ``x``, cut into these parts.

    Raises:
      TypeError: ``parts`` has other leaves.
      ValueError: counts that do not fit or divide an array, or too few devices.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> x = sm.with_sharding_constraint(np.ones((4, 6)), (2, 1))
      >>> sm.spec_of(x)
      ShardingSpec((Chunked((2,)), None), (ShardedAxis(0),))
    """
    what = "with_sharding_constraint"
    check_leaves(f"{what} parts", parts)
    leaves, tree = jax.tree.flatten(x)
    each = broadcast_parts(what, "parts", parts, x, "the value")
    avals = list(map(array_likes.leaf_aval, leaves))
    check_shapes(what, leaf_paths("x", x), avals, each)
    return jax.tree.unflatten(tree, list(map(constrain, leaves, each)))


class Decorator(Protocol):
    """What makes such functions, with its options chosen."""

    def __call__(self, fun: Callable[P, R], /) -> ShardedFunction[P, R]: ...


@overload
def sharded_jit(
    fun: Callable[P, R],
    in_parts: PyTree,
    out_parts: PyTree,
    num_partitions: int | None = None,
    static_argnums: int | Iterable[int] = (),
    *,
    local_in_parts: PyTree = None,
    local_out_parts: PyTree = None,
    local_num_partitions: int | None = None,
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
    local_in_parts: PyTree = None,
    local_out_parts: PyTree = None,
    local_num_partitions: int | None = None,
    donate_argnums: int | Iterable[int] = (),
) -> Decorator: ...


def sharded_jit(
    fun: Callable[..., Any] | None = None,
    in_parts: PyTree = None,
    out_parts: PyTree = None,
    num_partitions: int | None = None,
    static_argnums: int | Iterable[int] = (),
    *,
    local_in_parts: PyTree = None,
    local_out_parts: PyTree = None,
    local_num_partitions: int | None = None,
    donate_argnums: int | Iterable[int] = (),
) -> Any:
    """Compiles a function for several devices, each with a partition of the values.

    All parts, those of constraints inside too, have the same total, and the function
    runs on that many devices: on the first local ones if it is called alone, on that
    many for each element inside `spmap`. Partition k, counted row-major, is on the k-th
    device.

    If there are more partitions than this process has devices, they are those of all
    processes, on equally many devices of each, in process order. Arguments and results
    are global arrays then, or, where local parts say so, what this process has of them.

    Args:
      fun: a function of whole arrays. Left out, ``sharded_jit(...)`` is a decorator.
      in_parts: how positional arguments are cut: a tuple with a count for each
        dimension, such as ``(2, 1)``; None for what every device has whole; or a pytree
        prefix of the tuple of arguments with these as leaves. A tuple of ints is always
        one leaf. A `jax.sharding.PartitionSpec` of counts, ``P(2, 1)``, is taken too.
        Static arguments may have an entry or none. Keyword arguments are whole.
      out_parts: the same for the result.
      num_partitions: the total, of all processes together, if no parts say it.
      static_argnums: positions of arguments that are compile-time constants; those
        below 0 are counted from the last argument.
      local_in_parts: how this process's partitions of the arguments are cut, in the
        same way as ``in_parts``: with ``(4, 1)`` over two processes, ``(2, 1)``. Such
        an argument is half as long as the global one. None: no argument is
        process-local. Global arrays are taken as such in any case, and so is what is
        traced.
      local_out_parts: the same for the result. None: results are global arrays.
      local_num_partitions: how many of the partitions are on this process, to be
        checked.
      donate_argnums: as for `spmap`.

    Returns:
      The compiled function, with ``lower`` and ``trace`` as `jax.jit` gives them, and
      ``explain``. It works under `jax.jit`, `jax.grad` and `jax.vmap`, and inside
      `spmap`.

    Raises:
      TypeError: leaves or positions of other types. When called: an argument that JAX
        cannot compute with.
      ValueError: a count below 1. When called: parts that do not fit or divide an
        array, totals that differ, too few devices, local parts of other shapes than
        this process has.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> product = sm.sharded_jit(lambda x, y: x @ y, ((2, 1), None), (2, 1))
      >>> y = product(np.ones((4, 3)), np.ones((3, 6)))
      >>> [shard.data.shape for shard in y.addressable_shards]
      [(2, 6), (2, 6)]
    """
    if fun is None:
        return WithOptions(
            sharded_jit,
            in_parts=in_parts,
            out_parts=out_parts,
            num_partitions=num_partitions,
            static_argnums=static_argnums,
            local_in_parts=local_in_parts,
            local_out_parts=local_out_parts,
            local_num_partitions=local_num_partitions,
            donate_argnums=donate_argnums,
        )
    options.check_callable("sharded_jit", fun)
    for name, parts in (
        ("in_parts", in_parts),
        ("out_parts", out_parts),
        ("local_in_parts", local_in_parts),
        ("local_out_parts", local_out_parts),
        ("num_partitions", None if num_partitions is None else (num_partitions,)),
        (
            "local_num_partitions",
            None if local_num_partitions is None else (local_num_partitions,),
        ),
    ):
        check_leaves(f"sharded_jit {name}", parts)
    given_static = "static_argnums", static_argnums
    static, donated = options.positions(
        "sharded_jit", fun, given_static, donate_argnums, from_end=True
    )
    in_parts, local_in_parts = (
        tuple(parts) if isinstance(parts, list) else parts
        for parts in (in_parts, local_in_parts)
    )
    return ShardedFunction(
        fun,
        Options(
            in_parts,
            out_parts,
            num_partitions,
            local_in_parts,
            local_out_parts,
            local_num_partitions,
            static,
            donated,
        ),
    )
