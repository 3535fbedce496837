"""Keys that are equal for equal jaxprs.

Functions that are traced separately have different variables and source lines, but
their equations may be equal, as those of the steps of an unrolled loop are.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from shardmap._jax.types import AnyJaxpr
from shardmap._jax.walk import as_open_jaxpr, constants_of
from shardmap.planning.engine.nodes import Graph, Node, Operand, Scalar, Value

COMPARED = 2**20
"""The most bytes of a constant that is compared; a larger one equals itself only."""


class IdentityKey:
    """A key that is equal for one object only. It holds it, so its id is unique."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self._thing is other._thing

    def __hash__(self) -> int:
        return id(self._thing)


def jaxpr_key(jaxpr: AnyJaxpr) -> Hashable:
    """A key; two jaxprs with equal keys compute the same from equal arguments."""
    inner = as_open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}

    def of(atom: Any) -> Hashable:
        if isinstance(atom, jex_core.Literal):
            return atom.aval, key_of(atom.val)
        return numbers.setdefault(atom, len(numbers)), atom.aval

    equations = []
    arguments = tuple(map(of, (*inner.constvars, *inner.invars)))
    for equation in inner.eqns:
        ins = tuple(map(of, equation.invars))
        outs = tuple(map(of, equation.outvars))
        effects = tuple(sorted(map(repr, equation.effects)))
        params = key_of(equation.params)
        # Its context, such as where it runs, is not among its parameters.
        around = equation.ctx
        equations.append((equation.primitive, params, around, effects, ins, outs))
    results = tuple(map(of, inner.outvars))
    consts = tuple(map(key_of, constants_of(jaxpr)))
    return arguments, consts, tuple(equations), results


def key_of(thing: Any) -> Hashable:
    """The key of a parameter or a constant, by its identity if it has no hash."""
    kind = type(thing)
    if isinstance(thing, jex_core.Jaxpr | jex_core.ClosedJaxpr):
        return kind, jaxpr_key(thing)
    if isinstance(thing, tuple | list):
        return kind, tuple(map(key_of, thing))
    if isinstance(thing, Mapping):
        keys = sorted(thing, key=repr)
        return kind, tuple((key, key_of(thing[key])) for key in keys)
    if isinstance(thing, np.ndarray | np.generic) and thing.nbytes <= COMPARED:
        if thing.dtype != object:
            return kind, str(thing.dtype), thing.shape, thing.tobytes()
    if isinstance(thing, float | complex):
        return kind, repr(thing)  # 0.0 and -0.0 are equal.
    if isinstance(thing, jax.Array):
        return IdentityKey(thing)
    try:
        hash(thing)
    except TypeError:
        return IdentityKey(thing)
    return kind, thing


def share_equal(graph: Graph) -> Graph:
    """Replaces the results of an equation by those of an equal one before it.

    XLA does so too, but stages are compiled apart: the last bits of their results may
    differ, and ``f(x) >= f(x).max()`` would find nothing. It comes first, so that what
    follows sees each equation once.
    """
    known: dict[Hashable, tuple[Value, ...]] = {}

    def replaced(graph: Graph, node: Node) -> Sequence[Operand] | None:
        ins = [key_of(x.value) if isinstance(x, Scalar) else x for x in node.ins]
        types = [x.aval for x in (*node.ins, *node.outs)]
        key = node.primitive, key_of(node.params), tuple(ins), tuple(types)
        earlier = known.setdefault(key, node.outs)
        return None if earlier is node.outs else earlier

    return graph.rewritten(replaced)
