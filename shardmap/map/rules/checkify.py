"""Maps bound with a function instead of a jaxpr.

`jax.experimental.checkify` binds a map so: with the leaves of the error so far as the
first operands, and a function of these and of one element's operands that returns the
leaves of the error and the results. The error of a map is that of its first element
that has one.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.linear_util import WrappedFun

from shardmap.map.primitives.map_primitive import MapPrimitive, remove_axis
from shardmap.map.tracing import bind_map, trace_body


def bind_function(
    primitive: MapPrimitive,
    function: WrappedFun | Callable[..., Any],
    operands: Sequence[Any],
    params: dict[str, Any],
) -> list[Any]:
    """Binds a map of ``function``.

    Args:
      primitive: to bind.
      function: of one element, over flat operands.
      operands: the leaves of checkify's error, if any, which every element gets, then
        the map's operands.
      params: the map's parameters, without ``call_jaxpr``.

    Returns:
      The leaves of the error of the first element that has one, then the results.
    """
    mapped = params.pop("in_axes")
    in_axes = (None,) * (len(operands) - len(mapped)) + mapped
    avals = list(map(remove_axis, map(jax.typeof, operands), in_axes))
    call = function.call_wrapped if isinstance(function, WrappedFun) else function
    body = trace_body(
        lambda *args: call(*args), avals, params["axis_name"], params["axis_size"]
    )
    thunk = params.pop("out_axes_thunk", None)
    out_axes = params.pop("out_axes") if thunk is None else tuple(thunk())
    count = len(body.jaxpr.outvars) - len(out_axes)
    axes = in_axes, (0,) * count + out_axes
    results = bind_map(body, operands, *axes, params, primitive)
    return _first_error(results[:count]) + results[count:]


def _first_error(leaves: list[Any]) -> list[Any]:
    """The error of the first element that has one.

    The leaves of an error begin with its predicates, one for each kind of error.
    """
    predicates = list(itertools.takewhile(lambda leaf: leaf.dtype == bool, leaves))
    if not predicates:
        return leaves
    element = jnp.argmax(jnp.stack(predicates).any(0))
    return [leaf[element] for leaf in leaves]
