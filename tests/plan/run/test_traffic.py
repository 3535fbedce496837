"""What a run by other processes moves, told before it runs."""

import numpy as np
import pytest

from shardmap.plan.plan import plan


@pytest.mark.parametrize(("pieces", "are_combined"), [(16, False), (17, True)])
def test_partial_results_come_back_at_most(pieces, are_combined):
    x = np.ones((34, 8), np.float32)
    told = str(plan(lambda x: x.max(0), x, in_slices={0: pieces}).traffic(x))
    combined = ", or a part where workers combine them: 16 into one"
    assert told.endswith(f"result: {32 * pieces} B come back{combined * are_combined}")


def test_values_that_two_stages_read_are_sent_twice():
    x = np.ones((32, 8), np.float32)
    made = plan(lambda x: x - x.mean(0, keepdims=True), x, in_slices={0: 4})
    there, here, lines = made.traffic(x)
    assert lines == (
        "args[0]: 2.0 KiB are sent from here, as it lies in memory",
        "what earlier stages made: 128 B are sent from here, as it lies in memory",
        "what later stages need: 128 B come back",
        "result: 1.0 KiB come back",
    )
    assert (there, here) == (0, 3 * x.nbytes + 2 * 128)
    assert str(made.traffic(x)) == "\n".join(lines)


def test_of_many_shards_some_are_looked_at():
    x = np.ones((1000, 4), np.float32)
    told = plan(lambda x: x * 2, x, in_slices={0: 1000}).traffic(x)
    assert told.here == 2 * x.nbytes


def test_values_that_move_alike_are_one_row():
    x = np.ones((32, 8), np.float32)
    made = plan(
        lambda x: x - x.sum(0, keepdims=True) * x.max(0, keepdims=True),
        x,
        in_slices={0: 4},
    )
    [told] = [line for line in made.traffic(x).lines if "later stages" in line]
    assert told == "what later stages need: 256 B come back"
