"""`sharded_jit` and `with_sharding_constraint`: values cut into partitions.

The partitioner splits the program; the function stays written for whole values. Alone
it runs on as many devices as there are partitions. Inside `spmap` each element of the
mapped axis has that many devices.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
from jax.sharding import PartitionSpec

from shardmap.map import arguments, placement
from shardmap.map.api import TOP_LEVEL
from shardmap.map.constraints import (
    constrain,
    constraints_in,
    partition_mesh,
    partition_sharding,
    total_partitions,
)
from shardmap.map.lowering import map_jit

_Parts = tuple[int, ...] | None


def with_sharding_constraint(x: Any, parts: Any) -> Any:
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
    _check_leaves(f"{what} parts", parts)
    leaves, tree = jax.tree.flatten(x)
    each = _broadcast(what, "parts", parts, x, "the value")
    avals = list(map(arguments.leaf_aval, leaves))
    _check_shapes(what, _paths("x", x), avals, each)
    return jax.tree.unflatten(tree, list(map(constrain, leaves, each)))


def sharded_jit(
    fun: Callable[..., Any],
    in_parts: Any,
    out_parts: Any,
    num_partitions: int | None = None,
    static_argnums: int | Iterable[int] = (),
) -> Callable[..., Any]:
    """Compiles a function for several devices, each with a partition of the values.

    All parts, those of constraints inside too, have the same total, and the function
    runs on that many devices: on the first local ones if it is called alone, on that
    many for each element inside `spmap`. Partition k, counted row-major, is on the k-th
    device.

    Args:
      fun: a function of whole arrays.
      in_parts: how positional arguments are cut: a tuple with a count for each
        dimension, such as ``(2, 1)``; None for what every device has whole; or a pytree
        prefix of the tuple of arguments with these as leaves. A tuple of ints is always
        one leaf. A `jax.sharding.PartitionSpec` of counts, ``P(2, 1)``, is taken too.
        Static arguments may have an entry or none. Keyword arguments are whole.
      out_parts: the same for the result.
      num_partitions: the total, if no parts say it.
      static_argnums: positions of arguments that are compile-time constants.

    Returns:
      The compiled function. It works under `jax.jit`, `jax.grad` and `jax.vmap`, and
      inside `spmap`.

    Raises:
      TypeError: leaves of other types. When called: an argument that JAX cannot
        compute with.
      ValueError: a count below 1. When called: parts that do not fit or divide an
        array, totals that differ, too few devices.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> product = sm.sharded_jit(lambda x, y: x @ y, ((2, 1), None), (2, 1))
      >>> y = product(np.ones((4, 3)), np.ones((3, 6)))
      >>> [shard.data.shape for shard in y.addressable_shards]
      [(2, 6), (2, 6)]
    """
    if not callable(fun):
        raise TypeError(f"sharded_jit expects a callable, but got {fun!r}.")
    _check_leaves("sharded_jit in_parts", in_parts)
    _check_leaves("sharded_jit out_parts", out_parts)
    if num_partitions is not None:
        _check_leaves("sharded_jit num_partitions", (num_partitions,))
    static = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    if isinstance(in_parts, list):
        in_parts = tuple(in_parts)
    sharded = _ShardedFunction(fun, in_parts, out_parts, num_partitions, tuple(static))

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return sharded(args, kwargs)

    return call


class _Call(NamedTuple):
    """How one call is cut, but not its arrays."""

    in_tree: Any
    statics: tuple[tuple[int, Any], ...]
    in_parts: list[_Parts]
    out_tree: Any
    out_parts: list[_Parts]
    total: int | None
    in_avals: list[Any]
    out_avals: list[Any]


class _ShardedFunction:
    def __init__(
        self,
        fun: Callable[..., Any],
        in_parts: Any,
        out_parts: Any,
        num_partitions: int | None,
        static_argnums: tuple[int, ...],
    ) -> None:
        self._fun = fun
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._jitted = jax.jit(fun, static_argnums=static_argnums)
        self._in_parts = in_parts
        self._out_parts = out_parts
        self._num_partitions = num_partitions
        self._static = static_argnums
        self._programs: dict[Any, Any] = {}

    def __call__(self, args: Any, kwargs: Any) -> Any:
        argnums, leaves, in_tree = self._flatten(args, kwargs)
        if jex_core.find_top_trace(()) is not TOP_LEVEL:
            call = self._read(args, kwargs)
            return jax.tree.unflatten(call.out_tree, self._bind(call, leaves))
        avals = self._avals(argnums, args, kwargs, leaves)
        key = (
            in_tree,
            tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals),
            tuple(arg for k, arg in enumerate(args) if k not in argnums),
        )
        try:
            program, shardings, out_tree = self._programs[key]
        except (KeyError, TypeError):  # What is not hashable, `jax.jit` refuses.
            call = self._read(args, kwargs)
            program, shardings, out_tree = self._programs[key] = self._program(call)
        results = program(*placement.place(leaves, shardings))
        return jax.tree.unflatten(out_tree, results)

    def _flatten(self, args: Any, kwargs: Any) -> tuple[list[int], list[Any], Any]:
        count = len(args)
        static = {k + count if k < 0 else k for k in self._static}
        argnums = [k for k in range(count) if k not in static]
        leaves, tree = jax.tree.flatten((tuple(args[k] for k in argnums), kwargs))
        return argnums, leaves, tree

    def _avals(
        self, argnums: list[int], args: Any, kwargs: Any, leaves: list[Any]
    ) -> list[Any]:
        avals = []
        for k, leaf in enumerate(leaves):
            try:
                avals.append(arguments.leaf_aval(leaf))
            except TypeError:
                names = self._names(argnums, args, kwargs)
                raise TypeError(
                    f"sharded_jit argument {names[k]} of type {type(leaf)} is not a "
                    "valid JAX type. Give its position in static_argnums if it is to "
                    "be a compile-time constant."
                ) from None
        return avals

    def _names(self, argnums: list[int], args: Any, kwargs: Any) -> list[str]:
        dynamic = [args[k] for k in argnums]
        return arguments.leaf_names(self._fun, argnums, dynamic, kwargs)

    def _read(self, args: Any, kwargs: Any) -> _Call:
        """Checks a call, and traces the function to see what it asks for."""
        argnums, leaves, in_tree = self._flatten(args, kwargs)
        avals = self._avals(argnums, args, kwargs, leaves)
        names = self._names(argnums, args, kwargs)
        what = f"sharded_jit of {self._name}"
        prefix = self._in_parts
        if isinstance(prefix, tuple) and not _is_leaf(prefix):
            if len(prefix) == len(args):
                prefix = tuple(prefix[k] for k in argnums)
        dynamic = tuple(args[k] for k in argnums)
        in_parts = _broadcast(
            what, "in_parts", prefix, dynamic, "the positional arguments"
        )
        in_parts += [None] * (len(leaves) - len(in_parts))
        _check_shapes(what, names, avals, in_parts)

        traced = self._jitted.trace(*args, **kwargs)
        out = traced.out_info
        out_names = _paths("result", out)
        out_avals = list(map(arguments.leaf_aval, jax.tree.leaves(out)))
        out_parts = _broadcast(what, "out_parts", self._out_parts, out, "the result")
        _check_shapes(what, out_names, out_avals, out_parts)

        totals = [("num_partitions", self._num_partitions)]
        totals += [
            (f"in_parts of {name}", parts and total_partitions(parts))
            for name, parts in zip(names, in_parts, strict=True)
        ]
        totals += [
            (f"out_parts of {name}", parts and total_partitions(parts))
            for name, parts in zip(out_names, out_parts, strict=True)
        ]
        totals += [
            ("with_sharding_constraint", equation.params["total"])
            for equation in constraints_in(traced.jaxpr)
        ]
        said = [(source, total) for source, total in totals if total is not None]
        for source, total in said:
            if total != said[0][1]:
                raise ValueError(
                    f"{what}: {source} has {total} total partitions but {said[0][1]} "
                    f"are expected, as {said[0][0]} has. All parts must have the same "
                    "product, or be None."
                )
        return _Call(
            in_tree,
            tuple((k, arg) for k, arg in enumerate(args) if k not in argnums),
            in_parts,
            jax.tree.structure(out),
            out_parts,
            said[0][1] if said else None,
            avals,
            out_avals,
        )

    def _bind(self, call: _Call, leaves: Sequence[Any]) -> list[Any]:
        """Runs the function, or adds it to what is being traced."""

        def cut(values: Sequence[Any], parts: Sequence[_Parts]) -> list[Any]:
            return [
                constrain(value, value_parts, call.total, "sharded_jit")
                for value, value_parts in zip(values, parts, strict=True)
            ]

        given, kwargs = jax.tree.unflatten(call.in_tree, cut(leaves, call.in_parts))
        args = list(given)
        for k, static in call.statics:
            args.insert(k, static)
        results = jax.tree.leaves(self._jitted(*args, **kwargs))
        return cut(results, call.out_parts)

    def _program(self, call: _Call) -> tuple[Any, list[Any], Any]:
        """What runs calls like this one, how arguments must lie, the result's tree."""
        call = call._replace(total=call.total or 1)

        def shardings(avals: Sequence[Any], parts: Sequence[_Parts]) -> list[Any]:
            counts = [
                (1,) * aval.ndim if value_parts is None else value_parts
                for aval, value_parts in zip(avals, parts, strict=True)
            ]
            return [
                partition_sharding(c, partition_mesh(c, call.total or 1, "sharded_jit"))
                for c in counts
            ]

        def run(*leaves: Any) -> list[Any]:
            return self._bind(call, leaves)

        run.__name__ = run.__qualname__ = self._name
        operands = shardings(call.in_avals, call.in_parts)
        program = map_jit(
            run,
            partition_mesh((), call.total or 1, "sharded_jit"),
            in_shardings=tuple(operands),
            out_shardings=shardings(call.out_avals, call.out_parts),
        )
        return program, operands, call.out_tree


# Parts


def _is_counts(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) > 0
        and all(type(count) is int for count in value)
    )


def _is_leaf(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec) or _is_counts(value)


def _check_leaves(name: str, tree: Any) -> None:
    for leaf in jax.tree.leaves(tree, is_leaf=_is_leaf):
        counts = () if leaf is None else leaf
        if not _is_leaf(leaf) or not all(
            count is None or type(count) is int for count in counts
        ):
            raise TypeError(
                f"{name} must be a tuple of ints, None, or a (nested) container with "
                f"these as leaves, but got {tree}."
            )
        if any(count is not None and count < 1 for count in counts):
            raise ValueError(f"{name} must be counts of at least 1, but got {tree}.")


def _broadcast(
    what: str, name: str, parts: Any, tree: Any, described: str
) -> list[_Parts]:
    leaves = arguments.broadcast_axes(
        name, parts, tree, described, _is_leaf, caller=what
    )
    return [
        tuple(1 if count is None else count for count in leaf) if leaf else None
        for leaf in leaves
    ]


def _paths(root: str, tree: Any) -> list[str]:
    return [
        root + jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _check_shapes(
    what: str,
    names: Sequence[str],
    avals: Sequence[Any],
    all_parts: Sequence[_Parts],
) -> None:
    problems = []
    for name, aval, parts in zip(names, avals, all_parts, strict=True):
        if parts is None:
            continue
        where = f"\n  * {name} is {aval.str_short()}"
        if len(parts) != aval.ndim:
            problems.append(
                f"{where} (rank {aval.ndim}), but parts {parts} are for rank "
                f"{len(parts)}"
            )
            continue
        problems += [
            f"{where}: dimension {dimension} of size {size} is not divisible by "
            f"{count} parts"
            for dimension, (size, count) in enumerate(
                zip(aval.shape, parts, strict=True)
            )
            if size % count
        ]
    if problems:
        raise ValueError(
            f"{what} cannot cut these values into parts:{''.join(problems)}\nGive one "
            "count for each dimension, 1 where it is not cut, or None for the whole "
            "value."
        )
