"""One call of `sharded_jit`, read: how it is cut, and where it runs."""

import numpy as np
import pytest

import shardmap as sm

X = np.ones((8, 6), np.float32)


def read(fun, in_parts, out_parts, *args, alone=True, **options):
    split = sm.sharded_jit(fun, in_parts, out_parts, **options)
    return split._programs.read(args, {}, alone=alone)


def test_a_call_knows_its_devices_arrays_and_what_it_is():
    call = read(lambda x: x + 1, ((4, 2),), (8, 1), X)
    assert [device.id for device in call.devices] == list(range(8))
    assert call.total == 8
    (operand,), (result,) = call.shardings
    assert operand.shard_shape(X.shape) == (2, 3)
    assert result.shard_shape(X.shape) == (1, 6)
    assert call.described == (
        "8 partitions on devices [0, 1, 2, 3, 4, 5, 6, 7], arguments ['float32[8,6]']"
    )
    assert call.process_local is None


@pytest.mark.parametrize(("parts", "devices"), [(None, 1), ((2, 1), 2), ((2, 3), 6)])
def test_it_runs_on_as_many_devices_as_there_are_partitions(parts, devices):
    assert len(read(lambda x: x, (parts,), None, X).devices) == devices


def test_a_part_of_another_program_is_not_alone():
    part = read(lambda x: x, ((2, 1),), None, X, alone=False)
    assert not part.is_alone
    assert part.alone().is_alone
    assert part.alone().devices == part.devices


def test_equal_options_have_one_key():
    def key(*options, **more):
        return hash(sm.sharded_jit(abs, *options, **more)._programs.options.key())

    assert key(((2, 1),), [None]) == key(((2, 1),), [None])
    kinds = [key((2, 1), None), key(((2, 1),), None), key((2, 1), (2, 1))]
    kinds += [key(None, None, 2), key(None, None)]
    assert len({*kinds}) == len(kinds)
