"""What the tests of taps share: a host function that remembers, and numbers."""

import functools
import threading

import jax
import numpy as np

import shardmap as sm
from shardmap.api import taps

TWO = jax.devices()[:2]
spmap_on_two = functools.partial(sm.spmap, devices=TWO)


class Recorder:
    """A host function that keeps what it is called with, per device in order."""

    def __init__(self):
        self.calls = {}
        self._lock = threading.Lock()

    def __call__(self, value, device):
        with self._lock:
            self.calls.setdefault(device.id, []).append(value)

    def tap(self, x, **options):
        return taps.tap(self, x, with_device=True, **options)

    def wait(self):
        """What was recorded since the last time, as nested lists."""
        taps.taps_barrier()
        calls, self.calls = self.calls, {}
        return {
            device: [jax.tree.map(np.ndarray.tolist, value) for value in values]
            for device, values in sorted(calls.items())
        }


def numbered(*shape):
    """M[i, j] = 10 i + j, M[i, j, k] = 100 i + 10 j + k."""
    weights = 10.0 ** np.arange(len(shape))[::-1]
    return np.tensordot(weights, np.indices(shape), 1).astype(np.float32)


def tapped_map_of_map(recorder):
    def outer(x):
        x = recorder.tap(x + 1)
        x = sm.spmap(lambda y: recorder.tap(2 * y))(x)
        return recorder.tap(x + 1)

    return outer
