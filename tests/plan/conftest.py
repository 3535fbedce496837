"""A cluster."""

import pytest


# A cluster that has nothing to do takes time too: it ends with the module.
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
