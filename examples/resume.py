"""Training in several processes that continues after a restart:

    python -m shardmap run -n 2 examples/resume.py --folder /tmp/training

A small network learns the sine function. Each process draws its own part of every
batch. `spmap` maps the step over the devices of all processes, and `lax.pmean` averages
the gradients, so all have the same parameters. Every few steps the first process saves
them to a file, which all read when they start.

The draws depend only on the numbers of the step and of the process. A run that was
killed and restarted therefore ends with the same bits as one that was not.
"""

import argparse
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm

HIDDEN = 64
ROWS_PER_DEVICE = 32


def initial_state() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    params = {"w1": normal(1, HIDDEN), "b1": normal(HIDDEN)}
    params |= {"w2": 0.1 * normal(HIDDEN, 1), "b2": np.zeros(1, np.float32)}
    momenta = {f"m_{name}": np.zeros_like(value) for name, value in params.items()}
    return params | momenta


def loss_function(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - y) ** 2)


@sm.spmap(axis_name="batch", in_axes=(None, 0, 0), out_axes=None)
def train_step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """One step on a device's share of the batch: x and y (32, 1)."""
    params = {name: state[name] for name in ("w1", "b1", "w2", "b2")}
    loss, grads = lax.pmean(
        jax.value_and_grad(loss_function)(params, x, y), axis_name="batch"
    )
    momenta = {name: 0.9 * state[f"m_{name}"] + grads[name] for name in params}
    moved = {name: params[name] - 0.01 * momenta[name] for name in params}
    return moved | {f"m_{name}": value for name, value in momenta.items()}, loss


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """This process's part of a batch: (devices, 32, 1)."""
    rng = np.random.default_rng([step, jax.process_index()])
    shape = (jax.local_device_count(), ROWS_PER_DEVICE, 1)
    x = rng.uniform(-3, 3, shape).astype(np.float32)
    return x, np.sin(x)


def save(path: pathlib.Path, step: int, state: Any) -> None:
    """Replaces the file at once, so that it is always complete."""
    if jax.process_index() == 0:
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            np.savez(file, step=step, **jax.tree.map(np.asarray, state))
        os.replace(unfinished, path)


def restore(path: pathlib.Path) -> tuple[int, Any]:
    if not path.exists():
        return 0, initial_state()
    with np.load(path) as saved:
        state = dict(saved)
    return int(state.pop("step")), state


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; the exit code is 0 if the network has learnt."""
    parser = argparse.ArgumentParser(description="Training that can be resumed.")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=1000, help="in all")
    parser.add_argument("--every", type=int, default=20, help="steps between files")
    options = parser.parse_args(arguments)

    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize()

    path = options.folder / "checkpoint.npz"
    first, state = restore(path)
    print(f"begins at step {first}", flush=True)
    loss = np.inf
    for step in range(first, options.steps):
        state, loss = train_step(state, *batch(step))
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            save(path, step + 1, state)
            print(f"step {step + 1}: loss {float(loss):.4f}", flush=True)
    return 0 if first == options.steps or float(loss) < 0.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
