"""`jax.pmap` in one small file of public JAX: a model of shardmap.

A spec says where each shard of an array is. A primitive holds the function of one
element, and there is a rule for each transformation. It runs as a `jax.jit` of a
`jax.shard_map`, with one element on each device.

`python examples/small_pmap.py` compares it with `shardmap.spmap`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardmap as sm

# Where each shard is: shardmap/sharding


@dataclasses.dataclass(frozen=True)
class Spec:
    """How the leading dimension of an array is sharded.

    Attributes:
      shards: the number of shards, one for each device. None: each device has a copy.
      devices: the number of devices.
    """

    shards: int | None
    devices: int

    def indices(self, shape: Sequence[int]) -> list[slice]:
        """The rows on each device."""
        if self.shards is None:
            return [slice(None)] * self.devices
        rows = shape[0] // self.shards
        return [slice(k * rows, (k + 1) * rows) for k in range(self.shards)]

    def named_sharding(self, mesh: Mesh) -> NamedSharding:
        """The equivalent JAX sharding."""
        cut = () if self.shards is None else mesh.axis_names
        return NamedSharding(mesh, PartitionSpec(*cut))

    @staticmethod
    def of(array: jax.Array) -> "Spec":
        """The spec of an array on a mesh of one axis."""
        count = array.sharding.num_devices
        return Spec(None if array.sharding.is_fully_replicated else count, count)


# Shards on devices: shardmap/arrays


def put(x: np.ndarray, spec: Spec, mesh: Mesh) -> jax.Array:
    """Puts each shard on its device and makes one array of them."""
    shards = [
        jax.device_put(x[rows], device)
        for rows, device in zip(spec.indices(x.shape), mesh.devices.flat, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(
        x.shape, spec.named_sharding(mesh), shards
    )


# The map's equation: shardmap/map/primitives

map_p = jex_core.Primitive("small_map")
map_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class Element:
    """The function of one element, traced.

    JAX's type checker checks jaxprs in the parameters of an equation, where it does not
    know the axis. It does not check those in a class.
    """

    jaxpr: Any

    def __call__(self, *args: Any) -> list[Any]:
        return jex_core.jaxpr_as_fun(self.jaxpr)(*args)

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the arguments."""
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.jaxpr.in_avals]


def bind(
    element: Callable[..., Sequence[Any]],
    axis: tuple[str, int],
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None] | None,
    args: Sequence[Any],
) -> list[Any]:
    """Traces the function of one element and binds the map of it.

    Args:
      element: a function of flat lists of arrays.
      axis: the name and the size of the axis.
      in_axes, out_axes: 0 or None for each argument and result. ``out_axes=None`` maps
        all results.
      args: the arguments.
    """
    one = [
        jax.ShapeDtypeStruct(jnp.shape(x)[axis_ == 0 :], jnp.result_type(x))
        for x, axis_ in zip(args, in_axes, strict=True)
    ]
    traced = Element(jax.make_jaxpr(element, axis_env=[axis])(*one))
    if out_axes is None:
        out_axes = (0,) * len(traced.jaxpr.out_avals)
    axes = {"in_axes": tuple(in_axes), "out_axes": tuple(out_axes)}
    return map_p.bind(*args, element=traced, axis=axis, **axes)


@map_p.def_abstract_eval
def _abstract_eval(*avals, element, axis, in_axes, out_axes):
    return [
        aval.update(shape=(axis[1], *aval.shape)) if out_axis == 0 else aval
        for aval, out_axis in zip(element.jaxpr.out_avals, out_axes, strict=True)
    ]


# A program of its devices: shardmap/map/lowering


def mesh_of(axis: tuple[str, int]) -> Mesh:
    """The first devices, one for each element."""
    return Mesh(np.array(jax.devices()[: axis[1]]), axis[0])


def shard_mapped(*args, element, axis, in_axes, out_axes):
    """The map, written for one device."""

    def block(*blocks):
        elements = [
            x[0] if in_axis == 0 else x
            for x, in_axis in zip(blocks, in_axes, strict=True)
        ]
        results = element(*elements)
        return [
            y[None] if out_axis == 0 else y
            for y, out_axis in zip(results, out_axes, strict=True)
        ]

    spec_of = {0: PartitionSpec(axis[0]), None: PartitionSpec()}
    return jax.shard_map(
        block,
        mesh=mesh_of(axis),
        in_specs=tuple(spec_of[in_axis] for in_axis in in_axes),
        out_specs=[spec_of[out_axis] for out_axis in out_axes],
        check_vma=False,
    )(*args)


mlir.register_lowering(map_p, mlir.lower_fun(shard_mapped, multiple_results=True))


@map_p.def_impl
def _impl(*args, **params):
    return _program(**params)(*args)


@functools.lru_cache
def _program(**params):
    mesh = mesh_of(params["axis"])
    shardings = [
        NamedSharding(mesh, PartitionSpec(*mesh.axis_names[: in_axis == 0]))
        for in_axis in params["in_axes"]
    ]
    run = jax.jit(functools.partial(shard_mapped, **params))
    return lambda *args: run(*jax.device_put(args, tuple(shardings)))


# The rules of transformations: shardmap/map/rules


def _batch(args, dims, *, element, axis, in_axes, out_axes):
    """`jax.vmap`: each element has a batch."""
    moved = [
        x if dim is None else jnp.moveaxis(x, dim, 1 if in_axis == 0 else 0)
        for x, dim, in_axis in zip(args, dims, in_axes, strict=True)
    ]
    of_element = [None if dim is None else 0 for dim in dims]
    batched = jax.vmap(element, in_axes=of_element)
    results = bind(batched, axis, in_axes, out_axes, moved)
    return results, [1 if out_axis == 0 else 0 for out_axis in out_axes]


batching.primitive_batchers[map_p] = _batch


def _jvp(primals, tangents, *, element, axis, in_axes, out_axes):
    """Two maps: one of results and residuals, one that is linear in the tangents."""
    moves = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    trees = []

    def forward(*xs):
        def of_moving(*moving):
            rest = iter(moving)
            full = [next(rest) if m else x for m, x in zip(moves, xs, strict=True)]
            return element(*full)

        moving = [x for m, x in zip(moves, xs, strict=True) if m]
        results, pushforward = jax.linearize(of_moving, *moving)
        residuals, tree = jax.tree.flatten(pushforward)
        trees.append(tree)
        return [*results, *residuals]

    def linear(*xs):
        pushforward = jax.tree.unflatten(trees[-1], xs[:count])
        return pushforward(*xs[count:])

    forward_jaxpr = jax.make_jaxpr(forward, axis_env=[axis])(*element.structs)
    count = len(forward_jaxpr.out_avals) - len(out_axes)
    both = bind(forward, axis, in_axes, (*out_axes, *(0,) * count), primals)
    results, residuals = both[: len(out_axes)], both[len(out_axes) :]
    moving = [t for m, t in zip(moves, tangents, strict=True) if m]
    moving_axes = [in_axis for m, in_axis in zip(moves, in_axes, strict=True) if m]
    out_tangents = bind(
        linear, axis, (*(0,) * count, *moving_axes), out_axes, [*residuals, *moving]
    )
    return results, out_tangents


ad.primitive_jvps[map_p] = _jvp


def _transpose(cotangents, *args, element, axis, in_axes, out_axes):
    """The map of the transposed element; shared arguments get the sum over elements."""
    unknown = [ad.is_undefined_primal(x) for x in args]
    known = [x for u, x in zip(unknown, args, strict=True) if not u]
    known_axes = [a for u, a in zip(unknown, in_axes, strict=True) if not u]
    linear_axes = [a for u, a in zip(unknown, in_axes, strict=True) if u]
    cotangents = [
        ad.instantiate_zeros(ct) if isinstance(ct, ad.Zero) else ct for ct in cotangents
    ]

    def backward(*xs):
        known, cts = xs[: len(known_axes)], xs[len(known_axes) :]

        def of_unknown(*linear):
            rest, given = iter(linear), iter(known)
            return element(*(next(rest if u else given) for u in unknown))

        structs = [s for u, s in zip(unknown, element.structs, strict=True) if u]
        found = jax.linear_transpose(of_unknown, *structs)(list(cts))
        return [
            ct if in_axis == 0 else lax.psum(ct, axis[0])
            for ct, in_axis in zip(found, linear_axes, strict=True)
        ]

    axes = [*known_axes, *out_axes]
    found = iter(bind(backward, axis, axes, linear_axes, [*known, *cotangents]))
    return [next(found) if u else None for u in unknown]


ad.primitive_transposes[map_p] = _transpose


# What users call: shardmap/api


def small_pmap(
    fun: Callable[..., Any], axis_name: str, in_axes: int | Sequence[int | None] = 0
) -> Callable[..., Any]:
    """Maps ``fun`` over leading axes, one element on each device."""

    def mapped(*args: Any) -> Any:
        axes = [in_axes] * len(args) if isinstance(in_axes, int) else in_axes
        leaves, tree = jax.tree.flatten(args)
        leaf_axes = [
            a for a, arg in zip(axes, args, strict=True) for _ in jax.tree.leaves(arg)
        ]
        mapped_leaves = [x for x, a in zip(leaves, leaf_axes, strict=True) if a == 0]
        (size,) = {jnp.shape(x)[0] for x in mapped_leaves}
        out_tree = None

        def element(*xs: Any) -> list[Any]:
            nonlocal out_tree
            results, out_tree = jax.tree.flatten(fun(*jax.tree.unflatten(tree, xs)))
            return results

        mesh = mesh_of((axis_name, size))
        # `jax.jit` finds its devices in constraints, and not in a primitive of ours.
        specs = [Spec(size if a == 0 else None, size) for a in leaf_axes]
        leaves = [
            lax.with_sharding_constraint(jnp.asarray(x), spec.named_sharding(mesh))
            for x, spec in zip(leaves, specs, strict=True)
        ]
        results = bind(element, (axis_name, size), leaf_axes, None, leaves)
        return jax.tree.unflatten(out_tree, results)

    return mapped


def main(arguments: Sequence[str] = ()) -> int:
    """Compares it with `shardmap.spmap`."""
    jax.config.update("jax_num_cpu_devices", 8)
    rows, weight = np.arange(8, dtype=np.float32), jnp.float32(0.5)

    def fun(w, x):
        return jnp.sin(w * x) / lax.psum(jnp.cos(x), "i")

    ours = small_pmap(fun, "i", (None, 0))
    theirs = sm.spmap(fun, "i", in_axes=(None, 0))
    result = ours(weight, put(rows, Spec(8, 8), mesh_of(("i", 8))))
    print(jax.make_jaxpr(ours)(weight, rows).eqns[-1].primitive)
    print(Spec.of(result), sm.spec_of(theirs(weight, rows)))

    def gradient(f):
        return jax.grad(lambda w, x: (f(w, x) ** 2).sum(), (0, 1))

    changes = {
        "called": lambda f: f(weight, rows),
        "jit": lambda f: jax.jit(f)(weight, rows),
        "grad": lambda f: gradient(f)(weight, jnp.asarray(rows)),
        "grad of jit": lambda f: jax.jit(gradient(f))(weight, rows),
        "vmap": lambda f: jax.vmap(f, (None, 0))(weight, jnp.stack([rows, 2 * rows])),
    }
    for name, change in changes.items():
        one, other = (jax.tree.leaves(change(f)) for f in (ours, theirs))
        same = all(map(functools.partial(np.allclose, rtol=1e-5), one, other))
        print(f"{name}: {'the same as spmap' if same else 'DIFFERS'}")
        if not same:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
