"""Options that all mapped functions have, checked."""

import numpy as np
import pytest

import shardmap as sm
from shardmap.api.calls import options


def fun(x, y, z):
    return x


def test_positions_are_sorted_and_counted():
    assert options.positions("spmap", fun, ("static", (2, 0)), 1) == ((0, 2), (1,))
    assert options.positions("spmap", fun, ("static", ()), ()) == ((), ())
    last = options.positions("sharded_jit", fun, ("static", -1), (), from_end=True)
    assert last == ((-1,), ())
    assert options.positions("spmap", max, ("static", ()), 7) == ((), (7,))


@pytest.mark.parametrize(
    ("static", "donated", "error", "message"),
    [
        (-1, (), ValueError, "spmap static must be an int or several, none below 0"),
        ((), (0, -1), ValueError, r"donate_argnums must be .*but got \(0, -1\)"),
        ("x", (), TypeError, "static must be an int or several, none .* got 'x'"),
        ((), 3, ValueError, r"is \(3,\), but fun takes 3 positional arguments"),
        ((0, 1), (1, 2), ValueError, r"static \(0, 1\) and .* both have \[1\]"),
    ],
)
def test_other_positions_are_refused(static, donated, error, message):
    with pytest.raises(error, match=message):
        options.positions("spmap", fun, ("static", static), donated)


def test_names_and_sizes_of_axes():
    assert options.axis_name(("a", 1)) == ("a", 1)
    assert options.axis_size(None) is None
    assert options.axis_size(np.int64(3)) == 3
    for name, message in [([], "must be hashable"), (3, "must be no number")]:
        with pytest.raises(TypeError, match=f"spmap axis_name {message}"):
            options.axis_name(name)
    for size, error in [(-1, ValueError), (True, TypeError), (2.0, TypeError)]:
        with pytest.raises(error, match=f"an int from 0 on or None, but got {size!r}"):
            options.axis_size(size)


def test_flags_and_lowerings():
    assert options.flag("check_replicas", np.True_) is True
    with pytest.raises(TypeError, match="check_replicas must be True or False"):
        options.flag("check_replicas", 1)
    assert options.lowering("spmd", None) == "spmd"
    with pytest.raises(ValueError, match=r"mesh_map lowering must .* but got 'auto'"):
        options.lowering("auto", None, "mesh_map")
    with pytest.raises(ValueError, match="and batch_size=2 do not go together"):
        options.lowering("spmd", 2)


def test_what_is_called_and_what_it_runs_on():
    options.check_callable("spmap", fun)
    options.check_mesh(sm.make_mesh({"i": 8}))
    with pytest.raises(TypeError, match=r"write @spmap\(axis_name='i'\)"):
        options.check_callable("spmap", "i")
    with pytest.raises(TypeError, match=r"shardmap.make_mesh\({'i': 8}\) makes one"):
        options.check_mesh({"i": 8})


def test_trees_of_options_are_hashable():
    def key(tree):
        return options.hashable(tree, lambda leaf: leaf is None)

    assert key({"a": [1, None]}) == key({"a": [1, None]})
    assert len({key([1, None]), key((1, None)), key([1]), key([None, 1])}) == 4
