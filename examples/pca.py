"""Principal components of a table on disk, by `plan`: `python examples/pca.py`.

`principal_components` and `project` are written for a table in memory. `plan` cuts them
along the rows, and the shards read their rows from the file, one after the other. Each
shard computes the means and products of its rows, and a last stage combines them, so
the table is read once. The scores are written to a file.

The reference is scikit-learn, which reads the whole table.
"""

import argparse
import pathlib
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.decomposition import PCA

import shardmap as sm

COLUMNS = 64
COMPONENTS = 4
LARGEST_DIFFERENCE = 1e-4


def principal_components(table: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The column means (64,), the directions (64, 4), and their variances (4,)."""
    mean = table.mean(0)
    centered = table - mean
    covariance = centered.T @ centered / (len(table) - 1)
    variances, directions = jnp.linalg.eigh(covariance)
    return mean, directions[:, ::-1][:, :COMPONENTS], variances[::-1][:COMPONENTS]


def project(table: jax.Array, mean: jax.Array, directions: jax.Array) -> jax.Array:
    """The scores of each row: (rows, 4)."""
    return (table - mean) @ directions


def write_table(path: pathlib.Path, rows: int) -> np.memmap:
    """A table of (rows, 64), made of 4 strong directions and noise, piece by piece."""
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(COMPONENTS, COLUMNS)) * [[8], [6], [4], [2]]
    table = np.memmap(path, np.float32, "w+", shape=(rows, COLUMNS))
    for start in range(0, rows, 10_000):
        piece = table[start : start + 10_000]
        hidden = rng.normal(size=(len(piece), COMPONENTS))
        piece[:] = hidden @ mixing + rng.normal(size=piece.shape) + 1
    table.flush()
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; the exit code is 0 when the results agree."""
    parser = argparse.ArgumentParser(description="Out-of-core PCA by plan.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pieces", type=int, default=50, help="to cut the rows into")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        return compare(pathlib.Path(folder), options.rows, options.pieces)


def compare(folder: pathlib.Path, rows: int, pieces: int) -> int:
    table = write_table(folder / "table.bin", rows)
    print(f"a table of {table.shape}, {table.nbytes / 2**20:.0f} MiB on disk")

    shard_plan = sm.plan(principal_components, table, in_slices={0: pieces})
    largest = shard_plan.peak_bytes / 2**20
    count = shard_plan.num_shards
    print(f"{count} shards, of which the largest moves {largest:.1f} MiB")
    print(shard_plan.explain())
    mean, directions, variances = shard_plan.run(table)

    scores = np.memmap(
        folder / "scores.bin", np.float32, "w+", shape=(rows, COMPONENTS)
    )
    projection = sm.plan(
        project, table, mean, directions, in_slices=({0: pieces}, None, None)
    )
    projection.run(table, mean, directions, out=scores)

    reference = PCA(COMPONENTS, svd_solver="covariance_eigh").fit(table)
    expected = reference.transform(table)
    # A direction may point either way; so may its scores.
    signs = np.sign((directions * reference.components_.T).sum(0))
    differences = {
        "variances": variances / reference.explained_variance_ - 1,
        "directions": directions * signs - reference.components_.T,
        "scores": (scores * signs - expected) / expected.std(),
    }
    good = True
    for name, difference in differences.items():
        largest = float(np.max(np.abs(difference)))
        good = good and largest < LARGEST_DIFFERENCE
        print(
            f"{name} differ from scikit-learn's by {largest:.1e}, "
            f"less than {LARGEST_DIFFERENCE:.0e} wanted"
        )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
