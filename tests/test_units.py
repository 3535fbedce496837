"""Bytes and times as people read and write them, and the mark for as much as fits."""

import copy
import pickle

import numpy as np
import pytest

import shardmap as sm
from shardmap import units


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (64, 64),
        (np.int64(64), 64),
        (2e9, 2_000_000_000),
        ("64", 64),
        ("1 kB", 1000),
        ("1 KiB", 1024),
        ("1.5 GiB", 3 * 2**29),
    ],
)
def test_bytes_are_read(text, count):
    assert units.bytes_of("memory", text) == count


@pytest.mark.parametrize("text", ["", "x", "1 XB", "-1 kB", -1, 1.5, True, None])
def test_what_are_no_bytes_is_refused(text):
    with pytest.raises((ValueError, TypeError), match="memory must be"):
        units.bytes_of("memory", text)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**30, "5.0 GiB")],
)
def test_bytes_are_written(number, text):
    assert units.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.02, "20 ms"), (3e-9, "3 ns")]
)
def test_times_are_written(seconds, text):
    assert units.duration(seconds) == text


def test_there_is_one_mark():
    assert repr(sm.AUTO) == "AUTO"
    assert copy.deepcopy(sm.AUTO) is pickle.loads(pickle.dumps(sm.AUTO)) is sm.AUTO
