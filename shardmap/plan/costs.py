"""The costs of a plan's stages: what they compile, repeat, keep and recompute.

A value that several stages, or all shards of another loop, need is kept if that costs
less than recomputing it: see `engine.recompute`.
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
      number: the number of functions; shards that differ in position only share one.
      lengths: the number of different lengths of pieces, or of combinations of them.
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
    """About how many operations each stage repeats, of its own or of earlier stages."""
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
    """Yields the values that a stage keeps or recomputes, with the choice."""
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
