"""The primitives that the collectives of `jax.lax` bind, and the axes they name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax import lax


def _primitive(collective: Callable[[Any], Any]) -> Any:
    jaxpr = jax.make_jaxpr(collective, axis_env=[("i", 2)])(np.zeros(2, np.float32))
    return jaxpr.jaxpr.eqns[-1].primitive


AXIS_INDEX = _primitive(lambda x: lax.axis_index("i"))
PSUM = _primitive(lambda x: lax.psum(x, "i"))
PMAX = _primitive(lambda x: lax.pmax(x, "i"))
PMIN = _primitive(lambda x: lax.pmin(x, "i"))
ALL_GATHER = _primitive(lambda x: lax.all_gather(x, "i"))
ALL_TO_ALL = _primitive(lambda x: lax.all_to_all(x, "i", 0, 0))
PPERMUTE = _primitive(lambda x: lax.ppermute(x, "i", [(0, 0)]))
PBROADCAST = _primitive(lambda x: lax.pbroadcast(x, "i", 0))
REDUCE_SCATTER = _primitive(lambda x: lax.psum_scatter(x, "i", tiled=True))
RAGGED_ALL_TO_ALL = jex_core.primitives.ragged_all_to_all_p

COLLECTIVES = {
    AXIS_INDEX, PSUM, PMAX, PMIN, ALL_GATHER, ALL_TO_ALL, PPERMUTE, PBROADCAST,
    REDUCE_SCATTER, RAGGED_ALL_TO_ALL,
}  # fmt: skip


def axis_names(params: dict[str, Any]) -> tuple[Any, ...]:
    """The axes that a collective works over; numbers among them are dimensions."""
    names = params.get("axes", params.get("axis_name"))
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)
