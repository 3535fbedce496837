"""What is made for a function that `sharded_jit` cuts: programs."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from shardmap.api.calls import arguments, kept
from shardmap.api.partition_calls import (
    WHAT,
    Call,
    Options,
    converted,
    lay_out_and_convert,
)
from shardmap.api.parts import (
    Counts,
    agreed_total,
    broadcast_parts,
    check_local_parts,
    check_own_count,
    check_shapes,
    counted,
    is_leaf,
    whole_aval,
)
from shardmap.arrays import array_likes, processes, trees
from shardmap.arrays.process_local import is_whole, look
from shardmap.arrays.running import map_jit, run_and_convert
from shardmap.arrays.trees import leaf_paths
from shardmap.map import agreement, contexts, tracing
from shardmap.map.constraint import constrain, constraints_in, partition_mesh


class Programs:
    """All that is made for one function under one set of options.

    It does not hold the function, so it may live as long as the function does.
    """

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        self.fun = kept.WeakFunction(fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.options = options
        self._programs: dict[Any, Any] = {}

        def with_statics(*args: Any, **kwargs: Any) -> Any:
            values = (a.value if isinstance(a, arguments.Static) else a for a in args)
            return self.fun()(*values, **kwargs)

        # One object, by which JAX finds a trace again.
        self._with_statics = kept.described_like(with_statics, fun, self.name)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Runs the function on arguments that lie anywhere."""
        argnums, leaves, in_tree = self._flatten(args, kwargs)
        avals = self._avals(argnums, args, kwargs, leaves)
        are_whole = list(map(is_whole, leaves))
        key = (
            in_tree,
            tuple(are_whole),
            tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals),
            tuple(arg for k, arg in enumerate(args) if k not in argnums),
        )
        try:
            program, lay_out, convert = self._programs[key]
        except (KeyError, TypeError):  # What is not hashable, `jax.jit` refuses.
            call = self._read(args, kwargs, are_whole).alone()
            made = self._program(call), *lay_out_and_convert(call)
            program, lay_out, convert = self._programs[key] = made
        return run_and_convert(program, convert, lay_out(leaves), {})

    def under_mesh(self, args: Any, kwargs: Any) -> Any:
        """Runs the function under `jax.set_mesh`, or alone if it has other devices."""
        _, leaves, _ = self._flatten(args, kwargs)
        there = contexts.mesh_devices()
        with jax.set_mesh(contexts.NO_MESH):
            call = self._read(args, kwargs, list(map(is_whole, leaves))).alone()
            if call.devices != there or processes.several(there):
                return self.run(args, kwargs)
        return self.program_under_mesh(args, kwargs)

    @functools.cached_property
    def program_under_mesh(self) -> contexts.UnderMesh:
        """What runs the function under `jax.set_mesh`."""
        return contexts.UnderMesh(self.name, self.bind, self.options.static_argnums)

    def _program(self, call: Call) -> Any:
        """What runs calls like this one."""
        operands, results = call.shardings()
        return self._jit(
            lambda *leaves: self._bind(call, leaves),
            call,
            in_shardings=tuple(operands),
            out_shardings=results,
        )

    def trace(self, args: Any, kwargs: Any) -> tuple[jax.stages.Traced, Call]:
        """The function traced on arguments like these, and how the call is cut."""
        _, leaves, _ = self._flatten(args, kwargs)
        call = self._read(args, kwargs, list(map(is_whole, leaves))).alone()
        operands, results = call.shardings()

        def run(*args: Any, **kwargs: Any) -> Any:
            _, leaves, _ = self._flatten(args, kwargs)
            return jax.tree.unflatten(call.out_tree, self._bind(call, leaves))

        kept.described_like(run, self.fun(), self.name)
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
        are_whole = None
        if jax.process_count() > 1 and not tracing.inside_map():
            are_whole = look(leaves)
        call = self._read(args, kwargs, are_whole)
        if are_whole is None or not processes.several(call.devices):
            return jax.tree.unflatten(call.out_tree, self._bind(call, leaves))
        # JAX runs step by step what it differentiates.
        mesh = partition_mesh((), call.total or 1, WHAT)
        agreement.agree_to_lower(mesh, WHAT, lambda: call.program)
        call = call.alone()
        in_pieces, out_pieces = call.pieces()
        results = self._bind(call, converted(leaves, in_pieces, "whole"))
        return jax.tree.unflatten(call.out_tree, converted(results, out_pieces, "own"))

    def _flatten(self, args: Any, kwargs: Any) -> tuple[list[int], list[Any], Any]:
        count = len(args)
        static = {k + count if k < 0 else k for k in self.options.static_argnums}
        argnums = [k for k in range(count) if k not in static]
        leaves, tree = jax.tree.flatten((tuple(args[k] for k in argnums), kwargs))
        return argnums, leaves, tree

    def _avals(
        self, argnums: list[int], args: Any, kwargs: Any, leaves: list[Any]
    ) -> list[Any]:
        avals = []
        for k, leaf in enumerate(leaves):
            try:
                avals.append(array_likes.leaf_aval(leaf))
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
        return trees.leaf_names(self.fun(), argnums, dynamic, kwargs)

    def _read(self, args: Any, kwargs: Any, are_whole: Sequence[bool] | None) -> Call:
        """Checks a call, and traces the function to see what it asks for.

        Args:
          args: the positional arguments.
          kwargs: the keyword arguments.
          are_whole: which leaves are global arrays; None: all are traced, as such.
        """
        options = self.options
        argnums, leaves, in_tree = self._flatten(args, kwargs)
        avals = self._avals(argnums, args, kwargs, leaves)
        names = self._names(argnums, args, kwargs)
        what = f"{WHAT} of {self.name}"
        dynamic = tuple(args[k] for k in argnums)

        def of_arguments(name: str, prefix: Any) -> list[Counts]:
            if isinstance(prefix, tuple) and not is_leaf(prefix):
                if len(prefix) == len(args):
                    prefix = tuple(prefix[k] for k in argnums)
            parts = broadcast_parts(
                what, name, prefix, dynamic, "the positional arguments"
            )
            return parts + [None] * (len(leaves) - len(parts))

        in_parts = of_arguments("in_parts", options.in_parts)
        in_local: list[Counts] = [None] * len(leaves)
        if are_whole is not None:
            in_local = [
                None if whole else local
                for whole, local in zip(
                    are_whole,
                    of_arguments("local_in_parts", options.local_in_parts),
                    strict=True,
                )
            ]
        check_local_parts(what, "local_in_parts", names, avals, in_parts, in_local)
        check_shapes(
            what,
            names,
            avals,
            [
                parts if local is None else local
                for parts, local in zip(in_parts, in_local, strict=True)
            ],
        )
        avals = list(map(whole_aval, avals, in_parts, in_local))

        if any(in_local):
            given = [
                leaf
                if local is None
                else jax.ShapeDtypeStruct(
                    aval.shape, aval.dtype, weak_type=aval.weak_type
                )
                for leaf, aval, local in zip(leaves, avals, in_local, strict=True)
            ]
            dynamic, kwargs = jax.tree.unflatten(in_tree, given)
            as_given = dict(zip(argnums, dynamic, strict=True))
            args = [as_given.get(k, arg) for k, arg in enumerate(args)]
        statics = tuple((k, arg) for k, arg in enumerate(args) if k not in argnums)
        traced = self._jitted(statics).trace(*args, **kwargs)
        out = traced.out_info
        out_names = leaf_paths("result", out)
        out_avals = list(map(array_likes.leaf_aval, jax.tree.leaves(out)))
        out_parts, out_local = (
            broadcast_parts(what, name, parts, out, "the result")
            for name, parts in (
                ("out_parts", options.out_parts),
                ("local_out_parts", options.local_out_parts),
            )
        )
        check_shapes(what, out_names, out_avals, out_parts)
        if are_whole is None:
            out_local = [None] * len(out_parts)
        check_local_parts(
            what, "local_out_parts", out_names, out_avals, out_parts, out_local
        )

        total = agreed_total(
            what,
            [
                ("num_partitions", options.num_partitions),
                *counted("in_parts", names, in_parts),
                *counted("out_parts", out_names, out_parts),
                *(
                    ("with_sharding_constraint", equation.params["total"])
                    for equation in constraints_in(traced.jaxpr)
                ),
            ],
        )
        if options.local_num_partitions is not None and are_whole is not None:
            check_own_count(what, total or 1, options.local_num_partitions)
        return Call(
            in_tree,
            statics,
            in_parts,
            jax.tree.structure(out),
            out_parts,
            total,
            avals,
            out_avals,
            [local is not None for local in in_local],
            [local is not None for local in out_local],
            traced.jaxpr,
            self._described(total, avals, in_parts, out_parts, traced.jaxpr)
            if jax.process_count() > 1
            else "",
        )

    def _described(
        self,
        total: int | None,
        avals: Sequence[Any],
        in_parts: Sequence[Counts],
        out_parts: Sequence[Counts],
        jaxpr: Any,
    ) -> str:
        """What a call runs, equal in all processes that run the same program."""
        listed = ", ".join(
            aval.str_short() if parts is None else f"{aval.str_short()} in {parts}"
            for aval, parts in zip(avals, in_parts, strict=True)
        )
        return (
            f"{self.name}, {total or 1} partitions, arguments ({listed}), out_parts "
            f"{tuple(out_parts)}, operations {agreement.operations(jaxpr)}"
        )

    def _jitted(self, statics: Iterable[tuple[int, Any]]) -> Any:
        static = tuple(k for k, _ in statics)
        return jax.jit(self._with_statics, static_argnums=static, static_argnames=())

    def _bind(self, call: Call, leaves: Sequence[Any]) -> list[Any]:
        """Runs the function, or adds it to what is being traced."""

        def cut(values: Sequence[Any], parts: Sequence[Counts]) -> list[Any]:
            return [
                constrain(
                    value, value_parts, call.total, WHAT, call.is_alone, call.program
                )
                for value, value_parts in zip(values, parts, strict=True)
            ]

        operands = cut(leaves, call.in_parts)
        if call.is_alone:
            closed = call.jaxpr
            results = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *operands)
            return cut(results, call.out_parts)
        given, kwargs = jax.tree.unflatten(call.in_tree, operands)
        results = jax.tree.leaves(
            self._jitted(call.statics)(*call.positional(given), **kwargs)
        )
        return cut(results, call.out_parts)

    def _jit(self, run: Callable[..., Any], call: Call, **options: Any) -> Any:
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

        kept.described_like(logged, run, self.name)
        return map_jit(logged, call.devices, communicates=True, **options)
