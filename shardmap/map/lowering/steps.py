"""What is done to the function of one element before devices run it, in order.

`prepare` rewrites its jaxpr once. Each equation goes through `STEPS`, first to last,
after the equations that it holds.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable
from typing import Any, Literal

from shardmap._jax.context import bound_axes
from shardmap._jax.effects import without_axis
from shardmap._jax.primitives import SHARD_MAP, manual_axes_of
from shardmap._jax.types import AnyMesh, Equation, Jaxpr
from shardmap._jax.walk import rewrite_in_context
from shardmap.map.collectives import rewrites, split
from shardmap.map.layout import placed_inside
from shardmap.map.lowering import effects, retracing
from shardmap.map.primitives.axis import AxisLayout
from shardmap.map.primitives.map_primitive import MapPrimitive, spmap_p
from shardmap.map.primitives.params import MapParams
from shardmap.map.primitives.tap import tap_p
from shardmap.sharding.mesh import with_manual_axes


@dataclasses.dataclass(frozen=True)
class Context:
    """Where an equation stands.

    Attributes:
      axis: the map's, with the name that it has where the function runs.
      runs_as: what a device runs: the function itself, on one element; a block of
        elements at once; or a loop over parts of the block.
      mesh: the map's; None: the function runs where it is traced.
      under: that mesh with its manual axes, as equations here see it; None: they have
        a mesh of their own.
      inner_axes: the mesh axes for maps inside, one for each level; None: none of them
        is laid over this mesh.
      widens: whether XLA cannot reduce bfloat16 between these devices.
      within: what is around the equation: this map alone, a `jax.shard_map` in it, or
        a map in it, whose own lowering does the rest.
      in_scope: whether no other axis of the map's name is around.
      renames: the new names of axes, by those in the traced function.
      contexts: what `retracing` keeps for the time of a rewrite.
    """

    axis: AxisLayout
    runs_as: Literal["element", "block", "loop"]
    mesh: AnyMesh | None = None
    under: AnyMesh | None = None
    inner_axes: tuple[str, ...] | None = None
    widens: bool = False
    within: Literal["map", "shard_map", "inner map"] = "map"
    in_scope: bool = True
    renames: tuple[tuple[Hashable, Hashable], ...] = ()
    contexts: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def outermost(
        cls,
        axis: AxisLayout,
        mesh: AnyMesh | None = None,
        under: AnyMesh | None = None,
        is_element: bool = False,
        inner_axes: tuple[str, ...] | None = None,
        widens: bool = False,
    ) -> "Context":
        """The context of a map's function, whose axis has its traced name yet."""
        runs_as: Any = "loop" if axis.steps > 1 else "block"
        name = unshadowed(axis.name, mesh)
        if is_element:
            runs_as, name = "element", axis.device_axes[0]
        renames = () if name == axis.name else ((axis.name, name),)
        axis = dataclasses.replace(axis, name=name)
        return cls(axis, runs_as, mesh, under, inner_axes, widens, renames=renames)

    def inside(self, equation: Equation) -> "Context | None":
        """The context of the equations that an equation holds; None: not rewritten."""
        if equation.primitive is tap_p:
            return None  # Its jaxpr is there for JAX to look at.
        if equation.primitive is SHARD_MAP:
            return self._in_shard_map(equation)
        if not isinstance(equation.primitive, MapPrimitive):
            return self
        name = equation.params["axis_name"]
        if equation.primitive is not spmap_p:
            return self._bound([name])
        return dataclasses.replace(
            self._bound([name], unshadowed(name, self.mesh)), within="inner map"
        )

    def _in_shard_map(self, equation: Equation) -> "Context":
        names = manual_axes_of(equation)
        context = self._bound(names)
        if self.within == "inner map":
            return context
        under = self.under
        if under is not None:
            is_same = equation.params["mesh"].axis_names == under.axis_names
            under = with_manual_axes(under, names) if is_same else None
        return dataclasses.replace(context, under=under, within="shard_map")

    def _bound(
        self, names: Collection[Hashable], new_name: Hashable = None
    ) -> "Context":
        """The context where these names are bound again; one perhaps renamed."""
        renames = [pair for pair in self.renames if pair[0] not in names]
        if new_name is not None:
            renames += [(name, new_name) for name in names if name != new_name]
        ours = {old for old, new in self.renames if new == self.axis.name}
        hides = not (ours or {self.axis.name}).isdisjoint(names)
        return dataclasses.replace(
            self, renames=tuple(renames), in_scope=self.in_scope and not hides
        )


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


def rename_axes(equation: Equation, context: Context) -> Any:
    """Axes get the names that they have on the mesh."""
    if equation.primitive is spmap_p:
        old = equation.params["axis_name"]
        if (new := unshadowed(old, context.mesh)) == old:
            return equation
        return equation.replace(
            params=equation.params | {"axis_name": new},
            effects=without_axis(equation.effects, new),
        )
    return rewrites.rename_axes(equation, dict(context.renames))


def order_permutation(equation: Equation, context: Context) -> Any:
    """Permutations along mesh axes number devices in the order of the mesh."""
    if context.mesh is None or context.within != "map":
        return equation
    return rewrites.order_permutation(equation, context.mesh)


def place_map(equation: Equation, context: Context) -> Any:
    """Maps one level down are laid over the mesh axes that are left for them."""
    mesh, axes = context.mesh, context.inner_axes
    is_inner = equation.primitive is spmap_p and context.within == "map"
    if not is_inner or mesh is None or axes is None:
        return equation
    placed = placed_inside(MapParams.of(equation), mesh, axes)
    return equation if placed is None else equation.replace(params=placed.as_dict())


def widen_bfloat16(equation: Equation, context: Context) -> Any:
    """XLA's CPU compiler aborts at some reductions of bfloat16; they are of float32."""
    return rewrites.widen_bfloat16(equation) if context.widens else equation


def retrace(equation: Equation, context: Context) -> Any:
    """Equations are as if traced under the mesh: JAX lowers each under its own."""
    if context.under is None or context.within == "inner map":
        return equation
    return retracing.retrace_under(equation, context.under, context.contexts)


def block_collective(equation: Equation, context: Context) -> Any:
    """Collectives over the axis take a whole block of elements."""
    if context.runs_as != "block" or not context.in_scope:
        return equation
    return split.block_collective(equation, context.axis)


def make_vectorizable(equation: Equation, context: Context) -> Any:
    """Equations without a batching rule of JAX's get one, or are replaced."""
    if context.runs_as == "element" or context.within == "inner map":
        return equation
    if context.in_scope and split.is_collective(equation, context.axis.name):
        return equation  # A loop has its reductions as they are.
    with bound_axes({context.axis.name: context.axis.size}):
        return split.with_batching_rule(equation)


def call_for_each(equation: Equation, context: Context) -> Any:
    """Effects, such as calls of the host, happen once for each element of a block."""
    if context.runs_as != "block":
        return equation
    return effects.call_for_each(equation, context.axis)


STEPS: tuple[Callable[[Equation, Context], Any], ...] = (
    # First: the other steps ask for axes by their names on the mesh.
    rename_axes,
    # Next, what is the same on every device, whatever it runs.
    order_permutation,
    place_map,
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


def prepare(jaxpr: Jaxpr, context: Context) -> Any:
    """The function of one element, ready for what a device runs.

    Args:
      jaxpr: the function, as it was traced.
      context: of its outermost equations.
    """

    def change(equation: Equation, context: Context) -> Any:
        equations = [equation]
        for step in STEPS:
            changed: list[Any] = []
            for each in equations:
                result = step(each, context)
                changed += result if isinstance(result, list) else [result]
            equations = changed
        return equations

    def finish(jaxpr: Jaxpr, context: Context) -> Any:
        if context.within != "shard_map" or context.under is None:
            return jaxpr
        return retracing.with_mesh_in_types(jaxpr, context.under)

    return rewrite_in_context(
        jaxpr, context, change, lambda equation, c: c.inside(equation), finish
    )
