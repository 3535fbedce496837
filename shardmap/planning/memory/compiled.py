"""What the shards of a plan take, as XLA says of the largest ones, compiled.

The first run of these shards does not compile them again.
"""

import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from shardmap.planning.engine.nodes import Node, Value, box_bytes, nbytes
from shardmap.planning.engine.recipe import Recipe
from shardmap.planning.engine.slices import shape_of
from shardmap.planning.engine.stages import Stage
from shardmap.planning.memory.estimate import Part, Peak, shard_peak
from shardmap.planning.run.buffers import depth
from shardmap.planning.run.cut_program import CutProgram, arg_avals
from shardmap.planning.run.tasks import targets

COMPILED = 4
"""The most functions of a stage that are compiled: those of its largest shards."""

SLACK = 1.1
"""XLA may take so many times more of what is estimated than for a larger shard of the
same equations: up to 1.07 was seen."""

SAMPLED = 64
"""The most shards of each family that are sampled."""


def sample(stage: Stage) -> Iterator[list[int]]:
    """Some shards of each family of a stage, the largest among them.

    They have the first, the last, the middle or one of the two longest pieces of each
    loop: of ``x.T @ x``, a shard with two different pieces reads the most.
    """
    first = 0
    for family in stage.families:
        sizes = [len(stage.loops[k].pieces) for k in family.loops]
        choices = []
        for k in family.loops:
            lengths = [stop - start for start, stop in stage.loops[k].pieces]
            last, longest = len(lengths) - 1, lengths.index(max(lengths))
            lengths[longest] = -1
            second = lengths.index(max(lengths))
            choices.append(sorted({0, longest, second, last // 2, last}))
        numbers = []
        for index in itertools.islice(itertools.product(*choices), SAMPLED):
            number = 0
            for size, piece in zip(sizes, index, strict=True):
                number = number * size + piece
            numbers.append(first + number)
        yield numbers
        first += family.size


class SampledShard(NamedTuple):
    """What one shard of a stage takes.

    Attributes:
      recipe: how it is computed.
      moved: the bytes that it reads and returns.
      copied: those of them that a loop copies: parts of larger values, and parts that
        it adds to others.
      whole: the bytes of what is moved, and of what is copied, in values that are not
        cut.
      held: about what it holds besides.
    """

    recipe: Recipe
    moved: int
    copied: int
    whole: tuple[int, int]
    held: Peak


_SHARDS: "weakref.WeakKeyDictionary[Stage, dict[int, SampledShard]]"
_SHARDS = weakref.WeakKeyDictionary()
_TEMPORARIES: "weakref.WeakKeyDictionary[jax.stages.Wrapped, int | None]"
_TEMPORARIES = weakref.WeakKeyDictionary()


def _largest_shards(stage: Stage) -> list[SampledShard]:
    """The largest shards that compute something different, the largest first."""
    shards = [_shard(stage, k) for numbers in sample(stage) for k in numbers]
    shards.sort(key=lambda each: each.moved + each.held.bytes)
    last = {each.recipe.static: k for k, each in enumerate(shards)}
    return [shards[k] for k in sorted(last.values(), reverse=True)[:COMPILED]]


def _shard(stage: Stage, number: int) -> SampledShard:
    """What one shard reads, returns and holds."""
    known = _SHARDS.setdefault(stage, {})
    if number in known:
        return known[number]
    boxes, recipe = stage.recipe(number)
    every = [(box, "insert", value) for value, box in recipe.reads]
    moved = copied = whole = added = 0
    for box, combiner, value in [*every, *targets(stage, boxes)]:
        size = box_bytes(value, box)
        is_whole = shape_of(box) == value.shape
        moved += size
        whole += size * is_whole
        copied += size * (not is_whole or combiner != "insert")
        added += size * (is_whole and combiner != "insert")
    held = shard_peak(stage, recipe.static)
    known[number] = SampledShard(recipe, moved, copied, (whole, added), held)
    return known[number]


class Estimate(NamedTuple):
    """About what a cut function takes.

    Attributes:
      held: the most that a shard holds, and what is kept for later stages meanwhile.
      kept: the most that is kept for later stages, in any number of pieces.
      moved: the bytes that all shards read and return.
      shards: their number.
    """

    held: Peak
    kept: int
    moved: int
    shards: int


def estimated(cut_program: CutProgram, in_loops: bool) -> Estimate:
    """About what a cut function takes, by its equations.

    In loops, the arguments and results of shards exist anyway.
    """
    peaks, most, moved = [Peak(0)], 0, 0
    for place, stage in enumerate(cut_program.stages):
        kept = _kept(cut_program, place, in_scratch=False)
        beside = kept_bytes(cut_program, place)
        most = max(most, beside)
        if in_loops:
            beside = sum(map(nbytes, kept))
        shards = list[SampledShard]()
        for family, numbers in zip(stage.families, sample(stage), strict=True):
            few = [_shard(stage, numbers[k]) for k in {0, len(numbers) // 2, -1}]
            moved += family.size * sum(each.moved for each in few) // len(few)
            shards += few
        for shard in shards:
            held, parts = shard.held, [Part(value, value.shape) for value in kept]
            if not in_loops:
                read = _while_read(cut_program, shard) + cut_program.decoded
                taken, whole = max(shard.moved, read - held.bytes), shard.whole[0]
                parts += [
                    Part(value, shape_of(box)) for value, box in shard.recipe.reads
                ]
            elif stage.num_shards == 1 and not kept:
                taken = whole = 0
            else:
                taken, whole = shard.copied, shard.whole[1]
            parts += [held.largest] if held.largest else []
            largest = max(parts, key=lambda each: each.bytes, default=None)
            taken, whole = taken + beside, whole + beside
            peaks.append(Peak(held.bytes + taken, held.whole + whole, largest))
    peak = max(peaks, key=lambda each: each.bytes)
    return Estimate(peak, most, moved, cut_program.num_shards)


def temporaries(
    cut_program: CutProgram, stage: Stage, shard: SampledShard | None = None
) -> int:
    """The bytes that a shard, the largest one, holds and neither reads nor returns.

    It is compiled. If XLA does not tell, they are estimated.
    """
    shard = shard or _largest_shards(stage)[0]
    with cut_program.settings():
        function = cut_program.compiled(stage, shard.recipe)
        if function not in _TEMPORARIES:
            compiled = function.lower(*arg_avals(shard.recipe)).compile()
            analysis = compiled.memory_analysis()
            told = None if analysis is None else int(analysis.temp_size_in_bytes)
            _TEMPORARIES[function] = told
    measured = _TEMPORARIES[function]
    return shard.held.bytes if measured is None else measured


def _while_read(cut_program: CutProgram, shard: SampledShard) -> int:
    """The bytes that are held while a shard is read.

    The allocator of JAX may have the last piece of a store until the next one is there.
    """
    last = min(cut_program.decoded, 1)
    return (1 + last) * sum(itertools.starmap(box_bytes, shard.recipe.reads))


def read_bytes(cut_program: CutProgram) -> int:
    """The most that is held while a shard is read, besides what a store decodes."""
    return max(
        (
            _while_read(cut_program, shard) + kept_bytes(cut_program, place)
            for place, stage in enumerate(cut_program.stages)
            for shard in _largest_shards(stage)
        ),
        default=0,
    )


def _taken(cut_program: CutProgram, stage: Stage, shard: SampledShard) -> int:
    """The bytes that a shard reads, computes and returns, as XLA says."""
    held = shard.moved + temporaries(cut_program, stage, shard)
    return max(held, _while_read(cut_program, shard) + cut_program.decoded)


def shard_bytes(cut_program: CutProgram, stage: Stage) -> int:
    """The most that a shard of a stage reads, computes and returns."""
    return max(_taken(cut_program, stage, each) for each in _largest_shards(stage))


def peak_bytes(cut_program: CutProgram, limit: float = math.inf) -> int:
    """The most that a shard holds, and what is kept for later stages meanwhile.

    Shards are compiled, those first that seem to hold the most. With a ``limit``, no
    more are than tell whether all hold at most that.
    """
    shards = [
        (kept_bytes(cut_program, place), stage, shard)
        for place, stage in enumerate(cut_program.stages)
        for shard in _largest_shards(stage)
    ]
    shards.sort(key=lambda x: x[0] + x[2].moved + x[2].held.bytes, reverse=True)
    most, scales = 0, dict[tuple[Node, ...], float]()
    for kept, stage, shard in shards:
        about = max(shard.moved + shard.held.bytes, 1)
        nodes = tuple(step.node for step in shard.recipe.static.steps)
        read = _while_read(cut_program, shard) + cut_program.decoded
        at_most = max(SLACK * scales.get(nodes, math.inf) * about, read)
        if kept + at_most <= limit < math.inf:
            continue
        taken = _taken(cut_program, stage, shard)
        scales[nodes] = max(scales.get(nodes, 0), taken / about)
        most = max(most, kept + taken)
        if most > limit:
            break
    return most


def kept_bytes(cut_program: CutProgram, place: int) -> int:
    """The bytes held in memory while a stage runs, besides arguments and results."""
    values = [result.value for result in cut_program.stages[place].results]
    folds = sum(depth(cut_program.parts[v]) * nbytes(v) for v in values)
    return sum(map(nbytes, _kept(cut_program, place, in_scratch=False))) + folds


def scratch_bytes(cut_program: CutProgram, place: int) -> int:
    """The bytes kept in ``scratch`` while a stage runs."""
    return sum(map(nbytes, _kept(cut_program, place, in_scratch=True)))


def _kept(cut_program: CutProgram, place: int, in_scratch: bool) -> Sequence[Value]:
    has_scratch = cut_program.scratch is not None
    return [
        v
        for v in cut_program.kept[place]
        if (has_scratch and cut_program.is_large(v)) == in_scratch
    ]
