"""Elements of mapped results: the buffers of their devices, where old names are."""

import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardmap as sm
from shardmap import compat
from shardmap.compat.sources import uses_in

HOST = np.arange(8 * 3 * 2, dtype=np.float32).reshape(8, 3, 2)


@pytest.fixture(autouse=True)
def _installed():
    compat.install()
    yield
    compat.uninstall()


def check(element, value, number):
    """An element of the device of this number, or of all devices."""
    np.testing.assert_array_equal(element, value)
    devices = {jax.devices()[number]} if number is not None else set(jax.devices())
    assert element.devices() == devices
    assert element.committed == (number is None)


def test_an_int_index_takes_the_row_of_its_device():
    rows = sm.spmap(lambda x: x)(HOST)
    for index, number in {
        0: 0,
        -1: 7,
        np.int32(3): 3,
        (2,): 2,
        (5, 1): 5,
        (5, -1, 1): 5,
    }.items():
        check(rows[index], HOST[index], number)
    check(rows[6, :, :], HOST[6], 6)
    columns = sm.spmap(lambda x: x, out_axes=1)(HOST)
    check(columns[:, 3], HOST[3], 3)
    check(jax.jit(lambda x: x[1])(rows), HOST[1], None)


def test_an_element_of_a_map_in_a_map():
    grid = sm.spmap(sm.spmap(lambda x: x))(HOST.reshape(2, 4, 3, 2))
    check(grid[1, 2], HOST[6], 6)
    check(grid[1], HOST[4:], None)
    pairs = NamedSharding(sm.make_mesh(row=4, copy=2), PartitionSpec("row"))
    copies = jax.device_put(np.stack([HOST[0]] * 4), pairs)
    check(copies[1], HOST[0], 2)


def test_iteration_takes_the_row_of_each_device():
    rows = sm.spmap(lambda x: x)(HOST)
    for number, row in enumerate(rows):
        check(row, HOST[number], number)
    first, *_, last = rows
    check(first, HOST[0], 0)
    check(last, HOST[7], 7)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "index",
    [
        slice(3),
        (slice(None), 1),
        (1, slice(None), 0),
        (1, slice(1, 3)),
        ...,
        None,
        (Ellipsis, 0),
        np.array([1, 2]),
        HOST > 2,
        (),
    ],
)
def test_other_indices_are_those_of_jax(index):
    rows = sm.spmap(lambda x: x)(HOST)
    taken = rows[index]
    np.testing.assert_array_equal(taken, HOST[index])
    assert taken.devices() == set(jax.devices())


def test_arrays_without_a_row_on_each_device_are_indexed_by_jax():
    mesh = Mesh(np.array(jax.devices()), "i")
    blocks = jax.device_put(np.arange(16.0), NamedSharding(mesh, PartitionSpec("i")))
    whole = jax.device_put(HOST[:1], NamedSharding(mesh, PartitionSpec()))
    cut = jax.device_put(HOST.T, NamedSharding(mesh, PartitionSpec(None, None, "i")))
    for array in (blocks, whole, cut):
        check(array[0], np.asarray(array)[0], None)
        assert len(list(array)) == len(array)


def test_what_cannot_be_indexed_is_refused_as_by_jax():
    rows = sm.spmap(lambda x: x)(HOST)
    with pytest.raises(IndexError, match="Too many indices"):
        _ = rows[0, 0, 0, 0]
    with pytest.raises(TypeError, match="0-d array"):
        iter(rows[0, 0, 0])
    rows.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        _ = rows[0]


def test_uninstall_gives_jax_its_own_back():
    rows = sm.spmap(lambda x: x)(HOST)
    compat.uninstall()
    check(rows[0], HOST[0], None)


PROGRAM = """
import functools
import jax
from jax import pmap

@functools.partial(jax.pmap, axis_name="i")
def step(state, x):
    return state, {"loss": x}

double = pmap(lambda x: 2 * x)
y = double(x)
state, metrics = step(y, y)
print(metrics["loss"][0], y[-1], y[1:], x[0])
for row in y: print(row)
first = jax.tree.map(lambda x: x[0], state)
state.params[3]
both = step(y, y)
both[1][0]
"""
PLACES = [
    (13, "metrics['loss'][0] -> shardmap.shard_of(metrics['loss'], 0)"),
    (13, "y[-1] -> shardmap.shard_of(y, -1)"),
    (14, "in y -> in shardmap.unstack(y)"),
    (15, "jax.tree.map(lambda x: x[0], state) -> shardmap.unreplicate(state)"),
    (16, "state.params[3] -> shardmap.shard_of(state.params, 3)"),
    (
        18,
        "both[1][0] -> shardmap.shard_of(both, 1)[0]; if both is a tuple, "
        "shardmap.shard_of(both[1], 0)",
    ),
]


def test_the_source_tells_the_lines_and_the_edits():
    uses = uses_in("f.py", textwrap.dedent(PROGRAM))
    assert sorted((use.line, use.edit) for use in uses if use.edit) == PLACES
    assert not [use for use in uses_in("f.py", "y = f(x)\ny[0]") if use.edit]


def test_a_run_tells_the_lines():
    rows = sm.spmap(lambda x: x)(HOST)
    space = {"rows": rows}
    exec(compile("a = rows[0]\nb = list(rows)\nc = rows[1:]", "f.py", "exec"), space)
    assert [(use.line, use.name) for use in compat.uses()] == [
        (1, "jax.Array.__getitem__"),
        (2, "jax.Array.__iter__"),
    ]
