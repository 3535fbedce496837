"""What is known of a graph once its cuts are given: the result of `propagate`."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmap.planning.engine.loop_classes import AxisKey, UnionFind
from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value
from shardmap.planning.engine.rules import Contraction, Cut, Origins, Reason, Rule

LoopName: TypeAlias = tuple[AxisKey, int]
"""A class of axes, and which of the loops over it: ``x @ x.T`` needs two of them."""


def free_loop(key: AxisKey, taken: Collection[LoopName]) -> LoopName:
    """The first loop over a class of axes that is not taken."""
    return next((key, k) for k in itertools.count() if (key, k) not in taken)


class ReducedLoop(NamedTuple):
    """A loop over a contracted factor of a node.

    Attributes:
      node: the node.
      contraction: the factor, as the node's rule calls it, its size and its cut.
      loop: the loop.
    """

    node: Node
    contraction: Contraction
    loop: LoopName


class Pending(NamedTuple):
    """The state of a partial value: each shard has only a part of it.

    Attributes:
      combiner: how the parts become the value.
      reductions: the loops whose shards have the parts.
    """

    combiner: Combiner
    reductions: Collection[LoopName]


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
      rules: the rules of its nodes.
      cuts: value -> the cuts of its axes.
      classes: which axes are one loop.
      pending: values that are partial in their stage.
      level: value -> the first stage that can compute it.
      kept: values that a later stage reads; they are results of their own stage.
      costly: the kept values that later stages could compute again.
      reductions: the loops over contracted factors, by node.
      ended: the cuts that ended.
    """

    graph: Graph
    rules: Mapping[Node, Rule]
    cuts: Mapping[Operand, Sequence[Cut]]
    classes: UnionFind
    pending: Mapping[Operand, Pending]
    level: Mapping[Operand, int]
    kept: Mapping[Value, None]
    costly: Mapping[Value, None]
    reductions: Mapping[Node, Sequence[ReducedLoop]]
    ended: Sequence[Ended]
