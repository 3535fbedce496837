"""Tables of a page: what stands in a cell, and that markup is text in it."""

import re

import pytest

from shardmap.explain.draw import groups, tables
from tests.explain import explanations

HTML = re.compile(r"<[^>]*>")


def cells(columns, row):
    """What each cell says, by its column."""
    text = tables.table(columns, [row], "name")
    found = re.findall(r'<td data-label="([^"]*)"[^>]*><span>(.*?)</span></td>', text)
    return {label: HTML.sub("", cell) for label, cell in found}


def test_an_array():
    spec = explanations.ShardingSpec(
        (explanations.Chunked(4),), (explanations.ShardedAxis(0),)
    )
    said = cells(tables.ARRAY_COLUMNS, explanations.array(spec, (8,), path="x"))
    assert said == {
        "Array": "x",
        "Role": "input",
        "Type": "float32[8]",
        "Layout": "dimension 0 in 4 shards, each on 2 devices",
        "Bytes": "120.6 KiB",
        "On a device": "1.2 KiB",
    }
    unknown = cells(tables.ARRAY_COLUMNS, explanations.array(None, (8,)))
    assert unknown["On a device"] == "unknown"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, {"What": "all-reduce (psum)", "Over": "data, model", "Times": "100"}),
        ({"operation": None, "axes": ()}, {"What": "all-reduce", "Over": "unknown"}),
        (
            {"count": None, "group_size": None},
            {"Times": "unknown", "Devices": "unknown"},
        ),
        (
            {"added_by_partitioner": True},
            {"Where": "train.py:12 (step), put in by the compiler"},
        ),
    ],
)
def test_a_collective(changes, said):
    [row] = groups.groups_of_collectives([explanations.collective(**changes)])
    found = cells(tables.COLLECTIVE_COLUMNS, row)
    assert {label: found[label] for label in said} == said


def test_markup_is_text():
    spec = None
    array = explanations.array(spec, (8,), path=explanations.MARKUP)
    text = tables.table(tables.ARRAY_COLUMNS, [array], explanations.MARKUP)
    assert "<script>" not in text
    assert "<img" not in text
    assert cells(tables.ARRAY_COLUMNS, array)["Array"].startswith("&lt;/title&gt;")


def test_words():
    assert tables.count_of(1, "shard") == "1 shard"
    assert tables.count_of(2000, "shard") == "2,000 shards"
    assert tables.sentence("it is so..") == "It is so."
    assert tables.sentence("") == ""
    assert tables.bytes_of(None) == "unknown"
    assert tables.bytes_of(1023.6) == "1.0 KiB"
    assert tables.source(None) == ""
