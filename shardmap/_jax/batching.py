"""`jax.vmap` of a function."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class VmapAxis(NamedTuple):
    """The axis of a vmap."""

    name: Hashable
    size: int

    def vectorize(
        self, fun: Callable[..., Any], in_dims: Sequence[int | None], out_dims: Any
    ) -> Callable[..., Any]:
        """`jax.vmap` of ``fun``; all operands may be unmapped.

        JAX's own batching rules must know its collectives over this axis.
        """
        vmap = functools.partial(
            jax.vmap, out_axes=out_dims, axis_name=self.name, axis_size=self.size
        )
        if any(dim is not None for dim in in_dims):
            return vmap(fun, in_axes=tuple(in_dims))
        # jax.vmap requires a mapped operand.
        mapped = vmap(lambda _, *args: fun(*args), in_axes=(0, *in_dims))
        # In `jax.export` the size may be a symbol, which NumPy does not know.
        zeros = np.zeros if isinstance(self.size, int) else jnp.zeros
        return lambda *args: mapped(zeros(self.size, bool), *args)
