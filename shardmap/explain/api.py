"""`explain`: what runs in parallel, where arrays are, what moves, what it costs."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import jax
from jax.extend.core.primitives import cond_p
from jax.sharding import AbstractMesh

from shardmap._jax.context import left_whole
from shardmap._jax.types import Jaxpr, Value
from shardmap.arrays import array_likes, trees
from shardmap.explain import functions
from shardmap.explain.explanation import Explanation, PlanExplanation
from shardmap.explain.interconnect import Interconnect
from shardmap.explain.interconnect import interconnect as interconnect_named
from shardmap.explain.read import arrays, loops, sharded, vmaps
from shardmap.explain.read.axes import axes_of
from shardmap.explain.read.collectives import collectives_of, has
from shardmap.explain.read.compiled import cost_of, layouts_of
from shardmap.explain.read.hlo import threads
from shardmap.explain.read.hlo.collectives import compiled_collectives
from shardmap.explain.read.hlo.cost import Loops, Work, loops_of
from shardmap.explain.read.hlo.live import largest_at_peak
from shardmap.explain.read.hlo.text import Module, module_of
from shardmap.explain.read.matching import reported
from shardmap.explain.read.meshes import axes_of_meshes, device_of, meshes_of
from shardmap.explain.read.remarks.on_program import remarks_on
from shardmap.explain.read.remarks.rematerialised import rematerialised
from shardmap.explain.read.remarks.unrolled import unrolled
from shardmap.explain.read.source import definition_of
from shardmap.explain.report import ArrayLayout, Axis, Cost


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
    * Collectives are read from the jaxpr, and checked against the compiled program;
      what only the compiler put in is marked.
    * Times are estimates, by the formulas of `Interconnect.time`.
    * Over a `jax.sharding.AbstractMesh`, of any size, nothing is compiled: what only
      the compiler knows is None.

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
            f"explain takes a function, got {fun!r} of type {type(fun).__name__}: "
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


@left_whole()
def _explain(
    fun: Callable[..., Any],
    wires: Interconnect | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Explanation:
    args, kwargs = jax.tree.map(_as_array, (args, kwargs))
    traced = functions.traced(fun, args, kwargs)
    jaxpr = traced.jaxpr.jaxpr
    meshes = meshes_of(jaxpr, (args, kwargs))
    made = _program(fun, traced, meshes, args, kwargs)
    layouts = [*made.layouts_in, *made.layouts_out]
    described = _arrays(fun, traced, made, len(args))
    cuts = sharded.cuts_of(described, layouts)
    axes = sharded.with_devices(_axes(fun, args, kwargs, jaxpr), cuts)
    num_devices = max(
        [1, *map(arrays.device_count, layouts), *(m.size for m in meshes)]
    )
    device = None if made.is_abstract else device_of(layouts, meshes)
    available = (
        None if device is None else len(jax.local_devices(backend=device.platform))
    )
    mesh = axes_of_meshes(meshes, layouts)
    module = made.module
    of_program = collectives_of(jaxpr)
    of_compiled = None if module is None else compiled_collectives(module, mesh)
    sent, of_sent = reported(of_program, of_compiled, wires)
    by_partitioner = any(each.by_partitioner for each in of_program)
    notes = [*_notes(made, by_partitioner), *of_sent]
    if sent and has(jaxpr, cond_p):
        notes.append(
            "Collectives in a branch count as if the branch were always taken."
        )
    return Explanation(
        name=getattr(fun, "__name__", type(fun).__name__),
        mesh=mesh,
        num_devices=num_devices,
        device_kind=None if device is None else device.device_kind,
        axes=axes,
        arrays=described,
        collectives=sent,
        cost=made.cost,
        interconnect=wires,
        remarks=(
            *sharded.looped(axes, cuts),
            *remarks_on(traced.jaxpr, axes, described, num_devices, available),
            *loops.slowest(axes),
            *unrolled(jaxpr),
            *rematerialised(of_compiled or ()),
        ),
        notes=(*notes, *functions.cuts(fun, args, kwargs)),
        largest=() if module is None else largest_at_peak(module),
        available=available,
        call=(
            fun,
            any(info.donated for info in jax.tree.leaves(traced.args_info)),
        ),
        threads=None
        if device is None or module is None
        else threads.sentence(module, device.platform),
    )


class _Program(NamedTuple):
    """What becomes of a function.

    Attributes:
      layouts_in, layouts_out: where its arguments and results lie.
      is_abstract: whether its devices are not known, so that nothing is compiled.
      module: what was compiled; None without, or where there is no text of it.
      cost: what it takes.
      steps: how often its loops run.
    """

    layouts_in: Sequence[Any]
    layouts_out: Sequence[Any]
    is_abstract: bool
    module: Module | None = None
    cost: Cost | None = None
    steps: Loops | None = None


def _program(
    fun: Callable[..., Any],
    traced: Any,
    meshes: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> _Program:
    if any(isinstance(mesh, AbstractMesh) for mesh in meshes):
        if isinstance(fun, functions.HasShardings):
            return _Program(*fun.shardings(args, traced.out_info), True)
        return _Program(*arrays.shardings_in(traced.jaxpr.jaxpr), True)
    lowered = functions.lowered(fun, traced, args, kwargs)
    compiled = lowered.compile()
    text = compiled.as_text()
    module = module_of(text) if text else None
    steps = Loops(Work(1, 1, 1), False) if module is None else loops_of(module)
    layouts = layouts_of(lowered, compiled, traced)
    return _Program(*layouts, False, module, cost_of(compiled, steps), steps)


def _arrays(
    fun: Callable[..., Any], traced: Any, made: _Program, count: int
) -> tuple[ArrayLayout, ...]:
    """Where each argument, of which ``count`` are positional, and each result lies."""
    argnums = functions.array_argnums(fun, count)
    return (
        *arrays.array_layouts(
            "input",
            arrays.input_names(fun, traced.args_info, argnums),
            jax.tree.leaves(traced.args_info),
            made.layouts_in,
        ),
        *arrays.array_layouts(
            "output",
            trees.result_names(jax.tree.structure(traced.out_info)),
            jax.tree.leaves(traced.out_info),
            made.layouts_out,
        ),
    )


def _notes(made: _Program, by_partitioner: bool) -> list[str]:
    """What is not known, or is known in part."""
    notes = []
    if made.is_abstract:
        notes.append(
            "Nothing was compiled: the mesh is abstract. Collectives are those of the "
            "program; what the compiler adds, and costs, are not known."
        )
        if by_partitioner:
            notes.append(
                "The partitioner may do the collectives of a map with "
                "lowering='spmd' in another way."
            )
    if made.steps is not None and not made.steps.all_known:
        notes.append(
            "The steps of a loop whose length only the running program knows count "
            "once in flops and bytes accessed."
        )
    if made.module is not None and "__ynn_fusion" in made.module.text:
        notes.append(
            "The memory at the peak leaves out what XLA's library for products on CPU "
            "takes for itself."
        )
    return notes


# Tracing and compiling


def _as_array(leaf: Value) -> Any:
    """Arrays of other libraries by their shape; the rest as it is."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | complex | float | int):
        return leaf
    try:
        return _struct(leaf)
    except TypeError:
        return leaf  # A static argument, perhaps.


def _axes(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    jaxpr: Jaxpr,
) -> tuple[Axis, ...]:
    """The axes, with as many sizes of vmaps as marks on the arguments bring out."""
    source = definition_of(fun)
    best = axes_of(jaxpr, source)
    if not any(axis.kind == "vmap" for axis in best):
        return best
    # The first layer comes off before the function sees it.
    for layers in range(2, vmaps.MOST_LAYERS + 1):
        try:
            traced = functions.traced(fun, *vmaps.marked((args, kwargs), layers))
        except Exception:
            # Somebody looked for an array and found a mark: the marks end here.
            break
        best = axes_of(traced.jaxpr.jaxpr, source)
    return best


def _struct(leaf: Value) -> Any:
    aval = array_likes.leaf_aval(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
