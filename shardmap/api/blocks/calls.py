"""One call of a map over blocks: what it is made of, and how its arrays are sharded."""

import dataclasses
import functools
import operator
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardmap._jax.types import AnyMesh, Aval, PyTree, TreeDef, Value
from shardmap.api.blocks.axes import Axes, devices_of, is_axes, scaled, sharding_of
from shardmap.api.calls import kept, options
from shardmap.api.calls.call import Arguments, Call, ProcessLocal
from shardmap.api.calls.options import Lowering
from shardmap.api.calls.statics import Static, apply_statics
from shardmap.arrays import placement
from shardmap.map.shardings import MapShardings


class Options(NamedTuple):
    """The arguments of `mesh_map` but the function."""

    mesh: AnyMesh
    in_axes: PyTree
    out_axes: PyTree
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    lowering: Lowering

    def key(self) -> Hashable:
        """Hashable, equal for equal options."""

        def hashable(axes: PyTree) -> Hashable:
            leaves, tree = options.hashable(axes, is_axes)
            return tuple(tuple(leaf.items()) for leaf in leaves), tree

        return self._replace(
            in_axes=hashable(self.in_axes), out_axes=hashable(self.out_axes)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class BlockCall(Call):
    """One call of a map over blocks.

    Attributes:
      mesh: the devices.
      in_axes, out_axes: those of each leaf and of each result.
      out_blocks: what a block computes.
      levels: the mesh axes to map over, outermost first.
      across_processes: whether some devices are another process's.
      sends: whether anything goes between devices.
    """

    mesh: AnyMesh
    in_axes: Sequence[Axes]
    out_axes: Sequence[Axes]
    out_blocks: Sequence[Aval]
    levels: tuple[str, ...]
    across_processes: bool
    sends: bool

    @property
    def communicates(self) -> bool:
        return self.sends

    @functools.cached_property
    def shardings(self) -> MapShardings:
        def sharding(axes: Axes, aval: Aval) -> NamedSharding:
            cut = {} if placement.has_no_bytes(aval) else axes
            return sharding_of(cut, self.mesh, placement.memory_kind(aval))

        return MapShardings(
            tuple(map(sharding, self.in_axes, self.in_avals)),
            tuple(map(sharding, self.out_axes, self.out_blocks)),
        )

    @property
    def devices(self) -> list[jax.Device]:
        return devices_of(self.mesh)

    @property
    def described(self) -> str:
        devices = [device.id for device in self.devices]
        kinds = [aval.str_short() for aval in self.in_avals]
        return (
            f"blocks on mesh {dict(self.mesh.shape)}, devices {devices}, arguments "
            f"{kinds}"
        )

    @property
    def global_avals(self) -> tuple[Sequence[Aval], Sequence[Aval]]:
        whole = functools.partial(scaled, self.mesh, operator.mul)
        return self.in_avals, list(map(whole, self.out_blocks, self.out_axes))

    @functools.cached_property
    def process_local(self) -> ProcessLocal | None:
        """None of it is: a call takes and gives global arrays."""
        if not self.across_processes:
            return None
        count = len(self.in_avals)
        return ProcessLocal([None] * count, [None] * count, [None] * len(self.out_axes))


class Block:
    """The function of a block over flat leaves, to be traced.

    JAX finds a trace again by this object.
    """

    def __init__(
        self,
        fun: kept.WeakFunction,
        in_tree: TreeDef,
        statics: tuple[tuple[int, Static], ...],
    ) -> None:
        self._fun = fun
        self._arguments = Arguments((), in_tree, statics)

    def __call__(self, *blocks: Value) -> PyTree:
        args, kwargs = self._arguments.with_leaves(blocks)
        return apply_statics(self._fun(), args, kwargs)

    def leaves(self, *blocks: Value) -> list[Value]:
        """The same, with flat results."""
        return jax.tree.leaves(self(*blocks))

    def arrays(self, *blocks: Value) -> list[Value]:
        """The same, with arrays for Python numbers."""
        return list(map(jnp.asarray, self.leaves(*blocks)))
