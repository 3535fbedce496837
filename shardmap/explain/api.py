"""`explain`: what runs in parallel, where arrays are, what moves, what it costs."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, overload, runtime_checkable

import jax

from shardmap._jax.types import Value
from shardmap.arrays import array_likes
from shardmap.explain.explanation import Explanation
from shardmap.explain.interconnect import Interconnect
from shardmap.explain.interconnect import interconnect as interconnect_named
from shardmap.explain.program import Lowerable, Program, program_of
from shardmap.explain.read import remarks, sharded
from shardmap.explain.report import Axis, Remark
from shardmap.units import shown


@runtime_checkable
class Plan(Protocol):
    """A plan explains itself."""

    @property
    def num_shards(self) -> int: ...

    def explain(self) -> Any: ...


@runtime_checkable
class InPieces(Protocol):
    """A function in pieces, which explains how a call is cut."""

    def explain(self, *args: Any, **kwargs: Any) -> Any: ...

    def stage_costs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...


@overload
def explain(
    fun: Plan, *, interconnect: str | Interconnect | None = None
) -> Explanation: ...


@overload
def explain(
    fun: Callable[..., Any], *, interconnect: str | Interconnect | None = None
) -> Callable[..., Explanation]: ...


def explain(
    fun: Any, *args: Any, interconnect: str | Interconnect | None = None
) -> Callable[..., Explanation] | Explanation:
    """Explains what runs in parallel in a function, where arrays are, and what moves.

    The function is compiled as for a call, but does not run. It may be any function of
    arrays, with `spmap`, `mesh_map`, `jax.vmap`, `jax.jit`, `jax.shard_map`, `jax.pmap`
    and loops anywhere in it. A function that is not jitted is explained as `jax.jit`
    would run it.

    * Axes are read from the jaxpr, which does not contain the names and sizes of
      `jax.vmap`. A second trace finds those of vmaps over the arguments of ``fun``;
      others are unknown.
    * Collectives are read from the compiled program. Those that only the compiler added
      are marked, and a note counts those that it merged or removed.
    * Times are estimates; see `Interconnect.time`.
    * With a `jax.sharding.AbstractMesh`, nothing is compiled: collectives are read from
      the jaxpr, and fields that need the compiler are None.

    Args:
      fun: the function. A plan is accepted too, and explained immediately: what became
        of each cut, and its stages.
      interconnect: for estimates of times: a name in ``Interconnect.KNOWN``, such as
        ``"nvlink4"``, or an `Interconnect`. Default: no times.

    Returns:
      A function that takes the arguments of ``fun``, arrays or `jax.ShapeDtypeStruct`,
      and returns an `Explanation`: print it, save it as a page with
      ``save("report.html")``, or read its fields.

    Raises:
      TypeError: ``fun`` is not callable.
      ValueError: no interconnect has this name.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> mean = sm.spmap(lambda x: x - jax.lax.pmean(x, "i"), "i")
      >>> report = sm.explain(mean)(np.ones((32, 4), np.float32))
      >>> print(report.axes[0])
      axis 'i' of 32 = 8 devices x 4 vectorised x 1 step
      >>> [(each.kind, each.bytes_in) for each in report.collectives]
      [('all-reduce', 16)]
    """
    if isinstance(fun, Plan):
        explanation: Explanation = fun.explain()
        return explanation
    if not callable(fun):
        raise TypeError(
            f"explain takes a function, got {shown(fun)} of type {type(fun).__name__}: "
            "write explain(fun)(*args)"
        )
    if args:
        name = getattr(fun, "__name__", "fun")
        raise TypeError(
            f"explain takes only the function: write "
            f"explain({name})(x), not explain({name}, x)"
        )
    wires = interconnect_named(interconnect)
    fun = _as_function(fun)

    @functools.wraps(fun)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        return _explain(fun, wires, args, kwargs)

    return explained


def _as_function(fun: Callable[..., Any]) -> Any:
    """Wraps a bound method, whose attributes are those of the unbound one."""
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
    cuts = sharded.sharded_dimensions(program.arrays, program.layouts, program.meshes)
    axes = _axes(program, cuts)
    pieces, stages = (), ()
    if isinstance(fun, InPieces) and not isinstance(fun, Lowerable):
        cut = fun.explain(*args, **kwargs)
        pieces, stages = cut.pieces, cut.stages
    return Explanation(
        name=getattr(fun, "__name__", type(fun).__name__),
        mesh=program.mesh,
        devices=program.devices,
        num_devices=program.num_devices,
        device_kind=None if program.device is None else program.device.device_kind,
        axes=axes,
        arrays=program.arrays,
        collectives=tuple(each.on(wires) for each in program.collectives),
        cost=program.cost,
        interconnect=wires,
        remarks=_remarks(program, axes, cuts),
        notes=tuple(program.notes()),
        pieces=pieces,
        stages=stages,
        largest=program.largest,
        available=program.available,
        call=(fun, program.donates),
    )


def _remarks(
    program: Program, axes: Sequence[Axis], cuts: Sequence[sharded.ShardedDimension]
) -> tuple[Remark, ...]:
    """The remarks, idle devices first."""
    count, available = program.num_devices, program.available
    idle = sharded.idle_mesh_axes(program.mesh, axes, cuts)
    return (
        *remarks.idle_devices(axes, count, available),
        *remarks.unsharded_batch(program.arrays, idle),
        *remarks.short_axes(axes, available),
        *remarks.copies(program.arrays),
        *remarks.constants(program.traced.jaxpr.consts, count),
        *remarks.outside(program.traced.jaxpr, count),
        *remarks.looped(axes, cuts),
        *remarks.slowest(axes),
        *remarks.rematerialised(program.collectives),
    )


def _axes(
    program: Program, cuts: Sequence[sharded.ShardedDimension]
) -> tuple[Axis, ...]:
    """The axes, with the devices that they run on."""
    facts = program.facts
    paths = [array.path for array in program.arrays]
    over = {
        number: {(paths[argument], dimension) for argument, dimension in those}
        for number, those in facts.over.items()
    }
    axes = list(facts.axes)
    for number, those in facts.over.items():
        arguments = sorted({argument for argument, _ in those})
        found = tuple(paths[argument] for argument in arguments)
        axes[number] = dataclasses.replace(axes[number], over=found)
    asked = sharded.constrained(facts.constraints, program.meshes)
    return sharded.with_devices(axes, cuts, asked, over, program.mesh)


def _as_array(leaf: Value) -> Any:
    """Replaces an array of another library by its shape and dtype."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | complex | float | int):
        return leaf
    try:
        return _struct(leaf)
    except TypeError:
        return leaf  # A static argument, perhaps.


def _struct(leaf: Value) -> Any:
    aval = array_likes.leaf_aval(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
