"""Heat spreads over a plate on eight devices: `python examples/heat.py`.

The plate is a grid of temperatures with a cold edge. Each device holds one block of it.
A step in time needs the four neighbours of each cell, some of which are on other
devices. Before each step, every device therefore sends its edges to its neighbours with
`lax.ppermute`. The result is compared with the same steps on one device.

JAX makes eight virtual devices of the CPU, so this runs anywhere.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm

ROWS, COLUMNS = 4, 2  # The mesh: 4 blocks of rows, 2 of columns.
RATE = 0.2  # How much of the difference to its neighbours a cell takes in a step.
LARGEST_DIFFERENCE = 1e-5


def step(plate: jax.Array) -> jax.Array:
    """One step of the cells inside: (n + 2, m + 2) temperatures give (n, m)."""
    inside = plate[1:-1, 1:-1]
    around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
    return inside + RATE * (around - 4 * inside)


def with_halo(block: jax.Array, axis_name: str, dimension: int) -> jax.Array:
    """The block with the edges of its neighbours, along one dimension.

    Without a neighbour, `ppermute` returns zeros, which are the cold edge of the plate.
    """
    size = lax.axis_size(axis_name)
    up = [(k, k + 1) for k in range(size - 1)]
    down = [(k + 1, k) for k in range(size - 1)]
    first = lax.slice_in_dim(block, 0, 1, axis=dimension)
    last = lax.slice_in_dim(block, -1, None, axis=dimension)
    before = lax.ppermute(last, axis_name, up)
    after = lax.ppermute(first, axis_name, down)
    return jnp.concatenate([before, block, after], axis=dimension)


def spread(block: jax.Array, steps: jax.Array) -> jax.Array:
    """The steps of one device. The corners of the halo are not used."""

    def one(_: int, block: jax.Array) -> jax.Array:
        return step(with_halo(with_halo(block, "rows", 0), "columns", 1))

    return lax.fori_loop(0, steps, one, block)


@jax.jit
def spread_on_one_device(plate: jax.Array, steps: jax.Array) -> jax.Array:
    return lax.fori_loop(0, steps, lambda _, plate: step(jnp.pad(plate, 1)), plate)


def hot_spots(size: int) -> np.ndarray:
    """A cold plate with a hot disc and a hot bar across several blocks."""
    y, x = np.mgrid[0:size, 0:size] / size
    disc = (y - 0.3) ** 2 + (x - 0.5) ** 2 < 0.02
    bar = (abs(y - 0.75) < 0.03) & (abs(x - 0.4) < 0.3)
    return (100 * (disc | bar)).astype(np.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; the exit code is 0 when the two plates agree."""
    parser = argparse.ArgumentParser(description="Heat on a plate, over 8 devices.")
    parser.add_argument("--size", type=int, default=1024, help="cells along each side")
    parser.add_argument("--steps", type=int, default=1000, help="steps in time")
    options = parser.parse_args(arguments)

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", ROWS * COLUMNS)

    mesh = sm.make_mesh({"rows": ROWS, "columns": COLUMNS})
    cut = {"rows": 0, "columns": 1}
    on_mesh = sm.mesh_map(spread, mesh, in_axes=(cut, {}), out_axes=cut)

    start = hot_spots(options.size)
    steps = np.int32(options.steps)
    shape = on_mesh.lower(start, steps).in_specs[0].shard_shape(start.shape)
    print(f"a plate of {start.shape}, a block of {shape} on each of 8 devices")

    plate = on_mesh(start, steps)
    expected = spread_on_one_device(start, steps)
    difference = float(np.max(np.abs(np.asarray(plate) - np.asarray(expected))))
    print(f"mean: {start.mean():.4f} degrees, after {steps} steps {plate.mean():.4f}")
    print(
        f"the largest difference to one device is {difference:.1e}, "
        f"less than {LARGEST_DIFFERENCE:.0e} wanted"
    )
    return 0 if difference < LARGEST_DIFFERENCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
