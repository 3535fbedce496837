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
from shardmap.planning.memory.held import Line, Lines, Peak, described, inside
from shardmap.planning.run.buffers import depth
from shardmap.planning.run.cut_program import CutProgram, arg_avals
from shardmap.planning.run.tasks import targets

COMPILED = 4
"""The most functions of a stage that are compiled: those of its largest shards."""

FIRST = 4
"""So many stages are compiled even if one holds too much: numbers of pieces compare."""

SAMPLED = 64
"""The most shards of each family that are sampled."""


def sample(stage: Stage) -> Iterator[int]:
    """Some shards of a stage, the largest among them.

    They have the first, the last, the middle or one of the two longest pieces of each
    loop: of ``x.T @ x``, a shard with two different pieces reads the most.
    """
    first = 0
    for family in stage.families:
        sizes = [len(stage.loops[k].pieces) for k, *_ in family.loops]
        choices = []
        for k, *_ in family.loops:
            lengths = [stop - start for start, stop in stage.loops[k].pieces]
            last, longest = len(lengths) - 1, lengths.index(max(lengths))
            lengths[longest] = -1
            second = lengths.index(max(lengths))
            choices.append(sorted({0, longest, second, last // 2, last}))
        for index in itertools.islice(itertools.product(*choices), SAMPLED):
            number = 0
            for size, piece in zip(sizes, index, strict=True):
                number = number * size + piece
            yield first + number
        first += family.size


class LargestShard(NamedTuple):
    """The shard of a stage that holds the most.

    Attributes:
      recipe: how it is computed.
      moved: the bytes that it reads and returns.
      copied: those of them that a loop copies: parts of larger values, and parts that
        it adds to others.
      held: about what it holds besides.
    """

    recipe: Recipe
    moved: int
    copied: int
    held: Peak


_LARGEST: "weakref.WeakKeyDictionary[Stage, list[LargestShard]]"
_LARGEST = weakref.WeakKeyDictionary()
_TEMPORARIES: "weakref.WeakKeyDictionary[CutProgram, dict[Any, int | None]]"
_TEMPORARIES = weakref.WeakKeyDictionary()


def largest_shard(stage: Stage) -> LargestShard:
    """The shard of a stage that holds the most, by the equations alone."""
    return _largest_shards(stage)[0]


def _largest_shards(stage: Stage) -> list[LargestShard]:
    """The largest shards that compute something different, the largest first."""
    if stage not in _LARGEST:
        shards = [_shard(stage, number) for number in sample(stage)]
        shards.sort(key=lambda each: -(each.moved + each.held.bytes))
        distinct = {each.recipe.static: each for each in reversed(shards)}
        shards = [each for each in shards if distinct[each.recipe.static] is each]
        _LARGEST[stage] = shards[:COMPILED]
    return _LARGEST[stage]


def _middle(stage: Stage) -> int:
    """A shard in the middle of the longest pieces, of two loops not the same ones."""
    number = 0
    for place, (k, *_) in enumerate(stage.families[0].loops):
        lengths = [stop - start for start, stop in stage.loops[k].pieces]
        most = max(lengths)
        longest = [n for n, length in enumerate(lengths) if length == most]
        number *= len(lengths)
        number += longest[(len(longest) // 2 + place) % len(longest)]
    return number


def _shard(stage: Stage, number: int) -> LargestShard:
    """What one shard reads, returns and holds."""
    boxes, recipe = stage.recipe(number)
    every = [(box, "insert", value) for value, box in recipe.reads]
    moved = copied = 0
    for box, combiner, value in [*every, *targets(stage, boxes)]:
        size = box_bytes(value, box)
        moved += size
        if shape_of(box) != value.shape or combiner != "insert":
            copied += size
    return LargestShard(recipe, moved, copied, _held(stage, recipe.static))


def _held(stage: Stage, static: StaticRecipe) -> Peak:
    """About what a shard holds besides what it reads and returns."""
    nodes = {node.number: node for node in stage.backwards}
    rules = stage.analysis.rules
    values: dict[int, tuple[Value, tuple[int, ...]]] = {}
    lines = []
    shares: dict[Any, float] = {}
    for step in static.steps:
        node = nodes[step.node]
        outs: list[int] = []
        pairs = zip(node.outs, step.shapes, strict=True)
        for slot, (value, shape) in enumerate(pairs, step.first):
            if shape is not None:
                values[slot] = value, shape
                outs.append(slot)
        ins = [ref.slot for ref in step.ins if ref is not None]
        shares[outs[0]] = math.prod(values[outs[0]][1]) / max(
            math.prod(values[outs[0]][0].shape), 1
        )
        lines.append(Line(node, rules[step.node].cheap, ins, outs))
    ends = {ref.slot for ref in static.outs if ref is not None}

    def size_of(slot: Any) -> float:
        if slot in ends or slot not in values:
            return 0
        value, shape = values[slot]
        return nbytes(value) * math.prod(shape) / max(math.prod(value.shape), 1)

    most, largest = Lines(lines, ends).most(
        size_of, lambda line: inside(line.node) * shares[line.outs[0]]
    )
    slot_of_largest: Any = largest
    return described(most, *values.get(slot_of_largest, (None, None)))


def estimated(cut_program: CutProgram, in_loops: bool) -> Peak:
    """About the most that a shard holds, and what is kept for later stages meanwhile.

    One shard of each stage stands for all, in the middle of the longest pieces.

    Args:
      cut_program: the plan.
      in_loops: whether shards are bodies of loops, whose arguments and results exist.
    """
    largest = most_kept(cut_program)
    for place, stage in enumerate(cut_program.stages):
        shard = _shard(stage, _middle(stage))
        kept = sum(map(nbytes, _kept(cut_program, place, in_scratch=False)))
        if not in_loops:
            peak = _with_reads(shard).plus(kept_bytes(cut_program, place))
        elif stage.num_shards == 1 and not kept:
            peak = shard.held
        else:
            peak = shard.held.plus(kept + shard.copied)
        if peak.bytes > largest.bytes:
            is_kept = largest.is_kept and largest.largest >= peak.largest
            largest = largest._replace(bytes=peak.bytes) if is_kept else peak
    return largest


def most_kept(cut_program: CutProgram) -> Peak:
    """The most that is kept in memory for later stages, in any number of pieces."""
    every = [
        _kept(cut_program, place, in_scratch=False)
        for place in range(len(cut_program.stages))
    ]
    kept = max(every, key=lambda values: sum(map(nbytes, values)), default=())
    value = max(kept, key=nbytes, default=None)
    peak = described(sum(map(nbytes, kept)), value)
    return peak._replace(is_kept=value is not None)


def _with_reads(shard: LargestShard) -> Peak:
    peak = shard.held.plus(shard.moved)
    if not shard.recipe.reads:
        return peak
    value, box = max(shard.recipe.reads, key=lambda each: box_bytes(*each))
    if peak.largest >= box_bytes(value, box):
        return peak
    shape = value.aval.update(shape=shape_of(box)).str_short()
    return Peak(peak.bytes, box_bytes(value, box), shape)


def temporaries(cut_program: CutProgram, stage: Stage) -> int:
    """The bytes that the largest shard of a stage holds and neither reads nor returns.

    It is compiled. If XLA does not tell, they are estimated.
    """
    return _temporaries(cut_program, stage, largest_shard(stage))


def _temporaries(cut_program: CutProgram, stage: Stage, shard: LargestShard) -> int:
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


def shard_bytes(cut_program: CutProgram, stage: Stage) -> int:
    """The most that a shard of a stage reads, computes and returns."""
    return max(
        shard.moved + _temporaries(cut_program, stage, shard)
        for shard in _largest_shards(stage)
    )


def peak_bytes(cut_program: CutProgram, limit: float = math.inf) -> int:
    """The most that a shard holds, and what is kept for later stages meanwhile.

    Stages that seem to hold the most are compiled first. Others are not, if these hold
    more than ``limit``.
    """
    stages = cut_program.stages
    kept = [kept_bytes(cut_program, place) for place in range(len(stages))]

    def estimate(place: int) -> int:
        shard = _shard(stages[place], _middle(stages[place]))
        return shard.moved + shard.held.bytes + kept[place]

    most = 0
    order = sorted(range(len(stages)), key=estimate, reverse=True)
    for number, place in enumerate(order):
        if number >= FIRST and most > limit:
            break
        most = max(most, shard_bytes(cut_program, stages[place]) + kept[place])
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
