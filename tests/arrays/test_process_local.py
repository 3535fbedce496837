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


def test_one_process_has_the_whole(lies):
    assert lies.global_shape((8, 3)) == lies.local_shape((8, 3)) == (8, 3)
    whole = process_local.to_global(X, lies)
    assert whole.sharding == CUT
    np.testing.assert_array_equal(process_local.to_local(whole, lies), X)


def test_shapes_of_several_processes():
    lies = process_local.shardings_along(CUT, 1, 3)
    assert lies.global_shape((8, 2, 5)) == (8, 6, 5)
    assert lies.local_shape((8, 6, 5)) == (8, 2, 5)


def test_the_result_of_one_call_is_the_argument_of_the_next(lies):
    whole = jax.device_put(X, CUT)
    own = process_local.to_local(whole, lies)
    assert process_local.to_global(own, lies) is whole
    assert process_local.to_global(own + 0, lies) is not whole


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


def test_a_scalar_of_weak_type_stays_one(lies):
    assert process_local.to_global(2.5, lies) == 2.5
    assert isinstance(process_local.to_global(jax.numpy.asarray(2.5), lies), float)


def test_tangents_of_integers_are_on_no_device(lies):
    zeros = np.zeros((8, 3), jax.dtypes.float0)
    assert process_local.to_global(zeros, lies).dtype == jax.dtypes.float0
    assert process_local.to_local(zeros, lies).shape == (8, 3)


def test_looking_sees_values_behind_tracers_that_have_some():
    seen = []

    def f(x):
        seen.append(process_local.which_are_global([x, 1.0]))
        return x

    jax.vmap(f)(X)
    jax.grad(lambda x: f(x).sum())(X)
    jax.make_jaxpr(f)(X)
    assert seen == [[False, False], [False, False], None]
