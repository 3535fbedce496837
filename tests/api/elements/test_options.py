"""The options of `spmap`: what is taken, and what is the same map."""

import jax
import pytest

import shardmap as sm
from shardmap.api.elements.options import Options, batch_size, check_axes, mesh_axes

MESH = sm.make_mesh({"x": 4, "y": 2})


def test_equal_options_have_one_key():
    def key(**options):
        return hash(
            Options(**{"axis_name": "i", "in_axes": 0, "out_axes": 0} | options).key()
        )

    assert key(in_axes=({"a": 0}, None)) == key(in_axes=({"a": 0}, None))
    others = [
        key(),
        key(in_axes=(0,)),
        key(in_axes=[0]),
        key(in_axes=None),
        key(out_axes=None),
        key(axis_name=(1,)),
        key(axis_name=(True,)),
        key(lowering="spmd"),
    ]
    assert len({*others}) == len(others)


def test_axes_are_ints_or_none():
    check_axes("in_axes", ({"a": 0}, [None, 1]))
    with pytest.raises(
        TypeError, match=r"spmap in_axes must .*in_axes\[0\]\['a'\] is True"
    ):
        check_axes("in_axes", ({"a": True}, 0))


def test_a_batch_size_is_a_number_or_comes_with_memory():
    assert batch_size(None, None) == (None, None)
    assert batch_size(3, None) == (3, None)
    assert batch_size(sm.AUTO, "2 KiB") == (sm.AUTO, 2048)


@pytest.mark.parametrize(
    ("size", "memory", "message"),
    [
        (0, None, "must be an int above 0 or None, but got 0"),
        (True, None, "must be an int above 0 or None, but got True"),
        (3, "1 GB", "AUTO and memory= go together, but got batch_size=3"),
        (sm.AUTO, None, "go together, but got batch_size=.*memory=None"),
    ],
)
def test_other_batch_sizes_are_refused(size, memory, message):
    with pytest.raises(ValueError, match=message):
        batch_size(size, memory)


def test_mesh_axes_are_names():
    assert mesh_axes(None, None, None, None) is None
    assert mesh_axes(MESH, "x", None, None) == ("x",)
    assert mesh_axes(MESH, ["y", "x"], None, None) == ("y", "x")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((MESH, None, None, None), "mesh and mesh_axes together"),
        ((None, "x", None, None), "mesh and mesh_axes together"),
        ((MESH, "z", None, None), r"axes of the mesh, each once, but got \('z',\)"),
        ((MESH, ("x", "x"), None, None), r"each once, but got \('x', 'x'\)"),
        ((MESH, "x", jax.devices(), None), "give neither devices nor backend"),
        ((MESH, "x", None, "cpu"), "give neither devices nor backend"),
    ],
)
def test_other_mesh_axes_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        mesh_axes(*given)
