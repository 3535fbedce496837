"""Calls of the host from programs of several devices that all compute the same.

In maps inside maps, what the outer function computes is computed on each device that
one of its elements has, and on every copy of a mesh. JAX's own callbacks are called on
one of these devices: the first.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardmap._jax.context import NO_MESH
from shardmap._jax.effects import DEBUG_EFFECT, happens_outside
from shardmap._jax.primitives import PURE_CALLBACK
from shardmap._jax.types import AnyMesh, Equation, Jaxpr, Value, aval_of
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.map.layout import MeshWalk, inner_walk
from shardmap.map.primitives.axis import REPLICAS
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.primitives.rewriting import rewrite_jaxpr
from shardmap.map.primitives.tap import tap_p


def has_effect(equation: Equation) -> bool:
    """Whether anything happens in an equation that is seen outside of it."""
    return any(map(happens_outside, equation.effects))


def happens_here(equation: Equation) -> bool:
    """Whether an equation has an effect, and not only holds others that have."""
    # A tap's jaxpr is there for JAX to look at; it is not run.
    return has_effect(equation) and (
        equation.primitive is tap_p or not jaxprs_in(equation.params)
    )


def one_at_a_time(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` whose pure callbacks can be vectorised, by a call for each element.

    One that is not told how is for one element: so it is where each has its device.
    """
    found = False

    def change(equation: Equation, shadowed: bool) -> Any:
        nonlocal found
        params = equation.params
        if equation.primitive is not PURE_CALLBACK or params["vmap_method"] is not None:
            return equation
        found = True
        return equation.replace(params=params | {"vmap_method": "sequential"})

    changed = rewrite_jaxpr(jaxpr, None, change)
    return changed if found else jaxpr


def calls_host(jaxpr: Jaxpr, mesh: AnyMesh, mesh_axes: Collection[str]) -> bool:
    """Whether anything in ``jaxpr`` calls the host in a way that needs all mesh axes.

    JAX calls the host where a program is written per device along every axis of its
    mesh, and a tap has to know which device it is on along each. `jax.debug.callback`
    can do without one of them, but not tell replicas.

    Args:
      jaxpr: what one element computes.
      mesh: the mesh of the map.
      mesh_axes: those of its axes that the map walks.
    """
    effects = set(filter(happens_outside, jaxpr.effects))
    free = set(mesh.axis_names) - set(mesh_axes)
    return (
        bool(effects - {DEBUG_EFFECT})
        or bool(effects and (len(free) > 1 or REPLICAS in free))
        or any(equation.primitive is PURE_CALLBACK for equation in equations(jaxpr))
    )


def on_first_devices(
    jaxpr: Jaxpr, mesh: AnyMesh, walk: MeshWalk, around: Collection[str] = ()
) -> Any:
    """``jaxpr``, of a map, whose callbacks are called on one device for each element.

    Taps are left as they are: they say which device they are on.

    Args:
      jaxpr: what one element computes.
      mesh: the mesh, all of whose axes are written per device.
      walk: where the map goes.
      around: the mesh axes that maps around it walk.
    """
    walked = {*around, *walk.mesh_axes}
    free = tuple(name for name in mesh.axis_names if name not in walked)

    def change(equation: Equation, shadowed: bool) -> Any:
        params = equation.params
        if equation.primitive is spmap_p:
            inner = inner_walk(equation, mesh, walk.inner_axes) or MeshWalk((), ())
            inside = on_first_devices(params["call_jaxpr"], mesh, inner, walked)
            return equation.replace(params=params | {"call_jaxpr": inside})
        if not free or equation.primitive is tap_p or not happens_here(equation):
            return equation
        return _on_first(equation, {name: mesh.shape[name] for name in free})

    return rewrite_jaxpr(jaxpr, None, change, into_maps=False)


def _on_first(equation: Equation, sizes: dict[str, int]) -> Any:
    """The equation on the first device along axes; its results on all."""
    names = tuple(sizes)

    def call(*operands: Value) -> list[Any]:
        results = equation.primitive.bind(*operands, **equation.params)
        return list(results) if equation.primitive.multiple_results else [results]

    def skip(*_: object) -> list[Any]:
        return [jnp.zeros(a.shape, a.dtype) for a in map(aval_of, equation.outvars)]

    def run(*operands: Value) -> list[Any]:
        results = lax.cond(lax.axis_index(names) == 0, call, skip, *operands)
        return [lax.psum(r, names).astype(r.dtype) for r in results]

    operands = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        for aval in map(aval_of, equation.invars)
    ]
    # Typed with the mesh where it is lowered, not with the one around.
    with jax.sharding.use_abstract_mesh(NO_MESH):
        traced = jax.make_jaxpr(jax.jit(run), axis_env=list(sizes.items()))(*operands)
    [made] = traced.eqns
    return equation.replace(
        primitive=made.primitive, params=made.params, effects=made.effects
    )
