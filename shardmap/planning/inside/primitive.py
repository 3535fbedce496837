"""The primitive of `chunked`: a function and its cuts, in one equation of a jaxpr.

It becomes loops only when it is lowered. A transformation of JAX gives another function
that is cut in the same places: the derivative of a function in pieces is its
derivative, in pieces. So a backward pass recomputes values piece by piece, and custom
derivatives are respected.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from shardmap._jax.checkify import checkify_what_runs
from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import ClosedJaxpr, TreeDef, is_inexact
from shardmap._jax.walk import as_open_jaxpr
from shardmap.api.arguments import Static
from shardmap.arrays.compiled_memory import temporary_bytes
from shardmap.map.differing import differing_results
from shardmap.planning.engine.nodes import Value
from shardmap.planning.engine.rules import Cut
from shardmap.planning.in_slices import Asked, Points, cuts_at
from shardmap.planning.inside.stage_loops import laid_out_as, run_in_loops
from shardmap.planning.lax.control.loops import MOST_EQUATIONS
from shardmap.planning.lax.follow import Cuts
from shardmap.planning.lax.passes import Function, analysed, function_of
from shardmap.planning.lax.table import LOOKED_THROUGH
from shardmap.planning.memory.chunks import Chunks
from shardmap.planning.memory.compiled import estimated
from shardmap.planning.memory.search import Problem, program_within
from shardmap.planning.run.cut_program import CutProgram
from shardmap.units import AUTO, Auto


class Options(NamedTuple):
    """How a function is cut, and those that JAX derives. See `chunked`.

    Operands are cut as ``asked``. It ``finds`` the axes if none are given.
    """

    partial: bool
    memory: int | None = None
    finds: bool = False
    asked: Asked = ()


class ChunkedPrimitive(jex_core.Primitive):
    """The primitive of functions in pieces."""

    multiple_results = True

    def is_high(self, *_: object, **__: object) -> bool:
        """No: high-level equations in ``jaxpr`` are lowered with the loops."""
        return False


chunked_p = ChunkedPrimitive("chunked")


def _made(
    jaxpr: ClosedJaxpr,
    function: Function,
    asked: Asked,
    partial: bool,
    keeps: bool = True,
) -> CutProgram:
    """The function of a jaxpr, cut at points."""
    every, count = cuts_at("chunked", asked), len(jaxpr.in_avals)
    cuts, inside = every[:count], every[count:]
    # Each stage of a loop is compiled with all others, as one function.
    wanted = Cuts(
        cuts, partial, inside=inside, keeps=keeps, most_equations=MOST_EQUATIONS
    )
    trees = jax.tree.structure(jaxpr.in_avals), jax.tree.structure(jaxpr.out_avals)
    names = [f"operand {k}" for k in range(count)]
    return CutProgram(jaxpr, analysed(function, wanted), *trees, cuts, names)


@functools.lru_cache(maxsize=256)
def cut(jaxpr: ClosedJaxpr, options: Options) -> CutProgram:
    """A jaxpr, cut as asked, or so that it fits."""
    asked, function = options.asked, function_of(jaxpr)
    if options.memory is None:
        return _made(jaxpr, function, asked, options.partial)
    problem = Problem(
        functools.partial(_made, jaxpr, function),
        *function,
        function.values,
        asked,
        finds=options.finds,
        partial=options.partial,
        memory=options.memory,
        in_loops=True,
        took=lambda cut_program, _: _temporaries(cut_program),
        chunks=Chunks(*function),
    )
    return program_within(problem)


def _temporaries(cut_program: CutProgram) -> int:
    """The bytes that the loops take besides arguments and results, as XLA says."""
    given = cut_program.closed.in_avals
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in given]
    told = temporary_bytes(lambda *leaves: run_in_loops(cut_program, leaves), avals)
    return told if told is not None else estimated(cut_program, True).held.bytes


@functools.lru_cache(maxsize=256)
def computed(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[int | None, ...]]:
    """A jaxpr without the results that are operands; their numbers, or None."""
    places: dict[Any, int] = {v: k for k, v in enumerate(jaxpr.jaxpr.invars)}
    operands = tuple(
        None if isinstance(atom, jex_core.Literal) else places.get(atom)
        for atom in jaxpr.jaxpr.outvars
    )
    # Mapped axes, which count as effects, are bound around the equation, not here.
    if jaxpr.effects or all(number is None for number in operands):
        return jaxpr, (None,) * len(operands)
    is_new = [number is None for number in operands]
    pruned = jax.make_jaxpr(
        lambda *args: list(compress(_evaluate(jaxpr, args), is_new))
    )
    return pruned(*jaxpr.in_avals), operands


def without_tracers(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Makes operands of the constants of a jaxpr that are tracers; returns both.

    Arrays under an Explicit mesh become operands too, as there is none inside of the
    loops. Other constants stay, since cuts may depend on their values.
    """
    traced = [
        isinstance(value, jax.core.Tracer)
        or bool(jax.typeof(value).sharding.mesh.explicit_axes)
        for value in jaxpr.consts
    ]
    if not any(traced):
        return jaxpr, []
    held, known = split(traced, jaxpr.consts)
    count = len(jaxpr.in_avals)

    def fun(*operands: Any) -> list[Any]:
        consts = merge(traced, operands[count:], known)
        return jax.core.eval_jaxpr(jaxpr.jaxpr, consts, *operands[:count])

    # The avals unchanged: under an Explicit mesh they have the layout.
    return jax.make_jaxpr(fun)(*jaxpr.in_avals, *map(jax.typeof, held)), held


def bind(
    fun: Callable[..., Sequence[Any]], operands: Sequence[Any], options: Options
) -> list[Any]:
    """``fun`` of the operands, in pieces."""
    jaxpr = jax.make_jaxpr(fun)(*operands)
    return chunked_p.bind(*operands, jaxpr=jaxpr, options=options)


def _in_loops(*operands: Any, jaxpr: ClosedJaxpr, options: Options) -> list[Any]:
    jaxpr, forwarded = computed(jaxpr)
    cut_program = cut(jaxpr, options)
    run: Callable[..., Any] = functools.partial(run_in_loops, cut_program)
    if cut_program.num_shards > 1:
        run = laid_out_as(jaxpr, run)
    computed_outs = iter(run(operands))
    return [
        next(computed_outs) if number is None else operands[number]
        for number in forwarded
    ]


def _abstract_eval(*_: Any, jaxpr: ClosedJaxpr, **__: Any) -> tuple[Any, Any]:
    return jaxpr.out_avals, jaxpr.effects


def _evaluate(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *operands)


def split(which: Sequence[bool], values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The values with a flag, and those without: what `merge` puts together."""
    pairs = list(zip(which, values, strict=True))
    return [v for flag, v in pairs if flag], [v for flag, v in pairs if not flag]


def merge(which: Sequence[bool], yes: Iterable[Any], no: Iterable[Any]) -> list[Any]:
    """The inverse of `split`: values from ``yes`` and ``no``, as ``which`` says."""
    yes_left, no_left = iter(yes), iter(no)
    return [next(yes_left) if flag else next(no_left) for flag in which]


def _jvp_rule(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    options: Options,
) -> tuple[list[Any], list[Any]]:
    results = chunked_p.bind(*primals, jaxpr=jaxpr, options=options)
    moves = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    smooth = list(map(is_inexact, jaxpr.out_avals))

    def tangent_function(*operands: Any) -> list[Any]:
        along = list(operands[len(moves) :])
        moving, rest = split(moves, operands[: len(moves)])

        def of_moving(*moving: Any) -> list[Any]:
            tangents_out = _evaluate(jaxpr, merge(moves, moving, rest))
            return list(compress(tangents_out, smooth))

        return jax.jvp(of_moving, moving, along)[1]

    operands = [*primals, *compress(tangents, moves)]
    cuts = (*options.asked, *compress(options.asked, moves))
    tangents_out = bind(tangent_function, operands, options._replace(asked=cuts))
    zeros = [
        ad.Zero(aval.to_tangent_aval())
        for aval, is_smooth in zip(jaxpr.out_avals, smooth, strict=True)
        if not is_smooth
    ]
    return results, merge(smooth, tangents_out, zeros)


def _transpose_rule(
    cotangents: Sequence[Any],
    *operands: Any,
    jaxpr: ClosedJaxpr,
    options: Options,
) -> list[Any]:
    linear = list(map(ad.is_undefined_primal, operands))
    given = [not isinstance(cotangent, ad.Zero) for cotangent in cotangents]
    moving, known = split(linear, operands)
    # The avals unchanged: inside `jax.shard_map` they say over which axes they vary.
    avals = [operand.aval for operand in moving]

    def transposed(*operands: Any) -> Sequence[Any]:
        values, cts = operands[: len(known)], operands[len(known) :]

        def of_linear(*moving: Any) -> list[Any]:
            cotangents_in = _evaluate(jaxpr, merge(linear, moving, values))
            return list(compress(cotangents_in, given))

        return jax.linear_transpose(of_linear, *avals)(list(cts))

    _, cuts = split(linear, options.asked)
    cuts += compress(cuts_of_results(jaxpr, options), given)
    operands = (*known, *compress(cotangents, given))
    cotangents_in = bind(transposed, operands, options._replace(asked=tuple(cuts)))
    return merge(linear, cotangents_in, [None] * len(known))


def cuts_of_results(jaxpr: ClosedJaxpr, options: Options) -> Asked:
    """The cuts of the results, which become those of their cotangents."""
    asked, (smaller, forwarded) = options.asked, computed(jaxpr)
    analysis = cut(smaller, options).analysis

    def points(each: Cut) -> Points | Auto:
        # Cuts of values inside, whose numbers follow those of the operands, are chosen.
        chosen = any(
            k >= len(asked) or isinstance(asked[k][axis], Auto)
            for k, axis in each.origins
        )
        return AUTO if chosen and each.at else each.at

    cuts = iter(
        tuple(map(points, analysis.cuts[operand]))
        if isinstance(operand, Value)
        else ((),) * len(operand.shape)
        for operand in analysis.graph.outputs
    )
    return tuple(next(cuts) if k is None else asked[k] for k in forwarded)


def _batching_rule(
    vmap: Vmap,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    options: Options,
) -> tuple[list[Any], list[int | None]]:
    axis = Vmap(vmap.name, vmap.size)
    moved = [
        operand if dim is None else jnp.moveaxis(operand, dim, 0)
        for operand, dim in zip(operands, dims, strict=True)
    ]
    in_dims = [None if dim is None else 0 for dim in dims]

    given = tuple(dim is not None for dim in dims)
    batched = differing_results(as_open_jaxpr(jaxpr), vmap.name, given)
    out_dims = [0 if is_batched else None for is_batched in batched]
    cuts = tuple(
        row if dim is None else ((), *row)
        for row, dim in zip(options.asked, dims, strict=True)
    )
    fun = jex_core.jaxpr_as_fun(jaxpr)
    mapped = axis.vectorize(fun, in_dims, out_dims)
    return bind(mapped, moved, options._replace(asked=cuts)), out_dims


def keeping_residuals(
    fun: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    options: Options,
) -> list[Any]:
    """``fun`` of the leaves in pieces; its gradient recomputes nothing.

    What `jax.checkpoint` around it does not save is recomputed.
    """
    smooth = [is_inexact(jax.typeof(leaf)) for leaf in leaves]
    backward: TreeDef | None = None

    def forward(*leaves: Any) -> list[Any]:
        nonlocal backward
        moving, rest = split(smooth, leaves)

        def of_smooth(*moving: Any) -> list[Any]:
            return list(fun(*merge(smooth, moving, rest)))

        results, vjp = jax.vjp(of_smooth, *moving)
        residuals, backward = jax.tree.flatten(vjp)
        return [*results, *residuals]

    @jax.custom_vjp
    def run(*leaves: Any) -> list[Any]:
        return bind(fun, leaves, options)

    def run_forward(*leaves: Any) -> tuple[list[Any], Any]:
        jaxpr = jax.make_jaxpr(forward)(*leaves)
        outs = chunked_p.bind(*leaves, jaxpr=jaxpr, options=options)
        cuts = cuts_of_results(jaxpr, options)
        assert backward is not None
        count = len(outs) - backward.num_leaves
        return outs[:count], (outs[count:], Static((cuts, backward)))

    def run_backward(kept: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        residuals, static = kept
        cuts, tree = static.value
        given = [ct.dtype != jax.dtypes.float0 for ct in cotangents]
        cts, zeros = split(given, cotangents)

        def back(*operands: Any) -> Sequence[Any]:
            vjp = jax.tree.unflatten(tree, operands[: len(residuals)])
            return vjp(merge(given, operands[len(residuals) :], zeros))

        count = len(cotangents)
        of_cts, _ = split(given, cuts[:count])
        asked = (*cuts[count:], *of_cts)
        outs = bind(back, [*residuals, *cts], options._replace(asked=asked))
        return tuple(merge(smooth, outs, [None] * (len(smooth) - len(outs))))

    run.defvjp(run_forward, run_backward)
    return run(*leaves)


chunked_p.def_impl(jax.jit(_in_loops, static_argnames=("jaxpr", "options")))
chunked_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[chunked_p] = _jvp_rule
ad.primitive_transposes[chunked_p] = _transpose_rule
def_batching(chunked_p, _batching_rule)
mlir.register_lowering(chunked_p, mlir.lower_fun(_in_loops, multiple_results=True))

# A plan, or another `chunked`, inlines the function and cuts it.
LOOKED_THROUGH[chunked_p] = "jaxpr"
checkify_what_runs(chunked_p, _in_loops)
