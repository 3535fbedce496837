"""A function in pieces that keeps for its backward pass what it computed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax.types import ClosedJaxpr, TreeDef
from shardmap.plan.in_slices import Asked
from shardmap.plan.inside.primitive import (
    Options,
    chunked_p,
    cuts_of_results,
    is_inexact,
    merge,
)


def keeping_residuals(
    fun: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    asked: Asked,
    options: Options,
) -> list[Any]:
    """``fun`` of the leaves in pieces; its gradient computes nothing again.

    Args:
      fun: a flat function; what `jax.checkpoint` around it does not save is computed
        again.
      leaves: its arguments.
      asked: their cuts.
      options: how to cut.
    """
    smooth = [is_inexact(jax.typeof(leaf)) for leaf in leaves]
    backward: TreeDef | None = None

    def forward(*leaves: Any) -> list[Any]:
        nonlocal backward

        moving, rest = _split(smooth, leaves)

        def of_smooth(*moving: Any) -> list[Any]:
            return list(fun(*merge(smooth, moving, rest)))

        results, vjp = jax.vjp(of_smooth, *moving)
        residuals, backward = jax.tree.flatten(vjp)
        return [*results, *residuals]

    @jax.custom_vjp
    def run(*leaves: Any) -> list[Any]:
        jaxpr = _traced(fun, leaves)
        return chunked_p.bind(*leaves, jaxpr=jaxpr, asked=asked, options=options)

    def run_forward(*leaves: Any) -> tuple[list[Any], Any]:
        count = len(_traced(fun, leaves).out_avals)
        jaxpr = _traced(forward, leaves)
        found = chunked_p.bind(*leaves, jaxpr=jaxpr, asked=asked, options=options)
        cuts = cuts_of_results(jaxpr, asked, options)
        return found[:count], (found[count:], _NoArray((cuts, backward)))

    def run_backward(kept: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        residuals, static = kept
        cuts, tree = static.value
        given = [ct.dtype != jax.dtypes.float0 for ct in cotangents]
        cts, zeros = _split(given, cotangents)

        def back(*operands: Any) -> Sequence[Any]:
            vjp = jax.tree.unflatten(tree, operands[: len(residuals)])
            return vjp(merge(given, operands[len(residuals) :], zeros))

        count = len(cotangents)
        of_cts, _ = _split(given, cuts[:count])
        operands = [*residuals, *cts]
        found = chunked_p.bind(
            *operands,
            jaxpr=_traced(back, operands),
            asked=(*cuts[count:], *of_cts),
            options=options,
        )
        return tuple(merge(smooth, found, [None] * (len(smooth) - len(found))))

    run.defvjp(run_forward, run_backward)
    return run(*leaves)


def _split(flags: Sequence[bool], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The values with a flag, and those without: what `merge` puts together."""
    pairs = list(zip(flags, values, strict=True))
    return [v for flag, v in pairs if flag], [v for flag, v in pairs if not flag]


def _traced(fun: Callable[..., Any], operands: Sequence[Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(fun)(*operands)


@jax.tree_util.register_static
class _NoArray:
    """Static data of a backward pass."""

    def __init__(self, value: Any) -> None:
        self.value = value
