"""What `lower` gives: JAX's own stage, and how the arrays lie as specs."""

from typing import Any

import jax


class Lowered(jax.stages.Lowered):
    """A lowered map: all of `jax.stages.Lowered`, and the specs of its arrays.

    Attributes:
      in_specs: a `ShardingSpec` per array, in the structure of the positional
        arguments; behind them, if there are any, a dict of the keyword arguments.
        None stands where an argument is static.
      out_specs: the same in the structure of the result.

    Example:
      >>> import numpy as np, shardmap as sm
      >>> lowered = sm.spmap(lambda x: x + 1).lower(np.ones((8, 3)))
      >>> lowered.in_specs[0]
      ShardingSpec((Chunked((8,)), None), (ShardedAxis(0),))
      >>> lowered.compile()(np.ones((8, 3))).shape
      (8, 3)
    """

    __slots__ = ("in_specs", "out_specs")

    def __init__(
        self, lowered: jax.stages.Lowered, in_specs: Any, out_specs: Any
    ) -> None:
        for slot in jax.stages.Lowered.__slots__:
            setattr(self, slot, getattr(lowered, slot))
        self.in_specs = in_specs
        self.out_specs = out_specs
