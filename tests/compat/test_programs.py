"""Programs as they were written from 2019 to 2021 run unedited, and compute the same.

Each of tests/compat/programs uses several devices, and names that JAX has no more. What
it saves is compared with what one device computes here, in today's JAX.
"""

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.example_libraries import optimizers, stax

from shardmap import compat
from shardmap._jax.context import EMPTY_MESH
from shardmap.commands import old
from tests.command_line import call

# The programs write `with Mesh(...)`, of which JAX warns.
pytestmark = pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning")

PROGRAMS = pathlib.Path(__file__).parent / "programs"


@pytest.fixture(autouse=True)
def _as_users(monkeypatch):
    """The settings that users have, and what a program changes is put back."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("NPROC", os.environ.get("NPROC", "64"))
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.legacy_prng_key("allow"),
    ):
        yield
    compat.maps.thread_resources.env = compat.maps.ResourceEnv(EMPTY_MESH)
    compat.uninstall()


def saved(name, folder):
    """What a program saves, and what the command says of it."""
    file = folder / "saved.npz"
    result = call(old.main, str(PROGRAMS / name), str(file))
    assert result.returncode == 0, result.stderr
    return dict(np.load(file)), result


def assert_close(arrays, expected):
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(arrays[name], value, 1e-4, 1e-5, err_msg=name)


def places(result):
    return [
        line.strip().partition(f"{PROGRAMS.relative_to(pathlib.Path.cwd())}/")[2]
        for line in result.stderr.splitlines()
        if " -> " in line
    ]


@pytest.mark.deep
def test_data_parallel_training(tmp_path):
    arrays, result = saved("data_parallel.py", tmp_path)
    assert result.stdout == "8\n"
    assert (
        "data_parallel.py:8: from jax import pmap -> from shardmap.compat import pmap"
        in places(result)
    )

    rng = np.random.RandomState(0)
    images = rng.randn(64, 10).astype(np.float32)
    labels = np.eye(4, dtype=np.float32)[rng.randint(4, size=64)]
    make, predict = stax.serial(
        stax.Dense(16), stax.Relu, stax.Dense(4), stax.LogSoftmax
    )

    def loss(params):
        return -(predict(params, images) * labels).sum(1).mean()

    gradient = jax.jit(jax.grad(loss))
    _, first = make(jax.random.PRNGKey(0), (-1, 10))
    start, update, params_of = optimizers.momentum(0.1, mass=0.9)
    state = start(first)
    for i in range(5):
        state = update(i, gradient(params_of(state)), state)
    params = params_of(state)
    moved = jax.tree.leaves(jax.tree.map(jnp.subtract, params, first))
    expected = {f"arr_{k}": leaf for k, leaf in enumerate(moved)}
    assert_close(arrays, expected | {"loss": loss(params)})
    assert arrays["loss"] < loss(first)


def test_nested_pmap(tmp_path):
    arrays, result = saved("nested_pmap.py", tmp_path)
    assert len(places(result)) == 3
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    seeds = np.array([1.0, 3.0], np.float32)[:, None]
    expected = {
        "means": np.repeat(data.mean() * seeds, 4, 1),
        "spreads": np.full((2, 4), data.var()),
        "of_all": np.full((2, 4), data.mean() * seeds.mean()),
        "gradient": 8 * 2 * (data - data.mean()) / 24,
    }
    assert_close(arrays, expected)


def test_soft_pmap(tmp_path):
    arrays, _ = saved("soft_pmap.py", tmp_path)
    x = (jnp.arange(32) / 32).at[:2].set(0)
    expected = {
        "weights": jax.nn.softmax(x),
        "indices": 2 * np.arange(32),
        "slope": jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(x),
    }
    assert_close(arrays, expected)


def test_host_callback(tmp_path):
    arrays, result = saved("taps.py", tmp_path)
    assert result.stdout == "what: the sum\n136.0\n"
    xs = np.arange(1.0, 17.0).reshape(8, 2)
    expected = {
        "units": xs / np.linalg.norm(xs, axis=1, keepdims=True),
        "seen": (xs**2).sum(1),
        "whole": [xs.sum()],
        "answer": xs.sum() + 1,
    }
    assert_close(arrays, expected)


def test_xmap(tmp_path):
    arrays, result = saved("named_axes.py", tmp_path)
    assert result.stdout == (
        "ShardingSpec((Chunked((4,)), None), (ShardedAxis(0), Replicated(2)))\n"
    )
    rng = np.random.RandomState(0)
    w1, w2 = rng.randn(6, 8).astype("f"), rng.randn(8, 3).astype("f")
    images = rng.randn(16, 6).astype("f")
    expected = {
        "logits": jax.nn.log_softmax(np.maximum(images @ w1, 0) @ w2),
        "centred": images - images.mean(0),
        "looped": np.sin(np.arange(16.0)),
    }
    assert_close(arrays, expected)


def test_sharded_jit(tmp_path):
    arrays, result = saved("partitions.py", tmp_path)
    assert result.stdout == "[(4, 8), (4, 8)]\n"
    x = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
    y = np.ones((8, 8), np.float32) / 3
    expected = {
        "z": np.tanh(x @ y) + 1,
        "many": np.tanh(np.stack([x @ y, 2 * x @ y])) + 1,
        "count": 4,
    }
    assert_close(arrays, expected)


def test_specs(tmp_path):
    arrays, result = saved("specs.py", tmp_path)
    assert len(places(result)) == 19
    x = np.arange(4 * 3 * 6).reshape(4, 3, 6)
    # The last mesh axis has copies; of the others the first walks the last dimension.
    pieces = [
        x[2 * rows : 2 * rows + 2, :, 3 * columns : 3 * columns + 3]
        for columns in range(2)
        for rows in range(2)
        for _ in range(2)
    ]
    expected = {
        "pieces": pieces,
        "pulled": 2 * np.arange(24.0).reshape(8, 3),
        "size": 8,
        "equal": True,
        "placed": np.arange(8.0),
        "copies": np.ones((8, 3)),
    }
    assert_close(arrays, expected)


# What JAX 0.4.13 computes, with the names and options of its day.
IN_OLD_JAX = {
    "global_shapes.py": {
        "losses": [0.65260446, 0.66939783, 0.64938605],
        "b": [0.00404668, 0.02339699, 0.03484575, 0.0101414],
        "total": 9.3993705,
    },
    "notebook.py": {"first": [0.04684069] * 6, "total": 20.264747, "whole": True},
    "zero.py": {
        "first": [1.8844016, 0.5848892, 0.9023045, 2.2245533],
        "total": 14.335731,
        "momentum": -0.24316095,
        "whole": [True, False],
    },
}


@pytest.mark.deep
@pytest.mark.parametrize("name", IN_OLD_JAX)
def test_numbers_are_those_of_jax_at_that_time(name, tmp_path):
    arrays, _ = saved(name, tmp_path)
    assert_close(arrays, IN_OLD_JAX[name])


def test_pjit(tmp_path):
    arrays, _ = saved("partition_specs.py", tmp_path)
    x = np.arange(48, dtype=np.float32).reshape(8, 6) / 48
    w = np.ones((6, 4), np.float32)
    expected = {
        "w": w - 0.1 * x.sum(0)[:, None],
        "hidden": np.tanh(x @ w),
    }
    assert_close(arrays, expected)


@pytest.mark.parametrize("file", sorted(PROGRAMS.glob("*.py")), ids=lambda f: f.stem)
def test_none_of_them_runs_without(file):
    """Each imports, or asks for, what JAX has no more."""
    result = call(old.main, "--check", str(file))
    assert result.returncode == 1
    assert "shardmap knows no other" not in result.stdout
