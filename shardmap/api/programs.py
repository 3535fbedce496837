"""From a call to a program: read, trace, compile, place, run.

It is compiled ahead of time, once for each kind of arguments. What `spmap`, `mesh_map`
and `sharded_jit` do in their own ways is to trace; see `transformed.Transformed`.
"""

import collections
import functools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from shardmap._jax import api_boundary
from shardmap._jax.context import config_value, configuration
from shardmap._jax.stages import FoundNaN, trace_as
from shardmap._jax.types import PyTree, Value
from shardmap.api import caches
from shardmap.api.arguments import Arguments
from shardmap.api.transformed import Args, Call, Kwargs, ProcessLocal, Transformed
from shardmap.arrays import placement, processes, running
from shardmap.arrays.process_local import to_global, to_local
from shardmap.map import agreement, set_mesh


class CompiledCall(NamedTuple):
    """A compiled program, and the arguments that it takes.

    Attributes:
      run: runs it on positional and keyword arguments, the static ones each a
        `Static`; raises TypeError or ValueError, before it runs, for others.
      shardings: of the leaves.
      donated: which leaves are donated.
      process_local: as in `Call`.
      is_single_process: whether all its devices are this process's.
    """

    run: Callable[..., Any]
    shardings: Sequence[Sharding]
    donated: Sequence[bool]
    process_local: ProcessLocal | None
    is_single_process: bool


def run_call(
    transformed: Transformed, args: Args, kwargs: Kwargs
) -> tuple[PyTree, CompiledCall | None]:
    """Runs a call on arguments with any shardings.

    Beside the results it gives the program, if the next call may try it first.
    """
    arguments = transformed.read(args, kwargs)
    leaves = arguments.leaves
    key = arguments.cache_key(), configuration()
    program: CompiledCall | None = transformed.programs.get(key)
    if program is None:
        program = _compiled(transformed, transformed.trace_call(arguments))
        program = caches.keep(transformed.programs, key, program)
    if any(program.donated):
        check_donated(transformed, program, arguments)
    if program.process_local is None:
        placed = placement.place(leaves, program.shardings)
    else:
        placed = list(map(to_global, leaves, program.process_local.operands))
    is_moved = any(map(operator.is_not, leaves, placed))
    if is_moved:
        args, kwargs = arguments.with_leaves(placed)
    try:
        results = program.run(*args, **kwargs)
    except FoundNaN as error:
        if not program.is_single_process:
            raise FloatingPointError(f"{transformed.full_name}: {error}") from None
        return find_nan(transformed, args, kwargs), None
    if program.process_local is not None and program.process_local.results is not None:
        arrays, tree = jax.tree.flatten(results)
        local = map(to_local, arrays, program.process_local.results)
        results = jax.tree.unflatten(tree, local)
    return results, program if program.is_single_process and not is_moved else None


def run_on_set_mesh(transformed: Transformed, args: Args, kwargs: Kwargs) -> PyTree:
    """Runs a call on the devices of `jax.set_mesh`, as `jax.jit` does."""
    devices = tuple(set_mesh.current_mesh_devices())
    args, kwargs = set_mesh.device_put((tuple(args), kwargs))
    program = transformed.programs.get(devices)
    if program is None:
        # JAX mistakes a keyword argument for all of them if they have one name.
        def run(*_args: PyTree, **_kwargs: PyTree) -> PyTree:
            return transformed.bind(_args, _kwargs)

        run.__name__ = run.__qualname__ = transformed.name
        program = running.map_jit(
            run,
            devices,
            donate_argnums=transformed.donate_argnums,
            donate_argnames=transformed.donate_argnames,
        )
        program = caches.keep(transformed.programs, devices, program)
    return set_mesh.device_put(program(*args, **kwargs))


@api_boundary
def find_nan(transformed: Transformed, args: Args, kwargs: Kwargs) -> PyTree:
    """Runs a call operation by operation, as `jax.jit` does, to name the NaN."""
    arrays = jax.tree.leaves((args, kwargs))
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
        raise FloatingPointError(
            f"{transformed.full_name} has a NaN or an infinity in its "
            "results, and took the memory of donated arguments, so it cannot run again "
            "to tell which operation gives it. Leave donate_argnums out to find that."
        )
    return transformed.bind(args, kwargs)


def may_donate(args: Args) -> bool:
    """Whether no array is deleted or passed twice; either can end the process."""
    leaves = jax.tree.leaves(args)
    return len(set(map(id, leaves))) == len(leaves) and not any(map(_is_gone, leaves))


def _is_gone(leaf: Any) -> bool:
    try:  # For each leaf of each call: isinstance takes as long as the rest.
        return bool(leaf.is_deleted())
    except AttributeError:
        return False


def check_donated(
    transformed: Transformed, program: CompiledCall, arguments: Arguments
) -> None:
    """Checks that arrays are not deleted, and donated ones are passed once."""
    leaves = arguments.leaves
    if gone := [k for k, leaf in enumerate(leaves) if _is_gone(leaf)]:
        raise RuntimeError(
            f"{transformed.full_name}: Array has been deleted: "
            f"{transformed.leaf_names(arguments)[gone[0]]}. Its memory was donated to "
            "an earlier call, or freed; use what that call returned."
        )
    counts = collections.Counter(map(id, leaves))
    for k, leaf in enumerate(leaves):
        if program.donated[k] and counts[id(leaf)] > 1 and isinstance(leaf, jax.Array):
            names = transformed.leaf_names(arguments)
            same = [names[j] for j, other in enumerate(leaves) if other is leaf]
            raise ValueError(
                f"{transformed.full_name}: {names[k]} is donated, and the same array "
                f"is passed more than once, as {', '.join(same)}. Pass a copy, such as "
                "x.copy()."
            )


# Compiling


def check_devices(transformed: Transformed, call: Call) -> None:
    """Refuses to lower a call over an abstract mesh."""
    if not call.devices:
        raise ValueError(
            f"{transformed.full_name} cannot run on an AbstractMesh, which has no "
            "devices. Give it a jax.sharding.Mesh: shardmap.make_mesh makes one."
        )


def _compiled(transformed: Transformed, call: Call) -> CompiledCall:
    check_devices(transformed, call)
    # All processes make this call, before it is lowered.
    agreement.agree(
        call.mesh,
        transformed.full_name,
        lambda: f"{transformed.name}, {call.description()}",
    )
    assert call.shardings is not None
    arguments, emit = call.arguments, call.emit
    donated = arguments.donated(transformed.donate_argnums, transformed.donate_argnames)

    def run(*leaves: Value) -> list[Value]:
        return list(emit(*leaves))

    program = running.compiled(
        jit_call(
            transformed,
            run,
            call,
            list(call.shardings.results),
            donate_argnums=[k for k, donate in enumerate(donated) if donate],
        ),
        call.structs(),
        call.devices,
        arguments.in_tree,
        call.out_tree,
    )
    local = call.process_local
    is_single_process = local is None and not processes.spans_processes(call.devices)
    return CompiledCall(
        program, call.shardings.operands, donated, local, is_single_process
    )


def jit_call(
    transformed: Transformed,
    run: Callable[..., Any],
    call: Call,
    out_shardings: PyTree,
    static_argnums: tuple[int, ...] = (),
    **options: Any,
) -> jax.stages.Wrapped:
    """`jax.jit` of a function that binds a call, for its devices."""
    args, kwargs = call.arguments.with_leaves(call.arguments.leaves)
    trace_as(run, "jit", transformed.fun(), args, kwargs, static_argnums)
    # Over an abstract mesh a call is only traced.
    if call.mesh is not None and call.shardings is not None and call.devices:
        noted = config_value("jax_log_compiles")
        logging.getLogger("shardmap").log(
            logging.WARNING if noted else logging.DEBUG,
            "shardmap: compiling %s: mesh %s, devices %s, arguments (%s)",
            transformed.name,
            dict(call.mesh.shape),
            [device.id for device in call.devices],
            ", ".join(map(str, call.in_avals)),
        )
        options["out_shardings"] = out_shardings
        if out_shardings is None or len(call.mesh.axis_names) > 1:
            run = _with_constraints(run, call.shardings.results)
        options["compiler_options"] = running.compiler_options(call.devices)
    run.__name__ = run.__qualname__ = transformed.name
    return jax.jit(run, static_argnums=static_argnums, **options)


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
