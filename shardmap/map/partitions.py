"""`sharded_jit` and `with_sharding_constraint`: values cut into partitions.

The partitioner splits the program; the function stays written for whole values. Alone
it runs on as many devices as there are partitions. Inside `spmap` each element of the
mapped axis has that many devices.
"""

import functools
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
from jax.sharding import NamedSharding

from shardmap.map import arguments, functions, placement, tracing
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
from shardmap.map.stages import Lowered
from shardmap.sharding.spec import ShardingSpec


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
) -> "ShardedFunction":
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
      The compiled function, with ``lower`` and ``trace`` as `jax.jit` gives them. It
      works under `jax.jit`, `jax.grad` and `jax.vmap`, and inside `spmap`.

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
    options = _Options(in_parts, out_parts, num_partitions, tuple(static))
    return ShardedFunction(fun, options)


class _Call(NamedTuple):
    """How one call is cut, but not its arrays."""

    in_tree: Any
    statics: tuple[tuple[int, arguments.Static | None], ...]
    in_parts: list[Counts]
    out_tree: Any
    out_parts: list[Counts]
    total: int | None
    in_avals: list[Any]
    out_avals: list[Any]

    def positional(self, given: Iterable[Any]) -> list[Any]:
        """The positional arguments: those given, and the static ones."""
        args = list(given)
        for k, static in self.statics:
            args.insert(k, static)
        return args

    def alone(self) -> "_Call":
        """The call outside of maps, which has devices."""
        return self._replace(total=self.total or 1)

    @property
    def devices(self) -> list[jax.Device]:
        """Where it runs."""
        return list(partition_mesh((), self.total or 1, "sharded_jit").devices.flat)

    def shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """How arguments and results lie."""

        def sharding(aval: Any, parts: Counts) -> NamedSharding:
            counts = (1,) * aval.ndim if parts is None else parts
            mesh = partition_mesh(counts, self.total or 1, "sharded_jit")
            return partition_sharding(counts, mesh)

        return (
            list(map(sharding, self.in_avals, self.in_parts)),
            list(map(sharding, self.out_avals, self.out_parts)),
        )


class _Options(NamedTuple):
    in_parts: Any
    out_parts: Any
    num_partitions: int | None
    static_argnums: tuple[int, ...]

    def key(self) -> Hashable:
        """Hashable, equal for equal options."""
        in_parts, out_parts = (
            (tuple(leaves), tree)
            for leaves, tree in (
                jax.tree.flatten(parts, is_leaf=is_leaf)
                for parts in (self.in_parts, self.out_parts)
            )
        )
        return self._replace(in_parts=in_parts, out_parts=out_parts)


class ShardedFunction:
    """A function compiled for partitions; what `sharded_jit` returns."""

    def __init__(self, fun: Callable[..., Any], options: _Options) -> None:
        functools.update_wrapper(self, fun)
        self._programs: _Programs = functions.kept_for(
            fun, options.key(), lambda: _Programs(fun, options)
        )
        # They find the function by a weak reference, to an equal one perhaps.
        self._fun = self._programs.fun()
        self._static = options.static_argnums

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = arguments.wrap_statics(args, self._static)
        if jex_core.find_top_trace(()) is not TOP_LEVEL:
            return self._programs.bind(args, kwargs)
        return self._programs.run(args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lowers the function for these arguments, running nothing.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`, as for a call.
          **kwargs: the same, by keyword.

        Returns:
          A `jax.stages.Lowered` with ``in_specs`` and ``out_specs``.
        """
        traced, call = self._trace(args, kwargs)
        in_specs, out_specs = (
            [
                ShardingSpec.from_named_sharding(sharding, aval.ndim)
                for sharding, aval in zip(shardings, avals, strict=True)
            ]
            for shardings, avals in zip(
                call.shardings(), (call.in_avals, call.out_avals), strict=True
            )
        )
        args_specs, kwargs_specs = jax.tree.unflatten(call.in_tree, in_specs)
        no_statics = call._replace(statics=tuple((k, None) for k, _ in call.statics))
        return Lowered(
            traced.lower(),
            (
                *no_statics.positional(args_specs),
                *([kwargs_specs] if kwargs_specs else []),
            ),
            jax.tree.unflatten(call.out_tree, out_specs),
        )

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the function for these arguments, as `jax.jit(fun).trace` does."""
        traced, _ = self._trace(args, kwargs)
        return traced

    def _trace(self, args: Any, kwargs: Any) -> tuple[jax.stages.Traced, _Call]:
        return self._programs.trace(arguments.wrap_statics(args, self._static), kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A function of a class is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<sharded_jit of {self._programs.name}>"


class _Programs:
    """All that is made for one function under one set of options.

    It does not hold the function, so it may live as long as the function does.
    """

    def __init__(self, fun: Callable[..., Any], options: _Options) -> None:
        self.fun = functions.WeakFunction(fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self._options = options
        self._programs: dict[Any, Any] = {}

        def with_statics(*args: Any, **kwargs: Any) -> Any:
            values = (a.value if isinstance(a, arguments.Static) else a for a in args)
            return self.fun()(*values, **kwargs)

        # One object, by which JAX finds a trace again.
        self._with_statics = functions.described_like(with_statics, fun, self.name)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Runs the function on arguments that lie anywhere."""
        argnums, leaves, in_tree = self._flatten(args, kwargs)
        avals = self._avals(argnums, args, kwargs, leaves)
        key = (
            in_tree,
            tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals),
            tuple(arg for k, arg in enumerate(args) if k not in argnums),
        )
        try:
            program, shardings, out_tree = self._programs[key]
        except (KeyError, TypeError):  # What is not hashable, `jax.jit` refuses.
            program, shardings, out_tree = self._programs[key] = self._program(
                self._read(args, kwargs).alone()
            )
        results = program(*placement.place(leaves, shardings))
        return jax.tree.unflatten(out_tree, results)

    def _program(self, call: _Call) -> tuple[Any, list[NamedSharding], Any]:
        """What runs calls like this one, how arguments must lie, the result's tree."""
        operands, results = call.shardings()
        program = self._jit(
            lambda *leaves: self._bind(call, leaves),
            call,
            in_shardings=tuple(operands),
            out_shardings=results,
        )
        return program, operands, call.out_tree

    def trace(self, args: Any, kwargs: Any) -> tuple[jax.stages.Traced, _Call]:
        """The function traced on arguments like these, and how the call is cut."""
        call = self._read(args, kwargs).alone()
        operands, results = call.shardings()

        def run(*args: Any, **kwargs: Any) -> Any:
            _, leaves, _ = self._flatten(args, kwargs)
            return jax.tree.unflatten(call.out_tree, self._bind(call, leaves))

        functions.described_like(run, self.fun(), self.name)
        structs = [
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
            )
            for aval, sharding in zip(call.in_avals, operands, strict=True)
        ]
        given, keywords = jax.tree.unflatten(call.in_tree, structs)
        program = self._jit(
            run,
            call,
            static_argnums=tuple(k for k, _ in call.statics),
            static_argnames=(),
            out_shardings=jax.tree.unflatten(call.out_tree, results),
        )
        return program.trace(*call.positional(given), **keywords), call

    def bind(self, args: Any, kwargs: Any) -> Any:
        """Adds the function to what is being traced."""
        _, leaves, _ = self._flatten(args, kwargs)
        call = self._read(args, kwargs)
        return jax.tree.unflatten(call.out_tree, self._bind(call, leaves))

    def _flatten(self, args: Any, kwargs: Any) -> tuple[list[int], list[Any], Any]:
        count = len(args)
        static = {k + count if k < 0 else k for k in self._options.static_argnums}
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
        return arguments.leaf_names(self.fun(), argnums, dynamic, kwargs)

    def _read(self, args: Any, kwargs: Any) -> _Call:
        """Checks a call, and traces the function to see what it asks for."""
        argnums, leaves, in_tree = self._flatten(args, kwargs)
        avals = self._avals(argnums, args, kwargs, leaves)
        names = self._names(argnums, args, kwargs)
        what = f"sharded_jit of {self.name}"
        prefix = self._options.in_parts
        if isinstance(prefix, tuple) and not is_leaf(prefix):
            if len(prefix) == len(args):
                prefix = tuple(prefix[k] for k in argnums)
        dynamic = tuple(args[k] for k in argnums)
        in_parts = broadcast_parts(
            what, "in_parts", prefix, dynamic, "the positional arguments"
        )
        in_parts += [None] * (len(leaves) - len(in_parts))
        check_shapes(what, names, avals, in_parts)

        statics = tuple((k, arg) for k, arg in enumerate(args) if k not in argnums)
        traced = self._jitted(statics).trace(*args, **kwargs)
        out = traced.out_info
        out_names = leaf_paths("result", out)
        out_avals = list(map(arguments.leaf_aval, jax.tree.leaves(out)))
        out_parts = broadcast_parts(
            what, "out_parts", self._options.out_parts, out, "the result"
        )
        check_shapes(what, out_names, out_avals, out_parts)

        total = agreed_total(
            what,
            [
                ("num_partitions", self._options.num_partitions),
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
            statics,
            in_parts,
            jax.tree.structure(out),
            out_parts,
            total,
            avals,
            out_avals,
        )

    def _jitted(self, statics: Iterable[tuple[int, Any]]) -> Any:
        static = tuple(k for k, _ in statics)
        return jax.jit(self._with_statics, static_argnums=static, static_argnames=())

    def _bind(self, call: _Call, leaves: Sequence[Any]) -> list[Any]:
        """Runs the function, or adds it to what is being traced."""

        def cut(values: Sequence[Any], parts: Sequence[Counts]) -> list[Any]:
            return [
                constrain(value, value_parts, call.total, "sharded_jit")
                for value, value_parts in zip(values, parts, strict=True)
            ]

        given, kwargs = jax.tree.unflatten(call.in_tree, cut(leaves, call.in_parts))
        results = jax.tree.leaves(
            self._jitted(call.statics)(*call.positional(given), **kwargs)
        )
        return cut(results, call.out_parts)

    def _jit(self, run: Callable[..., Any], call: _Call, **options: Any) -> Any:
        """`jax.jit` of ``run`` on the devices of a call."""

        def logged(*args: Any, **kwargs: Any) -> Any:
            tracing.log_compile(
                "%s: %d partitions on devices %s, arguments %s",
                self.name,
                call.total or 1,
                [device.id for device in call.devices],
                [aval.str_short() for aval in call.in_avals],
            )
            return run(*args, **kwargs)

        functions.described_like(logged, run, self.name)
        return map_jit(logged, call.devices, communicates=True, **options)
