"""Shardings in the types of arrays, on meshes with Explicit axes.

A map has shardings of its own, so it takes arrays without shardings in their types.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.interpreters import ad, mlir

from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import Value, has_explicit_sharding, without_sharding


def drop_sharding(array: Value) -> Any:
    """The array without a sharding in its type."""
    if not has_explicit_sharding(jax.typeof(array)):
        return array
    return drop_sharding_p.bind(array)


def check_batch(what: str, args: Sequence[Any], dims: Sequence[int | None]) -> None:
    """Refuses a batch of ``what`` along an Explicit mesh axis."""
    for arg, dim in zip(args, dims, strict=True):
        aval = jax.typeof(arg)
        if dim is None or not has_explicit_sharding(aval):
            continue
        if (axis := aval.sharding.spec[dim]) is not None:
            raise ValueError(
                f"jax.vmap of {what} along the mesh axis {axis!r}, which is Explicit, "
                "is not supported. Map that dimension by an outer spmap with mesh= and "
                f"mesh_axes={axis!r} instead, or make the mesh with Auto axes."
            )


def _transpose(cotangent: Value, operand: Value) -> list[Any]:
    # The type of a tangent may have no sharding.
    if not has_explicit_sharding(operand.aval):
        return [drop_sharding(cotangent)]
    return [jax.sharding.reshard(cotangent, operand.aval.sharding)]


def _batching_rule(
    _: Vmap, args: Sequence[Any], dims: Sequence[int | None]
) -> tuple[Any, int | None]:
    check_batch("a map", args, dims)
    return drop_sharding_p.bind(*args), dims[0]


drop_sharding_p = jex_core.Primitive("drop_sharding")
drop_sharding_p.def_abstract_eval(without_sharding)
drop_sharding_p.def_impl(lambda array: array)
ad.deflinear2(drop_sharding_p, _transpose)
def_batching(drop_sharding_p, _batching_rule)
mlir.register_lowering(drop_sharding_p, lambda ctx, array: [array])
