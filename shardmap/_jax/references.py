"""Functions with references as pure functions."""

from typing import Any

import jax
import jax.extend.core as jex_core
from jax._src.state.discharge import discharge_state
from jax._src.state.indexing import NDIndexer
from jax.extend.core.primitives import swap_p

from shardmap._jax.marks import READ, with_marks
from shardmap._jax.types import Equation, Jaxpr, aval_of
from shardmap._jax.walk import equations, jaxprs_in, rewrite_jaxpr, without_constants


def _has_reference(atoms: Any) -> bool:
    return any(isinstance(atom.aval, jax.ref.AbstractRef) for atom in atoms)


def discharged(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` without the references that it makes: what they hold is a value.

    JAX has this for the jaxprs of Pallas only; it is what lowering does to all others.
    The axes of collectives have to be bound. What is read is marked.
    """
    if not any(_has_reference(e.outvars) for e in equations(jaxpr)):
        return jaxpr

    def change(equation: Equation) -> Any:
        if not _has_reference(equation.invars) or jaxprs_in(equation.params):
            return equation
        read = [v for v in equation.outvars if not isinstance(v, jex_core.DropVar)]
        return with_marks(equation, read, READ)

    marked = jex_core.ClosedJaxpr(rewrite_jaxpr(jaxpr, change), ())
    closed: Any = discharge_state(marked)
    return without_constants(closed) if closed.consts else closed.jaxpr


def with_index(equation: Equation) -> Equation:
    """A write to all of a reference, as one by an index.

    JAX 0.10 vectorises only that rightly: else the value is written as it lies, also
    where its mapped axis is not the first one.
    """
    is_write = equation.primitive is swap_p
    if not is_write or equation.params["tree"] != jax.tree.structure(()):
        return equation
    whole = NDIndexer.make_trivial_indexer(aval_of(equation.invars[0]).shape)
    return equation.replace(params={"tree": jax.tree.structure((whole,))})
