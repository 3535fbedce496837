"""Checks of the options of mapped functions."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from shardmap._jax.types import AnyMesh, PyTree
from shardmap.api.arguments import with_types
from shardmap.sharding.mesh import check_axis_names, check_devices, names_of
from shardmap.units import AUTO, Auto, bytes_of, is_integer, shown

Lowering = Literal["manual", "spmd"]


def key_of(options: PyTree, is_leaf: Callable[[Any], bool]) -> Hashable:
    """A hashable key of a named tuple of options, equal for equal options."""
    leaves, tree = jax.tree.flatten(options, is_leaf=is_leaf)
    keys = [
        tuple(leaf.items()) if isinstance(leaf, dict) else with_types(leaf)
        for leaf in leaves
    ]
    return tree, tuple(keys)


def _index_tuple(
    name: str, argnums: int | Iterable[int], caller: str
) -> tuple[int, ...]:
    """Checks the positions of arguments, an int or several, and returns a tuple."""
    values: tuple[Any, ...] = (argnums,)
    if isinstance(argnums, Iterable) and not isinstance(argnums, str):
        values = tuple(argnums)
    for value in values:
        if not is_integer(value) or value < 0:
            raise (ValueError if is_integer(value) else TypeError)(
                f"{caller} {name} must be an int or several, none below 0, but got "
                f"{shown(argnums)}."
            )
    return tuple(map(int, values))


def check_callable(caller: str, fun: object) -> None:
    """Checks that ``fun`` is callable."""
    if callable(fun) and not isinstance(fun, Mesh):
        return
    text = f"{caller} expects a callable, but got {shown(fun)}."
    if isinstance(fun, str) and caller == "spmap":
        text += f" For a decorator, write @spmap(axis_name={shown(fun)})."
    raise TypeError(text)


def check_mesh(mesh: AnyMesh | None, caller: str = "spmap") -> None:
    """Checks that ``mesh`` is a mesh of different devices."""
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        call = f"make_mesh({shown(mesh)})" if isinstance(mesh, Mapping) else "make_mesh"
        raise TypeError(
            f"{caller} mesh must be a jax.sharding.Mesh, but got {shown(mesh)}. "
            f"shardmap.{call} makes one."
        )
    if isinstance(mesh, Mesh):
        check_devices(caller, mesh.devices.flat, "mesh.devices")
    if mesh is not None:
        check_axis_names(caller, mesh.axis_names)


def positions(
    caller: str,
    fun: Callable[..., Any],
    static: tuple[str, int | Iterable[int]],
    donate_argnums: int | Iterable[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Checks positions of static arguments, which are sorted, and of donated ones."""
    static_argnums = _index_tuple(*static, caller)
    donated = _index_tuple("donate_argnums", donate_argnums, caller)
    if static_argnums or donated:
        # Only for its checks.
        jax.jit(fun, static_argnums=static_argnums, donate_argnums=donated)
    return tuple(sorted(static_argnums)), donated


def lowering(name: Lowering, batch_size: object, caller: str = "spmap") -> Lowering:
    """Checks the name of a lowering, and its use with ``batch_size``."""
    if name != "manual" and name != "spmd":
        raise ValueError(
            f"{caller} lowering must be 'manual' or 'spmd', but got {shown(name)}."
        )
    if name == "spmd" and batch_size is not None:
        raise ValueError(
            f"spmap lowering='spmd' and batch_size={batch_size} do not go together: "
            "the partitioner decides what a device does at once. Leave batch_size out, "
            "or use lowering='manual'."
        )
    return name


# Those of `spmap` alone


class SpmapOptions(NamedTuple):
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


def checked_axes(name: str, axes: PyTree) -> PyTree:
    """Checks that the leaves of ``axes`` are ints or None, and returns them so."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(axes):
        if not is_integer(leaf):
            where = (
                f": {name}{jax.tree_util.keystr(path)} is {shown(leaf)}" if path else ""
            )
            raise TypeError(
                f"spmap {name} must be an int, None, or (nested) container with those "
                f"types as leaves, but got {shown(axes)}{where}."
            )
    return jax.tree.map(int, axes)


def batch_size(
    size: int | Auto | None, memory: int | str | None
) -> tuple[int | Auto | None, int | None]:
    """Checks ``batch_size``, and returns it with the memory in bytes."""
    if size is None and memory is not None:
        size = AUTO
    if isinstance(size, Auto) != (memory is not None):
        raise ValueError(
            "spmap batch_size=AUTO and memory= go together, but got "
            f"batch_size={shown(size)} and memory={shown(memory)}."
        )
    if isinstance(size, Auto):
        assert memory is not None
        return size, bytes_of("spmap memory", memory)
    if size is not None and (not is_integer(size) or size < 1):
        raise ValueError(
            f"spmap batch_size must be an int above 0 or None, but got {shown(size)}."
        )
    return (None if size is None else int(size)), None


def mesh_axes(
    mesh: AnyMesh | None,
    names: str | Sequence[str] | None,
    devices: Sequence[jax.Device] | None,
    backend: str | None,
) -> tuple[str, ...] | None:
    """The axes of ``mesh`` to lay a map over, as a tuple."""
    if mesh is None and names is None:
        return None
    if mesh is None or names is None:
        raise ValueError(
            "spmap takes mesh and mesh_axes together, but got "
            f"mesh={mesh} and mesh_axes={shown(names)}. Without mesh it takes that of "
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


def axis_name(name: Hashable) -> Hashable:
    """Checks the name of an axis."""
    try:
        hash(name)
    except TypeError:
        write = ""
        if not isinstance(name, list | dict | set):
            write = " For a call with arguments, write spmap(f)(x)."
        raise TypeError(
            "spmap axis_name must be hashable, such as a string, but got "
            f"{shown(name)}.{write}"
        ) from None
    if isinstance(name, int):
        raise TypeError(
            f"spmap axis_name must be no number, but got {name!r}: collectives take "
            "numbers for dimensions of an array. Give it a name, such as a string."
        )
    return name
