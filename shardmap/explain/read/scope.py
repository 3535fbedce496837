"""The scope of an equation: loops, maps, and mesh axes around it."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from shardmap._jax.primitives import manual_axes_of
from shardmap._jax.types import Equation
from shardmap.explain.read.source import source_of
from shardmap.map.layout import MeshPlacement, inner_placement
from shardmap.map.lowering import decision
from shardmap.map.lowering.decision import OUTERMOST, Decision, Enclosing


class Scope(NamedTuple):
    """The loops, maps and mesh axes around an equation.

    Attributes:
      axis: the number of the axis directly around it.
      line: the line of the equation around it. Some equations have none of their own,
        such as those of the rule of a `jax.custom_vjp` under `jax.checkpoint`.
      runs: how often it runs; None if only the running program knows.
      sizes: the devices along each named axis.
      mesh: the mesh of the outermost map.
      inner_axes: the mesh axes left for maps inside.
      program: the manual and partitioned axes of the program around it.
    """

    axis: int | None = None
    line: str | None = None
    runs: int | None = 1
    sizes: tuple[tuple[Any, int], ...] = ()
    mesh: Any = None
    inner_axes: tuple[str, ...] = ()
    program: Enclosing = OUTERMOST

    def at(self, equation: Equation) -> "Scope":
        """The scope of an equation itself."""
        return self._replace(line=source_of(equation) or self.line)

    def with_sizes(self, sizes: Iterable[tuple[Any, int]]) -> "Scope":
        """The scope with other named axes in it."""
        return self._replace(sizes=tuple((dict(self.sizes) | dict(sizes)).items()))

    def devices(self, names: Iterable[Any]) -> int:
        """How many devices there are along some named axes."""
        sizes = dict(self.sizes)
        return math.prod(sizes.get(name, 1) for name in names)

    def in_loop(self, steps: int | None) -> "Scope":
        """The scope of the body of a loop."""
        if self.runs is None or steps is None:
            return self._replace(runs=None)
        return self._replace(runs=self.runs * steps)

    def in_shard_map(self, equation: Equation) -> "Scope":
        """The scope of the body of a `jax.shard_map`."""
        mesh, manual = equation.params["mesh"], manual_axes_of(equation)
        program = Enclosing(mesh.axis_names, self.program.manual | manual)
        sizes = ((name, mesh.shape[name]) for name in manual)
        return self.with_sizes(sizes)._replace(program=program)

    def in_map(self, equation: Equation) -> tuple[Decision, "Scope"]:
        """How a map of this package is lowered, and the scope of its function."""
        params = equation.params
        # Without a placement it runs on each device whole.
        mesh, walk = self.mesh, None
        if mesh is not None:
            walk = inner_placement(equation, mesh, self.inner_axes)
        elif params["mesh"] is not None:
            mesh = params["mesh"]
            walk = MeshPlacement.of(params)
        decided = decision.decide(params, mesh, walk, self.program)
        sizes = ((axis, mesh.shape[axis]) for axis in decided.mesh_axes)
        return decided, self.with_sizes(sizes)._replace(
            mesh=mesh,
            inner_axes=self.inner_axes if walk is None else walk.inner_axes,
            program=decided.inside(mesh, self.program),
        )
