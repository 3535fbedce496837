"""The bar, and the bytes that it tells."""

import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.cutting import cut_function
from shardmap.plan.run.progress import bar, moved
from shardmap.plan.run.shards import Shards
from tests.plan.run.checks import W, X


def test_without_tqdm_there_are_lines(made, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    made.run(X, W, progress=True)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"stage 0: 1 of 16 shards, \d.* B, .*/s", first)
    assert re.fullmatch(r"stage 1: 16 of 16 shards, \d.*B, .*/s", last)


def test_a_bar(made, capsys):
    pytest.importorskip("tqdm")
    made.run(X, W, progress=True)
    said = capsys.readouterr().err
    assert "stage 1: 100%" in said
    assert "16/16" in said


def test_a_shard_moves_what_it_reads_and_writes():
    made = cut_function(jnp.dot, (X, W), ({0: (10, 54)}, None))
    first, last = Shards(made, made.stages)
    assert moved(first) == 4 * (10 * 8 + 8 * 4 + 10 * 4)
    assert moved(last) == 4 * (54 * 8 + 8 * 4 + 54 * 4)


def test_the_bytes_that_are_done_are_told(capsys):
    pytest.importorskip("tqdm")
    made = cut_function(jnp.sin, (np.ones((1024, 256), np.float32),), ({0: 2},))
    with bar(2, True) as done:
        for shard in Shards(made, made.stages):
            done(shard)
    assert "2.0 MiB, " in capsys.readouterr().err
