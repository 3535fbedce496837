"""Process-local data and the global array of them, as far as one process can tell."""

import gc
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap.arrays import process_local

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "j"))
CUT = NamedSharding(MESH, PartitionSpec("i"))
X = np.arange(24, dtype=np.float32).reshape(8, 3)


@pytest.fixture(name="lies")
def _lies():
    return process_local.shardings_along(CUT, 0, 1)


def test_the_global_array_goes_with_the_rows(lies):
    whole = jax.device_put(X, CUT)
    own = process_local.to_local(whole, lies)
    gone = weakref.ref(whole)
    del whole
    gc.collect()
    assert gone() is not None
    del own
    gc.collect()
    assert gone() is None


def test_donated_rows_let_the_global_array_go(lies):
    whole = jax.device_put(X, CUT)
    own = process_local.to_local(whole, lies)
    gone = weakref.ref(whole)
    del whole
    assert process_local.to_global(own, lies, donate=True) is gone()
    gc.collect()
    assert gone() is None


def test_deleted_rows_have_no_global_array(lies):
    whole = jax.device_put(X, CUT)
    own = process_local.to_local(whole, lies)
    gone = weakref.ref(whole)
    del whole
    own.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(process_local.to_global(own, lies))
    gc.collect()
    assert gone() is None
