"""`jax.vmap` of a jaxpr, and which of its results are batched."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax import batching
from shardmap._jax.types import Jaxpr
from shardmap._jax.walk import per_jaxpr
from shardmap.map.collectives.split import vectorizable


class Batch(batching.Batch):
    """A vmap whose function may have collectives over its axis."""

    def vectorize(
        self, jaxpr: Jaxpr, in_dims: Sequence[int | None], out_dims: Any
    ) -> Callable[..., Any]:
        """`jax.vmap` of ``jaxpr``; all operands may be unmapped."""
        return self.vectorize_function(self.function(jaxpr), in_dims, out_dims)

    def function(self, jaxpr: Jaxpr) -> Callable[..., list[Any]]:
        """``jaxpr`` as a function that `jax.vmap` takes."""
        jaxpr = vectorizable(jaxpr, self.name, self.size)
        return lambda *args: jax.core.eval_jaxpr(jaxpr, (), *args)


@per_jaxpr
def batched_results(
    jaxpr: Jaxpr, batch: Batch, dims: tuple[int | None, ...]
) -> tuple[bool, ...]:
    """Which results of ``jaxpr`` are batched, if operands are at ``dims``."""
    avals = [var.aval for var in jaxpr.invars]
    return batching.batched_results_of(batch.function(jaxpr), avals, batch, dims)
