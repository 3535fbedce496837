"""What a run by other processes moves: there, and through this process."""

from typing import Any, NamedTuple

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import sliceable
from shardmap.arrays.trees import result_names
from shardmap.plan.away.tasks import Travels
from shardmap.plan.engine.keys import box_bytes
from shardmap.plan.engine.nodes import Value
from shardmap.plan.run.buffers import FOLDED
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.disk.scratch import checked, to_travel
from shardmap.plan.run.out import outputs
from shardmap.plan.run.shards import Shard
from shardmap.units import size

SEEN = 64
"""From how many shards of a stage the bytes of all are told."""


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
    travels = Travels.of(cut_program, leaves, given)
    travels.sinks.update(to_travel(cut_program, scratch))
    read: dict[tuple[Value, bool], float] = {}
    written: dict[tuple[Value, bool], float] = {}
    folded: set[Value] = set()
    for stage in cut_program.stages:
        step = max(1, stage.num_shards // SEEN)
        numbers = range(0, stage.num_shards, step)
        weight = stage.num_shards / max(len(numbers), 1)
        for number in numbers:
            shard = Shard(cut_program, stage, number)
            for value, box in shard.recipe.reads:
                key = value, travels.read(value, box) is not None
                read[key] = read.get(key, 0) + weight * box_bytes(value, box)
            for box, combiner, value in shard.writes():
                key = value, travels.write(box, combiner, value) is not None
                if combiner != "insert" and cut_program.parts[value] > FOLDED:
                    folded.add(value)
                written[key] = written.get(key, 0) + weight * box_bytes(value, box)
    names = dict(zip(cut_program.graph.inputs, cut_program.names, strict=True))
    results = result_names(cut_program.out_tree)
    for name, output in zip(results, cut_program.graph.outputs, strict=True):
        if isinstance(output, Value):
            names.setdefault(output, name)
    lines = []
    for (value, there), count in read.items():
        name = names.get(value, "what earlier stages made")
        source = travels.source(value)
        lines.append(f"{name}: {size(round(count))} {_read(there, source is not None)}")
        if there and source is not None:
            lines[-1] += f" ({source.kind})"
    for (value, there), count in written.items():
        name = names.get(value, "what later stages need")
        how = "are written by the workers" if there else "come back"
        lines.append(f"{name}: {size(round(count))} {how}")
        if value in folded:
            lines[-1] += f", or a part where workers combine them: {FOLDED} into one"
        elif not there and value in travels.sinks:
            lines[-1] += ", as shards share cells of it: cut along its chunks"
    both = [*read.items(), *written.items()]
    return Traffic(
        round(sum(count for (_, there), count in both if there)),
        round(sum(count for (_, there), count in both if not there)),
        tuple(lines),
    )


def _read(there: bool, travels: bool) -> str:
    if there:
        return "are read by the workers"
    return "are sent from here" + ("" if travels else ", as it lies in memory")
