"""A cluster, and plans of which no cut has an effect."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Here plans may run whole: `test_plan.py` tests that they warn of it."""
    ignored = pytest.mark.filterwarnings("ignore:plan. the function runs as a whole")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(ignored)


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
