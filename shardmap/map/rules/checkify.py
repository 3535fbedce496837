"""The rule of `jax.experimental.checkify` for maps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax.checkify import def_checkify
from shardmap._jax.types import Param
from shardmap.map.primitives.map_primitive import MapPrimitive, remove_axis
from shardmap.map.tracing import bind_map, trace_body


def _bind_checked(
    primitive: MapPrimitive,
    checked: Callable[..., Any],
    operands: Sequence[Any],
    *,
    in_axes: tuple[int | None, ...],
    out_axes: tuple[int | None, ...],
    **params: Param,
) -> Any:
    """Binds a map of a function that returns an error before its results."""
    avals = list(map(remove_axis, map(jax.typeof, operands), in_axes))
    body = trace_body(checked, avals, params["axis_name"], params["axis_size"])
    of_error = (0,) * (len(body.jaxpr.outvars) - len(out_axes))
    results = bind_map(body, operands, in_axes, of_error + out_axes, params, primitive)
    return jax.tree.unflatten(body.out_tree, results)


def register(primitive: MapPrimitive) -> None:
    """Registers the rule of checkify."""
    def_checkify(primitive, functools.partial(_bind_checked, primitive))
