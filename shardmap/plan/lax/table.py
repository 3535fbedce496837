"""The table of all rules, and the calls that are looked through."""

from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives as p

from shardmap.map.primitive import spmap_p
from shardmap.plan.lax import (
    batched,
    branches,
    indexed,
    loops,
    mapped,
    pointwise,
    random,
    reduce,
    reshape,
    shape,
    special,
    window,
)
from shardmap.plan.program import Calls
from shardmap.plan.rules import RuleMaker, RuleTable


def _custom_vmap_p() -> Any:
    @jax.custom_batching.custom_vmap
    def same(x: Any) -> Any:
        return x

    same.def_vmap(lambda size, batched, x: (x, batched[0]))
    return jax.make_jaxpr(same)(np.float32(0)).eqns[0].primitive


def _named_axis_effect() -> type:
    """Says that an equation is inside a map; its rule knows what to do about it."""
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.psum(x, "i"), axis_env=[("i", 2)])(0.0)
    return type(next(iter(jaxpr.eqns[-1].effects)))


CALLS = Calls(
    {
        p.call_p: "call_jaxpr",
        p.closed_call_p: "call_jaxpr",
        p.custom_jvp_call_p: "call_jaxpr",
        p.custom_vjp_call_p: "call_jaxpr",
        p.jit_p: "jaxpr",
        p.remat_p: "jaxpr",
        _custom_vmap_p(): "call",
    },
    shape.rewrites(),
    (_named_axis_effect(),),
)

WHEN_CUT = {
    p.argmax_p: reduce.arg_reduction(largest=True),
    p.argmin_p: reduce.arg_reduction(largest=False),
}

RULES: dict[Any, RuleMaker] = {
    **pointwise.RULES,
    **shape.RULES,
    **reshape.RULES,
    **reduce.RULES,
    **batched.RULES,
    **window.RULES,
    **indexed.RULES,
    **random.RULES,
    **special.RULES,
}

TABLE = RuleTable(RULES)
TABLE.makers |= {
    p.cond_p: lambda node: branches.Cond(node, TABLE, CALLS),
    spmap_p: lambda node: mapped.Mapped(node, TABLE, CALLS),
    p.scan_p: lambda node: loops.Scan(node, TABLE, CALLS),
    p.while_p: lambda node: loops.While(node, TABLE, CALLS),
}
