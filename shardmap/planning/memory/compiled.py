"""What the shards of a plan take, as XLA says of the largest ones, compiled.

The first run of these shards does not compile them again.
"""

import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shardmap.planning.engine.keys import box_bytes, nbytes
from shardmap.planning.engine.nodes import Scalar, Value
from shardmap.planning.engine.recipe import Recipe, StaticRecipe
from shardmap.planning.engine.slices import shape_of
from shardmap.planning.engine.stages import Stage
from shardmap.planning.memory.estimate import Peak, described, shard_peak
from shardmap.planning.run.buffers import depth
from shardmap.planning.run.cut_program import CutProgram, arg_avals
from shardmap.planning.run.tasks import targets

COMPILED = 4
"""The most functions of a stage that are compiled: those of its largest shards."""

SAMPLED = 64
"""The most shards of each family that are sampled."""


def sample(stage: Stage) -> Iterator[int]:
    """Some shards of a stage, the largest among them."""
    return itertools.chain.from_iterable(numbers for _, numbers in _families(stage))


def _families(stage: Stage) -> Iterator[tuple[int, list[int]]]:
    """The number of shards of each family, and some of them, the largest among them.

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
        yield family.size, numbers
        first += family.size


class SampledShard(NamedTuple):
    """What one shard of a stage takes.

    Attributes:
      recipe: how it is computed.
      moved: the bytes that it reads and returns.
      copied: those of them that a loop copies: parts of larger values, and parts that
        it adds to others.
      whole: those of what is moved, and of what is copied, in values that are not cut.
      held: about what it holds besides.
    """

    recipe: Recipe
    moved: int
    copied: int
    whole: tuple[int, int]
    held: Peak


_SHARDS: "weakref.WeakKeyDictionary[Stage, dict[int, SampledShard]]"
_SHARDS = weakref.WeakKeyDictionary()
_TEMPORARIES: "weakref.WeakKeyDictionary[CutProgram, dict[Any, int | None]]"
_TEMPORARIES = weakref.WeakKeyDictionary()


def _few(stage: Stage) -> list[tuple[int, list[SampledShard]]]:
    """The number of shards of each family, and its first, a middle and its last one."""
    return [
        (size, [_shard(stage, numbers[k]) for k in {0, len(numbers) // 2, -1}])
        for size, numbers in _families(stage)
    ]


def _largest_shards(stage: Stage) -> list[SampledShard]:
    """The largest shards that compute something different, the largest first."""
    shards = [_shard(stage, number) for number in sample(stage)]
    shards.sort(key=lambda each: -(each.moved + each.held.bytes))
    distinct = {each.recipe.static: each for each in reversed(shards)}
    shards = [each for each in shards if distinct[each.recipe.static] is each]
    return shards[:COMPILED]


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

    Args:
      cut_program: the plan.
      in_loops: whether shards are bodies of loops, whose arguments and results exist.
    """
    largest, most, moved = _most_kept(cut_program), 0, 0
    for place, stage in enumerate(cut_program.stages):
        kept = sum(map(nbytes, _kept(cut_program, place, in_scratch=False)))
        beside = kept_bytes(cut_program, place)
        most = max(most, beside)
        families = _few(stage)
        moved += sum(
            count * sum(each.moved for each in shards) // len(shards)
            for count, shards in families
        )
        for shard in (each for _, shards in families for each in shards):
            if not in_loops:
                peak = _with_reads(shard)
                read = _while_read(cut_program, shard) + cut_program.decoded
                more = beside + max(read - peak.bytes, 0)
                peak = peak.plus(more, beside)
            elif stage.num_shards == 1 and not kept:
                peak = shard.held
            else:
                peak = shard.held.plus(kept + shard.copied, kept + shard.whole[1])
            if peak.bytes > largest.bytes:
                if largest.is_kept and largest.largest >= peak.largest:
                    peak = largest._replace(bytes=peak.bytes, whole=peak.whole)
                largest = peak
    return Estimate(largest, most, moved, cut_program.num_shards)


def _most_kept(cut_program: CutProgram) -> Peak:
    """The values that are kept in memory for later stages, where they are the most."""
    every = [
        _kept(cut_program, place, in_scratch=False)
        for place in range(len(cut_program.stages))
    ]
    kept = max(every, key=lambda values: sum(map(nbytes, values)), default=())
    value, total = max(kept, key=nbytes, default=None), sum(map(nbytes, kept))
    peak = described(total, total, value, value.shape if value else ())
    return peak._replace(is_kept=value is not None)


def _with_reads(shard: SampledShard) -> Peak:
    peak = shard.held.plus(shard.moved, shard.whole[0])
    if not shard.recipe.reads:
        return peak
    value, box = max(shard.recipe.reads, key=lambda each: box_bytes(*each))
    if peak.largest >= box_bytes(value, box):
        return peak
    shape = value.aval.update(shape=shape_of(box)).str_short()
    return Peak(peak.bytes, peak.whole, box_bytes(value, box), shape)


def temporaries(cut_program: CutProgram, stage: Stage) -> int:
    """The bytes that the largest shard of a stage holds and neither reads nor returns.

    It is compiled. If XLA does not tell, they are estimated.
    """
    return _temporaries(cut_program, stage, _largest_shards(stage)[0])


def _temporaries(cut_program: CutProgram, stage: Stage, shard: SampledShard) -> int:
    known = _TEMPORARIES.setdefault(cut_program, {})
    if (key := _computation(stage, shard.recipe.static)) not in known:
        with cut_program.settings():
            function = cut_program.compiled(stage, shard.recipe)
            avals = arg_avals(shard.recipe)
            analysis = function.lower(*avals).compile().memory_analysis()
        known[key] = None if analysis is None else int(analysis.temp_size_in_bytes)
    measured = known[key]
    return shard.held.bytes if measured is None else measured


def _computation(stage: Stage, static: StaticRecipe) -> Any:
    """What a shard computes. It is equal for the steps of an unrolled loop."""
    nodes = {node.number: node for node in stage.backwards}
    avals = [str(value.aval.dtype) for value in static.read_values]
    steps = []
    for step in static.steps:
        node = nodes[step.node]
        scalars = [x.value for x in node.ins if isinstance(x, Scalar)]
        primitive = node.primitive, id(node.params), tuple(map(str, scalars))
        steps.append((*primitive, step._replace(node=0)))
    return tuple(avals), static.read_shapes, tuple(steps), static.outs


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


def shard_bytes(cut_program: CutProgram, stage: Stage, limit: float = math.inf) -> int:
    """The most that a shard of a stage reads, computes and returns.

    The largest shard is compiled first. Others are not, if it takes more than a limit.
    """
    most = 0
    for shard in _largest_shards(stage):
        held = shard.moved + _temporaries(cut_program, stage, shard)
        read = _while_read(cut_program, shard) + cut_program.decoded
        most = max(most, held, read)
        if most > limit:
            break
    return most


def peak_bytes(cut_program: CutProgram, limit: float = math.inf) -> int:
    """The most that a shard holds, and what is kept for later stages meanwhile.

    The stage that seems to hold the most is compiled first. Others are not, if it holds
    more than ``limit``.
    """
    stages = cut_program.stages
    kept = [kept_bytes(cut_program, place) for place in range(len(stages))]

    def estimate(place: int) -> int:
        shards = (shard for _, each in _few(stages[place]) for shard in each)
        return max(each.moved + each.held.bytes for each in shards) + kept[place]

    most = 0
    for place in sorted(range(len(stages)), key=estimate, reverse=True):
        took = shard_bytes(cut_program, stages[place], limit - kept[place])
        most = max(most, took + kept[place])
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
