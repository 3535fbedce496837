"""The memory that a shard of a plan takes: an upper bound, known before it runs."""

import math
import weakref

import jax

from shardmap.plan.engine.keys import data_aval, itemsize
from shardmap.plan.engine.stages import Stage
from shardmap.plan.inside.liveness import Peak, nbytes, peak
from shardmap.plan.inside.samples import sample
from shardmap.plan.inside.stage_loops import SameSteps, with_same_steps
from shardmap.plan.run.buffers import depth, start_dtype
from shardmap.plan.run.cut_program import CutProgram


def plan_peak(cut_program: CutProgram) -> Peak:
    """The most that one shard holds, and what is kept for later stages meanwhile."""
    found = Peak(0)
    for place, stage in enumerate(cut_program.stages):
        shard = shard_peak(cut_program, stage)
        size = shard.bytes + kept_bytes(cut_program, place)
        found = max(found, shard._replace(bytes=size), key=lambda each: each.bytes)
    return found


def kept_bytes(cut_program: CutProgram, place: int) -> int:
    """The bytes of what is held in memory besides arguments and results."""
    made = [result.value for result in cut_program.stages[place].results]
    folds = sum(depth(cut_program.parts[v]) * v.size * itemsize(v.aval) for v in made)
    return _kept(cut_program, place, in_scratch=False) + folds


def scratch_bytes(cut_program: CutProgram, place: int) -> int:
    """The bytes of what is kept in ``scratch`` while a stage runs."""
    return _kept(cut_program, place, in_scratch=True)


def _kept(cut_program: CutProgram, place: int, in_scratch: bool) -> int:
    has_scratch = cut_program.scratch is not None
    return sum(
        v.size * itemsize(v.aval)
        for v in cut_program.kept_at(place)
        if (has_scratch and cut_program.is_large(v)) == in_scratch
    )


def shard_peak(cut_program: CutProgram, stage: Stage) -> Peak:
    """The most that a shard holds at once: what it reads, computes and gives back."""
    return _largest(cut_program, stage)[0]


def temporaries(cut_program: CutProgram, stage: Stage) -> int:
    """The bytes of it that it neither reads nor gives back."""
    return _largest(cut_program, stage)[1]


_KNOWN: "weakref.WeakKeyDictionary[Stage, tuple[Peak, int]]" = (
    weakref.WeakKeyDictionary()
)


def _largest(cut_program: CutProgram, stage: Stage) -> tuple[Peak, int]:
    if stage not in _KNOWN:
        found = [
            _measured(cut_program, stage, shards)
            for shards in with_same_steps(stage, list(sample(stage)))
        ]
        _KNOWN[stage] = max(found, key=lambda each: each[0].bytes)
    return _KNOWN[stage]


def _measured(
    cut_program: CutProgram, stage: Stage, shards: SameSteps
) -> tuple[Peak, int]:
    """What each of these shards holds, and how much of it is temporary."""
    static = shards.static
    reads = [
        data_aval(jax.core.ShapedArray(shape, value.aval.dtype))
        for value, shape in zip(static.read_values, static.read_shapes, strict=True)
    ]
    member = shards.members[0]
    starts = tuple(member.pattern.at(member.starts[0])[1].starts)
    traced = jax.make_jaxpr(cut_program.function(stage, static))(
        *(jax.ShapeDtypeStruct(read.shape, read.dtype) for read in reads),
        jax.ShapeDtypeStruct((len(starts),), start_dtype(starts)),
    )
    inside = peak(traced.jaxpr)
    moved = sum(math.prod(read.shape) * read.dtype.itemsize for read in reads)
    moved += sum(map(nbytes, traced.jaxpr.outvars))
    return inside._replace(bytes=inside.bytes + moved), inside.bytes
