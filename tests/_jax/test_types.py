"""The short names for JAX's types say what is true of both ends of JAX."""

import jax

from shardmap._jax import types


def test_what_a_jaxpr_is_made_of_has_these_types():
    closed = jax.make_jaxpr(lambda x: x + 1.0)(1.0)
    [equation] = closed.jaxpr.eqns
    assert isinstance(closed, types.ClosedJaxpr)
    assert isinstance(closed.jaxpr, types.Jaxpr)
    assert isinstance(equation, types.Equation)
    assert isinstance(equation.primitive, types.Primitive)
    assert all(isinstance(atom, types.Atom) for atom in equation.invars)
    assert isinstance(equation.outvars[0].aval, types.Aval)
    assert isinstance(jax.tree.structure(()), types.TreeDef)
