"""The options of `spmap`, and checks of them."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax

from shardmap._jax.types import AnyMesh, PyTree
from shardmap.api.calls import statics
from shardmap.api.calls.options import Lowering, hashable
from shardmap.arrays import trees
from shardmap.sharding.mesh import names_of
from shardmap.units import Auto, bytes_of, shown


class Options(NamedTuple):
    """The arguments of `spmap` except the function."""

    axis_name: Hashable
    in_axes: PyTree
    out_axes: PyTree
    static_argnums: tuple[int, ...] = ()
    devices: tuple[jax.Device, ...] | None = None
    backend: str | None = None
    axis_size: int | None = None
    donate_argnums: tuple[int, ...] = ()
    mesh: AnyMesh | None = None
    mesh_axes: tuple[str, ...] | None = None
    batch_size: int | Auto | None = None
    memory: int | None = None
    lowering: Lowering = "manual"
    check_replicas: bool = False

    def key(self) -> Hashable:
        """Hashable, equal for equal options, whatever containers the axes are in."""
        return self._replace(
            axis_name=statics.typed(self.axis_name),
            in_axes=hashable(self.in_axes, trees.is_none),
            out_axes=hashable(self.out_axes, trees.is_none),
        )


def check_axes(name: str, axes: PyTree) -> None:
    """Checks that the leaves of ``axes`` are ints or None."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(axes):
        if type(leaf) is not int:
            where = (
                f": {name}{jax.tree_util.keystr(path)} is {shown(leaf)}" if path else ""
            )
            raise TypeError(
                f"spmap {name} must be an int, None, or (nested) container with those "
                f"types as leaves, but got {shown(axes)}{where}."
            )


def batch_size(
    size: int | Auto | None, memory: int | str | None
) -> tuple[int | Auto | None, int | None]:
    """Checks ``batch_size``, and returns it with the memory in bytes."""
    if isinstance(size, Auto) != (memory is not None):
        raise ValueError(
            "spmap batch_size=AUTO and memory= go together, but got "
            f"batch_size={size!r} and memory={memory!r}."
        )
    if isinstance(size, Auto):
        assert memory is not None
        return size, bytes_of("spmap memory", memory)
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(
            f"spmap batch_size must be an int above 0 or None, but got {shown(size)}."
        )
    return size, None


def mesh_axes(
    mesh: AnyMesh | None,
    names: str | Sequence[str] | None,
    devices: Sequence[jax.Device] | None,
    backend: str | None,
) -> tuple[str, ...] | None:
    """The axes of ``mesh`` to lay a map over, as a tuple.

    Raises:
      TypeError: ``names`` are none.
      ValueError: only one of ``mesh`` and ``names`` given, a name that the mesh does
        not have, or one twice.
    """
    if mesh is None and names is None:
        return None
    if mesh is None or names is None:
        raise ValueError(
            "spmap takes mesh and mesh_axes together, but got "
            f"mesh={mesh} and mesh_axes={names!r}. Without mesh it takes that of "
            "jax.set_mesh or `with mesh:` around it, and there is none."
        )
    if devices is not None or backend is not None:
        raise ValueError(
            "spmap takes its devices from mesh, so give neither devices nor backend "
            "with it."
        )
    names = names_of("spmap mesh_axes", names)
    if len(set(names)) < len(names) or set(names) - set(mesh.axis_names):
        raise ValueError(
            f"spmap mesh_axes must be axes of the mesh, each once, but got {names} for "
            f"a mesh with axes {mesh.axis_names}."
        )
    return names
