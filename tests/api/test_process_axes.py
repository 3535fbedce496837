"""The elements of a call over several processes, which are counted together."""

import pytest

from shardmap.api.elements import are_process_local, check_elements


def names():
    return ["x", "y"]


@pytest.mark.parametrize(
    ("are_global", "in_axes", "local"),
    [
        ((False, False), (0, 0), True),
        ((True, True), (0, 1), False),
        # What is not mapped does not count, unless there is nothing else.
        ((False, True), (0, None), True),
        ((True, False), (0, None), False),
        ((True, False), (None, None), False),
        ((False, False), (None, None), True),
    ],
)
def test_what_is_mapped_decides(are_global, in_axes, local):
    assert are_process_local(are_global, in_axes, names) is local


def test_both_kinds_together_are_refused():
    with pytest.raises(
        ValueError, match=r"\* x is a global array\n  \* y is process-local data\n"
    ):
        are_process_local((True, False), (0, 0), names)


def test_all_elements_are_counted():
    assert check_elements("f", 3, 2, None, 2) == 6
    assert check_elements("f", 3, 2, 6, 3) == 6


@pytest.mark.parametrize(
    ("own", "wanted", "divisor", "message"),
    [
        (0, None, 1, "spmap of f over 2 processes needs at least one element"),
        (3, 3, 1, "axis_size 3, .* but 3 on each of 2 are 6"),
        (3, None, 4, "3 elements on each of 2 processes do not divide among the 4"),
    ],
)
def test_other_counts_are_refused(own, wanted, divisor, message):
    with pytest.raises(ValueError, match=message):
        check_elements("f", own, 2, wanted, divisor)
