"""`mesh_map`: `jax.shard_map` as `spmap` is called, which also takes dicts of axes."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, overload

import jax
from jax.sharding import Mesh, PartitionSpec

from shardmap._jax.types import PyTree
from shardmap.api import options
from shardmap.api.blocks import BlockMap, MeshMapOptions, is_spec, named_axes
from shardmap.api.function import Mapped, P, R
from shardmap.api.options import Lowering
from shardmap.sharding.conversions import cut_spec
from shardmap.sharding.mesh import auto_mesh, names_of
from shardmap.units import check_bool, decorator_with_options, is_integer, shown


def _specs(parameter: str, axes: PyTree, over: Sequence[str]) -> PyTree:
    """Axes as PartitionSpecs of these mesh axes."""

    def spec(leaf: Any) -> PartitionSpec:
        if not _is_axes(leaf):
            raise TypeError(
                f"mesh_map {parameter} must be PartitionSpecs, dicts of mesh axis "
                "names and dimensions, or (nested) containers of them, but got "
                f"{shown(leaf)} in {shown(axes)}."
            )
        if isinstance(leaf, dict):
            if min(leaf.values(), default=0) < 0:
                raise ValueError(
                    f"mesh_map {parameter} has a dimension below 0 in {leaf}; count "
                    "from the front."
                )
            dims: dict[int, tuple[str, ...]] = {}
            for name, dimension in leaf.items():
                dims[int(dimension)] = (*dims.get(dimension, ()), name)
            leaf = cut_spec(dims)
        if unknown := named_axes(leaf) - set(over):
            raise ValueError(
                f"mesh_map {parameter} names {sorted(unknown, key=str)}, but the map "
                f"is over the mesh axes {tuple(over)}."
            )
        return leaf

    return jax.tree.map(spec, axes, is_leaf=_is_axes)


def _is_axes(value: object) -> bool:
    """Whether a value is a leaf of ``in_axes`` or ``out_axes``."""
    return is_spec(value) or (
        isinstance(value, dict)
        and all(isinstance(k, str) and is_integer(v) for k, v in value.items())
    )


class MeshMappedFunction(Mapped[P, R]):
    """A function mapped over the blocks of a mesh; what `mesh_map` returns."""

    _kind = BlockMap


@overload
def mesh_map(
    fun: Callable[P, R],
    mesh: Mesh,
    in_axes: PyTree,
    out_axes: PyTree,
    *,
    axis_names: str | Collection[str] | None = None,
    lowering: Lowering = "manual",
    check_vma: bool = False,
    donate_argnums: int | Iterable[int] = (),
    static_argnums: int | Iterable[int] = (),
) -> MeshMappedFunction[P, R]: ...


@overload
def mesh_map(
    fun: None = None,
    *,
    mesh: Mesh,
    in_axes: PyTree,
    out_axes: PyTree,
    axis_names: str | Collection[str] | None = None,
    lowering: Lowering = "manual",
    check_vma: bool = False,
    donate_argnums: int | Iterable[int] = (),
    static_argnums: int | Iterable[int] = (),
) -> Callable[[Callable[P, R]], MeshMappedFunction[P, R]]: ...


@decorator_with_options
def mesh_map(
    fun: Any = None,
    mesh: Mesh | None = None,
    in_axes: PyTree = None,
    out_axes: PyTree = None,
    *,
    axis_names: str | Collection[str] | None = None,
    lowering: Lowering = "manual",
    check_vma: bool = False,
    donate_argnums: int | Iterable[int] = (),
    static_argnums: int | Iterable[int] = (),
) -> Any:
    """Maps a function over blocks of arrays, one block for each device of a mesh.

    Each leaf of ``in_axes`` and ``out_axes`` is a `jax.sharding.PartitionSpec`, or a
    dict from mesh axis names to array dimensions. Each mesh axis cuts its dimension
    into one block for each device. A block has all dimensions of the array. Several
    mesh axes can cut one dimension, major to minor in the order of the tuple or the
    dict. Along other mesh axes, all devices have the same block. Collectives use the
    mesh axis names.

    This is `jax.jit` of `jax.shard_map`, which also takes the dicts of xmap, keyword
    and static arguments, and by default has ``check_vma=False``. That is what `spmap`
    and `jax.pmap` compute: `jax.grad` inside ``fun`` counts a `jax.lax.psum` once for
    each device. With ``check_vma=True`` it counts it once.

    Args:
      fun: the function of one block. Arguments and results are pytrees of blocks. If
        omitted, ``mesh_map(...)`` is a decorator.
      mesh: the devices.
      in_axes: a pytree prefix of the tuple of arguments, such as ``({"data": 0}, {})``
        or ``(P("data"), P())``. With ``{}`` or ``P()``, every device gets the whole
        argument. Keyword arguments are whole too. An entry for a static argument is
        optional.
      out_axes: the same for the result.
      axis_names: the mesh axes that the map is over. Maps inside can use the others.
        Default: all that no map around is over.
      lowering: as for `spmap`. Default ``"manual"``.
      check_vma: as for `jax.shard_map`, which tracks along which mesh axes values vary,
        and checks results by that. Maps inside, and ``lowering="spmd"``, need False.
        Default: False.
      donate_argnums: as for `spmap`.
      static_argnums: positions of arguments that are compile-time constants, as for
        `spmap`.

    Returns:
      The mapped function. It has ``lower`` and ``trace``, like a `jax.jit` function,
      and ``explain``.

    Raises:
      TypeError: ``fun`` is not callable, a mesh or axes are missing, or axes are
        neither PartitionSpecs nor dicts. When called: JAX does not accept an argument.
      ValueError: ``mesh`` or ``axis_names`` lack one of the axes. When called: an array
        does not have one of the dimensions, a dimension does not divide, or a result
        differs along a mesh axis that its out axes do not name.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> mesh = sm.make_mesh({"data": 4, "model": 2})
      >>> product = sm.mesh_map(
      ...     lambda x, w: jax.lax.psum(x @ w, "model"),
      ...     mesh,
      ...     in_axes=({"data": 0, "model": 1}, {"model": 0}),
      ...     out_axes={"data": 0},
      ... )
      >>> product(np.ones((8, 6)), np.ones((6, 3))).shape
      (8, 3)
    """
    options.check_callable("mesh_map", fun)
    options.check_mesh(mesh, "mesh_map")
    if mesh is not None:
        over = mesh.axis_names
        if axis_names is not None:
            over = names_of("mesh_map axis_names", axis_names)
            if unknown := set(over) - set(mesh.axis_names):
                raise ValueError(
                    f"mesh_map axis_names has {sorted(unknown, key=str)}, but the mesh "
                    f"has the axes {mesh.axis_names}."
                )
        in_axes = _specs("in_axes", in_axes, over)
        out_axes = _specs("out_axes", out_axes, over)
    if mesh is None or in_axes is None or out_axes is None:
        raise TypeError(
            "mesh_map needs mesh, in_axes and out_axes, but got "
            f"mesh={mesh}, in_axes={in_axes} and out_axes={out_axes}. "
            "shardmap.make_mesh makes a mesh; axes of {} mean: do not split."
        )
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    check_bool("mesh_map check_vma", check_vma)
    if check_vma and lowering == "spmd":
        raise ValueError(
            "mesh_map check_vma=True is for lowering='manual': with 'spmd' there is no "
            "jax.shard_map. Leave one of them out."
        )
    given_static = "static_argnums", static_argnums
    static, donated = options.positions("mesh_map", fun, given_static, donate_argnums)
    return MeshMappedFunction(
        fun,
        MeshMapOptions(
            mesh=auto_mesh(mesh),
            in_specs=in_axes,
            out_specs=out_axes,
            axis_names=tuple(name for name in mesh.axis_names if name in over),
            static_argnums=static,
            donate_argnums=donated,
            lowering=options.lowering(lowering, None, "mesh_map"),
            check_vma=bool(check_vma),
        ),
    )
