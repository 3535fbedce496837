"""What is done to the function of one element before devices run it, in order.

`prepare` rewrites its jaxpr once. Each equation goes through `STEPS`, first to last,
after the equations that it holds.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

from shardmap._jax.context import bound_axes
from shardmap._jax.effects import without_axis
from shardmap._jax.primitives import SHARD_MAP, manual_axes_of
from shardmap._jax.types import AnyMesh, Equation, Jaxpr
from shardmap._jax.walk import rewrite_in_context
from shardmap.map.collectives import rewrites, split
from shardmap.map.layout import lay_out_inner
from shardmap.map.lowering import effects, retracing
from shardmap.map.lowering.decision import platform_of
from shardmap.map.primitives.axis import AxisLayout
from shardmap.map.primitives.map_primitive import MapParams, MapPrimitive, spmap_p
from shardmap.map.primitives.tap import tap_p
from shardmap.sharding.mesh import with_manual_axes


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where an equation stands.

    Attributes:
      axis: the map's, with the name that it has where the function runs.
      mesh: the map's; None: the function runs where it is traced.
      retrace_mesh: that mesh with its manual axes, as equations here see it; None: they
        have a mesh of their own.
      inner_axes: the mesh axes for maps inside, one for each level; None: none of them
        is laid over this mesh.
      within: what is around the equation: this map alone, a `jax.shard_map` in it, or
        a map in it, whose own lowering does the rest.
      names: of axes, outermost first: in the traced function, and where it runs.
    """

    axis: AxisLayout
    mesh: AnyMesh | None
    retrace_mesh: AnyMesh | None
    inner_axes: tuple[str, ...] | None
    within: Literal["map", "shard_map", "inner map"]
    names: tuple[tuple[Hashable, Hashable], ...]

    @classmethod
    def of_map(
        cls,
        axis: AxisLayout,
        mesh: AnyMesh | None = None,
        retrace_mesh: AnyMesh | None = None,
        inner_axes: tuple[str, ...] | None = None,
        is_element: bool = False,
    ) -> "Scope":
        """That of a map's outermost equations; its axis has the traced name yet."""
        new = axis.device_axes[0] if is_element else unshadowed(axis.name, mesh)
        names = ((axis.name, new),)
        axis = dataclasses.replace(axis, name=new)
        return cls(axis, mesh, retrace_mesh, inner_axes, "map", names)

    @property
    def runs_as(self) -> Literal["element", "block", "loop"]:
        """What a device runs: the function itself, a block at once, or parts of it."""
        if self.axis.name in self.axis.device_axes:
            return "element"
        return "loop" if self.axis.steps > 1 else "block"

    @property
    def widens(self) -> bool:
        """Whether XLA cannot reduce bfloat16 between these devices."""
        if self.mesh is None or len(self.mesh.axis_names) == 1:
            return False
        return platform_of(self.mesh) == "cpu"

    @property
    def is_our_axis(self) -> bool:
        """Whether the axis name still means this map."""
        (old, _), *others = self.names
        return old not in dict(others)

    def inside(self, equation: Equation) -> "Scope | None":
        """That of the equations which an equation holds; None: not rewritten."""
        if equation.primitive is tap_p:
            return None  # Its jaxpr is there for JAX to look at.
        if equation.primitive is SHARD_MAP:
            return self._in_shard_map(equation)
        if not isinstance(equation.primitive, MapPrimitive):
            return self
        name = equation.params["axis_name"]
        if equation.primitive is not spmap_p:
            return self._with_names({name: name})
        scope = self._with_names({name: unshadowed(name, self.mesh)})
        return dataclasses.replace(scope, within="inner map")

    def _in_shard_map(self, equation: Equation) -> "Scope":
        manual = manual_axes_of(equation)
        scope = self._with_names({name: name for name in manual})
        if self.within == "inner map":
            return scope
        mesh = self.retrace_mesh
        if mesh is not None:
            is_same = equation.params["mesh"].axis_names == mesh.axis_names
            mesh = with_manual_axes(mesh, manual) if is_same else None
        return dataclasses.replace(scope, retrace_mesh=mesh, within="shard_map")

    def _with_names(self, bound: Mapping[Hashable, Hashable]) -> "Scope":
        return dataclasses.replace(self, names=(*self.names, *bound.items()))


@dataclasses.dataclass(frozen=True)
class _RenamedAxis:
    """The new name of a map's axis that is called like a mesh axis."""

    name: Hashable

    def __repr__(self) -> str:
        return repr(self.name)

    def __str__(self) -> str:
        return str(self.name)


def unshadowed(name: Hashable, mesh: AnyMesh | None) -> Hashable:
    """The name of a map's axis on a mesh: it must not hide a mesh axis."""
    is_hiding = mesh is not None and name in mesh.axis_names
    return _RenamedAxis(name) if is_hiding else name


# The steps


def rename_axes(equation: Equation, scope: Scope) -> Any:
    """Axes get the names that they have on the mesh."""
    if equation.primitive is spmap_p:
        old = equation.params["axis_name"]
        if (new := unshadowed(old, scope.mesh)) == old:
            return equation
        return equation.replace(
            params=equation.params | {"axis_name": new},
            effects=without_axis(equation.effects, new),
        )
    renamed = {old: new for old, new in dict(scope.names).items() if old != new}
    return rewrites.rename_axes(equation, renamed)


def order_permutation(equation: Equation, scope: Scope) -> Any:
    """Permutations along mesh axes number devices in the order of the mesh."""
    if scope.mesh is None or scope.within != "map":
        return equation
    return rewrites.order_permutation(equation, scope.mesh)


def lay_out_map(equation: Equation, scope: Scope) -> Any:
    """Maps one level down are laid over the mesh axes that are left for them."""
    mesh, axes = scope.mesh, scope.inner_axes
    is_inner = equation.primitive is spmap_p and scope.within == "map"
    if not is_inner or mesh is None or axes is None:
        return equation
    placed = lay_out_inner(MapParams.of(equation), mesh, axes)
    is_placed = placed.mesh_axes is not None
    return equation.replace(params=placed.as_dict()) if is_placed else equation


def widen_bfloat16(equation: Equation, scope: Scope) -> Any:
    """XLA's CPU compiler aborts at some reductions of bfloat16; they are of float32."""
    return rewrites.widen_bfloat16(equation) if scope.widens else equation


def retrace(equation: Equation, scope: Scope) -> Any:
    """Equations are as if traced under the mesh: JAX lowers each under its own."""
    if scope.retrace_mesh is None or scope.within == "inner map":
        return equation
    return retracing.retraced_equation(equation, scope.retrace_mesh)


def block_collective(equation: Equation, scope: Scope) -> Any:
    """Collectives over the axis take a whole block of elements."""
    if scope.runs_as != "block" or not scope.is_our_axis:
        return equation
    return split.block_collective(equation, scope.axis)


def make_vectorizable(equation: Equation, scope: Scope) -> Any:
    """Equations without a batching rule of JAX's get one, or are replaced."""
    if scope.runs_as == "element" or scope.within == "inner map":
        return equation
    if scope.is_our_axis and split.is_collective(equation, scope.axis.name):
        return equation  # A loop has its reductions as they are.
    with bound_axes({scope.axis.name: scope.axis.size}):
        return split.with_batching_rule(equation)


def call_for_each(equation: Equation, scope: Scope) -> Any:
    """Effects, such as calls of the host, happen once for each element of a block."""
    if scope.runs_as != "block":
        return equation
    return effects.call_for_each(equation, scope.axis)


STEPS: tuple[Callable[[Equation, Scope], Any], ...] = (
    # First: the other steps ask for axes by their names on the mesh.
    rename_axes,
    # Next, what is the same on every device, whatever it runs.
    order_permutation,
    lay_out_map,
    # While the dtypes and collectives are still those of the traced function.
    widen_bfloat16,
    # After the steps that make equations that have to be under the mesh too.
    retrace,
    # Last, for `jax.vmap`, what it does not know. Collectives first, as an all_to_all
    # over the axis needs another rule than one over others.
    block_collective,
    make_vectorizable,
    # Control flow is checked for effects that are in loops already.
    call_for_each,
)
"""The steps of lowering. Each takes an equation and returns it, another or several."""


def prepare(jaxpr: Jaxpr, scope: Scope) -> Any:
    """The function of one element as it was traced, ready for what a device runs."""

    def change(equation: Equation, scope: Scope) -> Any:
        equations = [equation]
        for step in STEPS:
            changed: list[Any] = []
            for each in equations:
                result = step(each, scope)
                changed += result if isinstance(result, list) else [result]
            equations = changed
        return equations

    def finish(jaxpr: Jaxpr, scope: Scope) -> Any:
        if scope.within != "shard_map" or scope.retrace_mesh is None:
            return jaxpr
        return retracing.with_mesh_in_types(jaxpr, scope.retrace_mesh)

    return rewrite_in_context(
        jaxpr, scope, change, lambda equation, c: c.inside(equation), finish
    )
