"""What a page sums up: a model of many arrays and collectives stays two screens."""

import numpy as np

import shardmap as sm
from shardmap.explain.draw import groups
from shardmap.explain.draw.page import page
from tests.explain import explanations


def test_arrays_are_summed_up_by_prefix_and_layout():
    rows = explanations.array(explanations.ROWS, (8, 64), path="params['w']")
    whole = explanations.array(
        explanations.SCALAR, (), path="params['b']", layout="replicated on 8 devices"
    )
    first, second = groups.groups_of_arrays([rows, whole, rows])
    assert first.arrays == (rows, rows)
    assert first.title.startswith(
        "params: 2 arrays, 241.1 KiB, dimension 0 in 4 shards"
    )
    assert second.title.startswith("params['b']: float32[], 120.6 KiB, replicated on")


def test_collectives_are_summed_up_by_line():
    each = explanations.collective()
    other = explanations.collective(bytes_in=8, bytes_out=8)
    elsewhere = explanations.collective(source="train.py:99 (step)")
    first, second = groups.groups_of_collectives([each, other, elsewhere, each])
    assert (first.times, first.bytes_in, first.same) == (300, 4096, False)
    assert first.link_bytes == 3 * each.link_bytes
    assert (second.times, second.same) == (100, True)
    unknown = explanations.collective(count=None, link_bytes=None, seconds=None)
    (group,) = groups.groups_of_collectives([each, unknown])
    assert (group.times, group.link_bytes, group.seconds) == (None, None, None)


def test_many_arrays_are_two_screens():
    assert len(page(explanations.large(), 80).splitlines()) < 80


def test_the_verdict_of_one_device():
    assert groups.verdict(explanations.bare()) == [
        "One program on one device: no axis is laid on several.",
        "Nothing moves between devices.",
    ]


def test_arrays_that_are_alike_are_drawn_once():
    def fun(q, k, v, w):
        return q * w, k + v

    mapped = sm.spmap(fun, in_axes=(0, 0, 0, None))
    row, w = np.ones((16, 8), np.float32), np.ones(8, np.float32)
    report = sm.explain(mapped)(row, row, row, w)
    paths = [[each.path for each in those] for those in groups.alike(report.arrays)]
    assert paths == [["q", "k", "v"], ["w"], ["result[0]", "result[1]"]]
    text = str(report)
    assert "  q, k, v: float32[16,8], 512 B each" in text.splitlines()
    assert text.count("0:2") == 2
    page = report._repr_html_()
    assert "<h3><code>q</code>, <code>k</code>, <code>v</code></h3>" in page
    assert page.count('class="array"') == 3
