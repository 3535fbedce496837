"""Names of mapped axes and mesh axes in collectives."""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core.primitives import ppermute_p

from shardmap._jax.collectives import axis_names, named_axes, with_axis_names
from shardmap._jax.effects import axis_of, with_axis
from shardmap._jax.types import AnyMesh, Equation, Jaxpr, Value
from shardmap._jax.walk import rewrite_jaxpr
from shardmap.map.primitives.map_primitive import binds, is_no_map, spmap_p


@dataclasses.dataclass(frozen=True)
class _RenamedAxis:
    """The new name of a map's axis that is called like a mesh axis."""

    name: Hashable

    def __repr__(self) -> str:
        return repr(self.name)


def rename_axis(jaxpr: Jaxpr, old: Hashable, new: Hashable) -> Any:
    """``jaxpr`` whose collectives over ``old`` are over ``new``."""

    def change(equation: Equation) -> Any:
        if old not in named_axes(equation):
            return equation
        names = axis_names(equation.params)
        renamed = tuple(new if name == old else name for name in names)
        effects = {
            with_axis(effect, new) if axis_of(effect) == old else effect
            for effect in equation.effects
        }
        return equation.replace(
            params=with_axis_names(equation.params, renamed), effects=effects
        )

    if new == old:
        return jaxpr
    return rewrite_jaxpr(jaxpr, change, lambda equation: not binds(equation, old))


def for_mesh(
    axis_name: Hashable, jaxpr: Jaxpr, mesh: AnyMesh, mesh_axis: str | None = None
) -> tuple[Hashable, Any]:
    """A map's axis name and jaxpr, ready for the devices of a mesh.

    No map keeps the name of a mesh axis: it would hide collectives over that mesh axis.
    Permutations name mesh axes in the mesh's order.

    Args:
      axis_name: the map's axis name.
      jaxpr: the function of one element.
      mesh: the devices.
      mesh_axis: the mesh axis with one element on each device, if there is one. The
        map's axis gets its name.
    """

    def unshadowing(name: Hashable) -> Hashable:
        return _RenamedAxis(name) if name in mesh.axis_names else name

    def change(equation: Equation) -> Any:
        if equation.primitive is not spmap_p:
            return equation
        params = equation.params
        new = unshadowing(params["axis_name"])
        body = rename_axis(params["call_jaxpr"], params["axis_name"], new)
        return equation.replace(params=params | {"axis_name": new, "call_jaxpr": body})

    new = mesh_axis or unshadowing(axis_name)
    jaxpr = rename_axis(rewrite_jaxpr(jaxpr, change), axis_name, new)
    return new, in_mesh_order(jaxpr, mesh)


Pairs = Sequence[tuple[int, int]]


def permute(x: Value, names: Sequence[str], pairs: Pairs) -> Any:
    """`jax.lax.ppermute` over mesh axes, the first one of ``names`` the major one."""
    order = jax.sharding.get_abstract_mesh().axis_names
    if set(names) <= set(order):
        sizes = [lax.axis_size(name) for name in names]
        names, pairs = _in_mesh_order(names, sizes, pairs, order)
    return lax.ppermute(x, tuple(names), pairs)


def in_mesh_order(jaxpr: Jaxpr, mesh: AnyMesh) -> Any:
    """``jaxpr`` whose permutations name mesh axes in the order of the mesh.

    JAX numbers devices in the order of the mesh, whatever the order of the names.
    """

    def change(equation: Equation) -> Any:
        if equation.primitive is not ppermute_p:
            return equation
        names = axis_names(equation.params)
        if not set(names) <= set(mesh.shape):
            return equation
        sizes = [mesh.shape[name] for name in names]
        pairs = equation.params["perm"]
        names, pairs = _in_mesh_order(names, sizes, pairs, mesh.axis_names)
        return equation.replace(
            params=equation.params | {"axis_name": names, "perm": pairs}
        )

    # The bodies of maps are put in order when these are lowered.
    return rewrite_jaxpr(jaxpr, change, is_no_map)


def _in_mesh_order(
    names: Sequence[str], sizes: Sequence[int], pairs: Pairs, order: Sequence[str]
) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The same permutation with its axes in another order."""
    ordered = sorted(range(len(names)), key=lambda k: order.index(names[k]))
    numbers = np.empty(math.prod(sizes), np.int64)
    numbers[np.arange(numbers.size).reshape(sizes).transpose(ordered).ravel()] = (
        np.arange(numbers.size)
    )
    return tuple(names[k] for k in ordered), tuple(
        (int(numbers[start]), int(numbers[end])) for start, end in pairs
    )
