"""How random programs are called: on what devices, in what layout, with what arguments.

A call of a program takes `x`, `n`, `d` and `w`, with the elements in front, and gives a
state of all elements, and what they agree on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import shardmap as sm
from tests.together.random_around import MESH_AXES, MESH_TYPES, mesh_of
from tests.together.random_oracle import ByLoops
from tests.together.random_programs import AXIS_NAMES
from tests.together.random_values import State

BLOCK_NAMES = AXIS_NAMES[:3]

_ORDER = st.permutations(BLOCK_NAMES)
_DIMENSIONS = st.lists(st.integers(0, 2), min_size=3, max_size=3)

LAYOUTS = st.one_of(
    st.tuples(st.just("devices"), st.integers(1, 8)),
    st.tuples(st.just("free")),
    st.tuples(
        st.just("mesh"), st.permutations(MESH_AXES), st.integers(1, 3), MESH_TYPES
    ),
    st.tuples(st.just("blocks"), _ORDER, _ORDER, _DIMENSIONS, _DIMENSIONS),
)
"""For `spmap` devices, or mesh axes in some order and of some type; for `mesh_map` the
axes of the mesh in order, the order in which axes are named, and which dimension of
arguments and of results each of `BLOCK_NAMES` cuts.
"""


class Call(NamedTuple):
    """How the outermost map is made, and called.

    Attributes:
      in_axis: of `State.x`.
      out_axes: of the state.
      static: at which place the program itself is passed, as a static argument.
      donated: which other arguments are.
      batch_size: as of `spmap`.
      ending: which sum over all elements comes last.
    """

    in_axis: int = 0
    out_axes: State = State(0, 0, 0)
    static: int | None = None
    donated: tuple[int, ...] = ()
    batch_size: int | None = None
    ending: int = 1


CALLS = st.builds(
    Call,
    st.integers(-2, 1),
    st.builds(State, st.integers(-2, 1), st.integers(-1, 0), st.integers(-1, 0)),
    st.none() | st.integers(0, 4),
    st.just(()) | st.lists(st.integers(0, 3), unique=True).map(tuple),
    st.none() | st.integers(1, 3),
    st.integers(0, 29),
)


def called(fun: Any, program: Any, call: Call, in_axes: Any, map_: Any) -> Any:
    """``map_`` of ``fun(program, *args)``, as a function of the arguments.

    Args:
      map_: ``map_(fun, in_axes, **options)``.
    """
    place = call.static
    options: dict[str, Any] = {}
    if place is None:
        if call.donated:
            options["donate_argnums"] = call.donated
        return map_(lambda *args: fun(program, *args), in_axes=in_axes, **options)

    def with_program(*args: Any) -> Any:
        return fun(args[place], *args[:place], *args[place + 1 :])

    options["static"] = place
    options["donate_argnums"] = tuple(k + (k >= place) for k in call.donated)
    in_axes = (*in_axes[:place], None, *in_axes[place:])
    mapped = map_(with_program, in_axes=in_axes, **options)
    return lambda *args: mapped(*args[:place], program, *args[place:])


def map_on(layout: Any, lowering: Any) -> Callable[..., Any]:
    """`spmap` on devices, or on mesh axes in some order; `jax.vmap` for level None."""
    kind, *which = layout
    places: list[dict[str, Any]] = []
    if kind == "devices":
        places = [{"devices": jax.devices()[: which[0]]}]
    elif kind == "mesh":
        axes, count, mesh_type = tuple(which[0]), *which[1:]
        mesh = mesh_of(mesh_type)
        places = [{"mesh": mesh, "mesh_axes": axes[:count]}]
        if rest := axes[count:]:
            places.append({"mesh": mesh, "mesh_axes": rest})

    def map_(
        fun: Any,
        level: int | None,
        name: Any,
        in_axes: Any,
        out_axes: Any = 0,
        batch_size: int | None = None,
        static: Any = (),
        **options: Any,
    ) -> Any:
        if level is None:
            return jax.vmap(fun, in_axes, out_axes)
        if level < len(places):
            options |= places[level]
        # Integers of NumPy are integers.
        number = np.int64 if level else int
        in_axes, out_axes, batch_size, static = jax.tree.map(
            number, (in_axes, out_axes, batch_size, static)
        )
        return sm.spmap(
            fun,
            name,
            in_axes=in_axes,
            out_axes=out_axes,
            # The partitioner decides itself what a device does at once.
            batch_size=batch_size if lowering == "manual" else None,
            static_broadcasted_argnums=static,
            lowering=lowering,
            **options,
        )

    return map_


def blocks_on(layout: Any, lowering: Any) -> Callable[..., Any]:
    """Three maps of two elements each, as one `mesh_map` of blocks of one element."""
    _, mesh_order, order, in_dimensions, out_dimensions = layout
    mesh = sm.make_mesh(dict.fromkeys(mesh_order, 2))

    def axes(dimensions: list[int]) -> dict[str, int]:
        return {name: np.int8(dimensions[BLOCK_NAMES.index(name)]) for name in order}

    def walk(dimensions: list[int]) -> tuple[list[int], list[int]]:
        """The axes from the major one of the first dimension on, and the shape."""
        cut = axes(dimensions)
        names = [name for k in range(3) for name in order if cut[name] == k]
        shape = [2 ** dimensions.count(k) for k in range(3)]
        return [BLOCK_NAMES.index(name) for name in names], shape

    def laid_out(array: Any) -> Any:
        places, shape = walk(in_dimensions)
        rest = array.shape[1:]
        array = array.reshape(2, 2, 2, *rest)
        array = array.transpose(*places, *range(3, array.ndim))
        return array.reshape(*shape, *rest)

    def in_line(array: Any) -> Any:
        places, _ = walk(out_dimensions)
        rest = array.shape[3:]
        array = array.reshape(2, 2, 2, *rest)
        array = array.transpose(*np.argsort(places), *range(3, array.ndim))
        return array.reshape(8, *rest)

    def maps(fun: Any, in_axes: Any, static: Any = (), **options: Any) -> Any:
        def block(*args: Any) -> Any:
            state, agreed = fun(
                *(
                    arg if axis is None else arg[0, 0, 0]
                    for arg, axis in zip(args, in_axes, strict=True)
                )
            )
            return jax.tree.map(lambda leaf: leaf[None, None, None], state), agreed

        mapped = sm.mesh_map(
            block,
            mesh,
            tuple({} if axis is None else axes(in_dimensions) for axis in in_axes),
            (axes(out_dimensions), {}),
            lowering=lowering,
            static_argnums=static,
            **options,
        )

        def by_blocks(*args: Any) -> Any:
            state, agreed = mapped(
                *(
                    arg if axis is None else laid_out(arg)
                    for arg, axis in zip(args, in_axes, strict=True)
                )
            )
            return jax.tree.map(in_line, state), agreed

        return by_blocks

    return maps


def around_by(outside: str) -> Callable[..., Any]:
    """What is around a map: `jax.vmap`, or `jax.shard_map` of one element each.

    Args:
      outside: "vmap", or "shard_map".
    """
    if outside == "vmap":
        return jax.vmap

    def around(fun: Any, in_axes: Any, out_axes: int, axis_name: str) -> Any:
        def block(*args: Any) -> Any:
            alone = (
                arg if axis is None else arg.squeeze(axis)
                for arg, axis in zip(args, in_axes, strict=True)
            )
            return jax.tree.map(lambda leaf: leaf[None], fun(*alone))

        def cut(axis: int | None) -> PartitionSpec:
            # `State.x` alone may be cut along another axis than the first.
            second = axis in (1, -1)
            return PartitionSpec(
                *() if axis is None else (None, axis_name)[not second :]
            )

        def mapped(*args: Any) -> Any:
            return jax.shard_map(
                block,
                mesh=sm.make_mesh({axis_name: args[1].shape[0]}),
                in_specs=tuple(map(cut, in_axes)),
                out_specs=PartitionSpec(axis_name),
                check_vma=False,
            )(*args)

        return mapped

    return around


def by_vmaps(machine: ByLoops) -> Callable[..., Any]:
    """The oracle of `blocks_on`."""

    def maps(fun: Any, in_axes: Any) -> Any:
        for name in reversed(BLOCK_NAMES):
            fun = machine.vmap(fun, 0, name, in_axes, (0, None))

        def of_all(*args: Any) -> Any:
            state, agreed = fun(
                *(
                    arg if axis is None else arg.reshape(2, 2, 2, *arg.shape[1:])
                    for arg, axis in zip(args, in_axes, strict=True)
                )
            )
            return State(*(each.reshape(8, *each.shape[3:]) for each in state)), agreed

        return of_all

    return maps
