"""One call: its arguments set apart, and what can have the same program."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardmap.api.calls.call import Arguments
from shardmap.api.calls.statics import Static
from tests.api.kinds import MESH, SHARDED, X, every_kind, mapped


def arguments():
    return Arguments.of((X, Static("a"), {"y": X}), {"z": X})


def test_static_arguments_are_set_apart_by_position():
    read = arguments()
    assert len(read.leaves) == 3
    assert read.statics == ((1, Static("a")),)
    assert (read.static_argnums, read.argnums) == ((1,), [0, 2])
    assert read.num_positional == 3


def test_other_leaves_go_where_the_arguments_were():
    args, kwargs = arguments().with_leaves([1, 2, 3])
    assert args == [1, Static("a"), {"y": 2}]
    assert kwargs == {"z": 3}


@pytest.mark.parametrize(
    ("argnums", "names", "donated"),
    [
        ((), ("z",), [False, False, False]),
        ((0,), (), [True, False, False]),
        ((1, 2), ("z",), [False, True, True]),
    ],
)
def test_donated_leaves_are_those_of_positions_and_names(argnums, names, donated):
    assert arguments().donated(argnums, names) == donated


def test_calls_of_a_kind_read_the_same():
    def kind(x, how):
        return Arguments.of((x, Static(how)), {}).kind()

    assert kind(X, "a") == kind(X + 1, "a") == kind(jax.numpy.asarray(X), "a")
    others = [(X, "b"), (X[:2], "a"), (X.astype(int), "a"), ([X], "a"), (1.0, "a")]
    assert len({kind(X, "a"), *(kind(*other) for other in others)}) == 6


@pytest.mark.few(2)
@every_kind
@pytest.mark.parametrize("where", ["as wanted", "elsewhere", "copied"])
def test_donated_arguments_give_their_memory_back(kind, where):
    f = mapped(kind, lambda x, y: x + y, donate_argnums=0)
    for _ in range(3):
        y = jax.device_put(X, SHARDED)
        x = jax.device_put(
            X,
            {
                "as wanted": SHARDED,
                "elsewhere": jax.devices()[2],
                "copied": NamedSharding(MESH, P()),
            }[where],
        )
        x = x + 0
        np.testing.assert_array_equal(f(x, y), 2 * X)
        # Of copies each device keeps none, or the shard that it goes on with.
        assert held_by(x) <= X.nbytes * (where == "copied")
        assert not y.is_deleted()


def held_by(array):
    """How many bytes its buffers take, of those that are left."""
    if array.is_deleted():
        return 0
    buffers = [shard.data for shard in array.addressable_shards]
    return sum(buffer.nbytes for buffer in buffers if not buffer.is_deleted())
