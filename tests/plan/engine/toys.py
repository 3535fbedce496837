"""A table of two toy rules, for the engine, which knows no primitive."""

import jax
import numpy as np
from jax.extend.core import primitives as p

from shardmap.plan.engine.factors import Factors, RuleTable
from shardmap.plan.engine.nodes import Calls, flatten
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.rules import Cut


def same(node):
    axes = range(len(node.out_shapes[0]))
    ins = [range(len(shape)) for shape in node.in_shapes]
    return Factors(node, ins, [axes])


def total(node):
    axes = range(len(node.in_shapes[0]))
    gone = node.params["axes"]
    out = [axis for axis in axes if axis not in gone]
    return Factors(
        node, [axes], [out], contracted=dict.fromkeys(gone, "add"), cheap=False
    )


TOY = RuleTable({p.sin_p: same, p.add_p: same, p.reduce_sum_p: total})


CALLS = Calls({p.jit_p: "jaxpr"}, {})


CUT = Cut((2, 4), False, frozenset({(0, 0)}))


NOT = Cut()


def analysed(fun, *shapes, cuts, partial=True):
    avals = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    graph = flatten(jax.make_jaxpr(fun)(*avals), CALLS)
    return Analysis(graph, TOY.rule, cuts, partial)
