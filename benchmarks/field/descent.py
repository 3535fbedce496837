"""A job of the scoreboard that reads its arrays many times: L-BFGS over a memmap.

All contenders share the descent, which is NumPy, and differ in how they get a loss and
its gradient from arrays in files.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from benchmarks.field.tasks import (
    COLUMNS,
    CUBED,
    DASK,
    HAND,
    JIT,
    NUMPY,
    OURS,
    Contender,
    Ready,
    Task,
    block_of,
    bounds,
    create_npy,
    empty_npy,
    namespace_of_cubed,
    of_cubed,
    of_dask,
    open_npy,
    rows_of,
)

STEPS, HISTORY = 6, 4
STEP = block_of(COLUMNS)

Slope: TypeAlias = Callable[[np.ndarray], Any]
"""Gives the gradient at some weights."""


def descend(slope: Slope) -> np.ndarray:
    """The weights after some steps of L-BFGS of length one."""
    weights = np.zeros(COLUMNS, np.float32)
    gradient = np.asarray(slope(weights))
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(STEPS - 1):
        step = -_direction(gradient, pairs)
        weights = weights + step
        after = np.asarray(slope(weights))
        pairs = [*pairs[1 - HISTORY :], (step, after - gradient)]
        gradient = after
    return weights


def _direction(
    gradient: np.ndarray, pairs: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    made, factors = gradient, []
    for step, change in reversed(pairs):
        factor = (step @ made) / (step @ change)
        factors.append(factor)
        made = made - factor * change
    if pairs:
        step, change = pairs[-1]
        made = made * ((step @ change) / (change @ change))
    for (step, change), factor in zip(pairs, reversed(factors), strict=True):
        made = made + step * (factor - (change @ made) / (step @ change))
    return made


def loss(weights: Any, x: Any, y: Any) -> Any:
    """The plain JAX function, of which all of JAX's contenders take the gradient."""
    import jax.numpy as jnp

    margin = x @ weights
    return (jnp.logaddexp(0.0, margin) - y * margin).mean()


def formula(xp: Any, weights: Any, x: Any, y: Any) -> Any:
    """The gradient, for tools that cannot find it."""
    margin = xp.sum(x * weights[None], axis=1) if xp is not np else x @ weights
    part = 1 / (1 + xp.exp(-margin)) - y
    return part @ x / x.shape[0]


def _planned(x: Any, y: Any) -> Ready:
    import jax

    from shardmap.planning.plan import plan

    cuts = {0: max(1, x.shape[0] // STEP)}
    weights = np.zeros(COLUMNS, np.float32)
    made = plan(jax.grad(loss), weights, x, y, in_slices=(None, cuts, cuts))
    return Ready(
        lambda: descend(lambda weights: made.run(weights, x, y)),
        made,
    )


def _by_hand(x: Any, y: Any) -> Ready:
    import jax

    compiled = jax.jit(jax.grad(loss))

    def slope(weights: np.ndarray) -> np.ndarray:
        total = np.zeros(COLUMNS, np.float32)
        for start, stop in bounds(x.shape[0], STEP):
            block = np.asarray(x[start:stop]), np.asarray(y[start:stop])
            total += np.asarray(compiled(weights, *block)) * ((stop - start) / len(x))
        return total

    return Ready(lambda: descend(slope))


def _numpy(x: Any, y: Any) -> Ready:
    return Ready(lambda: descend(lambda weights: formula(np, weights, x, y)))


def _one_jit(x: Any, y: Any) -> Ready:
    import jax

    compiled = jax.jit(jax.grad(loss))
    return Ready(lambda: descend(lambda weights: compiled(weights, x, y)))


def _dask(x: Any, y: Any) -> Ready:
    wrapped = of_dask(x, (STEP, COLUMNS)), of_dask(y, (STEP,))

    def slope(weights: np.ndarray) -> np.ndarray:
        made = wrapped[0] @ weights
        part = 1 / (1 + np.exp(-made)) - wrapped[1]
        gradient: np.ndarray = (part @ wrapped[0] / x.shape[0]).compute()
        return gradient

    return Ready(lambda: descend(slope))


def _cubed(folder: pathlib.Path, out: pathlib.Path) -> Ready:
    xp = namespace_of_cubed(out)
    x = of_cubed(open_npy(folder / "x.npy"), (STEP, COLUMNS))
    y = of_cubed(open_npy(folder / "y.npy"), (STEP,))

    def slope(weights: np.ndarray) -> np.ndarray:
        made = x @ xp.asarray(weights)
        part = 1 / (1 + xp.exp(-made)) - y
        gradient: np.ndarray = (part @ x / x.shape[0]).compute()
        return gradient

    return Ready(lambda: descend(slope))


def _create(folder: pathlib.Path, gigabytes: float) -> None:
    rows = rows_of(gigabytes, COLUMNS)
    create_npy(folder / "x.npy", (rows, COLUMNS))
    x, y = open_npy(folder / "x.npy"), empty_npy(folder / "y.npy", (rows,))
    true = np.linspace(-0.1, 0.1, COLUMNS, dtype=np.float32)
    noise = np.random.default_rng(2).standard_normal(rows, np.float32)
    for start, stop in bounds(rows, STEP):
        y[start:stop] = x[start:stop] @ true + noise[start:stop] > 0
    y.flush()


def _descent(prepare: Callable[[Any, Any], Ready]) -> Contender:
    return lambda folder, out: prepare(
        open_npy(folder / "x.npy"), open_npy(folder / "y.npy")
    )


TASKS: Mapping[str, Task] = {
    "L-BFGS over a memmap": Task(
        _create,
        {
            OURS: _descent(_planned),
            HAND: _descent(_by_hand),
            NUMPY: _descent(_numpy),
            JIT: _descent(_one_jit),
            DASK: _descent(_dask),
            CUBED: _cubed,
        },
    )
}
