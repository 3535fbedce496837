"""The reports of a plan, as text."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from shardmap._jax.primitives import function_name
from shardmap._jax.types import PyTree
from shardmap.planning.engine.factors import BESIDE
from shardmap.planning.engine.nodes import Operand, Value, nbytes
from shardmap.planning.engine.slices import Interval, pieces, shape_of
from shardmap.planning.engine.stages import Stage
from shardmap.planning.lax.random import DRAWN_WHOLE
from shardmap.planning.memory.compiled import (
    kept_bytes,
    peak_bytes,
    sample,
    scratch_bytes,
    shard_bytes,
    temporaries,
)
from shardmap.planning.run.cut_program import CutProgram
from shardmap.units import size

CHUNKS_READ = 1.5
"""A remark says so if this many pieces read each chunk of an argument."""


class StageCost(NamedTuple):
    """What one stage of a plan makes, reads and keeps.

    Attributes:
      number: the number of the stage.
      shards: the number of its shards.
      makes: the names of the values that it makes.
      reads: which arguments all its shards read, and how often.
      shard_bytes: the most bytes that a shard reads, computes and returns at once.
      kept_bytes: the bytes held in memory meanwhile, besides arguments and results.
      scratch_bytes: the bytes kept in ``scratch`` meanwhile.
      functions: about how many functions its shards compile.
    """

    number: int
    shards: int
    makes: tuple[str, ...]
    reads: str
    shard_bytes: int
    kept_bytes: int
    scratch_bytes: int
    functions: int


def stage_costs(cut_program: CutProgram) -> tuple[StageCost, ...]:
    """The costs of each stage, in the order in which they run."""
    return tuple(
        StageCost(
            stage.number,
            stage.num_shards,
            tuple(_name(cut_program, result.value) for result in stage.results),
            _reads(cut_program, [stage]),
            shard_bytes(cut_program, stage),
            kept_bytes(cut_program, place),
            scratch_bytes(cut_program, place),
            _functions(stage),
        )
        for place, stage in enumerate(cut_program.stages)
    )


def explanation(cut_program: CutProgram, name: str = "") -> Any:
    """What became of each cut; of a plan, which has no name of its own, its bytes too.

    Then what is narrowed, where values are kept, and what each stage does.
    """
    # It takes long to import.
    from shardmap.explaining.explanation import Explanation

    costs, title = stage_costs(cut_program), name
    lines: list[str] = []
    if not name:
        name, stages = function_name(cut_program.closed), len(costs)
        several = f" in {stages} stages" if stages > 1 else ""
        title = f"{name}: {cut_program.num_shards:,} shards{several}"
        most = size(peak_bytes(cut_program))
        read = _reads(cut_program, cut_program.stages) or "nothing"
        lines.append(f"a shard holds at most {most}; together the shards read {read}")
    lines += [*_arguments(cut_program), *narrowed(cut_program)]
    lines += [
        f"chunks of {argument} are decoded {times:.3g} times: cut it AS_CHUNKED, or in "
        "Pieces of a multiple of its chunks"
        for argument, times in cut_program.chunks_read.items()
        if times >= CHUNKS_READ
    ]
    lines += _stages(cut_program, costs)
    return Explanation(name, pieces=tuple(lines), stages=costs, title=title)


def _arguments(cut_program: CutProgram) -> Iterator[str]:
    """Yields what the cut of each axis of an argument reaches, or why it is whole."""
    inputs = zip(
        cut_program.names, cut_program.graph.inputs, cut_program.cuts, strict=True
    )
    for leaf, (name, value, row) in enumerate(inputs):
        yield f"{name}: {value.aval.dtype}{list(value.shape)}"
        for axis, cut in enumerate(row):
            if not cut.at:
                yield f"  axis {axis}: whole"
                continue
            lengths = {b - a for a, b in pieces(cut.at, value.shape[axis])}
            span = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
            yield f"  axis {axis}: cut into {len(cut.at) + 1} pieces of {span}"
            yield from (f"    {line}" for line in _fate(cut_program, (leaf, axis)))


def _stages(cut_program: CutProgram, costs: Sequence[StageCost]) -> Iterator[str]:
    """Yields the lines of each stage under its number; equal stages once."""
    if cut_program.scratch is not None:
        most = max((cost.scratch_bytes for cost in costs), default=0)
        yield f"scratch {cut_program.scratch}: {size(most)} at most"
    numbers: dict[tuple[str, ...], list[int]] = {}
    for number, (stage, cost) in enumerate(zip(cut_program.stages, costs, strict=True)):
        made = f"{cost.shards:,} shards make {', '.join(_grouped(cost.makes))}"
        told = Counter(
            f"  keeps {_name(cut_program, result.value)}, {size(nbytes(result.value))}"
            for result in stage.results
            if result.value in cut_program.analysis.costly
        )
        kept = [
            line + f", and {often - 1} more such values" * (often > 1)
            for line, often in told.items()
        ]
        drawn = _drawn_whole(cut_program, stage)
        lines = made + _costs(cut_program, stage, cost), *kept, *drawn
        numbers.setdefault(lines, []).append(number)
    for (made, *others), those in numbers.items():
        listed = [*map(str, those[:8]), *["..."] * (len(those) > 8)]
        yield f"stage{'s' * (len(those) > 1)} {', '.join(listed)}: {made}"
        yield from others


def runs_whole(cut_program: CutProgram) -> bool:
    """Returns True if cuts were asked for, but none reaches the end of the function."""
    stages, ended = cut_program.stages, cut_program.analysis.ended
    return (
        any(cut.at for row in cut_program.cuts for cut in row)
        and bool(stages)  # Else nothing is computed.
        and all(stage.num_shards == 1 for stage in stages)
        and not any(each.reason.in_stages for each in ended)
    )


def narrowed(cut_program: CutProgram) -> list[str]:
    """The arguments that JAX takes in 32 bits instead of 64, by their dtypes."""
    groups: dict[tuple[Any, Any], list[str]] = {}
    for name, dtypes in cut_program.narrowed.items():
        groups.setdefault(dtypes, []).append(name)
    return [
        f"{', '.join(_grouped(names))}: {given}, computed in {taken}, as "
        "jax_enable_x64 is off"
        for (given, taken), names in groups.items()
    ]


def _drawn_whole(cut_program: CutProgram, stage: Stage) -> list[str]:
    """Random numbers that a shard draws whole, though it uses a part of them."""
    rules = cut_program.analysis.rules
    lines = (
        f"  draws all of {node.name} ({node.source}) at once: {reason}"
        for node in reversed(stage.backwards if cut_program.num_shards > 1 else [])
        for reason in {*rules[node].wholes.values()} & DRAWN_WHOLE
    )
    return list(dict.fromkeys(lines))


def out_slices(cut_program: CutProgram) -> PyTree:
    """How the outputs are cut: per output {axis: list of (start, stop)}."""
    cuts: dict[Operand, dict[int, list[Interval]]] = {}
    for stage in cut_program.stages:
        for result in stage.results:
            cuts[result.value] = {
                axis: list(stage.loops[k].pieces)
                for axis, k in enumerate(result.axes)
                if k is not None
            }
    leaves = [cuts.get(value, {}) for value in cut_program.graph.outputs]
    return jax.tree.unflatten(cut_program.out_tree, leaves)


def _reads(cut_program: CutProgram, stages: Sequence[Stage]) -> str:
    """How often the shards of some stages read each argument in all."""
    elements: dict[Value, float] = {}
    for stage in stages:
        numbers = stage.spread()
        weight = stage.num_shards / len(numbers)
        for number in numbers:
            for value, box in stage.recipe(number)[1].reads:
                read = weight * math.prod(shape_of(box))
                elements[value] = elements.get(value, 0) + read
    about = "about " if any(stage.spread().step > 1 for stage in stages) else ""
    names_by_times: dict[str, list[str]] = {}
    for name, value in zip(cut_program.names, cut_program.graph.inputs, strict=True):
        # A piece of a chunk costs all of it.
        read = elements.get(value, 0) * cut_program.chunks_read.get(name, 1)
        if read:
            times = f"{read / value.size:.3g}"
            often = {"1": "once", "2": f"{about}twice"}.get(
                times, f"{about}{times} times"
            )
            names_by_times.setdefault(often, []).append(name)
    return ", ".join(
        f"{name} {often}"
        for often, names in names_by_times.items()
        for name in _grouped(names)
    )


MOST_NAMES = 4
"""This many leaves of one argument or result, or more, are counted, not named."""

_ROOT = re.compile(r"(?:kw)?args\[.*?\]|result(?:\[\d+\])?|.*")


def _grouped(names: Iterable[str]) -> list[str]:
    """Names of leaves; many leaves of one tree are replaced by their number."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _ROOT.match(name)
        groups.setdefault(match[0] if match else name, []).append(name)
    return [
        name
        for root, leaves in groups.items()
        for name in (
            leaves if len(leaves) < MOST_NAMES else [f"{len(leaves)} arrays of {root}"]
        )
    ]


def _fate(cut_program: CutProgram, origin: tuple[int, int]) -> list[str]:
    """Where the cut of an argument's axis arrives, and where it stops."""
    reached: dict[tuple[str, str], list[str]] = {}
    for stage in cut_program.stages:
        for number, loop in enumerate(stage.loops):
            if origin not in loop.origins:
                continue
            for result in stage.results:
                name = _name(cut_program, result.value)
                if number in result.axes:
                    what = f"reaches axis {result.axes.index(number)} of "
                    reached.setdefault((what, ""), []).append(name)
                if number in result.partial:
                    how = f", combined by {result.combiner}"
                    reached.setdefault(("gives parts of ", how), []).append(name)
    lines = [
        f"{before}{name}{behind}"
        for (before, behind), names in reached.items()
        for name in _grouped(dict.fromkeys(names))
    ]
    arrives = bool(lines)
    for ended in cut_program.analysis.ended:
        # If the cut arrives, the parts that a slice leaves out need no line.
        if origin in ended.origins and not (arrives and ended.reason == BESIDE):
            node = ended.node
            what = "stays cut" if ended.reason.in_stages else "stops"
            lines.append(f"{what} at {node.name} ({node.source}): {ended.reason}")
    if not lines:
        lines.append("reaches no result: whole where it is read")
    return list(dict.fromkeys(lines))


def _name(cut_program: CutProgram, value: Value) -> str:
    """The path of an output; of another value, what makes it and where."""
    if value in cut_program.output_names:
        return cut_program.output_names[value]
    node = value.producer
    assert node is not None
    return f"the {node.name} of shape {value.shape} ({node.source})"


MANY_LENGTHS = 8
"""With this many lengths of pieces, the report says that each compiles a function."""


def _costs(cut_program: CutProgram, stage: Stage, cost: StageCost) -> str:
    """What a stage keeps, computes, compiles and reads."""
    computed = temporaries(cut_program, stage)
    parts = [f"{size(cost.kept_bytes)} kept"] * bool(cost.kept_bytes)
    parts += [f"{size(cost.scratch_bytes)} kept in scratch"] * bool(cost.scratch_bytes)
    parts += [f"{size(computed)} of temporaries in a shard"] * bool(computed)
    if cost.functions > 1:
        about = "about " * (stage.spread().step > 1)
        parts.append(f"{about}{cost.functions:,} functions compiled")
        if (lengths := _lengths(stage)) >= MANY_LENGTHS:
            parts[-1] += f" for pieces of {lengths:,} lengths (see Pieces)"
    parts += [f"reads {cost.reads}"] * bool(cost.reads)
    return "".join(f"; {each}" for each in parts)


def _functions(stage: Stage) -> int:
    """About how many functions the shards of a stage compile.

    Shards that differ in position only share one.
    """
    numbers = {*stage.spread()}.union(*sample(stage))
    recipes = {stage.recipe(number)[1].static for number in numbers}
    return max(len(recipes), _lengths(stage))


def _lengths(stage: Stage) -> int:
    """How many different lengths the pieces of its shards have."""
    return sum(
        math.prod(len({b - a for a, b in stage.loops[k].pieces}) for k in family.loops)
        for family in stage.families
    )
