"""Frames of XLA's tables, from the innermost outwards."""

from shardmap.explain.read.hlo.frames import Frames
from tests.explain.read.hlo.test_collectives import TABLES


def test_a_frame_has_a_place_and_those_around_it():
    frames = Frames(TABLES)
    assert frames.place(2) == ("/home/user/model.py", 7, "Model.loss")
    # What no table has is not there.
    assert frames.place(3) == ("", 1, "Model.loss")
    assert [*frames.stack(3)] == [3, 1]
    assert [*frames.stack(1)] == [1]
    assert [*frames.stack(9)] == []


def test_the_line_is_the_innermost_of_the_users():
    frames = Frames(TABLES)
    assert frames.source(2) == "/home/user/model.py:7 (Model.loss)"
    assert frames.source(3) == "/home/user/train.py:12 (<module>)"
    assert frames.source(9) is None


def test_a_frame_around_itself_ends():
    around = TABLES.replace("parent_frame_id=2}\n3", "parent_frame_id=3}\n3")
    assert [*Frames(around).stack(2)] == [2]


def test_a_text_without_tables():
    assert Frames("HloModule jit_f").source(1) is None
