"""The options of a mapped function, checked."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from shardmap.api.calls import arguments


class Options(NamedTuple):
    """The arguments of `spmap` but the function, and what made the map of them."""

    axis_name: Hashable
    in_axes: Any
    out_axes: Any
    static_argnums: tuple[int, ...]
    devices: tuple[jax.Device, ...] | None
    backend: str | None
    axis_size: int | None
    donate_argnums: tuple[int, ...]
    mesh: Mesh | None
    mesh_axes: tuple[str, ...] | None
    batch_size: int | None
    lowering: str
    check_replicas: bool
    kind: str = "spmap"

    def key(self) -> Hashable:
        """Hashable, equal for equal options, whatever containers the axes are in."""
        in_axes, out_axes = (
            (tuple(leaves), tree)
            for leaves, tree in (
                jax.tree.flatten(axes, is_leaf=lambda x: x is None)
                for axes in (self.in_axes, self.out_axes)
            )
        )
        axis_name = arguments.typed(self.axis_name)
        return self._replace(axis_name=axis_name, in_axes=in_axes, out_axes=out_axes)


def check_axes(name: str, axes: Any) -> None:
    """Refuses anything but ints and None as the leaves of ``axes``."""
    for leaf in jax.tree.leaves(axes):
        if type(leaf) is not int:
            raise TypeError(
                f"spmap {name} must be an int, None, or (nested) container with those "
                f"types as leaves, but got {axes}."
            )


def index_tuple(name: str, argnums: Any) -> tuple[int, ...]:
    """Positions of arguments, given as an int or several, as a tuple."""
    values = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"spmap {name} must be an int or several, none below 0, but got "
                f"{argnums}."
            )
    return values


def batch_size(size: int | None) -> int | None:
    """``size``, if it is one."""
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(
            f"spmap batch_size must be an int above 0 or None, but got {size!r}."
        )
    return size


def lowering(name: str, batch_size: int | None) -> str:
    """``name``, if there is such a lowering and it can do what is asked."""
    if name not in ("manual", "spmd"):
        raise ValueError(
            f"spmap lowering must be 'manual' or 'spmd', but got {name!r}."
        )
    if name == "spmd" and batch_size is not None:
        raise ValueError(
            f"spmap lowering='spmd' and batch_size={batch_size} do not go together: "
            "the partitioner decides what a device does at once. Leave batch_size out, "
            "or use lowering='manual'."
        )
    return name


def mesh_axes(
    mesh: Mesh | None, names: str | Sequence[str] | None, devices: Any, backend: Any
) -> tuple[str, ...] | None:
    """The axes of ``mesh`` to lay a map over, as a tuple.

    Raises:
      ValueError: only one of ``mesh`` and ``names`` given, a name that the mesh does
        not have, or one twice.
    """
    if mesh is None and names is None:
        return None
    if mesh is None or names is None:
        raise ValueError(
            "spmap takes mesh and mesh_axes together, but got "
            f"mesh={mesh} and mesh_axes={names!r}."
        )
    if devices is not None or backend is not None:
        raise ValueError(
            "spmap takes its devices from mesh, so give neither devices nor backend "
            "with it."
        )
    names = (names,) if isinstance(names, str) else tuple(names)
    if len(set(names)) < len(names) or set(names) - set(mesh.axis_names):
        raise ValueError(
            f"spmap mesh_axes must be axes of the mesh, each once, but got {names} for "
            f"a mesh with axes {mesh.axis_names}."
        )
    return names
