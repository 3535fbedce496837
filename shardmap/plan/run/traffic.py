"""The bytes that a run by other processes moves."""

from collections import defaultdict
from typing import Any, NamedTuple

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import sliceable
from shardmap.arrays.sources.registry import Away
from shardmap.plan.engine.keys import box_bytes
from shardmap.plan.run.buffers import ARITY
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.disk.scratch import checked, scratch_sinks
from shardmap.plan.run.out import outputs
from shardmap.plan.run.processes import RemoteAccess
from shardmap.plan.run.shards import Shard
from shardmap.units import size


class Traffic(NamedTuple):
    """Bytes of a run by other processes. Made by `ShardPlan.traffic`.

    Attributes:
      there: what those processes read and write themselves.
      here: what goes through this process, in both directions; at most, as workers may
        put partial results together.
      lines: the same for each argument and result, in words.
    """

    there: int
    here: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def traffic(
    cut_program: CutProgram, args: tuple[PyTree, ...], out: PyTree, scratch: Any = None
) -> Traffic:
    """See `ShardPlan.traffic`."""
    scratch = cut_program.scratch if scratch is None else checked(scratch)
    leaves = list(map(sliceable, cut_program.leaves(args)))
    places = outputs(cut_program, out, leaves)
    given = {value: array for value, array in places if value}
    access = RemoteAccess(cut_program.graph.inputs, leaves, given)
    access.sinks.update(scratch_sinks(cut_program, scratch))
    inputs = zip(cut_program.graph.inputs, cut_program.names, strict=True)
    names = {**cut_program.output_names, **dict(inputs)}
    # By argument, or result, and by how it travels.
    read: defaultdict[tuple[str, str, bool], float] = defaultdict(float)
    written: defaultdict[tuple[str, str, bool], float] = defaultdict(float)
    for stage in cut_program.stages:
        numbers = stage.spread()
        weight = stage.num_shards / max(len(numbers), 1)
        for number in numbers:
            shard = Shard(cut_program, stage, number)
            for value, box in shard.recipe.reads:
                name = names.get(value, "what earlier stages made")
                there = access.read(value, box) is not None
                how = _read(access.source(value), there)
                read[name, how, there] += weight * box_bytes(value, box)
            for box, combiner, value in shard.writes:
                name = names.get(value, "what later stages need")
                there = access.write(box, combiner, value) is not None
                how = "are written by the workers" if there else "come back"
                if combiner != "insert" and cut_program.parts[value] > ARITY:
                    how += f", or a part where workers combine them: {ARITY} into one"
                elif not there and value in access.sinks:
                    how += ", as shards share cells of it: cut along its chunks"
                written[name, how, there] += weight * box_bytes(value, box)
    rows = [*read.items(), *written.items()]
    lines = [f"{name}: {size(round(count))} {how}" for (name, how, _), count in rows]
    whole = sum(count for _, count in rows)
    moved = sum(count for (*_, there), count in rows if there)
    return Traffic(round(moved), round(whole - moved), tuple(lines))


def _read(source: Away | None, there: bool) -> str:
    if source is None:
        return "are sent from here, as it lies in memory"
    return f"are read by the workers ({source.kind})" if there else "are sent from here"
