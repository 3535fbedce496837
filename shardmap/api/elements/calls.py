"""One call of `spmap`, and the shardings of its arrays."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from shardmap._jax.types import Aval, with_shape
from shardmap.api.calls.call import Call, ProcessLocal
from shardmap.arrays.process_local import ProcessShardings, parts_along, shardings_along
from shardmap.map import tracing
from shardmap.map.primitives.axis import axis_text
from shardmap.map.shardings import MapShardings, map_shardings


@dataclasses.dataclass(frozen=True, eq=False)
class ElementCall(Call):
    """One call of a map over elements.

    Attributes:
      body: the traced function of one element.
      params: of the map's equation. Its operands are the body's constants, then the
        leaves.
      is_across_processes: whether it is run now, on devices of several processes.
      is_process_local: whether the leaves are this process's part of longer global
        arrays.
    """

    body: tracing.Body
    params: dict[str, Any]
    is_across_processes: bool = False
    is_process_local: bool = False

    @functools.cached_property
    def _map_shardings(self) -> MapShardings:
        """The shardings of the equation, whose first operands are constants."""
        return map_shardings(self.params)

    @functools.cached_property
    def shardings(self) -> MapShardings | None:
        if self.mesh is None:
            return None
        operands, results = self._map_shardings
        return MapShardings(operands[len(self.body.constants) :], results)

    @property
    def described(self) -> str:
        params = self.params
        where = (
            [device.id for device in self.devices] if params["mesh"] else "around it"
        )
        elements = [var.aval.str_short() for var in params["call_jaxpr"].invars]
        return (
            f"{axis_text(params['axis_name'])} of {params['axis_size']} elements on "
            f"devices {where}, elements {elements}"
        )

    @property
    def global_avals(self) -> tuple[Sequence[Aval], Sequence[Aval]]:
        if not self.is_process_local:
            return super().global_avals
        shardings, _ = self.process_shardings
        shardings = shardings[len(self.body.constants) :]
        operands = [
            with_shape(aval, each.global_shape(aval.shape))
            for each, aval in zip(shardings, self.in_avals, strict=True)
        ]
        return operands, self.out_avals

    @functools.cached_property
    def process_shardings(
        self,
    ) -> tuple[list[ProcessShardings], list[ProcessShardings]]:
        """The shardings of operands and results in this process."""
        operands, results = self._map_shardings
        parts = parts_along(self.params["mesh"], self.params["mesh_axes"])
        return (
            [
                shardings_along(s, axis, parts)
                for s, axis in zip(operands, self.params["in_axes"], strict=True)
            ],
            [
                shardings_along(s, axis, parts)
                for s, axis in zip(results, self.params["out_axes"], strict=True)
            ],
        )

    @functools.cached_property
    def process_local(self) -> ProcessLocal | None:
        if not self.is_across_processes:
            return None
        operands, results = self.process_shardings
        operands = operands[len(self.body.constants) :]
        is_global = not self.is_process_local
        return ProcessLocal(
            operands,
            [None if each.factors is None else is_global for each in operands],
            [None if is_global else each for each in results],
        )


def with_axis(aval: Aval, axis: int | None, size: int) -> Aval:
    """The aval of an array of ``size`` elements."""
    if axis is None:
        return aval
    shape = (*aval.shape[:axis], size, *aval.shape[axis:])
    return with_shape(aval, shape)
