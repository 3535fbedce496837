"""The primitives of JAX that an explanation looks for."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core.primitives import (
    all_gather_p,
    all_to_all_p,
    dynamic_slice_p,
    gather_p,
    pmax_p,
    pmin_p,
    ppermute_p,
    psum_p,
    ragged_all_to_all_p,
    slice_p,
    squeeze_p,
)
from jax.sharding import AbstractMesh, AxisType, PartitionSpec


def _shard_map_equation(collective: Callable[[Any], Any]) -> Any:
    mesh = AbstractMesh((2,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")
    mapped = jax.shard_map(collective, mesh=mesh, in_specs=spec, out_specs=spec)
    block = jax.ShapeDtypeStruct((4,), np.float32)
    return jax.make_jaxpr(mapped)(block).jaxpr.eqns[0]


def _primitive(collective: Callable[[Any], Any]) -> Any:
    """The primitive that a collective of `jax.lax` binds inside a shard_map."""
    return _shard_map_equation(collective).params["jaxpr"].eqns[0].primitive


SHARD_MAP = _shard_map_equation(lambda x: x).primitive

KINDS: dict[Any, tuple[str, str]] = {
    psum_p: ("all-reduce", "psum"),
    _primitive(lambda x: lax.psum(x, "i")): ("all-reduce", "psum"),
    pmax_p: ("all-reduce", "pmax"),
    pmin_p: ("all-reduce", "pmin"),
    all_gather_p: ("all-gather", "all_gather"),
    _primitive(lambda x: lax.psum_scatter(x, "i", tiled=True)): (
        "reduce-scatter",
        "psum_scatter",
    ),
    all_to_all_p: ("all-to-all", "all_to_all"),
    ragged_all_to_all_p: ("all-to-all", "ragged_all_to_all"),
    ppermute_p: ("collective-permute", "ppermute"),
    _primitive(lambda x: lax.pbroadcast(x, "i", 0)): (
        "collective-permute",
        "pbroadcast",
    ),
}
"""For each collective: its kind, as XLA calls it, and its function in `jax.lax`."""

PARTS = (slice_p, dynamic_slice_p, gather_p, squeeze_p)
"""What takes a part of an array."""


def axis_names(equation: Any) -> tuple[Any, ...]:
    """The named axes that a collective goes over; numbers are dimensions."""
    names = equation.params.get("axes", equation.params.get("axis_name"))
    names = names if isinstance(names, tuple) else (names,)
    return tuple(name for name in names if not isinstance(name, int))
