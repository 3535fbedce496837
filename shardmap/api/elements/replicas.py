"""Looking at results after a run."""

from typing import Any

import jax
import numpy as np

from shardmap._jax.types import PyTree


def check_copies_agree(name: str, results: PyTree) -> None:
    """Compares what devices hold of the same shard of a result, bit by bit.

    Args:
      name: the mapped function's, for the error.
      results: a pytree of arrays.

    Raises:
      RuntimeError: names the result, the devices and how many values differ.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        first: dict[str, Any] = {}
        for shard in leaf.addressable_shards:
            held = first.setdefault(str(shard.index), shard)
            one, other = np.asarray(held.data), np.asarray(shard.data)
            if one.tobytes() != other.tobytes():
                raise RuntimeError(
                    f"spmap of {name}: copies of result{jax.tree_util.keystr(path)} "
                    f"disagree: of its {one.size} values, {np.sum(one != other)} "
                    f"differ between {held.device} and {shard.device}. Something in "
                    "the function is not the same on every device, such as a callback."
                )
