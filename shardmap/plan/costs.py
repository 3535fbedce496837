"""The values that a plan keeps, and those that it computes again.

A value that several stages need, or every shard of another loop, is kept where that
costs less than to compute it again: see `engine.recompute`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.recompute import counted
from shardmap.plan.engine.stages import Stage
from shardmap.plan.engine.work import Choice, operations
from shardmap.plan.memory.plan_peak import sample
from shardmap.plan.run.cut_program import CutProgram
from shardmap.units import count, size


class Compiled(NamedTuple):
    """What the shards of a stage compile.

    Attributes:
      number: how many functions; shards that differ in their place alone share one.
      lengths: of how many lengths, or combinations of them, the pieces are.
      exact: whether every shard was looked at; else there may be a few more.
    """

    number: int
    lengths: int
    exact: bool


def functions(stage: Stage) -> Compiled:
    numbers = {*stage.spread(), *sample(stage)}
    found = {stage.recipe(number)[1].static for number in numbers}
    lengths = sum(
        math.prod(len(stage.loops[k].lengths) for k in family.loops)
        for family in stage.families
    )
    exact = len(numbers) == stage.num_shards
    return Compiled(max(len(found), lengths), lengths, exact)


def repeated(cut_program: CutProgram) -> list[int]:
    """About how many operations the shards of each stage repeat.

    These are what the stage, or one before it, has done already.
    """
    rules = cut_program.analysis.rules
    before: dict[int, float] = defaultdict(float)
    found = []
    for stage in cut_program.stages:
        more = 0.0
        for number, often in counted(stage)[0].items():
            again = min(often, max(before[number] + often - 1, 0))
            more += again * operations(rules[number])
            before[number] += often
        found.append(round(more))
    return found


def choices(cut_program: CutProgram, stage: Stage) -> Iterator[tuple[Value, Choice]]:
    """The values that a stage makes and that were kept, or are computed again."""
    made = {result.value for result in stage.results}
    for value, choice in cut_program.analysis.work.choices.items():
        if choice.kept and value in made:
            yield value, choice
        elif not choice.kept and cut_program.analysis.level[value] == stage.number:
            yield value, choice


def told(name: str, choice: Choice) -> str:
    """A choice in words."""
    times = "once more" if choice.times == 1 else f"{choice.times:,} times more"
    again = f"{count(choice.operations)} operations and reads {size(choice.reads)}"
    if choice.kept:
        return (
            f"keeps {name}, {size(choice.nbytes)}: to compute it {times} takes {again}"
            + " each time" * (choice.times > 1)
        )
    return (
        f"computes {name} {times}, which takes {again}"
        + " each time" * (choice.times > 1)
        + f": kept it would be {size(choice.nbytes)}"
    )
