"""Runs a function in pieces, and keeps its residuals for the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax.types import TreeDef
from shardmap.plan.in_slices import Asked
from shardmap.plan.inside.primitive import (
    Options,
    bind,
    chunked_p,
    cuts_of_results,
    is_inexact,
    merge,
    split,
)


def keeping_residuals(
    fun: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    asked: Asked,
    options: Options,
) -> list[Any]:
    """Computes ``fun`` of the leaves in pieces; its gradient recomputes nothing.

    Args:
      fun: a flat function; what `jax.checkpoint` around it does not save is recomputed.
      leaves: its arguments.
      asked: their cuts.
      options: how to cut.
    """
    smooth = [is_inexact(jax.typeof(leaf)) for leaf in leaves]
    backward: TreeDef | None = None

    def forward(*leaves: Any) -> list[Any]:
        nonlocal backward
        moving, rest = split(smooth, leaves)

        def of_smooth(*moving: Any) -> list[Any]:
            return list(fun(*merge(smooth, moving, rest)))

        results, vjp = jax.vjp(of_smooth, *moving)
        residuals, backward = jax.tree.flatten(vjp)
        return [*results, *residuals]

    @jax.custom_vjp
    def run(*leaves: Any) -> list[Any]:
        return bind(fun, leaves, asked, options)

    def run_forward(*leaves: Any) -> tuple[list[Any], Any]:
        jaxpr = jax.make_jaxpr(forward)(*leaves)
        found = chunked_p.bind(*leaves, jaxpr=jaxpr, asked=asked, options=options)
        cuts = cuts_of_results(jaxpr, asked, options)
        assert backward is not None
        count = len(found) - backward.num_leaves
        return found[:count], (found[count:], _NoArray((cuts, backward)))

    def run_backward(kept: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        residuals, static = kept
        cuts, tree = static.value
        given = [ct.dtype != jax.dtypes.float0 for ct in cotangents]
        cts, zeros = split(given, cotangents)

        def back(*operands: Any) -> Sequence[Any]:
            vjp = jax.tree.unflatten(tree, operands[: len(residuals)])
            return vjp(merge(given, operands[len(residuals) :], zeros))

        count = len(cotangents)
        of_cts, _ = split(given, cuts[:count])
        own = (*cuts[count:], *of_cts)
        found = bind(back, [*residuals, *cts], own, options)
        return tuple(merge(smooth, found, [None] * (len(smooth) - len(found))))

    run.defvjp(run_forward, run_backward)
    return run(*leaves)


@jax.tree_util.register_static
class _NoArray:
    """Static data of a backward pass."""

    def __init__(self, value: Any) -> None:
        self.value = value
