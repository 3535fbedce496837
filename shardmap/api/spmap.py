"""`spmap`: what users call."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypedDict, Unpack, overload

import jax
from jax.sharding import Mesh

from shardmap._jax.context import current_mesh
from shardmap._jax.types import PyTree
from shardmap.api import options
from shardmap.api.elements import ElementMap
from shardmap.api.function import Mapped, P, R
from shardmap.api.options import Lowering, SpmapOptions
from shardmap.map.primitives.axis import UNNAMED
from shardmap.sharding.mesh import auto_mesh, check_devices, too_few_devices
from shardmap.units import (
    Auto,
    decorator_with_options,
    integer_of,
)


class MappedFunction(Mapped[P, R]):
    """A function mapped over an axis; what `spmap` returns.

    Call it like the function, with arrays that have the mapped axis.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> def mean_of_squares(x: jax.Array) -> jax.Array:
      ...     return jax.lax.pmean(x * x, "i")
      >>> mapped: sm.MappedFunction = sm.spmap(mean_of_squares, "i")
      >>> mapped
      <spmap of mean_of_squares>
      >>> mapped(np.array([1.0, 3.0]))
      Array([5., 5.], dtype=float32)
    """

    _kind = ElementMap


class Keywords(TypedDict, total=False):
    """The keyword arguments of `spmap`."""

    in_axes: PyTree
    out_axes: PyTree
    static_broadcasted_argnums: int | Iterable[int]
    devices: Sequence[jax.Device] | None
    backend: str | None
    axis_size: int | None
    donate_argnums: int | Iterable[int]
    mesh: Mesh | None
    mesh_axes: str | Sequence[str] | None
    batch_size: int | Auto | None
    memory: int | str | None
    lowering: Lowering


@overload
def spmap(
    fun: Callable[P, R], axis_name: Hashable = None, **keywords: Unpack[Keywords]
) -> MappedFunction[P, R]: ...


@overload
def spmap(
    fun: None = None, axis_name: Hashable = None, **keywords: Unpack[Keywords]
) -> Callable[[Callable[P, R]], MappedFunction[P, R]]: ...


@decorator_with_options
def spmap(
    fun: Any = None,
    axis_name: Hashable = None,
    *,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    mesh: Mesh | None = None,
    mesh_axes: str | Sequence[str] | None = None,
    batch_size: int | Auto | None = None,
    memory: int | str | None = None,
    lowering: Lowering = "manual",
) -> Any:
    """Maps a function over an array axis, one element on each device.

    ``spmap(f)(x)`` computes ``stack([f(x[0]), f(x[1]), ...])``. Elements communicate
    with the collectives of `jax.lax` over ``axis_name``. If there are more elements
    than devices, each device has a block of elements.

    The parameters are those of `jax.pmap`, and some more. Like `jax.vmap`, ``spmap``
    can be used inside `jax.jit`, `jax.grad`, `jax.vmap`, control flow, and ``spmap``
    itself.

    Args:
      fun: the function of one element. Arguments and results are pytrees of arrays. If
        omitted, ``spmap(...)`` is a decorator.
      axis_name: the name of the axis in collectives, any hashable. Default:
        ``mesh_axes`` if that is one string, otherwise no name.
      in_axes: the mapped axis of each positional argument, as a pytree prefix. A leaf
        is an int, which may be negative, or None: every element gets the whole
        argument. Keyword arguments are mapped along axis 0. Default: 0.
      out_axes: the mapped axis of each result, as a pytree prefix. None: all elements
        have the same result, which is returned once. Default: 0.
      static_broadcasted_argnums: positions of arguments that are compile-time
        constants. They must be hashable. Default: none.
      devices: the devices to use, in this order. Default: the first ones. With devices
        of several processes, each process passes and gets the elements of its own
        devices, or global arrays.
      backend: the platform whose devices to use, such as ``"cpu"``. Default: JAX's.
      axis_size: the number of elements, over all processes. Required if no argument is
        mapped.
      donate_argnums: positions of arguments whose memory the results may reuse. They
        can be passed by keyword. An array is deleted if its memory was reused, as with
        `jax.jit`. Default: none.
      mesh: a mesh to place the axis on, instead of ``devices`` or ``backend``. Nested
        maps on different axes of one mesh are one program.
      mesh_axes: the mesh axes for the elements, a name or several, major to minor. With
        ``()``, every device computes all elements. Without ``mesh``, they are axes of
        the mesh of ``with mesh:`` or `jax.set_mesh`.
      batch_size: the number of elements that a device vectorises at once. It loops
        over such batches, as `jax.lax.map` does. `AUTO`: as many as fit into
        ``memory``. Default: `AUTO` with ``memory``, otherwise all.
      memory: the bytes that a device may use besides arguments and results: an int, or
        a text such as ``"2 GB"``.
      lowering: ``"manual"``: a program per device, with explicit collectives.
        ``"spmd"``: one vectorised program, which XLA's partitioner splits. The results
        are the same. Default: ``"manual"``.

    Returns:
      The mapped function. It has ``lower`` and ``trace``, like a `jax.jit` function,
      and ``explain``.

    Raises:
      TypeError: ``fun`` is not callable, or axes are neither ints nor None. When
        called: JAX does not accept an argument.
      ValueError: there are no devices. When called: mapped sizes differ, an argument
        does not have the mapped axis, or a result with ``out_axes=None`` differs
        between elements.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> @sm.spmap(axis_name="i")
      ... def normalize(x):
      ...     return x / jax.lax.psum(x, "i")
      >>> normalize(np.array([1.0, 3.0, 4.0]))
      Array([0.125, 0.375, 0.5  ], dtype=float32)
    """
    options.check_callable("spmap", fun)
    if mesh is None and mesh_axes is not None:
        around = current_mesh()
        mesh = None if around.empty else around
    options.check_mesh(mesh)
    in_axes = options.checked_axes("in_axes", in_axes)
    out_axes = options.checked_axes("out_axes", out_axes)
    if devices is not None:
        devices = check_devices("spmap", devices)
        if not devices:
            raise ValueError(
                "'devices' argument to spmap must be non-empty, or None."
                f"{too_few_devices(2)}"
            )
    if axis_size is not None:
        axis_size = integer_of("spmap axis_size", axis_size, least=0)
    given_static = "static_broadcasted_argnums", static_broadcasted_argnums
    static, donated = options.positions("spmap", fun, given_static, donate_argnums)
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    batch, allowed = options.batch_size(batch_size, memory)
    if axis_name is None and isinstance(mesh_axes, str):
        axis_name = mesh_axes
    chosen = SpmapOptions(
        axis_name=UNNAMED if axis_name is None else options.axis_name(axis_name),
        in_axes=in_axes,
        out_axes=out_axes,
        static_argnums=static,
        devices=devices,
        backend=backend,
        axis_size=axis_size,
        donate_argnums=donated,
        mesh=None if mesh is None else auto_mesh(mesh),
        mesh_axes=options.mesh_axes(mesh, mesh_axes, devices, backend),
        batch_size=batch,
        memory=allowed,
        lowering=options.lowering(lowering, batch_size),
    )
    return MappedFunction(fun, chosen)
