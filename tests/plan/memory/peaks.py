"""One function in pieces in a fresh process: what is allowed, and what it took.

    python -m tests.plan.memory.peaks NAME

prints both, and what few rows take, in bytes, as JSON: the growth of the process'
memory beyond the results, for a tenth of what XLA says of the function as a
whole. `MALLOC_MMAP_THRESHOLD_` should be small, so that what is freed is given back.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import shardmap as sm
from tests.plan.run.peaks import COLUMNS, PROGRAMS, ROWS, SMALL, status

SHARE, LEAST = 10, 2**22


def growth(run):
    """By how many bytes the memory that is no file's grew at most, and the results."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before, files = status("VmRSS"), status("RssFile")
    results = jax.block_until_ready(run())
    return status("VmHWM") - before - max(status("RssFile") - files, 0), results


def measured(fun, rows):
    """The bytes that are allowed, and those that a call took besides its results."""
    row = np.random.default_rng(0).standard_normal((1, COLUMNS), np.float32)
    x = jax.block_until_ready(jnp.tile(row, (rows, 1)))
    whole = jax.jit(fun).lower(x).compile().memory_analysis()
    allowed = max(whole.temp_size_in_bytes // SHARE, LEAST)
    chunked = sm.chunked(fun, ({0: sm.AUTO},), memory=allowed)
    compiled = jax.jit(chunked).lower(x).compile()
    took, results = growth(lambda: compiled(x))
    given = sum(leaf.nbytes for leaf in jax.tree.leaves(results))
    return {"allowed": allowed, "took": took - given}


def main():
    fun = PROGRAMS[sys.argv[1]]
    own = measured(fun, SMALL)["took"]  # What the runtime and its threads take.
    print(json.dumps({**measured(fun, ROWS), "own": own}))


if __name__ == "__main__":
    main()
