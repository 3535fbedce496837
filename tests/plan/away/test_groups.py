"""Which shards go together, and what travels where one of them fails."""

import pickle

from shardmap.plan.away.groups import TaskError, groups, level_of


def test_groups_are_whole_nodes():
    def sizes(items, keys, totals, most=1000):
        found = groups(items, keys, totals.get, lambda key: 1, 1, most)
        return [(len(each.items), dict(each.parts)) for each in found]

    assert sizes(range(40), lambda k: ["a"], {"a": 40}) == [
        (16, {"a": 16}),
        (16, {"a": 16}),
        (8, {"a": 8}),
    ]
    # Two boxes in turn make their nodes together.
    pairs = sizes(range(64), lambda k: ["ab"[k % 2]], {"a": 32, "b": 32})
    assert pairs == [(32, {"a": 16, "b": 16})] * 2
    # Nothing is put together of what is not whole within so many.
    alone = sizes(range(64), lambda k: ["ab"[k % 2]], {"a": 32, "b": 32}, most=20)
    assert alone == [(1, {})] * 64
    assert sizes(range(3), lambda k: [], {}) == [(1, {})] * 3


def test_levels_leave_work_for_all():
    assert [level_of(n, 4) for n in (0, 63, 64, 1023, 1024)] == [0, 0, 1, 1, 2]


def test_errors_of_a_group_travel():
    error = pickle.loads(pickle.dumps(TaskError(3, 2, OSError("gone"))))
    assert (error.place, error.attempts, str(error.error)) == (3, 2, "gone")
