"""The bar, and the bytes that it tells."""

import re
import sys

import pytest

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
    assert re.search(r"\d KiB, \d.*/s", said)  # What has moved.
