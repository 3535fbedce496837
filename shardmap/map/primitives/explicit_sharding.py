"""Shardings in the types of arrays, on meshes with Explicit axes.

A map has shardings of its own, so it takes arrays without shardings in their types.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from shardmap._jax.context import concrete_mesh, without_mesh
from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import Value, is_typed, without_sharding


def drop_sharding(array: Value) -> Any:
    """The array without a sharding in its type."""
    if not is_typed(jax.typeof(array)):
        return array
    return sharding_type_p.bind(array, sharding=None)


def check_batch(what: str, args: Sequence[Any], dims: Sequence[int | None]) -> None:
    """Refuses a batch along an Explicit mesh axis.

    Args:
      what: whose batching rule it is, for the error.
      args, dims: the operands, and where each has the batch.
    """
    for arg, dim in zip(args, dims, strict=True):
        aval = jax.typeof(arg)
        if dim is None or not is_typed(aval):
            continue
        if (axis := aval.sharding.spec[dim]) is not None:
            raise ValueError(
                f"jax.vmap of {what} along the mesh axis {axis!r}, which is Explicit, "
                "is not supported. Map that dimension by an outer spmap with mesh= and "
                f"mesh_axes={axis!r} instead, or make the mesh with Auto axes."
            )


def _typed_aval(aval: Any, *, sharding: NamedSharding | None) -> Any:
    plain = without_sharding(aval)
    return plain if sharding is None else plain.update(sharding=sharding)


def _transpose(cotangent: Value, operand: Value, **_: object) -> list[Any]:
    # The type of a tangent may have no sharding.
    if not is_typed(operand.aval):
        return [drop_sharding(cotangent)]
    return [jax.sharding.reshard(cotangent, operand.aval.sharding)]


def _batching_rule(
    _: Vmap, args: Sequence[Any], dims: Sequence[int | None], *, sharding: Any
) -> tuple[Any, int | None]:
    (array,), (dim,) = args, dims
    check_batch("a map", args, dims)
    if dim is not None and sharding:
        entries = list(sharding.spec)
        entries += [None] * (dim - len(entries))
        entries.insert(dim, None)
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return sharding_type_p.bind(array, sharding=sharding), dim


def _implementation(x: Value, *, sharding: NamedSharding | None) -> Any:
    here = concrete_mesh()
    if sharding is None or here.empty or here.abstract_mesh != sharding.mesh:
        return x
    # The type of a concrete array follows its sharding.
    with without_mesh():
        return jax.device_put(x, NamedSharding(here, sharding.spec))


sharding_type_p = jex_core.Primitive("typed")
sharding_type_p.def_abstract_eval(_typed_aval)
sharding_type_p.def_impl(_implementation)
ad.deflinear2(sharding_type_p, _transpose)
def_batching(sharding_type_p, _batching_rule)
mlir.register_lowering(sharding_type_p, lambda ctx, x, **_: [x])
