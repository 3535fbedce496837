"""The scope of an equation: loops, maps, and mesh axes around it."""

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
      mesh: the mesh of the outermost map.
      inner_axes: the mesh axes left for maps inside.
      program: the manual and partitioned axes of the program around it.
    """

    axis: int | None = None
    line: str | None = None
    mesh: Any = None
    inner_axes: tuple[str, ...] = ()
    program: Enclosing = OUTERMOST

    def at(self, equation: Equation) -> "Scope":
        """The scope of an equation itself."""
        return self._replace(line=source_of(equation) or self.line)

    def in_shard_map(self, equation: Equation) -> "Scope":
        """The scope of the body of a `jax.shard_map`."""
        mesh, manual = equation.params["mesh"], manual_axes_of(equation)
        program = Enclosing(mesh.axis_names, self.program.manual | manual)
        return self._replace(program=program)

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
        return decided, self._replace(
            mesh=mesh,
            inner_axes=self.inner_axes if walk is None else walk.inner_axes,
            program=decided.inside(mesh, self.program),
        )
