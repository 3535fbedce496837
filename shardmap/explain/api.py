"""`explain`: what runs in parallel, where arrays are, what moves, what it costs."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax
from jax.extend.core.primitives import cond_p

from shardmap._jax.types import Value
from shardmap.arrays import array_likes
from shardmap.explain import functions
from shardmap.explain.explanation import Explanation, PlanExplanation
from shardmap.explain.interconnect import Interconnect
from shardmap.explain.interconnect import interconnect as interconnect_named
from shardmap.explain.program import Program, program_of
from shardmap.explain.read import loops, sharded, vmaps
from shardmap.explain.read.axes import Axes, axes_of
from shardmap.explain.read.collectives import collectives_of, has
from shardmap.explain.read.hlo.vectorised import Shapes
from shardmap.explain.read.remarks.on_program import remarks_on
from shardmap.explain.read.sent import Sent, collective, missing, rematerialised
from shardmap.explain.read.source import definition_of
from shardmap.explain.report import Axis, Remark
from shardmap.plan.inside.primitive import chunked_p
from shardmap.units import shown


@overload
def explain(
    fun: functions.Plan, *, interconnect: str | Interconnect | None = None
) -> PlanExplanation: ...


@overload
def explain(
    fun: Callable[..., Any], *, interconnect: str | Interconnect | None = None
) -> Callable[..., Explanation]: ...


def explain(
    fun: Any, *, interconnect: str | Interconnect | None = None
) -> Callable[..., Explanation] | PlanExplanation:
    """Explains how a function runs: in parallel, vectorised, in a loop; at what cost.

    The function is traced, more than once perhaps, and compiled as a call would do, but
    not run. It is one that `spmap`, `mesh_map`, `jax.vmap`, `jax.jit`, `jax.shard_map`
    or `jax.pmap` gave, or any other of arrays, with these and loops anywhere in it;
    what is not jitted is explained as `jax.jit` would run it.

    * Axes are read from the jaxpr. Of a `jax.vmap` in the middle of a program JAX keeps
      that it was there, not its size, which is deduced from the shapes or left open.
    * Collectives are read from the compiled program; what only the compiler put in is
      marked. Those of the program that it merged or removed are counted in a note.
    * Times are estimates, by the formulas of `Interconnect.time`.
    * Over a `jax.sharding.AbstractMesh`, of any size, nothing is compiled: collectives
      are read from the jaxpr, and what only the compiler knows is None.

    Args:
      fun: the function; or what `plan` gave, which is explained at once: what becomes
        of each cut, and its stages.
      interconnect: what joins the devices, for times: the name of one in
        ``Interconnect.KNOWN``, such as ``"nvlink4"``, or an `Interconnect` of your own
        numbers. Default: no times.

    Returns:
      A function that takes what ``fun`` takes, arrays or `jax.ShapeDtypeStruct`, and
      gives an `Explanation`: print it, ``save("report.html")`` it, or read its fields.

    Raises:
      TypeError: ``fun`` is not callable.
      ValueError: no interconnect has that name.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> mean = sm.spmap(lambda x: x - jax.lax.pmean(x, "i"), "i")
      >>> report = sm.explain(mean)(np.ones((32, 4), np.float32))
      >>> print(report.axes[0])
      axis 'i' of 32 = 8 devices x 4 vectorised x 1 step
      >>> [(each.kind, each.bytes_in) for each in report.collectives]
      [('all-reduce', 16)]
    """
    if isinstance(fun, functions.Plan):
        title = str(fun).splitlines()[0]
        return PlanExplanation(title, fun.explain(), fun.stage_costs)
    if not callable(fun):
        raise TypeError(
            f"explain takes a function, got {shown(fun)} of type {type(fun).__name__}: "
            "write explain(fun)(*args)"
        )
    wires = interconnect_named(interconnect)
    fun = _as_function(fun)

    @functools.wraps(fun)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        return _explain(fun, wires, args, kwargs)

    return explained


def _as_function(fun: Callable[..., Any]) -> Any:
    """A bound method as a function: its attributes are those of the unbound one."""
    if not inspect.ismethod(fun):
        return fun

    def bound(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    bound.__name__ = fun.__name__
    # Where `inspect.signature` looks first, which `jax.jit` asks for names.
    vars(bound)["__signature__"] = inspect.signature(fun)
    return bound


def _explain(
    fun: Callable[..., Any],
    wires: Interconnect | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Explanation:
    args, kwargs = jax.tree.map(_as_array, (args, kwargs))
    program = program_of(fun, args, kwargs)
    cuts = sharded.cuts_of(program.arrays, program.layouts, program.meshes)
    axes = _axes(program, cuts)
    sent, notes = _sent(program)
    return Explanation(
        name=getattr(fun, "__name__", type(fun).__name__),
        mesh=program.mesh,
        devices=program.devices,
        num_devices=program.num_devices,
        device_kind=program.device_kind,
        axes=axes,
        arrays=program.arrays,
        collectives=tuple(collective(each, wires) for each in sent),
        cost=program.cost,
        interconnect=wires,
        remarks=_remarks(program, axes, cuts, sent),
        notes=tuple(notes),
        pieces=functions.cuts(fun, args, kwargs),
        stages=functions.stages(fun, args, kwargs),
        largest=program.largest,
        available=program.available,
        call=(fun, program.donates),
    )


def _sent(program: Program) -> tuple[Sequence[Sent], list[str]]:
    """What goes between devices, and notes on what is not known.

    These are XLA's collectives where the program is compiled.
    """
    of_program = collectives_of(
        program.jaxpr, definition_of(program.fun), partitioned=program.is_abstract
    )
    notes = program.notes()
    sent = of_program
    if not program.is_abstract:
        sent = program.collectives
        notes += missing(of_program, sent)
    if sent and has(program.jaxpr, cond_p):
        notes.append(
            "Collectives in a branch count as if the branch were always taken."
        )
    return sent, notes


def _remarks(
    program: Program,
    axes: Sequence[Axis],
    cuts: Sequence[sharded.ShardedDimension],
    sent: Sequence[Sent],
) -> tuple[Remark, ...]:
    closed, count = program.traced.jaxpr, program.num_devices
    return (
        *sharded.looped(axes, cuts),
        *remarks_on(closed, axes, program.arrays, count, program.available),
        *loops.slowest(axes),
        *rematerialised(sent),
    )


def _axes(
    program: Program, cuts: Sequence[sharded.ShardedDimension]
) -> tuple[Axis, ...]:
    """The axes, and what devices they are on."""
    axes, made, over = _axes_of(program)
    paths = [array.path for array in program.arrays]
    axes = tuple(
        dataclasses.replace(axis, over=tuple(paths[k] for k in sorted(over.get(n, ()))))
        for n, axis in enumerate(axes)
    )
    shards: dict[int, list[int]] = {}
    if made and program.module is not None:
        shapes = Shapes(program.module)
        for number, those in made.items():
            axis = axes[number]
            size = axis.size if axis.kind == "vmap" else axis.vectorised
            shards[number] = [] if size is None else shapes.cuts(those, size)
    asked = sharded.constraints_in(program.jaxpr, program.meshes)
    return sharded.with_devices(axes, [*cuts, *asked], shards, program.mesh)


def _axes_of(program: Program) -> Axes:
    """The axes, with as many sizes of vmaps as marks on the arguments bring out."""
    source = definition_of(program.fun)
    best = axes_of(program.jaxpr, source)
    # Marks would keep a function in pieces from being cut.
    in_pieces = has(program.jaxpr, chunked_p)
    if in_pieces or not any(axis.kind == "vmap" for axis in best.axes):
        return best
    # The first layer comes off before the function sees it.
    for layers in range(2, vmaps.MOST_LAYERS + 1):
        marked = vmaps.marked((program.args, program.kwargs), layers)
        try:
            traced = functions.traced(program.fun, *marked)
        except Exception:
            # Somebody looked for an array and found a mark: the marks end here.
            break
        best = axes_of(traced.jaxpr.jaxpr, source)
    return best


def _as_array(leaf: Value) -> Any:
    """Arrays of other libraries by their shape; the rest as it is."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | complex | float | int):
        return leaf
    try:
        return _struct(leaf)
    except TypeError:
        return leaf  # A static argument, perhaps.


def _struct(leaf: Value) -> Any:
    aval = array_likes.leaf_aval(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
