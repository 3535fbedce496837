"""`xmap` and other functions of ``jax.experimental.maps``, with their parameters."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from shardmap._jax.context import current_mesh
from shardmap._jax.types import PyTree
from shardmap.api.spmap import spmap

__all__ = [
    "Mesh",
    "ResourceEnv",
    "SerialLoop",
    "mesh",
    "serial_loop",
    "thread_resources",
    "xmap",
]


class SerialLoop(NamedTuple):
    """A resource of an axis: a loop of this many steps over its elements."""

    length: int


Resource: TypeAlias = str | SerialLoop
Resources: TypeAlias = Mapping[Hashable, Resource | tuple[Resource, ...]]

NamedAxes: TypeAlias = dict[int, Hashable] | Sequence[Hashable]
"""Which axes of an array have names."""

_loops: dict[str, SerialLoop] = {}


@contextlib.contextmanager
def serial_loop(name: str, length: int) -> Iterator[None]:
    """Gives a name to a `SerialLoop`, for ``axis_resources``."""
    before = _loops.get(name)
    _loops[name] = SerialLoop(length)
    try:
        yield
    finally:
        del _loops[name]
        if before is not None:
            _loops[name] = before


class ResourceEnv(NamedTuple):
    """A mesh, and the named loops, for ``thread_resources.env``."""

    physical_mesh: Mesh
    loops: Sequence[object] = ()

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis of the mesh, and of each `serial_loop`."""
        loops = {name: loop.length for name, loop in _loops.items()}
        return {**self.physical_mesh.shape, **loops}


class _ThreadResources(threading.local):
    def __init__(self) -> None:
        self._entered = contextlib.ExitStack()

    @property
    def env(self) -> ResourceEnv:
        """The surrounding mesh, perhaps an empty one; one that is set surrounds all."""
        return ResourceEnv(current_mesh(), tuple(_loops.values()))

    @env.setter
    def env(self, value: ResourceEnv) -> None:
        self._entered.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._entered.enter_context(value.physical_mesh)


thread_resources = _ThreadResources()

mesh = Mesh
"""``with mesh(devices, names):`` is ``with jax.sharding.Mesh(devices, names):``."""


def xmap(
    fun: Callable[..., Any],
    in_axes: PyTree,
    out_axes: PyTree,
    *,
    axis_sizes: Mapping[Hashable, int] | None = None,
    axis_resources: Resources | None = None,
    donate_argnums: int | Sequence[int] = (),
    backend: str | None = None,
) -> Callable[..., Any]:
    """Maps a function over named axes.

    Each name with a resource is a `shardmap.spmap`, over mesh axes or in a loop; each
    other name is a `jax.vmap`. If two names have the same mesh axis, the first gets it.

    Args:
      fun: the function of one element of all the named axes.
      in_axes: a pytree prefix of the tuple of arguments, whose leaves name axes: a dict
        such as ``{0: "a"}`` or a list such as ``["a", ...]``.
      out_axes: the same for the result.
      axis_sizes: sizes of axes that no argument has.
      axis_resources: for each name an axis of the surrounding mesh, a `SerialLoop` or
        its name, or a tuple of these.
      donate_argnums: positions of arguments whose memory the results may reuse.
      backend: not used; the mesh has the devices.

    Returns:
      The mapped function. It has ``lower``, like a `jax.jit` function.

    Raises:
      ValueError: when called: the size of a name is unknown, or differs; a resource is
        neither an axis of the surrounding mesh nor a loop; or an array does not have an
        axis, or has others than a list without ``...``.

    >>> import jax.numpy as jnp
    >>> outer = xmap(jnp.multiply, (["a"], ["b"]), ["b", "a"])
    >>> outer(np.array([1, 2, 3]), np.array([10, 20]))
    Array([[10, 20, 30],
           [20, 40, 60]], dtype=int32)
    """
    if backend is not None and backend != jax.default_backend():
        raise ValueError(
            f"xmap takes no backend {backend!r}: make a mesh of its devices."
        )
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums
    if isinstance(in_axes, list) and not _is_axes(in_axes):
        in_axes = tuple(in_axes)
    return _Mapped(fun, in_axes, out_axes, axis_sizes, axis_resources, donated)


class _Mapped:
    """The result of `xmap`: a program for each surrounding mesh and sizes of axes."""

    def __init__(
        self,
        fun: Callable[..., Any],
        in_axes: PyTree,
        out_axes: PyTree,
        sizes: Mapping[Hashable, int] | None,
        resources: Resources | None,
        donated: Sequence[int],
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._in_axes, self._out_axes = in_axes, out_axes
        self._given, self._resources = sizes or {}, resources or {}
        self._donated = donated
        self._made: dict[Hashable, Any] = {}

    def __call__(self, *args: PyTree) -> PyTree:
        return self._program(args)(*args)

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Lowers the function for these arguments, as `jax.jit` does."""
        lowered: jax.stages.Lowered = self._program(args).lower(*args)
        return lowered

    def _program(self, args: Sequence[PyTree]) -> Any:
        ins = self._in_axes
        ins = (ins,) * len(args) if _is_axes(ins) else ins
        sizes = _sizes(ins, args, self._given)
        unknown = {*self._resources, *_names(self._out_axes)} - sizes.keys()
        if unknown:
            raise ValueError(
                f"xmap does not know the size of the axes {sorted(map(str, unknown))}: "
                "name them in in_axes, or give axis_sizes."
            )
        around = current_mesh()
        ways: dict[Hashable, _Way | None] = {}
        free = dict(around.shape)
        for name, size in sizes.items():
            way = _way(name, self._resources.get(name), size, around, free)
            ways[name] = way
            for axis in way.mesh_axes if way else ():
                del free[axis]
        key = len(args), around, tuple(sizes.items()), tuple(ways.items())
        if key not in self._made:
            self._made[key] = _nested(
                self._fun, ins, self._out_axes, sizes, ways, around, self._donated
            )
        return self._made[key]


class _Way(NamedTuple):
    """How the elements of one axis run: their mesh axes, and how many at once."""

    mesh_axes: tuple[str, ...]
    batch_size: int | None


def _way(
    name: Hashable,
    resources: Resource | tuple[Resource, ...] | None,
    size: int,
    around: Mesh,
    free: Mapping[str, int],
) -> _Way | None:
    """The way of the axis ``name``, on the free axes of the mesh; None: vectorised."""
    if resources is None:
        return None
    is_one = isinstance(resources, SerialLoop) or not isinstance(resources, tuple)
    given = (resources,) if is_one else resources
    entries = tuple(_loops.get(e, e) if isinstance(e, str) else e for e in given)
    mesh_axes = tuple(e for e in entries if isinstance(e, str))
    steps = int(np.prod([e.length for e in entries if isinstance(e, SerialLoop)]))
    if missing := [axis for axis in mesh_axes if axis not in around.shape]:
        raise ValueError(
            f"xmap's axis_resources put {name!r} on {missing}, but the mesh around the "
            f"call has the axes {tuple(around.shape)}, and the loops around it are "
            f"{tuple(_loops)}. Call it in `with Mesh(...):`, or, if it is a loop, in "
            f"`with serial_loop({missing[0]!r}, steps):`; or give SerialLoop(steps) "
            "instead of its name."
        )
    if len(set(mesh_axes)) < len(mesh_axes):
        raise ValueError(
            f"xmap's axis_resources put {name!r} on {mesh_axes}: each axis of the mesh "
            "can have it once."
        )
    on_device = -(-size // int(np.prod([around.shape[axis] for axis in mesh_axes])))
    batch_size = None if steps == 1 else -(-on_device // steps)
    mesh_axes = tuple(axis for axis in mesh_axes if axis in free)
    return _Way(mesh_axes, batch_size) if mesh_axes or batch_size else None


def _nested(
    fun: Callable[..., Any],
    ins: PyTree,
    outs: PyTree,
    sizes: Mapping[Hashable, int],
    ways: Mapping[Hashable, _Way | None],
    around: Mesh,
    donated: Sequence[int],
) -> Callable[..., Any]:
    """The maps over all axes, those with resources outermost, as one program."""
    names = sorted(sizes, key=lambda name: ways[name] is None)
    mapped = fun
    for k in reversed(range(len(names))):
        name, way = names[k], ways[names[k]]
        in_axes, out_axes = (_axes_of(names, k, axes) for axes in (ins, outs))
        if way is None:
            mapped = jax.vmap(
                mapped, in_axes, out_axes, axis_name=name, axis_size=sizes[name]
            )
            continue
        place: dict[str, Any] = (
            {"devices": jax.local_devices()[:1]}
            if around.empty
            else {"mesh": around, "mesh_axes": way.mesh_axes}
        )
        mapped = spmap(
            mapped,
            name,
            in_axes=in_axes,
            out_axes=out_axes,
            axis_size=sizes[name],
            batch_size=way.batch_size,
            **place,
        )

    @functools.wraps(fun)  # For profiles.
    def checked(*args: PyTree) -> PyTree:
        result = mapped(*args)
        check = functools.partial(_check_ranks, "a result")
        jax.tree.map(check, outs, result, is_leaf=_is_axes)
        return result

    return jax.jit(checked, donate_argnums=tuple(donated))


def _axes_of(names: Sequence[Hashable], k: int, axes: PyTree) -> PyTree:
    """The position of the axis ``names[k]`` after the removal of those before it.

    >>> _axes_of(["a", "b"], 1, (["a", "b", ...], {2: "b"}, {}))
    (0, 2, None)
    """

    def position(leaf: NamedAxes) -> int | None:
        places = {name: place for place, name in _as_dict(leaf).items()}
        if names[k] not in places:
            return None
        place = places[names[k]]
        gone = [places[name] for name in names[:k] if name in places]
        return place - sum(0 <= other < place for other in gone)

    return jax.tree.map(position, axes, is_leaf=_is_axes)


def _is_axes(axes: PyTree) -> bool:
    """Whether this says of one array which axes have names.

    >>> [_is_axes(a) for a in ({}, {0: "a"}, ["a", ...], (["a"], {}), {"w": {}})]
    [True, True, True, False, False]
    """
    if isinstance(axes, dict):
        return all(isinstance(place, int) for place in axes)
    return isinstance(axes, (list, tuple)) and all(
        name is None or name is ... or isinstance(name, str) for name in axes
    )


def _as_dict(axes: NamedAxes) -> dict[int, Hashable]:
    """
    >>> _as_dict(["a", None, "b", ...])
    {0: 'a', 2: 'b'}
    """
    if isinstance(axes, dict):
        if min(axes, default=0) < 0:
            raise ValueError(f"xmap got the axes {axes}: count them from 0.")
        return axes
    return {
        place: name for place, name in enumerate(axes) if name not in (None, Ellipsis)
    }


def _check_prefix(ins: PyTree, args: PyTree) -> None:
    """Raises an error if the pytree of axes is not a prefix of the arguments."""
    try:
        jax.tree.map(lambda *_: None, ins, args, is_leaf=_is_axes)
    except ValueError:
        raise ValueError(
            "xmap in_axes must be a pytree prefix of the tuple of arguments: it is "
            f"{ins}, which does not fit {jax.tree.structure(args)}. Give one leaf, as "
            '{0: "a"} or ["a", ...], for each argument or for each part of it.'
        ) from None


def _check_ranks(what: str, axes: NamedAxes, part: PyTree) -> None:
    """Raises an error for axes that arrays do not have."""
    for array in jax.tree.leaves(part):
        rank = np.ndim(array)
        exact = not isinstance(axes, dict) and ... not in axes
        if rank <= max(_as_dict(axes), default=-1) or (exact and rank != len(axes)):
            raise ValueError(
                f"xmap got {what} with {rank} axes, but its axes are {axes}"
                + (": end the list with ... if it may have more." if exact else ".")
            )


def _names(axes: PyTree) -> set[Hashable]:
    leaves = jax.tree.leaves(axes, is_leaf=_is_axes)
    return {name for leaf in leaves for name in _as_dict(leaf).values()}


def _sizes(
    ins: PyTree, args: Sequence[PyTree], given: Mapping[Hashable, int]
) -> dict[Hashable, int]:
    """The size of each named axis, in the order of the arguments."""
    sizes: dict[Hashable, int] = {}

    def read(leaf: NamedAxes, part: PyTree) -> None:
        _check_ranks("an argument", leaf, part)
        for place, name in _as_dict(leaf).items():
            for array in jax.tree.leaves(part):
                size = np.shape(array)[place]
                if sizes.setdefault(name, size) != size:
                    raise ValueError(
                        f"xmap got arguments whose axis {name!r} has the sizes "
                        f"{sizes[name]} and {size}: it is one axis."
                    )

    _check_prefix(tuple(ins), tuple(args))
    jax.tree.map(read, tuple(ins), tuple(args), is_leaf=_is_axes)
    for name, size in given.items():
        if sizes.setdefault(name, size) != size:
            raise ValueError(
                f"xmap got axis_sizes with {name!r}: {size}, but an argument has "
                f"{sizes[name]}: leave it out."
            )
    return sizes
