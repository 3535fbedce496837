"""What a plan tells about itself, as text."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardmap.arrays.trees import result_names
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import pieces
from shardmap.plan.engine.stages import Stage
from shardmap.units import size

if TYPE_CHECKING:
    from shardmap.plan.plan import ShardPlan

Origin = tuple[int, int]


def summary(plan: "ShardPlan") -> str:
    """A few lines: shards, bytes, and what each asked cut became."""
    largest, everything = plan.largest()
    stages = f" in {len(plan.stages)} stages" if len(plan.stages) > 1 else ""
    lines = [
        f"ShardPlan: {plan.num_shards:,} shards{stages}, at most {size(largest)} of "
        f"{size(everything)} in one ({plan.cut_fraction:.1%})"
    ]
    for leaf, axis in _asked(plan):
        fate = "; ".join(_fate(plan, leaf, axis))
        lines.append(f"  {plan.names[leaf]} {_cut(plan, leaf, axis)}; {fate}")
    return "\n".join(lines)


def explain(plan: "ShardPlan") -> str:
    """Every axis of every argument: cut, reaching what; or whole, and why."""
    lines = []
    for leaf, value in enumerate(plan.program.inputs):
        lines.append(f"{plan.names[leaf]}: {value.aval.dtype}{list(value.shape)}")
        for axis in range(len(value.shape)):
            if not plan.cuts[leaf][axis].at:
                lines.append(f"  axis {axis}: whole, as asked")
                continue
            lines.append(f"  {_cut(plan, leaf, axis)}")
            lines += [f"    {line}" for line in _fate(plan, leaf, axis)]
    for stage in plan.stages:
        lines.append(_stage(plan, stage))
    return "\n".join(lines)


def _asked(plan: "ShardPlan") -> list[Origin]:
    return [
        (leaf, axis)
        for leaf, row in enumerate(plan.cuts)
        for axis, cut in enumerate(row)
        if cut.at
    ]


def _cut(plan: "ShardPlan", leaf: int, axis: int) -> str:
    length = plan.program.inputs[leaf].shape[axis]
    lengths = {b - a for a, b in pieces(plan.cuts[leaf][axis].at, length)}
    count = len(plan.cuts[leaf][axis].at) + 1
    span = f"{min(lengths)} to {max(lengths)}" if len(lengths) > 1 else min(lengths)
    return f"axis {axis}: asked to be cut into {count} pieces of {span}"


def _fate(plan: "ShardPlan", leaf: int, axis: int) -> list[str]:
    """Where a cut arrives, and where it ends."""
    origin = leaf, axis
    lines = []
    for stage in plan.stages:
        for number, loop in enumerate(stage.loops):
            if origin not in loop.origins:
                continue
            for result in stage.results:
                name = _name(plan, result.value)
                if number in result.axes:
                    reached = result.axes.index(number)
                    lines.append(f"reaches axis {reached} of {name}")
                if number in result.partial:
                    lines.append(
                        f"gives parts of {name}, combined by {result.combiner}"
                    )
    for ended in plan.analysis.ended:
        if origin in ended.origins:
            node = ended.node
            lines.append(f"ends at {node.name} ({node.source}): {ended.reason}")
    if not lines:
        lines.append("reaches no result: whole where it is read")
    return list(dict.fromkeys(lines))


def _name(plan: "ShardPlan", value: Value) -> str:
    """An output by its path, another value by its place."""
    names = result_names(plan.out_tree)
    for name, output in zip(names, plan.program.outputs, strict=True):
        if output is value:
            return name
    node = value.producer
    assert node is not None
    return f"the {node.name} of shape {value.shape} ({node.source})"


def _stage(plan: "ShardPlan", stage: Stage) -> str:
    made = ", ".join(_names(plan, (result.value for result in stage.results)))
    return f"stage {stage.number}: {stage.num_shards:,} shards make {made}"


def _names(plan: "ShardPlan", values: Iterable[Value]) -> list[str]:
    return [_name(plan, value) for value in values]
