"""Maps bound with a function instead of a jaxpr, as by `jax.experimental.checkify`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.linear_util import WrappedFun

from shardmap._jax.checkify import def_checkify
from shardmap.map.primitives.map_primitive import MapPrimitive, remove_axis
from shardmap.map.tracing import bind_map, trace_body


def bind_function(
    primitive: MapPrimitive,
    function: WrappedFun | Callable[..., Any],
    operands: Sequence[Any],
    params: dict[str, Any],
    checks: bool = False,
) -> list[Any]:
    """Binds a map of ``function``.

    Args:
      primitive: to bind.
      function: of one element, over flat operands.
      operands: the map's.
      params: the map's parameters, without ``call_jaxpr``.
      checks: whether the function may return other values before the results. All
        elements' are returned, along a new first axis.

    Raises:
      TypeError: there are not as many axes as operands or results.
    """
    in_axes = params.pop("in_axes")
    primitive.check_count("operands", len(operands), "in_axes", in_axes)
    avals = list(map(remove_axis, map(jax.typeof, operands), in_axes))
    call = function.call_wrapped if isinstance(function, WrappedFun) else function
    body = trace_body(
        lambda *args: call(*args), avals, params["axis_name"], params["axis_size"]
    )
    thunk = params.pop("out_axes_thunk", None)
    out_axes = params.pop("out_axes") if thunk is None else tuple(thunk())
    results = len(body.jaxpr.outvars)
    if not checks:
        primitive.check_count("results", results, "out_axes", out_axes)
    count = results - len(out_axes)
    return bind_map(body, operands, in_axes, (0,) * count + out_axes, params, primitive)


def register(primitive: MapPrimitive) -> None:
    def bind(*operands: Any, subfuns: tuple[Any], **params: Any) -> list[Any]:
        return bind_function(primitive, *subfuns, operands, params, checks=True)

    def_checkify(primitive, bind)
