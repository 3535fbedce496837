"""Types of users travel by what they register."""

import numpy as np
import pytest

from shardmap.planning.sources import registry
from shardmap.planning.sources.registry import register_shard_handler, remote_ref


class Ramp:
    dtype = np.dtype("float32")

    def __init__(self, size):
        self.shape = (size,)

    def __getitem__(self, index):
        return np.arange(*self.shape, dtype=self.dtype)[index]


class Longer(Ramp):
    pass


def describe(ramp):
    return {"place": ramp.shape[0]}


def reopen(about, writable):
    return Ramp(about["place"])


@pytest.fixture(autouse=True)
def unregistered(monkeypatch):
    monkeypatch.setattr(registry, "_openers", dict(registry._openers))


def test_a_type_is_registered_with_those_derived_from_it():
    register_shard_handler(Ramp, describe=describe, reopen=reopen)
    sent = remote_ref(Longer(5))
    assert (sent.kind, sent.grain) == ("tests.Ramp", None)
    np.testing.assert_array_equal(sent.open()[1:3], [1, 2])
    assert (
        remote_ref(Ramp(5)).place
        == remote_ref(Longer(5)).place
        != remote_ref(Ramp(6)).place
    )


def test_what_cannot_be_described_stays():
    register_shard_handler(Ramp, describe=lambda ramp: None, reopen=reopen)
    assert remote_ref(Ramp(5)) is None


def test_a_description_that_cannot_be_sent_is_told():
    register_shard_handler(Ramp, describe=lambda ramp: {"it": open}, reopen=reopen)
    remote_ref(Ramp(5)).check_pickles()
    register_shard_handler(
        Ramp, describe=lambda ramp: {"it": lambda: ramp}, reopen=reopen
    )
    with pytest.raises(TypeError, match=r"cannot import reopen of tests.Ramp.*lam"):
        remote_ref(Ramp(5)).check_pickles()


def test_half_a_registration_is_refused():
    with pytest.raises(TypeError, match=r"got no reopen for Ramp: give both"):
        register_shard_handler(Ramp, describe=describe)
    with pytest.raises(TypeError, match=r"got no describe for Ramp: give both"):
        register_shard_handler(Ramp, reopen, reopen=reopen)
    with pytest.raises(TypeError, match=r"a function as grain, got 3 for Ramp"):
        register_shard_handler(Ramp, describe=describe, reopen=reopen, grain=3)
    with pytest.raises(TypeError, match=r"a function of a value and a sharding"):
        register_shard_handler(Ramp)
