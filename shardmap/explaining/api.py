"""`explain`: what runs in parallel, where arrays are, what moves, what it costs."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, overload, runtime_checkable

import jax
import numpy as np
from jax.extend.core.primitives import cond_p
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardmap._jax import api_boundary
from shardmap._jax.context import check_live
from shardmap._jax.errors import explained_errors
from shardmap._jax.hlo import compiled_with_protos
from shardmap._jax.primitives import vmaps_around
from shardmap._jax.stages import is_compile_only
from shardmap._jax.types import Value
from shardmap._jax.walk import equations
from shardmap.arrays import array_likes
from shardmap.explaining import elsewhere
from shardmap.explaining.chips import CHIPS, capacity_of, machine_of, wiring_of
from shardmap.explaining.explanation import Explanation
from shardmap.explaining.interconnect import Interconnect, interconnect_of
from shardmap.explaining.read import arrays, remarks
from shardmap.explaining.read.hlo.collectives import compiled_collectives, unseen
from shardmap.explaining.read.hlo.cost import (
    busiest_lines,
    cost_of,
    loops_of,
    memory_of,
    products_of,
    read_bytes,
)
from shardmap.explaining.read.hlo.loops import steps_of
from shardmap.explaining.read.hlo.module import Message, Module
from shardmap.explaining.read.hlo.sources import Sources
from shardmap.explaining.read.visitor import (
    CHUNKED,
    Facts,
    VmapAxis,
    facts_of,
    marked,
    vmaps_over,
)
from shardmap.explaining.report import Collective, Cost
from shardmap.map.primitives.axis import REPLICAS
from shardmap.source import definition_of
from shardmap.units import shown


@runtime_checkable
class Plan(Protocol):
    """A plan, which has a method to explain it."""

    @property
    def num_shards(self) -> int: ...

    def explain(self) -> Any: ...


@overload
def explain(
    fun: Plan, *, interconnect: str | Interconnect | None = None
) -> Explanation: ...


@overload
def explain(
    fun: Callable[..., Any],
    *,
    interconnect: str | Interconnect | None = None,
    devices: str | Sequence[jax.Device] | None = None,
) -> Callable[..., Explanation]: ...


def explain(
    fun: Any,
    *args: Any,
    interconnect: str | Interconnect | None = None,
    devices: str | Sequence[jax.Device] | None = None,
) -> Callable[..., Explanation] | Explanation:
    """Explains what runs in parallel in a function, where arrays are, and what moves.

    The function is compiled as for a call, but does not run. It may be any function of
    arrays, with `spmap`, `mesh_map`, `jax.vmap`, `jax.jit`, `jax.shard_map`, `jax.pmap`
    and loops anywhere in it. A function that is not jitted is explained as `jax.jit`
    would run it.

    * Axes are read from the jaxpr, which does not contain those of `jax.vmap`. A second
      trace finds those of vmaps over the arguments of ``fun``; others are left out.
    * Collectives are read from the compiled program. Those that only the compiler added
      are marked.
    * A program over a `jax.sharding.AbstractMesh` needs ``devices``, as many as that.

    Args:
      fun: the function. A plan is accepted too, and explained immediately: what became
        of each cut, and its stages.
      interconnect: what joins the devices, for the least time of collectives: a name
        in ``Interconnect.KNOWN``, such as ``"nvlink4"``, or an `Interconnect`. On
        several slices of TPUs or hosts with GPUs it is the network between them.
        Default: that of the kind of device, if it is known; between hosts with GPUs,
        400 Gb/s for each GPU.
      devices: the devices to compile for: a machine that need not be here, such as
        ``"v5e:16x16"`` (see `devices`), or a list of devices. Maps, `make_mesh` and
        `sharded_jit` use them where the program names no devices, and so does a program
        on one device. Arguments are global, and only their shapes count. Default: the
        devices on which the program runs.

    Returns:
      A function that takes the arguments of ``fun``, arrays or `jax.ShapeDtypeStruct`,
      and returns an `Explanation`: print it, save it as a page with
      ``save("report.html")``, or read its fields.

    Raises:
      TypeError: ``fun`` is not callable.
      ValueError: no interconnect or machine has this name; or, when called, the program
        names other devices than ``devices``, or the interconnect is of another chip.
      ImportError: the compiler of ``devices`` is not installed.

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
    fun, given = _as_function(fun), interconnect_of(interconnect)
    there = elsewhere.devices_of(devices)

    @functools.wraps(fun)
    @api_boundary
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        return explanation_for(fun, given, there, args, kwargs)

    return explained


def _as_function(fun: Any) -> Any:
    """Wraps a bound method, whose ``lower`` and ``trace`` belong to the function.

    And a function of NumPy, which `jax.jit` does not take.
    """
    if not inspect.ismethod(fun) and not isinstance(fun, np.ufunc):
        return fun
    bound: Any = functools.partial(fun)
    bound.__name__ = fun.__name__
    return bound


def explanation_for(
    fun: Any,
    given: Interconnect | None,
    there: Sequence[jax.Device],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_quick: bool = False,
) -> Explanation:
    """The explanation of a call, compiled in full or with few optimizations."""
    with_path = jax.tree_util.tree_map_with_path
    is_jitted = isinstance(fun, jax.stages.Wrapped)
    args = with_path(functools.partial(_as_array, is_jitted, "args"), args)
    kwargs = with_path(functools.partial(_as_array, is_jitted, "kwargs"), kwargs)
    if there:
        args, kwargs = elsewhere.unplaced(fun, args, kwargs, there)
    # Facts of the jaxpr.
    with elsewhere.traced_for(there):
        traced = _trace(fun, args, kwargs)
        facts = facts_of(traced.jaxpr.jaxpr, definition_of(fun))
        vmaps = _vmaps(fun, traced, args, kwargs)
    if there:
        traced = elsewhere.moved(traced, there)
    meshes = arrays.meshes_of(traced.jaxpr.jaxpr, (args, kwargs))
    if abstract := [mesh for mesh in meshes if isinstance(mesh, AbstractMesh)]:
        count = abstract[0].size
        raise ValueError(
            f"the program is over an abstract mesh of {count:,} devices. Give explain "
            "devices= to compile it for, as many: a machine such as 'v5e:4x4', or a "
            "list of devices."
        )
    # Facts of the compiled program.
    if there:
        lowered = elsewhere.lowered_for(there, traced)
    else:
        lowered = _lower(fun, traced, args, kwargs)
    compiled, record, buffers = compiled_with_protos(lowered, is_quick)
    module = Module(record or Message(buffers).data(1))
    sources = Sources(module)
    layouts_of_arrays, layouts = arrays.array_layouts(traced, compiled)
    # Both together.
    named = [each.mesh for each in layouts if isinstance(each, NamedSharding)]
    mesh = max([*named, *meshes], key=lambda mesh: mesh.size, default=None)
    sizes = {} if mesh is None else mesh.shape
    # A map has this axis even without replicas of its elements.
    mesh_axes = tuple(each for each in sizes.items() if each != (REPLICAS, 1))
    cuts = [arrays.axis_sizes(layout) for layout in layouts]
    axes = arrays.with_devices(facts.axes, vmaps, cuts, facts.constraints, mesh_axes)
    arguments = arrays.sharded_arguments(layouts_of_arrays, cuts)
    collectives = compiled_collectives(module, sources, mesh_axes, arguments)
    counts = [each.num_devices for each in layouts if isinstance(each, Sharding)]
    num_devices = max([1, *counts, *(mesh.size for mesh in meshes)])
    devices = arrays.devices_of(layouts, meshes, there)
    device = devices[0]
    wires = wiring_of(given, devices)
    collectives = [each.on(wires) for each in collectives]
    # Devices that only compile belong to no process.
    available = machine = None
    if is_compile_only(device):
        machine = machine_of(there or devices)
    else:
        available = len(jax.local_devices(backend=device.platform))
    capacity = capacity_of(device)
    memory = memory_of(buffers, module, sources, device.platform)
    cost = cost_of(compiled, module, memory.peak)
    idle = arrays.idle_mesh_axes(mesh_axes, axes, cuts)
    pieces, stages = (), ()
    is_chunked = hasattr(fun, "explain") and not hasattr(fun, "lower")
    if CHUNKED in facts.primitives and is_chunked:
        cut = fun.explain(*args, **kwargs)
        pieces, stages = cut.pieces, cut.stages
    return Explanation(
        name=getattr(fun, "__name__", type(fun).__name__),
        mesh=mesh_axes,
        mesh_devices=arrays.ids_of(mesh.devices.flat if isinstance(mesh, Mesh) else ()),
        num_devices=num_devices,
        device_kind=device.device_kind,
        axes=axes,
        arrays=layouts_of_arrays,
        collectives=tuple(collectives),
        cost=cost,
        interconnect=wires and wires.inside,
        network=wires and wires.between,
        remarks=(
            *remarks.too_large(
                None if compiled else memory.peak, capacity, layouts_of_arrays
            ),
            *remarks.idle_devices(axes, num_devices, available),
            *remarks.unsharded_batch(layouts_of_arrays, idle),
            *remarks.short_axes(axes),
            *remarks.copies(layouts_of_arrays, cost.peak_bytes),
            *remarks.constants(traced.jaxpr.consts, num_devices),
            *remarks.unrolled(traced.jaxpr),
            *remarks.of_collectives(collectives, device.platform),
        ),
        notes=tuple(_notes(facts, module, bool(collectives))),
        pieces=pieces,
        stages=stages,
        largest=memory.largest,
        busiest=busiest_lines(module, sources),
        available=available,
        machine=machine,
        capacity=capacity,
        least_times=_least_times(device, module, cost, collectives),
        call=(fun, any(each.donated for each in jax.tree.leaves(traced.args_info))),
    )


def _least_times(
    device: jax.Device, module: Module, cost: Cost, collectives: Sequence[Collective]
) -> tuple[tuple[str, float], ...]:
    """The least time of a call by each of what a device does; see `Explanation`."""
    chip = CHIPS.get(device.device_kind)
    if chip is None or not chip.memory_bandwidth or cost.argument_bytes is None:
        return ()
    # Values on the chip count as accessed, too. XLA for GPUs counts nothing.
    moved = read_bytes(module.entry) + (cost.output_bytes or 0)
    if cost.bytes_accessed is not None:
        moved = min(moved, round(cost.bytes_accessed))
    times = {
        "arithmetic": chip.seconds(products_of(module.entry)),
        "memory": moved / chip.memory_bandwidth,
        "interconnect": sum(each.seconds or 0 for each in collectives),
    }
    return tuple(sorted(times.items(), key=lambda each: -each[1]))


def _trace(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Traces the function as a call does: by itself, or by `jax.jit`."""
    if not isinstance(fun, jax.stages.Wrapped):
        fun = jax.jit(fun)
    with explained_errors():
        traced = fun.trace(*args, **kwargs)
        # The stages of a library, such as `flax.nnx.jit`, hold those of JAX.
        traced = getattr(traced, "traced", traced)
        if len(traced.jaxpr.in_avals) > len(jax.tree.leaves(traced.args_info)):
            # A tracer that has left its trace is an argument, too, till the run.
            check_live(jax.make_jaxpr(fun)(*args, **kwargs).consts)
    return traced


def _lower(
    fun: Any, traced: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    # A map over several processes knows which of them lower it; its trace does not.
    if not hasattr(fun, "lower"):
        return traced.lower()
    lowered = fun.lower(*args, **kwargs)
    return getattr(lowered, "lowered", lowered)


def _vmaps(
    fun: Callable[..., Any], traced: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[VmapAxis]:
    """The vmaps over the arguments, for which the function is traced again."""
    if not any(map(vmaps_around, equations(traced.jaxpr.jaxpr))):
        return []
    marks = marked((args, kwargs))
    try:
        traced = _trace(fun, *marks)
    except Exception:  # A user's, of any type: it looked for an array and saw a mark.
        return []
    return vmaps_over(traced.jaxpr.jaxpr, definition_of(fun))


def _notes(facts: Facts, module: Module, has_collectives: bool) -> list[str]:
    """Notes on what is unknown or partly known."""
    notes = []
    if loops := loops_of(module):
        notes.append(
            "Bytes read and written count the steps of a loop once, operations all."
        )
    if any(steps_of(loop) is None for loop in loops):
        notes.append(
            "The steps of a loop whose length only the running program knows count as "
            "one."
        )
    notes += unseen(module)
    if has_collectives and cond_p.name in facts.primitives:
        notes.append(
            "Collectives in a branch count as if the branch were always taken."
        )
    return notes


def _as_array(is_jitted: bool, group: str, path: tuple[Any, ...], leaf: Value) -> Any:
    """Replaces an array of another library by its shape and dtype."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | complex | float | int):
        return leaf
    try:
        aval = array_likes.abstract_value(leaf)
    except TypeError:
        why = array_likes.refusal(leaf)
        if why is None and is_jitted:
            return leaf  # A static argument, perhaps.
        raise TypeError(
            f"explain argument {group}{jax.tree_util.keystr(path)} "
            + (why or f"is {shown(leaf)}, no array: fix it with functools.partial")
        ) from None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
