"""Decides whether to keep a value or to recompute it, from recipes of sample shards.

A shard computes all that it needs. For pairwise distances that are cut along both axes,
each shard computes the norms of its rows, and other shards compute them too. The
recipes tell how often the shards of a stage take a value, and how often they run the
equation that takes it. If the first is about twice the second, the value may be kept.
So may one that each shard computes whole, such as a sort, and takes a piece of.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.propagate import Analysis, Runs
from shardmap.plan.engine.recipe import Step
from shardmap.plan.engine.rules import Rule
from shardmap.plan.engine.stages import SPREAD, Stage, stages_of
from shardmap.plan.engine.work import Choice, again, operations

WORTH_KEEPING = 2**24
"""A value may be kept if shards would repeat at least this many operations."""

TAKEN = 2
"""A value may be kept if shards compute more than this many times what they take."""

MOST_MEASURED = 64
"""The most stages of which shards are sampled.

In a plan of more stages, each one that takes a value counts as computing it: a sample
would compute all that lies before its stage."""

SAMPLES = 8
"""About how many shards of a stage are sampled; few, as ``memory`` tries many cuts."""

Counts: TypeAlias = tuple[dict[int, float], dict[tuple[int, int], float]]
"""How often each node runs, and how often its operands are taken, by number."""

KeptFor: TypeAlias = Mapping[int, Mapping[int, Choice]]
"""Node number -> the numbers of operands that are kept for it -> the choice."""


def measured(make: Callable[[KeptFor], Analysis]) -> Analysis:
    """The analysis that keeps values where that costs less than recomputing them.

    Args:
      make: returns the analysis with these operands kept.
    """
    kept_for: dict[int, dict[int, Choice]] = {}
    count = functools.cache(functools.partial(counted, samples=SAMPLES))

    def made() -> Analysis:
        analysis = make(kept_for)
        if len(stages_of(analysis)) > MOST_MEASURED:
            _keep(analysis, lambda node, stages: stages)
        return analysis

    while found := _repeated(analysis := made(), count):
        for (node, operand), choice in found.items():
            kept_for.setdefault(node, {})[operand] = choice
    stages = stages_of(analysis)

    @functools.cache
    def runs() -> dict[int, float]:
        total: dict[int, float] = defaultdict(float)
        for stage in stages:
            for number, own in count(stage)[0].items():
                total[number] += own
        return total

    if len(stages) <= MOST_MEASURED:
        _keep(analysis, lambda node, _: runs()[node.number])
    return analysis


def _keep(analysis: Analysis, runs: Runs) -> None:
    """Keeps what is costly to recompute; see `Analysis.keep_costly`."""
    known = len(analysis.kept)
    analysis.keep_costly(runs)
    if len(analysis.kept) > known:
        analysis.stages = []


def _repeated(
    analysis: Analysis, count: Callable[[Stage], Counts]
) -> dict[tuple[int, int], Choice]:
    """(node number, operand number) -> the choice to keep what shards recompute."""
    nodes = {node.number: node for node in analysis.graph.nodes}
    whole = sum(map(operations, analysis.rules.values()))
    found = {}
    for stage in stages_of(analysis):
        if whole * stage.num_shards < WORTH_KEEPING:
            continue
        runs, takes = count(stage)
        for (number, operand), taken in takes.items():
            value = nodes[number].ins[operand]
            assert isinstance(value, Value)
            assert value.producer is not None
            times = again(taken / runs[number])
            if (made := runs[value.producer.number]) > TAKEN * taken:
                times = max(times, again(made))
            if (
                times < 1
                or value in analysis.pending
                or operand in analysis.rules[number].shared_out
            ):
                continue
            choice = analysis.work.choice(value, times)
            if times * choice.operations < WORTH_KEEPING:
                continue
            if value in analysis.kept or analysis.work.worth_keeping([value], times):
                found[number, operand] = choice._replace(kept=True)
    return found


def counted(stage: Stage, samples: int = SPREAD) -> Counts:
    """How often the shards of a stage run each node, and take its computed operands.

    A shard that runs half of a node counts as 0.5. If nothing is repeated, all shards
    together run each node once.

    Args:
      stage: the stage.
      samples: about how many of its shards are sampled.
    """
    nodes = {node.number: node for node in stage.backwards}
    rules = stage.analysis.rules
    runs: dict[int, float] = defaultdict(float)
    takes: dict[tuple[int, int], float] = defaultdict(float)
    numbers = stage.spread(samples)
    alike = Counter(stage.recipe(number)[1].static for number in numbers)
    for static, members in alike.items():
        count = members * stage.num_shards / len(numbers)
        # XLA computes once what is computed whole, whichever parts of it are taken.
        steps: dict[Any, Step] = {
            (step.node, step.ins) if rules[step.node].wholes else step: step
            for step in static.steps
        }
        for step in steps.values():
            part = _share(rules[step.node], step)
            runs[step.node] += count * part
            operands = zip(nodes[step.node].ins, step.ins, strict=True)
            for k, (value, ref) in enumerate(operands):
                if part and ref and isinstance(value, Value):
                    if value not in stage.reads:
                        taken = math.prod(ref.shape) / max(value.size, 1)
                        takes[step.node, k] += count * taken
    return runs, takes


def _share(rule: Rule, step: Step) -> float:
    """How much of an equation a step does: 1 is all of it."""
    shapes = [None if ref is None else ref.shape for ref in step.ins]
    own, every = rule.fraction(step.static, shapes)
    return own / every if every else 1.0
