"""The memory of a plan's shards, and of what is kept between its stages."""

import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from shardmap.plan.engine.keys import box_bytes, nbytes
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.recipe import Recipe, StaticRecipe
from shardmap.plan.engine.slices import Box, shape_of
from shardmap.plan.engine.stages import Stage
from shardmap.plan.lax import batched
from shardmap.plan.memory.liveness import Peak, peak
from shardmap.plan.run.buffers import depth
from shardmap.plan.run.cut_program import CutProgram, arg_avals
from shardmap.plan.run.tasks import targets

COUNTERS = 2**10
"""Bytes that compilers take for counters and the like, which are not counted."""

COPIED = 16
"""The memory divided by this is added, for what XLA copies between loops."""

SAMPLED = 64
"""The most shards of each family that are sampled."""


def sample(stage: Stage) -> Iterator[int]:
    """Some shards of a stage, the largest among them.

    They have the first, the last, the middle or the longest piece of each loop.
    """
    first = 0
    for family in stage.families:
        sizes = [len(stage.loops[k].pieces) for k, *_ in family.loops]
        choices = []
        for k, *_ in family.loops:
            lengths = [stop - start for start, stop in stage.loops[k].pieces]
            last, longest = len(lengths) - 1, lengths.index(max(lengths))
            choices.append(sorted({0, longest, last // 2, last}))
        for index in itertools.islice(itertools.product(*choices), SAMPLED):
            number = 0
            for size, piece in zip(sizes, index, strict=True):
                number = number * size + piece
            yield first + number
        first += family.size


class _Shard(NamedTuple):
    """What one shard holds.

    Attributes:
      recipe: how it is computed.
      temporary: the memory of what it computes besides its results.
      moved: the bytes that it reads and returns.
      copied: those of them that a loop copies.
    """

    recipe: Recipe
    temporary: Peak
    moved: int
    copied: int

    def peak(self, in_loops: bool) -> Peak:
        if in_loops:
            return self.temporary.plus(self.copied)
        found = self.temporary.plus(self.moved)
        if found.largest or not self.recipe.reads:
            return found
        value, box = max(self.recipe.reads, key=lambda each: box_bytes(*each))
        shape = value.aval.update(shape=shape_of(box)).str_short()
        return Peak(found.bytes, box_bytes(value, box), shape)


_KNOWN: "weakref.WeakKeyDictionary[Stage, list[_Shard]]" = weakref.WeakKeyDictionary()


def _shards(cut_program: CutProgram, stage: Stage) -> list[_Shard]:
    """One shard for each function of a stage, among those of `sample`."""
    if stage not in _KNOWN:
        found: dict[StaticRecipe, _Shard] = {}
        for number in sample(stage):
            boxes, recipe = stage.recipe(number)
            moved, copied = _moved(stage, boxes, recipe)
            known = found.get(recipe.static)
            if known is None:
                temporary = _temporary(cut_program, stage, recipe)
                found[recipe.static] = _Shard(recipe, temporary, moved, copied)
            elif moved > known.moved:
                found[recipe.static] = known._replace(moved=moved, copied=copied)
        _KNOWN[stage] = list(found.values())
    return _KNOWN[stage]


def _moved(
    stage: Stage, boxes: Sequence[Box | None], recipe: Recipe
) -> tuple[int, int]:
    """The bytes that a shard reads and writes, and those that a loop copies."""
    pairs = [(box, "insert", value) for value, box in recipe.reads]
    every = [
        # A loop copies parts of larger values, and parts that it adds to others.
        (box_bytes(value, box), shape_of(box) != value.shape or combiner != "insert")
        for box, combiner, value in [*pairs, *targets(stage, boxes)]
    ]
    return sum(n for n, _ in every), sum(n for n, is_copied in every if is_copied)


def _temporary(cut_program: CutProgram, stage: Stage, recipe: Recipe) -> Peak:
    function = cut_program.function(stage, recipe.static)
    with cut_program.settings():
        return peak(jax.make_jaxpr(function)(*arg_avals(recipe)).jaxpr)


def shard_peak(cut_program: CutProgram, stage: Stage, in_loops: bool = False) -> Peak:
    """The most that a shard holds at once: what it reads, computes and returns.

    Args:
      cut_program: the plan.
      stage: the shard's stage.
      in_loops: whether it is the body of a loop, whose arguments and results exist.
    """
    return _largest(cut_program, stage, in_loops).peak(in_loops)


def _largest(cut_program: CutProgram, stage: Stage, in_loops: bool) -> _Shard:
    shards = _shards(cut_program, stage)
    return max(shards, key=lambda each: each.peak(in_loops).bytes)


def temporaries(cut_program: CutProgram, stage: Stage) -> int:
    """The bytes that the largest shard holds and neither reads nor returns."""
    return _largest(cut_program, stage, in_loops=False).temporary.bytes


def _stage_peak(cut_program: CutProgram, place: int, in_loops: bool) -> Peak:
    """The most that one shard of a stage holds, and what is kept meanwhile."""
    found = shard_peak(cut_program, cut_program.stages[place], in_loops)
    kept = _kept(cut_program, place, in_scratch=False)
    if in_loops:
        found = found.plus(sum(map(nbytes, kept)))
        found = found.plus(found.bytes // COPIED)
    else:
        found = found.plus(kept_bytes(cut_program, place))
    return max(found, _peak_of(found.bytes, kept), key=lambda each: each.largest)


def _peak_of(count: int, kept: Sequence[Value]) -> Peak:
    """A peak of so many bytes, with the largest of the values that are kept then."""
    if not kept:
        return Peak(count)
    value = max(kept, key=nbytes)
    source = value.producer.source if value.producer else ""
    return Peak(count, nbytes(value), value.aval.str_short(), source, is_kept=True)


def plan_peak(
    cut_program: CutProgram,
    in_loops: bool = False,
    limit: float = math.inf,
    cost: float = math.inf,
) -> Peak:
    """The most that one shard holds, and what is kept for later stages meanwhile.

    Args:
      cut_program: the plan.
      in_loops: whether shards are bodies of loops in one program.
      limit: the stages after the first one that holds more are left out.
      cost: so are those after which `cost_of` the peak is more than this.
    """
    largest, moved = Peak(0), 0
    places = range(len(cut_program.stages))
    # What is kept is known without samples of shards.
    for place in places:
        kept = _kept(cut_program, place, in_scratch=False)
        if sum(map(nbytes, kept)) > limit:
            return _peak_of(sum(map(nbytes, kept)), kept)
    for place in places:
        found = _stage_peak(cut_program, place, in_loops)
        largest = max(largest, found, key=lambda each: each.bytes)
        moved += _moved_by(cut_program.stages[place])
        if largest.bytes > limit or cost_of(largest, moved) > cost:
            break
    return largest.plus(cut_program.kernel_bytes)


def cost_of(peak: Peak, moved: int) -> int:
    """What is compared between cuts along different axes.

    A peak that is too large becomes smaller with more pieces, but the bytes that all
    shards move do not: they count more.
    """
    return peak.bytes * moved**2


def bytes_moved(cut_program: CutProgram) -> int:
    """About the bytes that all shards read and write, of the stages that are known."""
    return sum(_moved_by(stage) for stage in cut_program.stages if stage in _KNOWN)


def _moved_by(stage: Stage) -> int:
    return stage.num_shards * max(each.moved for each in _KNOWN[stage])


def compiled_bytes(cut_program: CutProgram, in_loops: bool = False) -> int:
    """As `plan_peak`, with the temporaries of the largest shards that XLA reports.

    The stage with the largest shards is compiled, and stages with linear algebra, FFTs
    or sorts, whose kernels take scratch memory. The first run of these shards does not
    compile them again.
    """
    places = range(len(cut_program.stages))
    peaks = [_stage_peak(cut_program, place, in_loops).bytes for place in places]
    most = max(peaks, default=0)
    for place, stage in enumerate(cut_program.stages):
        has_kernels = any(node.primitive in batched.RULES for node in stage.backwards)
        if has_kernels or peaks[place] == most:
            peaks[place] += _beyond(cut_program, stage, in_loops)
    return max(peaks, default=0)


def _beyond(cut_program: CutProgram, stage: Stage, in_loops: bool) -> int:
    """What XLA reports of the largest shard of a stage beyond the model."""
    largest = _largest(cut_program, stage, in_loops)
    function = cut_program.compiled(stage, largest.recipe)
    compiled = function.lower(*arg_avals(largest.recipe)).compile()
    analysis = compiled.memory_analysis()
    if analysis is None:  # Some backends have none.
        return 0
    temporary = int(analysis.temp_size_in_bytes) - COUNTERS
    return max(temporary - largest.temporary.bytes, 0)


def kept_bytes(cut_program: CutProgram, place: int) -> int:
    """The bytes held in memory while a stage runs, besides arguments and results."""
    made = [result.value for result in cut_program.stages[place].results]
    folds = sum(depth(cut_program.parts[v]) * nbytes(v) for v in made)
    return sum(map(nbytes, _kept(cut_program, place, in_scratch=False))) + folds


def scratch_bytes(cut_program: CutProgram, place: int) -> int:
    """The bytes kept in ``scratch`` while a stage runs."""
    return sum(map(nbytes, _kept(cut_program, place, in_scratch=True)))


def _kept(cut_program: CutProgram, place: int, in_scratch: bool) -> list[Value]:
    has_scratch = cut_program.scratch is not None
    return [
        v
        for v in cut_program.kept[place]
        if (has_scratch and cut_program.is_large(v)) == in_scratch
    ]
