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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

# Where each shard is: shardmap/sharding


@dataclasses.dataclass(frozen=True)
class Spec:
    """How an array is laid over the devices: cut along axis 0, or a copy on each."""

    is_cut: bool
    devices: int

    def indices(self, shape: Sequence[int]) -> list[slice]:
        """The rows on each device."""
        if not self.is_cut:
            return [slice(None)] * self.devices
        rows = shape[0] // self.devices
        return [slice(k * rows, (k + 1) * rows) for k in range(self.devices)]

    def named_sharding(self, mesh: Mesh) -> NamedSharding:
        """The equivalent JAX sharding."""
        return NamedSharding(mesh, P(*mesh.axis_names) if self.is_cut else P())

    @staticmethod
    def of(array: jax.Array) -> "Spec":
        """The spec of an array on a mesh of one axis."""
        sharding = array.sharding
        return Spec(not sharding.is_fully_replicated, sharding.num_devices)


# Shards on devices: shardmap/arrays


def put(x: np.ndarray, spec: Spec, mesh: Mesh) -> jax.Array:
    """Puts each shard on its device and makes one array of them."""
    places = zip(spec.indices(x.shape), mesh.devices.flat, strict=True)
    shards = [jax.device_put(x[rows], device) for rows, device in places]
    sharding = spec.named_sharding(mesh)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


# The map's equation: shardmap/map/primitives

map_p = jex_core.Primitive("small_map")
map_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class Element:
    """The traced function of one element, hidden from the type checker of JAX.

    The checker does not know the axis in a jaxpr that is a parameter of an equation.
    """

    jaxpr: Any

    def __call__(self, *args: Any) -> list[Any]:
        return jex_core.jaxpr_as_fun(self.jaxpr)(*args)


def bind(element, axis, in_axes, out_axes, args):
    """Traces the function of one element and binds the map of it.

    ``axis`` is a name and a size. ``in_axes`` and ``out_axes`` have 0 or None for each
    argument and result; ``out_axes=None`` maps all results.
    """
    one = [
        jax.ShapeDtypeStruct(jnp.shape(x)[in_axis == 0 :], jnp.result_type(x))
        for x, in_axis in zip(args, in_axes, strict=True)
    ]
    jaxpr = jax.make_jaxpr(element, axis_env=[axis])(*one)
    if out_axes is None:
        out_axes = (0,) * len(jaxpr.out_avals)
    axes = {"in_axes": tuple(in_axes), "out_axes": tuple(out_axes)}
    return map_p.bind(*args, element=Element(jaxpr), axis=axis, **axes)


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


@functools.partial(jax.jit, static_argnames=("element", "axis", "in_axes", "out_axes"))
def program(*args, element, axis, in_axes, out_axes):
    """The map, written for one device."""

    def block(*blocks):
        along = zip(blocks, in_axes, strict=True)
        results = element(*(x[0] if in_axis == 0 else x for x, in_axis in along))
        along = zip(results, out_axes, strict=True)
        return [y[None] if out_axis == 0 else y for y, out_axis in along]

    spec_of = {0: P(axis[0]), None: P()}
    return jax.shard_map(
        block,
        mesh=mesh_of(axis),
        in_specs=tuple(spec_of[in_axis] for in_axis in in_axes),
        out_specs=[spec_of[out_axis] for out_axis in out_axes],
        check_vma=False,
    )(*args)


map_p.def_impl(program)
mlir.register_lowering(map_p, mlir.lower_fun(program, multiple_results=True))


# The rules of transformations: shardmap/map/rules


def select(values, which):
    """The values for which ``which`` is true."""
    return [value for value, chosen in zip(values, which, strict=True) if chosen]


def merge(which, chosen, others):
    """The list of which `select` made ``chosen`` and left ``others``."""
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
    tree = None

    def forward(*xs):
        nonlocal tree

        def of_moving(*moving):
            return element(*merge(moves, moving, select(xs, still)))

        results, pushforward = jax.linearize(of_moving, *select(xs, moves))
        residuals, tree = jax.tree.flatten(pushforward)
        return [*results, *residuals]

    def linear(*xs):
        pushforward = jax.tree.unflatten(tree, xs[: len(residuals)])
        return pushforward(*xs[len(residuals) :])

    jaxpr = jax.make_jaxpr(forward, axis_env=[axis])(*element.jaxpr.in_avals)
    mapped = (0,) * (len(jaxpr.out_avals) - len(out_axes))
    both = bind(forward, axis, in_axes, (*out_axes, *mapped), primals)
    results, residuals = both[: len(out_axes)], both[len(out_axes) :]
    linear_axes = (*mapped, *select(in_axes, moves))
    operands = [*residuals, *select(tangents, moves)]
    return results, bind(linear, axis, linear_axes, out_axes, operands)


def _transpose(cotangents, *args, element, axis, in_axes, out_axes):
    """The map of the transposed element; shared arguments get the sum over elements."""
    unknown = [ad.is_undefined_primal(x) for x in args]
    known = [not is_unknown for is_unknown in unknown]
    known_axes, linear_axes = select(in_axes, known), select(in_axes, unknown)
    structs = select(element.jaxpr.in_avals, unknown)

    def backward(*xs):
        given, cts = xs[: len(known_axes)], xs[len(known_axes) :]

        def of_unknown(*linear):
            return element(*merge(unknown, linear, given))

        found = jax.linear_transpose(of_unknown, *structs)(list(cts))
        return [
            ct if in_axis == 0 else lax.psum(ct, axis[0])
            for ct, in_axis in zip(found, linear_axes, strict=True)
        ]

    operands = [*select(args, known), *map(ad.instantiate_zeros, cotangents)]
    found = bind(backward, axis, [*known_axes, *out_axes], linear_axes, operands)
    return merge(unknown, found, [None] * len(known_axes))


batching.primitive_batchers[map_p] = _batch
ad.primitive_jvps[map_p] = _jvp
ad.primitive_transposes[map_p] = _transpose


# What users call: shardmap/api


def small_pmap(
    fun: Callable[..., Any], axis_name: str, in_axes: int | Sequence[int | None] = 0
) -> Callable[..., Any]:
    """Maps ``fun`` over leading axes, one element on each device."""

    def mapped(*args: Any) -> Any:
        axes = (in_axes,) * len(args) if isinstance(in_axes, int) else tuple(in_axes)
        leaf_axes = [
            a for a, arg in zip(axes, args, strict=True) for _ in jax.tree.leaves(arg)
        ]
        leaves, tree = jax.tree.flatten(args)
        (size,) = {len(x) for x in select(leaves, [a == 0 for a in leaf_axes])}
        axis, out_tree = (axis_name, size), None

        def element(*xs: Any) -> list[Any]:
            nonlocal out_tree
            results, out_tree = jax.tree.flatten(fun(*jax.tree.unflatten(tree, xs)))
            return results

        # `jax.jit` finds its devices in constraints, and not in a primitive of ours.
        shardings = [
            Spec(a == 0, size).named_sharding(mesh_of(axis)) for a in leaf_axes
        ]
        placed = map(lax.with_sharding_constraint, map(jnp.asarray, leaves), shardings)
        results = bind(element, axis, leaf_axes, None, list(placed))
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
    result = ours(weight, put(rows, Spec(True, 8), mesh_of(("i", 8))))
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
