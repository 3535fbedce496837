"""The plan that most tests run, its result, and a cluster."""

import jax
import pytest

from shardmap.plan.plan import plan
from tests.plan.run.checks import W, X, columns


@pytest.fixture(scope="module")
def made():
    return plan(columns, X, W, in_slices=({0: 8}, None))


@pytest.fixture(scope="module")
def want():
    return jax.jit(columns)(X, W)


@pytest.fixture(scope="module")
def dask_client():
    distributed = pytest.importorskip("distributed", reason="a Dask cluster needs it")
    pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client
