"""`jax.pmap` in one small file of public JAX: a model of shardmap.

A spec says where each shard of an array is. A primitive holds the function of one
element, and there is a rule for each transformation. It is lowered to a `jax.shard_map`
with one element on each device, or to one vectorised program for XLA's partitioner.

`python examples/small_pmap.py` compares it with `shardmap.spmap`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

# Where each shard is: shardmap/sharding


class Chunked(NamedTuple):  # A dimension is cut into chunks of equal size.
    count: int


class Unstacked(NamedTuple):  # Each device has one entry, without the dimension.
    count: int


class ShardedAxis(NamedTuple):  # Along it the axis-th cut dimension is cut.
    axis: int


class Replicated(NamedTuple):  # Along it all devices have the same shard.
    count: int


class Spec(NamedTuple):
    """How each dimension of an array is cut, and what those of the grid are for."""

    sharding: tuple[Chunked | Unstacked | None, ...]
    mesh_mapping: tuple[ShardedAxis | Replicated, ...]

    @property
    def cut(self) -> list[int]:
        """The dimensions that are cut."""
        return [dim for dim, how in enumerate(self.sharding) if how is not None]

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the grid of devices."""
        of_axes = [self.sharding[dim].count for dim in self.cut]
        return tuple(
            of_axes[m.axis] if isinstance(m, ShardedAxis) else m.count
            for m in self.mesh_mapping
        )

    def indices(self, shape: Sequence[int]) -> list[tuple[int | slice, ...]]:
        """The index of the shard on each device."""
        indices = []
        for position in np.ndindex(*self.grid):
            index: list[int | slice] = [slice(None)] * len(shape)
            for m, k in zip(self.mesh_mapping, position, strict=True):
                if isinstance(m, ShardedAxis):
                    dim, how = self.cut[m.axis], self.sharding[self.cut[m.axis]]
                    rows = shape[dim] // how.count
                    chunk = slice(k * rows, (k + 1) * rows)
                    index[dim] = chunk if isinstance(how, Chunked) else k
            indices.append(tuple(index))
        return indices

    def stacked(self) -> "Spec":
        """The layout of the whole array: what is unstacked in a map is in chunks."""
        chunks = tuple(how and Chunked(how.count) for how in self.sharding)
        return self._replace(sharding=chunks)

    def proto(self) -> dict[str, Any]:
        """The fields of XLA's `OpSharding`: tiles, and the device of each tile."""
        # Tiles are numbered by the dimensions of the array, and replicas come last.
        places = [getattr(m, "axis", len(self.cut)) for m in self.mesh_mapping]
        order = np.argsort(places, stable=True)
        number = np.arange(math.prod(self.grid)).reshape(self.grid)
        tiles = [how.count if how else 1 for how in self.sharding]
        copies = number.size // math.prod(tiles)
        return {
            "tiles": tiles + [copies] * (copies > 1),
            "devices": number.transpose(order).ravel().tolist(),
            "last_tile_is_replicas": copies > 1,
        }

    def named_sharding(self, devices: Sequence[jax.Device]) -> NamedSharding:
        """The equivalent JAX sharding of the whole array."""
        names = [f"grid{k}" for k in range(len(self.grid))]
        mesh = Mesh(np.array(devices).reshape(self.grid), names)
        parts: list[str | None] = [None] * len(self.sharding)
        for name, m in zip(names, self.mesh_mapping, strict=True):
            if isinstance(m, ShardedAxis):
                parts[self.cut[m.axis]] = name
        return NamedSharding(mesh, P(*parts))


def spec_of_map(in_axis: int | None, ndim: int, size: int) -> Spec:
    """The spec of an argument with one element on each device, or the same on all."""
    if in_axis is None:
        return Spec((None,) * ndim, (Replicated(size),))
    return Spec((Unstacked(size), *[None] * (ndim - 1)), (ShardedAxis(0),))


# Shards on devices: shardmap/arrays


def put(x: np.ndarray, spec: Spec, devices: Sequence[jax.Device]) -> jax.Array:
    """Puts each shard on its device and makes one array of them."""
    spec = spec.stacked()
    pieces = [x[index] for index in spec.indices(x.shape)]
    shards = list(map(jax.device_put, pieces, devices))
    sharding = spec.named_sharding(devices)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


# The map's equation: shardmap/map/primitives

map_p = jex_core.Primitive("small_map")
map_p.multiple_results = True


class Axis(NamedTuple):
    """The mapped axis, and how the map of it is lowered."""

    name: str
    size: int
    lowering: str = "manual"


@dataclasses.dataclass(frozen=True, eq=False)
class Element:
    """The function of one element; JAX's type checker does not know its axis."""

    jaxpr: Any

    def __call__(self, *args: Any) -> list[Any]:
        return jex_core.jaxpr_as_fun(self.jaxpr)(*args)


def bind(fun, axis, in_axes, out_axes, args):
    """Traces the function of one element, and binds the map of it.

    ``in_axes`` and ``out_axes`` have 0 or None for each argument and for the first
    leaves of the result; others are mapped. Returns a pytree as ``fun`` does.
    """
    shapes = [jnp.shape(x)[a == 0 :] for x, a in zip(args, in_axes, strict=True)]
    one = list(map(jax.ShapeDtypeStruct, shapes, map(jnp.result_type, args)))
    bound = [(axis.name, axis.size)]
    jaxpr, result = jax.make_jaxpr(fun, axis_env=bound, return_shape=True)(*one)
    out_axes = (*out_axes, *[0] * (len(jaxpr.out_avals) - len(out_axes)))
    axes = {"in_axes": tuple(in_axes), "out_axes": out_axes}
    leaves = map_p.bind(*args, element=Element(jaxpr), axis=axis, **axes)
    return jax.tree.unflatten(jax.tree.structure(result), leaves)


@map_p.def_abstract_eval
def _abstract_eval(*avals, element, axis, in_axes, out_axes):
    return [
        aval.update(shape=(axis.size, *aval.shape)) if out_axis == 0 else aval
        for aval, out_axis in zip(element.jaxpr.out_avals, out_axes, strict=True)
    ]


# A program of its devices: shardmap/map/lowering


def lay_out(x: Any, in_axis: int | None, axis: Axis) -> jax.Array:
    """The array with one element on each device, or the same on all.

    `jax.jit` finds its devices in such constraints, not in a primitive of ours.
    """
    spec = spec_of_map(in_axis, jnp.ndim(x), axis.size)
    sharding = spec.named_sharding(jax.devices()[: axis.size])
    return lax.with_sharding_constraint(jnp.asarray(x), sharding)


def manual(*args, element, axis, in_axes, out_axes):
    """The map, written for one device, which has one element."""

    def block(*blocks):
        along = zip(blocks, in_axes, strict=True)
        results = element(*(x[0] if in_axis == 0 else x for x, in_axis in along))
        along = zip(results, out_axes, strict=True)
        return [y[None] if out_axis == 0 else y for y, out_axis in along]

    specs = {0: P(axis.name), None: P()}
    mesh = Mesh(np.array(jax.devices()[: axis.size]), axis.name)
    in_specs, out_specs = ([specs[a] for a in axes] for axes in (in_axes, out_axes))
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    return mapped(block, in_specs=tuple(in_specs), out_specs=out_specs)(*args)


def partitioned(*args, element, axis, in_axes, out_axes):
    """The map, written for all elements at once; XLA cuts it as its results are."""
    place = functools.partial(lay_out, axis=axis)
    # `jax.vmap` knows the collectives over its axis, and needs a mapped argument.
    mapped = jax.vmap(
        lambda _, *xs: element(*xs), (0, *in_axes), list(out_axes), axis_name=axis.name
    )
    results = mapped(jnp.arange(axis.size), *map(place, args, in_axes))
    return list(map(place, results, out_axes))


LOWERINGS = {"manual": manual, "spmd": partitioned}


@functools.partial(jax.jit, static_argnames=("element", "axis", "in_axes", "out_axes"))
def program(*args, axis, **params):
    """The map as a program of its devices."""
    return LOWERINGS[axis.lowering](*args, axis=axis, **params)


map_p.def_impl(program)
mlir.register_lowering(map_p, mlir.lower_fun(program, multiple_results=True))


# The rules of transformations: shardmap/map/rules


def merge(which, chosen, others):
    """The list of which `compress` took ``chosen`` and left ``others``."""
    chosen, others = iter(chosen), iter(others)
    return [next(chosen if is_chosen else others) for is_chosen in which]


def _batch(args, dims, *, element, axis, in_axes, out_axes):
    """`jax.vmap`: each element has a batch."""
    moved = [
        x if dim is None else jnp.moveaxis(x, dim, 1 if in_axis == 0 else 0)
        for x, dim, in_axis in zip(args, dims, in_axes, strict=True)
    ]
    batched = jax.vmap(element, in_axes=[None if dim is None else 0 for dim in dims])
    results = bind(batched, axis, in_axes, out_axes, moved)
    return results, [1 if out_axis == 0 else 0 for out_axis in out_axes]


def _jvp(primals, tangents, *, element, axis, in_axes, out_axes):
    """Two maps: one of results and residuals, one that is linear in the tangents."""
    moves = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    still = [not moved for moved in moves]

    def forward(*xs):
        def of_moving(*moving):
            return element(*merge(moves, moving, compress(xs, still)))

        return jax.linearize(of_moving, *compress(xs, moves))

    # What it returns beside the results is a pytree of the residuals, which are mapped.
    results, pushforward = bind(forward, axis, in_axes, out_axes, primals)
    residuals, tree = jax.tree.flatten(pushforward)

    def linear(*xs):
        pushforward = jax.tree.unflatten(tree, xs[: len(residuals)])
        return pushforward(*xs[len(residuals) :])

    linear_axes = [*[0] * len(residuals), *compress(in_axes, moves)]
    operands = [*residuals, *compress(tangents, moves)]
    return results, bind(linear, axis, linear_axes, out_axes, operands)


def _transpose(cotangents, *args, element, axis, in_axes, out_axes):
    """The map of the transposed element; shared arguments get the sum over elements."""
    unknown = [ad.is_undefined_primal(x) for x in args]
    known = [not is_unknown for is_unknown in unknown]
    known_axes = list(compress(in_axes, known))
    linear_axes = list(compress(in_axes, unknown))
    structs = compress(element.jaxpr.in_avals, unknown)

    def backward(*xs):
        given, cts = xs[: len(known_axes)], xs[len(known_axes) :]

        def of_unknown(*linear):
            return element(*merge(unknown, linear, given))

        of_operands = jax.linear_transpose(of_unknown, *structs)(list(cts))
        return [
            ct if in_axis == 0 else lax.psum(ct, axis.name)
            for ct, in_axis in zip(of_operands, linear_axes, strict=True)
        ]

    operands = [*compress(args, known), *map(ad.instantiate_zeros, cotangents)]
    linear_cts = bind(backward, axis, [*known_axes, *out_axes], linear_axes, operands)
    return merge(unknown, linear_cts, [None] * len(known_axes))


batching.primitive_batchers[map_p] = _batch
ad.primitive_jvps[map_p] = _jvp
ad.primitive_transposes[map_p] = _transpose


# What users call: shardmap/api


def small_pmap(
    fun: Callable[..., Any],
    axis_name: str,
    in_axes: Sequence[int | None],
    lowering: str = "manual",
) -> Callable[..., Any]:
    """Maps ``fun`` over leading axes, one element on each device."""

    def mapped(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        leaf_axes = [
            a for a, x in zip(in_axes, args, strict=True) for _ in jax.tree.leaves(x)
        ]
        (size,) = {len(x) for x, a in zip(leaves, leaf_axes, strict=True) if a == 0}
        axis = Axis(axis_name, size, lowering)
        placed = [lay_out(x, a, axis) for x, a in zip(leaves, leaf_axes, strict=True)]

        def of_leaves(*xs: Any) -> Any:
            return fun(*jax.tree.unflatten(tree, xs))

        return bind(of_leaves, axis, leaf_axes, (), placed)

    return mapped


def same_layouts() -> bool:
    """Whether a spec means what shardmap's does: 2 x 2 shards, each of them twice."""
    mapping = ShardedAxis(1), Replicated(2), ShardedAxis(0)
    ours = Spec((Chunked(2), Chunked(2)), mapping)
    mapping = sm.ShardedAxis(1), sm.Replicated(2), sm.ShardedAxis(0)
    theirs = sm.ShardingSpec((sm.Chunked(2), sm.Chunked(2)), mapping)
    shape, proto, expected = (4, 6), ours.proto(), theirs.sharding_proto()
    print(proto)
    return (
        ours.indices(shape) == list(sm.spec_to_indices(shape, theirs))
        and proto["tiles"] == list(expected.tile_assignment_dimensions)
        and proto["devices"] == list(expected.tile_assignment_devices)
        and sm.spec_of(put(np.zeros(shape), ours, jax.devices())) == theirs
    )


def main(arguments: Sequence[str] = ()) -> int:
    """Compares it with `shardmap.spmap`."""
    jax.config.update("jax_num_cpu_devices", 8)
    rows = put(np.arange(8, dtype=np.float32), spec_of_map(0, 1, 8), jax.devices())

    def fun(w, x):
        return jnp.sin(w * x) / lax.psum(jnp.cos(x), "i")

    def gradient(f):
        return jax.grad(lambda w, x: (f(w, x) ** 2).sum(), (0, 1))

    changes = {
        "called": lambda f: f(0.5, rows),
        "jit": lambda f: jax.jit(f)(0.5, rows),
        "grad": lambda f: gradient(f)(0.5, rows),
        "grad of jit": lambda f: jax.jit(gradient(f))(0.5, rows),
        "vmap": lambda f: jax.vmap(f, (None, 0))(0.5, jnp.stack([rows, 2 * rows])),
    }
    theirs = sm.spmap(fun, "i", in_axes=(None, 0))
    are_same = {"layouts": same_layouts()}
    for lowering in LOWERINGS:
        ours = small_pmap(fun, "i", (None, 0), lowering)
        for name, change in changes.items():
            close = jax.tree.map(np.allclose, change(ours), change(theirs))
            are_same[f"{lowering} {name}"] = all(jax.tree.leaves(close))
    for name, is_same in are_same.items():
        print(f"{name}: {'the same as spmap' if is_same else 'DIFFERS'}")
    return int(not all(are_same.values()))


if __name__ == "__main__":
    raise SystemExit(main())
