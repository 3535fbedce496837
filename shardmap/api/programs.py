"""From a call to a program: what `spmap`, `mesh_map` and `sharded_jit` share.

Each of them traces a call in its own way, which gives a `Call`. If JAX is tracing, that
is bound. Else it is compiled ahead of time and run.
"""

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import AxisType, Sharding

from shardmap._jax.context import (
    NO_MESH,
    config_value,
    configuration,
)
from shardmap._jax.stages import FoundNaN, Mismatch, trace_as
from shardmap._jax.types import AnyMesh, Aval, Jaxpr, PyTree, TreeDef, Value
from shardmap._lazy import logging
from shardmap.api import caches
from shardmap.api.arguments import Arguments
from shardmap.api.user_function import Args, Kwargs, UserFunction
from shardmap.arrays import placement, processes, running, trees
from shardmap.arrays.process_local import ProcessShardings, to_global, to_local
from shardmap.map import agreement, set_mesh
from shardmap.map.layout import MapShardings
from shardmap.map.primitives import explicit_sharding
from shardmap.sharding.mesh import mesh_devices


class ProcessLocal(NamedTuple):
    """How this process's data are parts of the global arrays of a call.

    Attributes:
      operands: for each leaf.
      results: for each result; None: all of them are global arrays.
    """

    operands: Sequence[ProcessShardings]
    results: Sequence[ProcessShardings] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A traced call, with all that is needed to run or to bind it.

    Attributes:
      arguments: its arguments.
      in_avals: the avals of the leaves, as global arrays.
      out_tree: the structure of the result.
      out_avals: the avals of the results, as global arrays.
      mesh: where it runs; None inside another map.
      jaxpr: what the function computes.
      bind: adds the map of these leaves to what is being traced.
      find_shardings: gives the shardings of leaves and results.
      process_local: how it is called over several processes; None: with global arrays.
    """

    arguments: Arguments
    in_avals: Sequence[Aval]
    out_tree: TreeDef
    out_avals: Sequence[Aval]
    mesh: AnyMesh | None
    jaxpr: Jaxpr
    bind: Callable[[Sequence[Value]], Sequence[Value]]
    find_shardings: Callable[[], MapShardings]
    process_local: ProcessLocal | None = None

    @functools.cached_property
    def shardings(self) -> MapShardings | None:
        """The shardings of leaves and results; None inside another map."""
        return None if self.mesh is None else self.find_shardings()

    @functools.cached_property
    def devices(self) -> list[jax.Device]:
        """The devices of its mesh; none of an abstract one."""
        return mesh_devices(self.mesh)

    def result(self, leaves: Sequence[Value]) -> PyTree:
        """Binds the map of these leaves."""
        return jax.tree.unflatten(self.out_tree, self.bind(leaves))

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The global arrays that the program takes."""
        assert self.shardings is not None
        return [
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
            )
            for aval, sharding in zip(
                self.in_avals, self.shardings.operands, strict=True
            )
        ]

    def description(self) -> str:
        """A text that is equal in all processes that make this call."""
        assert self.mesh is not None
        assert self.shardings is not None
        types = ", ".join(aval.str_short() for aval in self.in_avals)
        specs = [", ".join(str(s.spec) for s in each) for each in self.shardings]
        return (
            f"mesh {dict(self.mesh.shape)}, arguments ({types}), in_specs "
            f"({specs[0]}), out_specs ({specs[1]}), operations "
            f"{agreement.operations(self.jaxpr)}"
        )


class CompiledCall(NamedTuple):
    """A compiled program, and the arguments that it takes.

    Attributes:
      run: runs it on positional and keyword arguments, the static ones each a
        `Static`; raises TypeError or ValueError, before it runs, for others.
      shardings: of the leaves.
      donated: which leaves are donated.
      process_local: as in `Call`.
      is_here: whether all its devices are this process's.
    """

    run: Callable[..., Any]
    shardings: Sequence[Sharding]
    donated: Sequence[bool]
    process_local: ProcessLocal | None
    is_here: bool


class Transformed(Protocol):
    """A user's function under `spmap`, `mesh_map` or `sharded_jit`."""

    function: UserFunction
    options: Any

    def trace_call(self, arguments: Arguments, is_top_level: bool = True) -> Call:
        """Checks the arguments of a call and traces the function.

        Args:
          arguments: those of the call.
          is_top_level: whether it is a program, and not a part of another.
        """

    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        """Adds a call to what is being traced."""

    def is_on_set_mesh(self) -> bool:
        """Whether a call under `jax.set_mesh` is a program on that mesh."""


# What is bound


def bind_in_jit(transformed: Transformed) -> Callable[[Args, Kwargs], PyTree]:
    """A function that binds calls under `jax.jit`, which caches its traces."""

    def run(args: Args, kwargs: Kwargs) -> PyTree:
        arguments = transformed.function.read(args, kwargs)
        return transformed.trace_call(arguments, False).result(arguments.leaves)

    run.__name__ = run.__qualname__ = transformed.function.name
    jitted = jax.jit(run)
    return lambda args, kwargs: jitted(tuple(args), kwargs)


def types_of_mesh_around() -> AbstractContextManager[Any]:
    """A context in which types have no mesh but that of a `jax.shard_map` around."""
    there = jax.sharding.get_abstract_mesh()
    return jax.sharding.use_abstract_mesh(there if there.manual_axes else NO_MESH)


def bind_without_types(
    bind: Callable[[Sequence[Value]], Sequence[Value]], leaves: Sequence[Value]
) -> list[Any]:
    """Binds a map to leaves without shardings in their types, nor those of a mesh."""
    operands = list(map(explicit_sharding.drop_sharding, leaves))
    with types_of_mesh_around():
        results = bind(operands)
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return list(map(explicit_sharding.drop_sharding_p.bind, results))
    return list(results)


def run_on_set_mesh(transformed: Transformed, args: Args, kwargs: Kwargs) -> PyTree:
    """Runs a call on the devices of `jax.set_mesh`, as `jax.jit` does."""
    function, devices = transformed.function, tuple(set_mesh.current_mesh_devices())
    args, kwargs = set_mesh.device_put((tuple(args), kwargs))
    program = function.programs.get(devices)
    if program is None:
        # JAX mistakes a keyword argument for all of them if they have one name.
        def run(*_args: PyTree, **_kwargs: PyTree) -> PyTree:
            return transformed.bind(_args, _kwargs)

        run.__name__ = run.__qualname__ = function.name
        program = running.map_jit(
            run,
            devices,
            communicates=True,
            donate_argnums=function.donate_argnums,
            donate_argnames=function.donate_argnames,
        )
        program = caches.keep(function.programs, devices, program)
    return set_mesh.device_put(program(*args, **kwargs))


# What runs


def run(
    transformed: Transformed, args: Args, kwargs: Kwargs
) -> tuple[PyTree, CompiledCall | None]:
    """Runs a call on arguments with any shardings.

    Returns:
      The results; and the program, if the next call may try it first.
    """
    function = transformed.function
    arguments = function.read(args, kwargs)
    leaves = arguments.leaves
    key = arguments.cache_key(), configuration()
    program: CompiledCall | None = function.programs.get(key)
    if program is None:
        program = _compiled(function, transformed.trace_call(arguments))
        program = caches.keep(function.programs, key, program)
    if any(program.donated):
        check_donated(function, program, arguments)
    if program.process_local is None:
        placed = placement.place(leaves, program.shardings, donate=program.donated)
    else:
        operands = program.process_local.operands
        placed = list(map(to_global, leaves, operands, program.donated))
    is_moved = any(map(operator.is_not, leaves, placed))
    if is_moved:
        args, kwargs = arguments.with_leaves(placed)
    try:
        results = program.run(*args, **kwargs)
    except FoundNaN as error:
        if not program.is_here:
            raise FloatingPointError(f"{function.full_name}: {error}") from None
        return find_nan(transformed, args, kwargs), None
    if program.process_local is not None and program.process_local.results is not None:
        arrays, tree = jax.tree.flatten(results)
        local = map(to_local, arrays, program.process_local.results)
        results = jax.tree.unflatten(tree, local)
    return results, program if program.is_here and not is_moved else None


def find_nan(transformed: Transformed, args: Args, kwargs: Kwargs) -> PyTree:
    """Runs a call operation by operation, as `jax.jit` does, to name the NaN.

    Raises:
      FloatingPointError: one gives a NaN, or the arguments have been donated.
    """
    arrays = jax.tree.leaves((args, kwargs))
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
        raise FloatingPointError(
            f"{transformed.function.full_name} has a NaN or an infinity in its "
            "results, and took the memory of donated arguments, so it cannot run again "
            "to tell which operation gives it. Leave donate_argnums out to find that."
        )
    return transformed.bind(args, kwargs)


def may_donate(function: UserFunction, program: CompiledCall, args: Args) -> bool:
    """Whether a program may be tried with these arguments.

    It may if the donated arrays are committed: `run` moves others, and frees them.
    """
    leaves = jax.tree.leaves(args)
    if len(set(map(id, leaves))) < len(leaves):
        check_donated(function, program, Arguments.of(args, {}))
    return len(leaves) == len(program.donated) and all(
        map(_is_ready, itertools.compress(leaves, program.donated))
    )


def _is_ready(leaf: Any) -> bool:
    """Whether a donated leaf needs no move; `run` names one that is deleted."""
    try:  # For each leaf of each call: isinstance takes as long as the rest.
        return leaf.committed and not leaf.is_deleted()
    except AttributeError:
        return True


def check_donated(
    function: UserFunction, program: CompiledCall, arguments: Arguments
) -> None:
    """Checks that arrays are not deleted, and donated ones are passed once."""
    leaves = arguments.leaves
    gone = [
        k
        for k, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and leaf.is_deleted()
    ]
    if gone:
        names = function.leaf_names(arguments)
        raise RuntimeError(
            f"{function.full_name}: Array has been deleted: "
            f"{', '.join(names[k] for k in gone)}. Its memory was donated to an "
            "earlier call, or freed; use what that call returned."
        )
    if len(set(map(id, leaves))) == len(leaves):
        return
    counts = collections.Counter(map(id, leaves))
    for k, leaf in enumerate(leaves):
        if program.donated[k] and counts[id(leaf)] > 1 and isinstance(leaf, jax.Array):
            names = function.leaf_names(arguments)
            same = [names[j] for j, other in enumerate(leaves) if other is leaf]
            raise ValueError(
                f"{function.full_name}: {names[k]} is donated, and the same array is "
                f"passed more than once, as {', '.join(same)}: its memory can be "
                "used once. Pass a copy, such as x.copy()."
            )


# Compiling


def check_devices(function: UserFunction, call: Call) -> None:
    """Refuses to lower a call over an abstract mesh."""
    if not call.devices:
        raise ValueError(
            f"{function.full_name} cannot run on an AbstractMesh, which has no "
            "devices. Give it a jax.sharding.Mesh: shardmap.make_mesh makes one."
        )


def agree(function: UserFunction, call: Call) -> None:
    """Checks that all processes make this call, before it is lowered."""
    agreement.agree(
        call.mesh, function.full_name, lambda: f"{function.name}, {call.description()}"
    )


def _compiled(function: UserFunction, call: Call) -> CompiledCall:
    check_devices(function, call)
    agree(function, call)
    assert call.shardings is not None
    arguments, structs = call.arguments, call.structs()
    donated = arguments.donated(function.donate_argnums, function.donate_argnames)
    compiled = functools.partial(running.compiled, devices=call.devices)
    if trees.accepts_placeholders(arguments.in_tree, call.out_tree):
        args, kwargs = arguments.with_leaves(structs)
        program = compiled(jitted(function, call), args, kwargs)
    else:
        program = compiled(_jitted_by_leaves(function, call, donated), structs, {})
        program = _by_leaves(program, arguments.in_tree, call.out_tree)
    is_here = call.process_local is None and not processes.spans_processes(call.devices)
    return CompiledCall(
        program, call.shardings.operands, donated, call.process_local, is_here
    )


def jitted(
    function: UserFunction, call: Call, static_argnums: Collection[int] = ()
) -> jax.stages.Wrapped:
    """A call as `jax.jit`, to be traced for the call's `structs`."""

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return call.result(jax.tree.leaves((args, kwargs)))

    args, kwargs = call.arguments.with_leaves(call.arguments.leaves)
    trace_as(run, "jit", function.fun(), args, kwargs, tuple(static_argnums))
    return _jit(
        function,
        run,
        call,
        call.out_tree,
        static_argnums=tuple(static_argnums),
        donate_argnums=function.donate_argnums,
        donate_argnames=function.donate_argnames,
    )


def _jitted_by_leaves(
    function: UserFunction, call: Call, donated: Sequence[bool]
) -> jax.stages.Wrapped:
    """The same for flat leaves and results."""

    def run(*leaves: Value) -> list[Value]:
        return list(call.bind(leaves))

    results = jax.tree.structure([0] * call.out_tree.num_leaves)
    donate_argnums = [k for k, donate in enumerate(donated) if donate]
    return _jit(function, run, call, results, donate_argnums=donate_argnums)


def _jit(
    function: UserFunction,
    run: Callable[..., Any],
    call: Call,
    out_tree: TreeDef,
    **options: Any,
) -> jax.stages.Wrapped:
    # Over an abstract mesh a call is only traced.
    if call.mesh is not None and call.shardings is not None and call.devices:
        noted = config_value("jax_log_compiles")
        logging.log(
            logging.WARNING if noted else logging.DEBUG,
            "shardmap: compiling %s: mesh %s, devices %s, arguments (%s)",
            function.name,
            dict(call.mesh.shape),
            [device.id for device in call.devices],
            ", ".join(map(str, call.in_avals)),
        )
        shardings = call.shardings.results
        options["out_shardings"] = trees.prefix_of(out_tree, shardings)
        if len(call.mesh.axis_names) > 1:
            run = _with_constraints(run, shardings)
        options["compiler_options"] = running.compiler_options(call.devices)
    run.__name__ = run.__qualname__ = function.name
    return jax.jit(run, **options)


def _with_constraints(
    run: Callable[..., PyTree], shardings: Sequence[jax.sharding.Sharding]
) -> Callable[..., PyTree]:
    """``run``, whose results have these shardings inside the program too.

    XLA cuts what is manual along some mesh axes only along others as it likes, which
    JAX refuses if it overrides ``out_shardings``.
    """

    @functools.wraps(run)  # JAX reads the names of arguments.
    def with_constraints(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(run(*args, **kwargs))
        constrained = map(jax.lax.with_sharding_constraint, leaves, shardings)
        return jax.tree.unflatten(tree, constrained)

    return with_constraints


def _by_leaves(
    program: Callable[..., Any], in_tree: TreeDef, out_tree: TreeDef
) -> Callable[..., Any]:
    """A compiled program of leaves, for pytrees that take nothing but arrays.

    JAX makes such objects of avals and shardings.
    """

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != in_tree:
            raise Mismatch("compiled for arguments of another structure")
        return jax.tree.unflatten(out_tree, program(*leaves))

    return run
