"""Arrays that the partitioner makes whole: a remark for each line."""

from shardmap.explain.read.hlo.causes import Cause
from shardmap.explain.read.remarks.rematerialised import rematerialised
from tests.explain.read.test_matching import compiled

CAUSE = Cause("it is made whole", "say its layout", is_rematerialised=True)


def test_one_remark_for_each_line():
    found = rematerialised(
        [
            compiled(cause=CAUSE, bytes_out=2048, source="a.py:1"),
            compiled(cause=CAUSE, bytes_out=64, source="a.py:1"),
            compiled(cause=CAUSE, bytes_out=64, source=None),
            compiled(cause=CAUSE._replace(is_rematerialised=False)),
            compiled(),
        ]
    )
    assert [(each.text, each.advice, each.source) for each in found] == [
        ("it is made whole, 2.0 KiB on each", "say its layout", "a.py:1"),
        ("it is made whole, 64 B on each", "say its layout", None),
    ]
