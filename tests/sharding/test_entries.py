"""The entries of a spec: what they take, store, refuse and print."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from shardmap.sharding.entries import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    Unstacked,
)

ENTRIES = [
    (Chunked((2, 4)), "Chunked((2, 4))"),
    (Chunked(3), "Chunked((3,))"),
    (Unstacked(2), "Unstacked(2)"),
    (NoSharding(), "NoSharding()"),
    (ShardedAxis(0), "ShardedAxis(0)"),
    (Replicated(2), "Replicated(2)"),
]
each_entry = pytest.mark.parametrize(("entry", "text"), ENTRIES)
WITH_FIELD = [
    (Chunked, "chunks", "a number of chunks in Chunked"),
    (Unstacked, "size", "the size in Unstacked"),
    (ShardedAxis, "axis", "the axis in ShardedAxis"),
    (Replicated, "replicas", "the number of replicas in Replicated"),
]
each_kind = pytest.mark.parametrize(("kind", "field", "what"), WITH_FIELD)


@each_entry
def test_prints_as_the_code_that_builds_it(entry, text):
    assert repr(entry) == text
    assert eval(text) == entry


@each_entry
def test_pickles_and_copies(entry, text):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(entry, protocol)) == entry
    assert copy.deepcopy(entry) == entry


def test_compares_and_hashes_by_type_and_value():
    assert Unstacked(2) != Replicated(2)
    assert Unstacked(2) != Chunked(2)
    assert ShardedAxis(2) != Replicated(2)
    assert Unstacked(2) != Unstacked(3)
    assert Unstacked(2) == Unstacked(2)
    assert NoSharding() == NoSharding()
    assert len({Unstacked(2), Replicated(2), Unstacked(2), Chunked(2)}) == 3


@each_kind
def test_is_immutable(kind, field, what):
    entry = kind(2)
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        setattr(entry, field, 3)


@each_kind
def test_takes_its_field_by_the_old_name(kind, field, what):
    assert kind(**{field: 2}) == kind(2)
    assert getattr(kind(2), field) == ((2,) if kind is Chunked else 2)
    assert dataclasses.replace(kind(2), **{field: 3}) == kind(3)


def test_chunks_are_stored_as_a_tuple_of_ints():
    for given in (2, [2], (2,), np.int32(2), np.array([2]), (n for n in [2])):
        entry = Chunked(given)
        assert entry == Chunked((2,))
        assert hash(entry) == hash(Chunked((2,)))
        assert type(entry.chunks) is tuple
        assert type(entry.chunks[0]) is int


@pytest.mark.parametrize("kind", [Unstacked, ShardedAxis, Replicated])
def test_numpy_integers_are_stored_as_ints(kind):
    (stored,) = dataclasses.astuple(kind(np.uint8(2)))
    assert type(stored) is int
    assert stored == 2


@each_kind
@pytest.mark.parametrize("value", [True, np.True_, 2.0, np.float32(2), None, "2"])
def test_refuses_what_is_no_integer(kind, field, what, value):
    with pytest.raises(TypeError, match=f"{what} must be an integer, got .* of type"):
        kind(value)


@pytest.mark.parametrize("chunks", [[2, True], (2, 2.0), [None]])
def test_refuses_chunks_that_are_no_integers(chunks):
    with pytest.raises(TypeError, match="a number of chunks in Chunked must be an int"):
        Chunked(chunks)


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("kind", [Chunked, Unstacked, Replicated])
def test_refuses_sizes_below_one(kind, value):
    with pytest.raises(ValueError, match=f"must be at least 1, got {value}"):
        kind(value)


def test_refuses_one_chunk_number_below_one_among_others():
    with pytest.raises(ValueError, match="Chunked must be at least 1, got 0"):
        Chunked((2, 0))


def test_refuses_no_chunks():
    with pytest.raises(ValueError, match="got an empty sequence: write None for a dim"):
        Chunked(())


def test_refuses_a_negative_axis():
    with pytest.raises(
        ValueError, match="at least 0, got -1: sharded axes are counted"
    ):
        ShardedAxis(-1)
