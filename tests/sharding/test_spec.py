"""Specs as values: what they print, equal, and are pickled as."""

import dataclasses
import pickle

import pytest
from hypothesis import given

from shardmap.sharding.entries import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    Unstacked,
)
from shardmap.sharding.spec import ShardingSpec
from tests.strategies import specs

C, U, S, R = Chunked, Unstacked, ShardedAxis, Replicated
N = None


@given(specs())
def test_prints_as_the_code_that_builds_it_and_pickles(spec):
    assert eval(repr(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(eval(repr(spec))) == hash(spec)


def test_print_of_the_design():
    spec = ShardingSpec([C(4), NoSharding()], [S(0), R(2)])
    text = "ShardingSpec((Chunked((4,)), None), (ShardedAxis(0), Replicated(2)))"
    assert repr(spec) == text


def test_old_field_names_lists_and_no_sharding():
    spec = ShardingSpec(sharding=[NoSharding(), C([2])], mesh_mapping=[S(0)])
    assert spec.sharding == (None, C(2))
    assert spec.mesh_mapping == (S(0),)
    assert spec == ShardingSpec((None, C(2)), (S(0),))
    assert spec != ShardingSpec((C(2), None), (S(0),))
    assert spec != ShardingSpec((None, U(2)), (S(0),))
    assert len({spec, ShardingSpec((None, C(2)), (S(0),))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError, match="sharding"):
        spec.sharding = ()


def test_stacked_changes_unstacked_only():
    spec = ShardingSpec((U(2), C((2, 3)), N), (S(1), R(2), S(0), S(2)))
    expected = ShardingSpec((C(2), C((2, 3)), N), spec.mesh_mapping)
    assert spec.stacked() == expected
    assert expected.stacked() == expected
