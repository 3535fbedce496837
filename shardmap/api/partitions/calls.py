"""One call of a function that `sharded_jit` cuts: what it is made of, how it is cut."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from shardmap._jax.types import Aval, ClosedJaxpr, PyTree
from shardmap.api.calls.call import Call, ProcessLocal
from shardmap.api.calls.options import hashable
from shardmap.api.partitions.parts import Counts, is_leaf
from shardmap.arrays import placement, processes
from shardmap.arrays.process_local import ProcessShardings, shardings_of
from shardmap.map.constraint import alone, partition_mesh
from shardmap.map.partition_axes import partition_sharding
from shardmap.map.shardings import MapShardings

WHAT = "sharded_jit"


@dataclasses.dataclass(frozen=True, eq=False)
class PartitionCall(Call):
    """How one call is cut into partitions.

    Attributes:
      in_parts, out_parts: how each leaf is cut.
      total: how many partitions there are, if anybody says.
      whole_in_avals, out_avals: the kinds of leaves and results, as global arrays.
      own_in, own_out: for each leaf whether it is process-local data.
      jaxpr: what the function computes.
      agreed_on: what other processes have to run as well, where there are such.
      is_alone: whether it is a program of its own, and no part of another.
    """

    in_parts: Sequence[Counts]
    out_parts: Sequence[Counts]
    total: int | None
    whole_in_avals: Sequence[Aval]
    out_avals: Sequence[Aval]
    own_in: Sequence[bool]
    own_out: Sequence[bool]
    jaxpr: ClosedJaxpr
    agreed_on: str
    is_alone: bool = False

    def alone(self) -> "PartitionCall":
        """The call as a program of its own, and no part of another: with devices."""
        closed = self.jaxpr.replace(jaxpr=alone(self.jaxpr.jaxpr))
        return dataclasses.replace(
            self, total=self.total or 1, jaxpr=closed, is_alone=True
        )

    @functools.cached_property
    def devices(self) -> list[jax.Device]:
        return list(partition_mesh((), self.total or 1, WHAT).devices.flat)

    @property
    def communicates(self) -> bool:
        return True

    @property
    def described(self) -> str:
        devices = [device.id for device in self.devices]
        kinds = [aval.str_short() for aval in self.whole_in_avals]
        return f"{self.total or 1} partitions on devices {devices}, arguments {kinds}"

    @property
    def global_avals(self) -> tuple[Sequence[Aval], Sequence[Aval]]:
        return self.whole_in_avals, self.out_avals

    @functools.cached_property
    def shardings(self) -> MapShardings:
        def sharding(aval: Aval, parts: Counts) -> NamedSharding:
            if parts is None or placement.has_no_bytes(aval):
                parts = (1,) * aval.ndim
            mesh = partition_mesh(parts, self.total or 1, WHAT)
            return partition_sharding(parts, mesh)

        return MapShardings(
            tuple(map(sharding, self.whole_in_avals, self.in_parts)),
            tuple(map(sharding, self.out_avals, self.out_parts)),
        )

    @functools.cached_property
    def process_local(self) -> ProcessLocal | None:
        if not processes.several(self.devices):
            return None

        def for_process(
            sharding: NamedSharding, has_own: bool
        ) -> ProcessShardings | None:
            return shardings_of(sharding) if has_own else None

        return ProcessLocal(
            list(map(for_process, self.shardings.operands, self.own_in)),
            [False if own else None for own in self.own_in],
            list(map(for_process, self.shardings.results, self.own_out)),
        )


class Options(NamedTuple):
    """The arguments of `sharded_jit` but the function."""

    in_parts: PyTree
    out_parts: PyTree
    num_partitions: int | None
    local_in_parts: PyTree
    local_out_parts: PyTree
    local_num_partitions: int | None
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]

    def key(self) -> Hashable:
        """Hashable, equal for equal options."""
        return self._replace(
            in_parts=hashable(self.in_parts, is_leaf),
            out_parts=hashable(self.out_parts, is_leaf),
            local_in_parts=hashable(self.local_in_parts, is_leaf),
            local_out_parts=hashable(self.local_out_parts, is_leaf),
        )
