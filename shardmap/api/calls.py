"""A traced call, which `spmap`, `mesh_map` and `sharded_jit` each make in their way.

If JAX is tracing, it is bound; else it is compiled and run, as `programs` tells.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from shardmap._jax.context import NO_MESH
from shardmap._jax.types import AnyMesh, Aval, Jaxpr, PyTree, TreeDef, Value
from shardmap.api.arguments import Arguments
from shardmap.arrays.process_local import ProcessShardings
from shardmap.map import agreement
from shardmap.map.layout import MapShardings
from shardmap.map.primitives import explicit_sharding
from shardmap.sharding.mesh import mesh_devices


class ProcessLocal(NamedTuple):
    """How this process's data are parts of the global arrays of a call.

    Attributes:
      operands: for each leaf.
      results: for each result; None: all of them are global arrays.
    """

    operands: Sequence[ProcessShardings]
    results: Sequence[ProcessShardings] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A traced call, with all that is needed to run or to bind it.

    Attributes:
      arguments: its arguments.
      in_avals: the avals of the leaves, as global arrays.
      out_tree: the structure of the result.
      out_avals: the avals of the results, as global arrays.
      mesh: where it runs; None inside another map.
      jaxpr: what the function computes.
      bind: adds the map of these leaves to what is being traced.
      find_shardings: gives the shardings of leaves and results.
      process_local: how it is called over several processes; None: with global arrays.
    """

    arguments: Arguments
    in_avals: Sequence[Aval]
    out_tree: TreeDef
    out_avals: Sequence[Aval]
    mesh: AnyMesh | None
    jaxpr: Jaxpr
    bind: Callable[[Sequence[Value]], Sequence[Value]]
    find_shardings: Callable[[], MapShardings]
    process_local: ProcessLocal | None = None

    @functools.cached_property
    def shardings(self) -> MapShardings | None:
        """The shardings of leaves and results; None inside another map."""
        return None if self.mesh is None else self.find_shardings()

    @functools.cached_property
    def devices(self) -> list[jax.Device]:
        """The devices of its mesh; none of an abstract one."""
        return mesh_devices(self.mesh)

    def result(self, leaves: Sequence[Value]) -> PyTree:
        """Binds the map of these leaves."""
        return jax.tree.unflatten(self.out_tree, self.bind(leaves))

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The global arrays that the program takes."""
        assert self.shardings is not None
        return [
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
            )
            for aval, sharding in zip(
                self.in_avals, self.shardings.operands, strict=True
            )
        ]

    def description(self) -> str:
        """A text that is equal in all processes that make this call."""
        assert self.mesh is not None
        assert self.shardings is not None
        types = ", ".join(aval.str_short() for aval in self.in_avals)
        specs = [", ".join(str(s.spec) for s in each) for each in self.shardings]
        return (
            f"mesh {dict(self.mesh.shape)}, arguments ({types}), in_specs "
            f"({specs[0]}), out_specs ({specs[1]}), operations "
            f"{agreement.operations(self.jaxpr)}"
        )


def types_of_mesh_around() -> AbstractContextManager[Any]:
    """A context in which types have no mesh but that of a `jax.shard_map` around."""
    there = jax.sharding.get_abstract_mesh()
    return jax.sharding.use_abstract_mesh(there if there.manual_axes else NO_MESH)


def bind_without_types(
    bind: Callable[[Sequence[Value]], Sequence[Value]], leaves: Sequence[Value]
) -> list[Any]:
    """Binds a map to leaves without shardings in their types, nor those of a mesh."""
    operands = list(map(explicit_sharding.drop_sharding, leaves))
    with types_of_mesh_around():
        results = bind(operands)
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return list(map(explicit_sharding.drop_sharding_p.bind, results))
    return list(results)
