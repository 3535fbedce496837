"""A function whose plan is saved, what its folder has in the end, and harm to that."""

import jax.numpy as jnp
import numpy as np

from shardmap.plan.away.folder.job import Job
from shardmap.plan.away.folder.work import results
from tests.plan.plan_programs import reals

X, W = reals(64, 8), reals(8, 4)


def score(x, w):
    mean = x.mean(0, keepdims=True)
    deviation = jnp.sqrt((x * x).mean(0, keepdims=True) - mean**2 + 1e-3)
    y = jnp.tanh((x - mean) / deviation @ w)
    return {"sum": y.sum(0), "rows": y, "same": x, "max": mean.max()}


def assert_made(path, want):
    found = results(Job(path))
    names = {f"result['{name}']": value for name, value in want.items()}
    assert found.keys() == names.keys()
    for name, value in names.items():
        got = np.load(path / found[name].where)
        assert got.tobytes() == np.asarray(value).tobytes()


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])
