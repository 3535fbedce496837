"""The parameters of a map's equation, as a record."""

import dataclasses
import math
from collections.abc import Hashable
from typing import Any, Literal

from shardmap._jax.types import AnyMesh, Axes, Equation, Jaxpr
from shardmap.map.primitives.axis import UNNAMED, AxisLayout


@dataclasses.dataclass(frozen=True)
class MapParams:
    """The parameters of an equation of `spmap_p`.

    Attributes:
      axis_name: the name that collectives in ``call_jaxpr`` use.
      axis_size: the number of elements.
      in_axes, out_axes: the mapped axis of each operand and result; None: not mapped.
      call_jaxpr: the function of one element, without constants.
      name: of the mapped function, for messages and profiles.
      mesh: the devices; None: those of the map around this one, or else one device,
        which vectorises all elements.
      mesh_axes: the mesh axes that the elements are laid over, major to minor; None:
        each device runs all of them.
      inner_axes: the mesh axes for maps inside, one for each level.
      batch_size: how many elements a device vectorises; None: all that it has.
      lowering: "manual" or "spmd".
      mesh_jaxpr: tells `jax.jit` of the mesh. `spmap_p` adds it.
    """

    axis_name: Hashable
    axis_size: int
    in_axes: Axes
    out_axes: Axes
    call_jaxpr: Jaxpr
    name: str = "call_jaxpr"
    mesh: AnyMesh | None = None
    mesh_axes: tuple[str, ...] | None = None
    inner_axes: tuple[str, ...] = ()
    batch_size: int | None = None
    lowering: Literal["manual", "spmd"] = "manual"
    mesh_jaxpr: Jaxpr | None = None

    @classmethod
    def of(cls, equation: Equation) -> "MapParams":
        """Those of a map's equation."""
        return cls(**equation.params)

    def __str__(self) -> str:
        """The map in the words of a message, such as "spmap of step"."""
        return f"spmap of {self.name}"

    @property
    def scope(self) -> str:
        """Its name in profiles, such as "spmap(step, data)"."""
        axis = "" if self.axis_name == UNNAMED else f", {self.axis_name}"
        return f"spmap({self.name}{axis})"

    def as_dict(self) -> dict[str, Any]:
        """The parameters for `spmap_p.bind`, and for an equation."""
        return dict(vars(self))

    def on(
        self,
        mesh: AnyMesh | None,
        mesh_axes: tuple[str, ...] | None = None,
        inner_axes: tuple[str, ...] = (),
    ) -> "MapParams":
        """The map on a mesh; see its attributes."""
        return dataclasses.replace(
            self, mesh=mesh, mesh_axes=mesh_axes, inner_axes=inner_axes
        )

    @property
    def axis(self) -> AxisLayout:
        """How the elements are laid over the mesh axes; in one block without any."""
        mesh_axes, devices = self.mesh_axes or (), 1
        if self.mesh is not None:
            devices = math.prod(self.mesh.shape[name] for name in mesh_axes)
        return AxisLayout(
            self.axis_name, self.axis_size, mesh_axes, devices, self.batch_size
        )
