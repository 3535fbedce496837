"""The jobs of the scoreboard: what makes out-of-core tools fail, as plain functions.

Each job has the function, for JAX, NumPy and dask.array alike, whose interfaces are
NumPy's, and what one writes by hand in JAX, block by block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

COLUMNS, OUTPUTS, GROUPS, CENTERS, SIDE = 512, 64, 12, 16, 64
BLOCK = 2**22
"""The bytes of a block."""


@dataclass(frozen=True)
class Job:
    """One row of the scoreboard."""

    arrays: int
    """How many arrays there are, of equal shapes."""
    fun: Callable[..., Any]
    """The plain function, of these, with `jax.numpy` as the first argument."""
    kernel: Callable[..., Any]
    """By hand: what is done with a block, jit-compiled; it gives sums."""
    finish: Callable[..., Any]
    """By hand: what becomes of the sums over all blocks, and the number of rows."""
    second: Callable[..., Any] | None = None
    """By hand: a second pass over the blocks, which gets what `finish` gives."""
    shape: tuple[int, ...] = (COLUMNS,)
    """That of a row."""


def _quadratic(xp: Any, u: Any, v: Any) -> Any:
    return xp.stack([(u * u).mean(0), (v * v).mean(0), (u * v).mean(0)])


def _anomaly(xp: Any, x: Any) -> Any:
    grouped = x.reshape(-1, GROUPS, x.shape[1])
    return (grouped - grouped.mean(0)[None]).std(0)


def _climatology(xp: Any, x: Any) -> Any:
    return x.reshape(-1, GROUPS, x.shape[1]).mean(0)


def _vorticity(xp: Any, u: Any, v: Any) -> Any:
    return (xp.roll(v, -1, 2) - v - xp.roll(u, -1, 1) + u).mean(0)


def _difference(xp: Any, x: Any) -> Any:
    return abs(x[2:] - 2 * x[1:-1] + x[:-2]).max(0)


def _residuals(xp: Any, x: Any) -> Any:
    return ((x - x.mean(1)[:, None]) ** 2).sum()


def _filtered(xp: Any, x: Any) -> Any:
    keep = x > 0
    return xp.where(keep, x, 0).sum(0) / keep.sum(0)


def _gram(xp: Any, x: Any) -> Any:
    return x.T @ x


def _covariance(xp: Any, x: Any) -> Any:
    mean = x.mean(0)
    return x.T @ x / x.shape[0] - mean[:, None] * mean[None]


def _weights() -> np.ndarray:
    shape = (COLUMNS, OUTPUTS)
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32) / 32


def _project(xp: Any, x: Any) -> Any:
    mean = x.mean(0)
    deviation = xp.sqrt((x * x).mean(0) - mean * mean + 1e-3)
    return xp.tanh((x - mean) / deviation @ xp.asarray(_weights())).sum(0)


def _nearest(xp: Any, x: Any) -> Any:
    centers = xp.asarray(_weights()[:, :CENTERS].T * 32)
    distance = (centers * centers).sum(1)[None] - 2 * (x @ centers.T)
    chosen = distance.argmin(1)[:, None] == xp.arange(CENTERS)[None]
    chosen = chosen.astype("float32")
    return (chosen.T @ x) / xp.maximum(chosen.sum(0), 1)[:, None]


def _kernel_nearest(xp: Any, x: Any) -> Any:
    centers = xp.asarray(_weights()[:, :CENTERS].T * 32)
    distance = (centers * centers).sum(1)[None] - 2 * (x @ centers.T)
    chosen = distance.argmin(1)[:, None] == xp.arange(CENTERS)[None]
    chosen = chosen.astype("float32")
    return chosen.T @ x, chosen.sum(0)


def _moments(xp: Any, x: Any) -> Any:
    return x.sum(0), (x * x).sum(0)


def _scale(sums: Any, rows: int) -> Any:
    mean = sums[0] / rows
    return mean, np.sqrt(sums[1] / rows - mean * mean + 1e-3)


JOBS: Mapping[str, Job] = {
    "quadratic means": Job(
        2,
        _quadratic,
        lambda xp, u, v: ((u * u).sum(0), (v * v).sum(0), (u * v).sum(0)),
        lambda sums, rows: np.stack(sums) / rows,
    ),
    "anomaly by group": Job(
        1,
        _anomaly,
        lambda xp, x: (x.reshape(-1, GROUPS, x.shape[1]).sum(0),),
        lambda sums, rows: (sums[0] / (rows // GROUPS),),
        lambda xp, x, mean: (
            ((x.reshape(-1, GROUPS, x.shape[1]) - mean[None]) ** 2).sum(0),
        ),
    ),
    "climatology over time": Job(
        1,
        _climatology,
        lambda xp, x: (x.reshape(-1, GROUPS, x.shape[1]).sum(0),),
        lambda sums, rows: sums[0] / (rows // GROUPS),
    ),
    "vorticity with wrap": Job(
        2,
        _vorticity,
        lambda xp, u, v: ((xp.roll(v, -1, 2) - v - xp.roll(u, -1, 1) + u).sum(0),),
        lambda sums, rows: sums[0] / rows,
        shape=(SIDE, SIDE),
    ),
    "sum of residuals": Job(
        1,
        _residuals,
        lambda xp, x: (((x - x.mean(1)[:, None]) ** 2).sum(),),
        lambda sums, rows: sums[0],
    ),
    "filter then mean": Job(
        1,
        _filtered,
        lambda xp, x: (xp.where(x > 0, x, 0).sum(0), (x > 0).sum(0)),
        lambda sums, rows: sums[0] / sums[1],
    ),
    "gram": Job(1, _gram, lambda xp, x: (x.T @ x,), lambda sums, rows: sums[0]),
    "PCA by covariance": Job(
        1,
        _covariance,
        lambda xp, x: (x.sum(0), x.T @ x),
        lambda sums, rows: sums[1] / rows - np.outer(sums[0] / rows, sums[0] / rows),
    ),
    "standardise, project": Job(
        1,
        _project,
        _moments,
        _scale,
        lambda xp, x, mean, deviation: (
            xp.tanh((x - mean) / deviation @ xp.asarray(_weights())).sum(0),
        ),
    ),
    "k-means step": Job(
        1,
        _nearest,
        _kernel_nearest,
        lambda sums, rows: sums[0] / np.maximum(sums[1], 1)[:, None],
    ),
    "double difference": Job(
        1,
        _difference,
        # Two rows more than the block has, which `field` reads.
        lambda xp, x: (abs(x[2:] - 2 * x[1:-1] + x[:-2]).max(0),),
        lambda sums, rows: sums[0],
    ),
}
HALO = {"double difference": 2}
"""How many rows of the next block a block by hand needs."""
GROUPED = {"anomaly by group", "climatology over time"}
"""Whose blocks are whole groups."""
MAXIMUM = {"double difference"}
"""What is put together by the largest, not by sums."""


def last(name: str, sums: Any, rows: int) -> Any:
    """By hand: the result of the second pass."""
    if name == "anomaly by group":
        return np.sqrt(sums[0] / (rows // GROUPS))
    return sums[0]
