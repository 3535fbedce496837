"""A plan of a mapped file, and the folder that it is saved in."""

import numpy as np
import pytest

from shardmap.plan.plan import plan
from tests.plan.away.folder.checks import W, X, score


@pytest.fixture
def x(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(64, 8))
    x[:] = X
    return x


@pytest.fixture
def made(x):
    return plan(score, x, W, in_slices=({0: 8}, None))


@pytest.fixture
def path(made, x, tmp_path):
    made.save(tmp_path / "job", x, W, tasks=3)
    return tmp_path / "job"
