"""What is known of a graph once its cuts are given: the result of `propagate`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardmap.planning.engine.loop_classes import AxisKey, UnionFind
from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value
from shardmap.planning.engine.rules import Cut, Factor, Origins, Reason, Rule


class ReducedLoop(NamedTuple):
    """A loop over a contracted factor of a node.

    Attributes:
      node: the node's number.
      factor: the factor, as the node's rule calls it.
      size: the factor's size.
      key: an operand's axis that the loop runs along.
      cut: how it is cut.
    """

    node: int
    factor: Factor
    size: int
    key: AxisKey
    cut: Cut


class Pending(NamedTuple):
    """The state of a partial value: each shard has only a part of it.

    Attributes:
      combiner: how the parts become the value.
      reductions: the loops whose shards have the parts: their numbers in an analysis,
        or the names that a loop or branch has for them.
    """

    combiner: Combiner
    reductions: Collection[Any]


class Ended(NamedTuple):
    """A cut that stops at a node, and why."""

    origins: Origins
    node: Node
    reason: Reason


@dataclass(frozen=True, eq=False)
class Analysis:
    """The cuts, the stage and the state of every value of a graph.

    Attributes:
      graph: the graph.
      rules: node number -> rule.
      cuts: value -> the cuts of its axes.
      classes: which axes are one loop.
      pending: values that are partial in their stage.
      level: value -> the first stage that can compute it.
      kept: values that a later stage reads; they are results of their own stage.
      costly: the kept values that later stages could compute again.
      reductions: the loops over contracted factors, by number.
      one_reduction: for each of them, the number that stands for all that are one loop.
      same_reductions: such a number -> all that are this loop.
      ended: the cuts that ended.
    """

    graph: Graph
    rules: Mapping[int, Rule]
    cuts: Mapping[Operand, Sequence[Cut]]
    classes: UnionFind
    pending: Mapping[Operand, Pending]
    level: Mapping[Operand, int]
    kept: Mapping[Value, None]
    costly: Mapping[Value, None]
    reductions: Sequence[ReducedLoop]
    one_reduction: Sequence[int]
    same_reductions: Mapping[int, Sequence[ReducedLoop]]
    ended: Sequence[Ended]
