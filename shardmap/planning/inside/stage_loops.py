"""The stages of a cut program as loops: one `jax.lax.scan` for shards that are alike.

Shards are alike if they run the same steps on boxes of the same sizes; only positions
differ, which the loop looks up. A short last piece, or a piece at a border, has a loop
of its own, or runs without one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from shardmap._jax.context import varying_axes, varying_like
from shardmap._jax.types import ClosedJaxpr
from shardmap.planning.engine.monoids import Combiner, Part, combine, start, together
from shardmap.planning.engine.nodes import Scalar, Value, data_aval, is_key, key_impl
from shardmap.planning.engine.slices import shape_of
from shardmap.planning.engine.stages import Members, Stage
from shardmap.planning.lax import batched
from shardmap.planning.lax.indexed import gather, scatter
from shardmap.planning.lax.staged.pieces import PIECES
from shardmap.planning.run.buffers import start_dtype
from shardmap.planning.run.cut_program import CutProgram

WITH_PLACES = frozenset({*gather.RULES, *scatter.RULES})
"""Primitives whose operands say which places they read or write."""


WITH_MATRICES = frozenset({*batched.RULES, PIECES})
"""Primitives that may call LAPACK. A function of pieces may be a QR."""


def with_same_steps(stage: Stage) -> list[list[Members]]:
    """Groups the shards of a stage by the steps that they run."""
    groups: dict[Any, list[Members]] = {}
    every = stage.members()
    for member in sorted(every, key=lambda member: int(member.numbers[0])):
        pattern = member.pattern
        sizes = tuple(None if box is None else shape_of(box) for box in pattern.boxes)
        groups.setdefault((pattern.recipe.static, sizes), []).append(member)
    return list(groups.values())


def run_in_loops(cut_program: CutProgram, leaves: Sequence[Any]) -> list[Any]:
    """The results of the function for these arguments, flat; as it is if not cut."""
    graph, closed = cut_program.graph, cut_program.closed
    if cut_program.num_shards <= 1:
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)
    known: dict[Value, Any] = dict(zip(graph.inputs, leaves, strict=True))
    known.update((v, jnp.asarray(array)) for v, array in graph.constants.items())
    for stage in cut_program.stages:
        buffers = {
            result.value: _new_buffer(result.value, result.combiner)
            for result in stage.results
            if result.value not in known
        }
        every = with_same_steps(stage)
        for shards in every:
            steps = shards[0].pattern.recipe.static.steps
            rules = (cut_program.analysis.rules[step.node] for step in steps)
            beside = len(every) > 1 or any(rule.runs_once for rule in rules)
            buffers = _run_shards(cut_program, stage, shards, known, buffers, beside)
        known |= buffers
    return [
        jnp.asarray(operand.value, operand.aval.dtype)
        if isinstance(operand, Scalar)
        else known[operand]
        for operand in graph.outputs
    ]


def _new_buffer(value: Value, combiner: Combiner) -> Any:
    aval = data_aval(value.aval)
    fill = 0 if combiner == "insert" else start(combiner, aval.dtype)
    buffer = jnp.full(aval.shape, fill, aval.dtype)
    impl = key_impl(value.aval)
    return buffer if impl is None else jax.random.wrap_key_data(buffer, impl=impl)


def _run_shards(
    cut_program: CutProgram,
    stage: Stage,
    shards: Sequence[Members],
    known: Mapping[Value, Any],
    before: dict[Value, Any],
    beside: bool,
) -> dict[Value, Any]:
    """Runs shards with the same steps; returns the buffers with their results.

    They read what is ``known``. ``beside`` them, XLA could run others.
    """
    boxes, static = shards[0].pattern.boxes, shards[0].pattern.recipe.static
    function = cut_program.emitted(stage, static)
    positions = Positions(shards)
    written = [
        k
        for k, box in enumerate(boxes)
        if box is not None and stage.results[k].value in before
    ]
    results = [stage.results[k] for k in written]
    groups = together((result.combiner, result.value) for result in results)

    # XLA of JAX 0.10 merges a slice of a slice into one slice of the array, and forgets
    # that places outside of the first slice do not exist.
    primitives = {step.node.primitive for step in static.steps}
    apart = not primitives.isdisjoint(WITH_PLACES)
    read = _read if primitives.isdisjoint(WITH_MATRICES) else _read_matrices

    def step(buffers: dict[int, Any], row: Any) -> dict[int, Any]:
        ends, begins, starts = positions.at(row)
        reads = [
            read(known[value], start, shape)
            for value, start, shape in zip(
                static.read_values, begins, static.read_shapes, strict=True
            )
        ]
        if apart:
            reads = lax.optimization_barrier(reads)
        made = function(reads, starts)
        after: dict[int, Any] = {}
        for places in groups:
            numbers = [written[place] for place in places]
            into, parts, at = (
                [each[k] for k in numbers] for each in (buffers, made, ends)
            )
            combined = _write(into, parts, at, results[places[0]].combiner)
            after |= zip(numbers, combined, strict=True)
        return after

    buffers = {k: before[stage.results[k].value] for k in written}
    if positions.count == 1:
        buffers = _by_itself(lambda each: step(each, ()), buffers, beside)
    else:
        if any(varying_axes(jax.typeof(known[v])) for v in static.read_values):
            row = jax.tree.map(lambda each: each[0], positions.rows)
            buffers = _varying(lambda each: step(each, row), buffers)
        buffers, _ = lax.scan(
            lambda each, row: (step(each, row), None),
            *(buffers, positions.rows, positions.count),
        )
    return before | {stage.results[k].value: buffers[k] for k in written}


def _by_itself(
    run: Callable[[Any], Any], buffers: dict[int, Any], beside: bool
) -> dict[int, Any]:
    """Runs a body without a loop.

    XLA may interleave it with other shards, and hold the memory of all. It does not
    interleave branches, so the body becomes a branch, and a barrier hides from XLA that
    this branch is always taken.
    """
    if not beside:
        return run(buffers)
    always = lax.optimization_barrier(np.True_)
    return lax.cond(always, run, lambda each: each, _varying(run, buffers))


def _varying(run: Callable[[Any], Any], buffers: dict[int, Any]) -> dict[int, Any]:
    """The buffers with the varying mesh axes that they have after a run."""
    likes = jax.make_jaxpr(run)(buffers).out_avals
    varying = map(varying_like, buffers.values(), likes)
    return dict(zip(buffers, varying, strict=True))


def _read(array: Any, start: Sequence[Any], shape: tuple[int, ...]) -> Any:
    if array.shape == shape:
        return array
    if all(isinstance(number, int) for number in start):
        limits = [a + n for a, n in zip(start, shape, strict=True)]
        return lax.slice(array, start, limits)
    begin = _of_one_dtype(start)
    return lax.dynamic_slice(array, begin, shape, allow_negative_indices=False)


def _read_matrices(array: Any, start: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """As `_read`, but reads whole rows of a matrix as one flat row.

    LAPACK takes matrices by columns. XLA would transpose those of the whole array
    before the loop, not those of each piece in it.
    """
    if array.shape == shape or len(shape) < 2 or shape[-1] != array.shape[-1]:
        return _read(array, start, shape)
    *batch, row, _ = start
    columns, flat = shape[-1], lax.collapse(array, array.ndim - 2)
    if flat.shape[-1] >= 2**31:  # Positions have 32 bits.
        return _read(array, start, shape)
    sizes = (*shape[:-2], shape[-2] * columns)
    return _read(flat, [*batch, row * columns], sizes).reshape(shape)


def _of_one_dtype(start: Sequence[Any]) -> list[Any]:
    """Positions as JAX takes them: ints get the dtype of the others."""
    dtypes = [number.dtype for number in start if not isinstance(number, int)]
    return [np.asarray(n, *dtypes[:1]) if isinstance(n, int) else n for n in start]


def _write(
    buffers: Sequence[Any],
    parts: Sequence[Any],
    starts: Sequence[Sequence[Any]],
    combiner: Combiner,
) -> list[Any]:
    """The buffers with a result that is one array, or a tuple of arrays."""
    parts = [
        part if is_key(buffer) else jnp.asarray(part, buffer.dtype)
        for buffer, part in zip(buffers, parts, strict=True)
    ]
    if combiner != "insert":
        before = [
            _read(buffer, begin, part.shape)
            for buffer, begin, part in zip(buffers, starts, parts, strict=True)
        ]
        if isinstance(combiner, Part):
            # Fused with what combines them, XLA may compute parts again.
            parts = lax.optimization_barrier(parts)
        parts = combine(jnp, combiner, before, parts)
    return [
        part
        if part.shape == buffer.shape
        else lax.dynamic_update_slice(
            buffer, part, _of_one_dtype(begin), allow_negative_indices=False
        )
        for buffer, part, begin in zip(buffers, parts, starts, strict=True)
    ]


def laid_out_as(
    jaxpr: ClosedJaxpr, run: Callable[[Sequence[Any]], list[Any]]
) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns ``run``; along Explicit mesh axes its results have the jaxpr's layouts.

    A piece of an axis that is on several devices has no layout that JAX knows, so
    inside of the loops the compiler decides.
    """
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [aval.sharding.mesh for aval in (*jaxpr.in_avals, *jaxpr.out_avals)]
    for mesh in meshes:
        if axes := mesh.explicit_axes:
            specs = [aval.sharding.spec for aval in jaxpr.out_avals]
            layouts = [NamedSharding(mesh, spec) for spec in specs]
            return jax.sharding.auto_axes(run, axes=axes, out_sharding=layouts)
    return run


class Positions:
    """The positions of shards that run the same steps.

    Attributes:
      count: the number of shards.
      rows: the positions that differ between shards, which the loop scans over.
    """

    def __init__(self, members: Sequence[Members]) -> None:
        boxes, recipe = members[0].pattern.boxes, members[0].pattern.recipe
        self._written = {k: len(box) for k, box in enumerate(boxes) if box is not None}
        self._reads = [len(box) for _, box in recipe.reads]
        # The law has the starts and stops of boxes; only the starts are positions.
        ends = 2 * (sum(self._written.values()) + sum(self._reads))
        chosen = np.r_[0:ends:2, ends : ends + len(recipe.starts)].astype(int)
        turn = np.argsort(np.concatenate([member.numbers for member in members]))
        numbers = np.concatenate(
            [
                (law.factors[chosen] @ member.starts.T + law.const[chosen, None])
                // law.divisor[chosen, None]
                for member in members
                for law in [member.pattern.affine_map]
            ],
            axis=1,
        )[:, turn]
        bounds = [int(numbers.min()), int(numbers.max())] if numbers.size else []
        self._dtype = start_dtype(bounds)
        self.count = len(turn)
        # Positions that differ by a constant are one row, to which it is added.
        self._firsts = numbers[:, 0].tolist()
        moves = [row.tobytes() for row in numbers - numbers[:, :1]]
        rows = [row for row in dict.fromkeys(moves) if any(row)]
        kinds = {row: number for number, row in enumerate(rows)}
        self._kinds = [kinds.get(row) for row in moves]
        self.rows = [np.frombuffer(row, np.int64).astype(self._dtype) for row in rows]

    def at(
        self, row: Sequence[Any]
    ) -> tuple[dict[int, list[Any]], list[list[Any]], list[Any]]:
        """Where one shard writes, per result; where it reads; its other positions.

        A position of a box is an int if all shards have the same.
        """
        numbers = (
            first if kind is None else row[kind] + first
            for kind, first in zip(self._kinds, self._firsts, strict=True)
        )

        def taken(count: int) -> list[Any]:
            return [next(numbers) for _ in range(count)]

        written = {k: taken(rank) for k, rank in self._written.items()}
        reads = [taken(rank) for rank in self._reads]
        starts = [jnp.asarray(number, self._dtype) for number in numbers]
        return written, reads, starts
