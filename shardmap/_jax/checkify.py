"""The rules of `jax.experimental.checkify` for maps.

By JAX's rule for `jax.shard_map` the error of a map has an axis, and JAX cannot check
what comes after the map. JAX has no public way to register another rule.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax._src import checkify

from shardmap._jax.types import Jaxpr, Param, Primitive


def def_checkify(primitive: Primitive, bind: Callable[..., Any]) -> None:
    """Registers how checks inside a map are functionalised.

    ``bind`` takes the function of one element, which returns an error and the results,
    the operands, and the parameters but ``call_jaxpr``. It returns the errors of all
    elements, along a new first axis, and the results.
    """

    def rule(*args: Any, call_jaxpr: Jaxpr, **params: Param) -> tuple[Any, Any]:
        context, error, enabled, operands = _arguments(args)
        closed = jex_core.ClosedJaxpr(call_jaxpr, ())
        checked = functools.partial(
            checkify.checkify_jaxpr, *context, closed, enabled, checkify.init_error
        )
        each, results = bind(checked, operands, **params)
        return _with_first(error, each), results

    checkify.error_checks[primitive] = rule


def checkify_what_runs(primitive: Primitive, run: Callable[..., list[Any]]) -> None:
    """Registers that checks are added to what ``run`` makes of an equation.

    By JAX's own rule such an equation is bound as it is, so that nothing is found.
    """

    def rule(*args: Any, **params: Param) -> tuple[Any, Any]:
        context, error, enabled, operands = _arguments(args)
        closed = jax.make_jaxpr(functools.partial(run, **params))(*operands)
        return checkify.checkify_jaxpr(*context, closed, enabled, error, *operands)

    checkify.error_checks[primitive] = rule


def _arguments(args: Sequence[Any]) -> tuple[Sequence[Any], Any, Any, list[Any]]:
    """The context, the error, the enabled checks and the operands of a rule."""
    # From JAX 0.12 on, a context comes before the error.
    place = [isinstance(arg, checkify.Error) for arg in args].index(True)
    error, enabled, *operands = args[place:]
    return args[:place], error, enabled, operands


def _with_first(error: Any, each: Any) -> Any:
    """An error, or that of the first element that has one."""
    if not each._pred or 0 in np.shape(next(iter(each._pred.values()))):
        return error
    element = jnp.argmax(jnp.stack(list(each._pred.values())).any(0))
    first = jax.tree.map(lambda values: values[element], each)
    for kind, failed in first._pred.items():
        of_kind = failed, first._code[kind], first._metadata, first._payload[kind]
        if kind in error._pred:
            error = checkify.update_error(error, *of_kind, kind)
        else:
            error = error._update(kind, *of_kind)
    return error
