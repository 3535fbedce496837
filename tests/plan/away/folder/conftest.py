"""A plan of a mapped file, and the folder that it is saved in."""

import shutil

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


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """What each test has a copy of: its functions are compiled once."""
    folder = tmp_path_factory.mktemp("saved")
    x = np.memmap(folder / "x", np.float32, "w+", shape=X.shape)
    x[:] = X
    plan(score, x, W, in_slices=({0: 8}, None)).save(folder / "job", x, W, tasks=3)
    return folder / "job"


@pytest.fixture
def path(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "job", symlinks=True)
