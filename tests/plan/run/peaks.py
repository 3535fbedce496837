"""One plan in a fresh process: what it says that it holds, and what it held.

    python -m tests.plan.run.peaks NAME FOLDER

prints both, in bytes, as JSON. Arguments and results lie in files, so that neither is
anonymous memory.
"""

import json
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

import shardmap as sm

ROWS, COLUMNS = 2**17, 256
SMALL = 2**9


def standardised(x):
    return (x - x.mean(0, keepdims=True)) / (x.std(0, keepdims=True) + 1)


def smoothed(x):
    return (x[2:] + x[1:-1] + x[:-2]) / 3


def product(x):
    return x.T @ x


def projected(x):
    w = jnp.ones((x.shape[1], 64), x.dtype)
    return jnp.tanh(x @ w).sum(0)


PROGRAMS = {
    "elementwise chain": lambda x: jnp.tanh(x * 2 + 1) ** 2,
    "sum": lambda x: x.sum(0),
    "mean and deviation": lambda x: (x.mean(0), x.std(0)),
    "standardised": standardised,
    "shifted": smoothed,
    "product": product,
    "projection": projected,
    "maximum": lambda x: jnp.abs(x).max(),
    "argmax": lambda x: jnp.argmax(x, 0),
    "variance of rows": lambda x: x.var(1),
    "softmax of rows": lambda x: jax.nn.softmax(x, 1),
    "softmax of columns": lambda x: jax.nn.softmax(x, 0),
    "log-sum-exp": lambda x: jax.nn.logsumexp(x, 0),
    "reversed": lambda x: x[::-1] * 2,
    "every third": lambda x: x[::3] + 1,
    "stacked": lambda x: jnp.stack([x, x * 2], 1),
    "joined": lambda x: jnp.concatenate([x, x * 2], 1),
    "reshaped": lambda x: jnp.sin(x).reshape(-1, 2 * COLUMNS),
    "sorted rows": lambda x: jnp.sort(x, 1),
    "running sum": lambda x: jnp.cumsum(x, 0),
    "FFT of rows": lambda x: jnp.abs(jnp.fft.fft(x)),
    "histogram": lambda x: jnp.zeros(16).at[(x[:, 0] * 4).astype(int) % 16].add(1.0),
    "covariance": lambda x: (x - x.mean(0, keepdims=True)).T @ (x - 1),
    "where": lambda x: jnp.where(x > 0, x, jnp.exp(x)),
    "roll": lambda x: jnp.roll(x, 5, 0) - x,
}


MEMORY = 2**24
PRODUCTS = {
    "matmul": (jnp.matmul, ((2**13, 2**10), (2**10, 2**12))),
    "tensordot": (
        lambda x, y: jnp.tensordot(x, y, ((1, 2), (1, 0))),
        ((256, 64, 1024), (1024, 64, 256)),
    ),
}
"""Functions of two arrays, with shapes of which plans stay below `MEMORY`."""


def in_a_fresh_process(module, *arguments):
    """What such a module prints last, which is JSON."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        # Else the allocator keeps what is freed, as it likes.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def status(key):
    """A number of bytes that the kernel knows of this process."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"this system does not tell {key}")


def measured(fun, shapes, folder, max_in_flight=None, **cuts):
    """The bytes that the plan says, and those that its run took."""
    args = [
        np.lib.format.open_memmap(folder / f"x{k}.npy", "w+", np.float32, shape)
        for k, shape in enumerate(shapes)
    ]
    for x in args:
        x[:] = np.random.default_rng(0).standard_normal(x.shape[-1], np.float32)
    shard_plan = sm.plan(fun, *args, **cuts)
    shapes, structure = jax.tree.flatten(jax.eval_shape(fun, *args))
    outs = [
        np.lib.format.open_memmap(folder / f"y{k}.npy", "w+", y.dtype, y.shape or (1,))
        for k, y in enumerate(shapes)
    ]
    outs = [out.reshape(y.shape) for out, y in zip(outs, shapes, strict=True)]
    out = jax.tree.unflatten(structure, outs)
    said = shard_plan.peak_bytes
    before = status("RssAnon")
    most, done = [before], threading.Event()

    def watch():
        while not done.wait(0.001):
            most[0] = max(most[0], status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    shard_plan.run(*args, out=out, max_in_flight=max_in_flight)
    done.set()
    watcher.join()
    return {"said": said, "took": most[0] - before}


def main():
    name, folder = sys.argv[1:]
    path = pathlib.Path(folder)
    if name in PRODUCTS:
        print(json.dumps(measured(*PRODUCTS[name], path, memory=MEMORY)))
        return
    fun, cuts = PROGRAMS[name], {"in_slices": ({0: 8},), "max_in_flight": 1}
    # What the interpreter, the compiler and their threads take for any program.
    own = measured(fun, [(SMALL, COLUMNS)], path, **cuts)["took"]
    print(json.dumps({**measured(fun, [(ROWS, COLUMNS)], path, **cuts), "own": own}))


if __name__ == "__main__":
    main()
