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

from shardmap.map import arguments, placement
from shardmap.map.api import TOP_LEVEL
from shardmap.map.constraints import (
    constrain,
    constraints_in,
    partition_mesh,
    partition_sharding,
)
from shardmap.map.parts import (
    Counts,
    agreed_total,
    broadcast_parts,
    check_leaves,
    check_shapes,
    counted,
    is_leaf,
    leaf_paths,
)
from shardmap.map.running import map_jit


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
    check_leaves(f"{what} parts", parts)
    leaves, tree = jax.tree.flatten(x)
    each = broadcast_parts(what, "parts", parts, x, "the value")
    avals = list(map(arguments.leaf_aval, leaves))
    check_shapes(what, leaf_paths("x", x), avals, each)
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
    check_leaves("sharded_jit in_parts", in_parts)
    check_leaves("sharded_jit out_parts", out_parts)
    if num_partitions is not None:
        check_leaves("sharded_jit num_partitions", (num_partitions,))
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
    in_parts: list[Counts]
    out_tree: Any
    out_parts: list[Counts]
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
        if isinstance(prefix, tuple) and not is_leaf(prefix):
            if len(prefix) == len(args):
                prefix = tuple(prefix[k] for k in argnums)
        dynamic = tuple(args[k] for k in argnums)
        in_parts = broadcast_parts(
            what, "in_parts", prefix, dynamic, "the positional arguments"
        )
        in_parts += [None] * (len(leaves) - len(in_parts))
        check_shapes(what, names, avals, in_parts)

        traced = self._jitted.trace(*args, **kwargs)
        out = traced.out_info
        out_names = leaf_paths("result", out)
        out_avals = list(map(arguments.leaf_aval, jax.tree.leaves(out)))
        out_parts = broadcast_parts(
            what, "out_parts", self._out_parts, out, "the result"
        )
        check_shapes(what, out_names, out_avals, out_parts)

        total = agreed_total(
            what,
            [
                ("num_partitions", self._num_partitions),
                *counted("in_parts", names, in_parts),
                *counted("out_parts", out_names, out_parts),
                *(
                    ("with_sharding_constraint", equation.params["total"])
                    for equation in constraints_in(traced.jaxpr)
                ),
            ],
        )
        return _Call(
            in_tree,
            tuple((k, arg) for k, arg in enumerate(args) if k not in argnums),
            in_parts,
            jax.tree.structure(out),
            out_parts,
            total,
            avals,
            out_avals,
        )

    def _bind(self, call: _Call, leaves: Sequence[Any]) -> list[Any]:
        """Runs the function, or adds it to what is being traced."""

        def cut(values: Sequence[Any], parts: Sequence[Counts]) -> list[Any]:
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

        def shardings(avals: Sequence[Any], parts: Sequence[Counts]) -> list[Any]:
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
            list(partition_mesh((), call.total or 1, "sharded_jit").devices.flat),
            communicates=True,
            in_shardings=tuple(operands),
            out_shardings=shardings(call.out_avals, call.out_parts),
        )
        return program, operands, call.out_tree
