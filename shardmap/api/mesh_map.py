"""`mesh_map`: a function of blocks, one for each device of a mesh."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol, overload

from jax.sharding import Mesh, NamedSharding

from shardmap._jax.types import PyTree
from shardmap.api.blocks.axes import check_names, sharding_of
from shardmap.api.blocks.calls import Options
from shardmap.api.blocks.programs import BlockPrograms
from shardmap.api.calls import options
from shardmap.api.calls.call import Arguments
from shardmap.api.calls.options import Lowering
from shardmap.api.calls.statics import wrap_statics
from shardmap.api.function import Mapped, P, R
from shardmap.sharding.mesh import auto_mesh


class MeshMappedFunction(Mapped[P, R]):
    """A function mapped over the blocks of a mesh; what `mesh_map` returns."""

    _kind = BlockPrograms

    def shardings(
        self, args: tuple[PyTree, ...], out: PyTree
    ) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """The shardings of the arguments' leaves and of those of a result like ``out``.

        What is passed by keyword is not among them.
        """
        programs: BlockPrograms = self._programs
        mesh = programs.options.mesh
        in_axes = programs.in_axes(Arguments.of(wrap_statics(args, self._static), {}))
        return (
            [sharding_of(axes, mesh) for axes in in_axes],
            [sharding_of(axes, mesh) for axes in programs.out_axes(out)],
        )


class Decorator(Protocol):
    """What makes such functions, with its options chosen."""

    def __call__(self, fun: Callable[P, R], /) -> MeshMappedFunction[P, R]: ...


@overload
def mesh_map(
    fun: Callable[P, R],
    mesh: Mesh,
    in_axes: PyTree,
    out_axes: PyTree,
    *,
    lowering: Lowering = "manual",
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
    lowering: Lowering = "manual",
    donate_argnums: int | Iterable[int] = (),
    static_argnums: int | Iterable[int] = (),
) -> Decorator: ...


def mesh_map(
    fun: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    in_axes: PyTree = None,
    out_axes: PyTree = None,
    *,
    lowering: Lowering = "manual",
    donate_argnums: int | Iterable[int] = (),
    static_argnums: int | Iterable[int] = (),
) -> Any:
    """Maps a function over blocks of arrays, one block for each device of a mesh.

    Each leaf of ``in_axes`` and ``out_axes`` is a dict from mesh axis names to array
    dimensions. A dimension that a mesh axis names is cut among the devices along it;
    the function gets the block, with all its dimensions. Several mesh axes on one
    dimension cut it major to minor, in the order of the dict. Along mesh axes that are
    not named, all devices have the same block. Collectives go over mesh axis names.

    The idea is `jax.shard_map`'s, and its elder xmap's with anonymous blocks; it is
    made of maps as `spmap` makes them, one inside the other.

    Args:
      fun: takes and gives pytrees of blocks. Left out, ``mesh_map(...)`` is a
        decorator.
      mesh: the devices.
      in_axes: a pytree prefix of the tuple of arguments with dicts as leaves, such as
        ``({"data": 0}, {})``, ``{}`` for what every device gets whole, as it does what
        is passed by keyword. Static arguments may have an entry or none.
      out_axes: the same for the result.
      lowering: as for `spmap`. Default ``"manual"``.
      donate_argnums: as for `spmap`.
      static_argnums: positions of arguments that are compile-time constants, as for
        `spmap`.

    Returns:
      The mapped function, with ``lower`` and ``trace`` as `jax.jit` gives them, and
      ``explain``.

    Raises:
      TypeError: ``fun`` is not callable, no mesh or axes, or axes that are no dicts of
        names and dimensions. When called: an argument that JAX cannot compute with.
      ValueError: a mesh axis that ``mesh`` does not have. When called: a dimension that
        an array does not have or that does not divide, a result that differs along a
        mesh axis that its out axes do not name.

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
    if fun is None:
        return functools.partial(
            mesh_map,
            mesh=mesh,
            in_axes=in_axes,
            out_axes=out_axes,
            lowering=lowering,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
        )
    options.check_callable("mesh_map", fun)
    if mesh is None or in_axes is None or out_axes is None:
        raise TypeError(
            "mesh_map needs mesh, in_axes and out_axes, but got "
            f"mesh={mesh}, in_axes={in_axes} and out_axes={out_axes}. "
            "shardmap.make_mesh makes a mesh; axes of {} cut nothing."
        )
    options.check_mesh(mesh, "mesh_map")
    check_names("in_axes", in_axes, mesh)
    check_names("out_axes", out_axes, mesh)
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    given_static = "static_argnums", static_argnums
    static, donated = options.positions("mesh_map", fun, given_static, donate_argnums)
    return MeshMappedFunction(
        fun,
        Options(
            mesh=auto_mesh(mesh),
            in_axes=in_axes,
            out_axes=out_axes,
            static_argnums=static,
            donate_argnums=donated,
            lowering=options.lowering(lowering, None, "mesh_map"),
        ),
    )
