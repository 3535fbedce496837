"""A plan of two stages, an argument that counts what is read of it, and damage
to files."""

import threading

import jax.numpy as jnp
import numpy as np

from tests.plan.plan_programs import reals

X, W = reals(64, 8), reals(8, 4)


def columns(x, w):
    mean = x.mean(0)
    deviation = jnp.sqrt((x * x).mean(0) - mean * mean + 1e-3)
    return jnp.tanh(((x - mean[None]) / deviation[None]) @ w).sum(0), x @ w


def assert_bytes(got, want):
    for a, b in zip(got, want, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def read_by_shards(array):
    """What of a `Recorded` was read, but for the whole, which a checkpoint compares."""
    every = tuple(slice(0, size) for size in array.shape)
    return [index for index in array.reads if index != every]


class Recorded:
    """An array-like that counts what is read of it, and fails when told to.

    `failures` are pairs (first row, which reading of it): whatever else is read in
    between, these fail.
    """

    def __init__(self, array, failures=()):
        self.array, self.failures = array, frozenset(failures)
        self.shape, self.dtype = array.shape, array.dtype
        self.reads = []
        self.lock = threading.Lock()

    def __getitem__(self, index):
        with self.lock:
            self.reads.append(index)
            if (index[0].start, self.reads.count(index)) in self.failures:
                raise OSError("the disk is gone")
        return self.array[index]
