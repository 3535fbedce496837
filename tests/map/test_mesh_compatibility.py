"""Meshes of several maps in one program: which XLA can make one of."""

import jax
import pytest

import shardmap as sm
from shardmap.map.mesh_compatibility import check_arguments, check_meshes


def mesh(**sizes):
    return sm.make_mesh(sizes, devices=jax.devices()[:8])


@pytest.mark.parametrize(
    "others",
    [
        [mesh(c=8)],
        [mesh(c=4, d=2)],
        [mesh(c=4, d=1, e=2)],
        [mesh(c=2, d=2, e=2), mesh(f=8)],
    ],
)
def test_meshes_with_each_other_s_cuts_are_one(others):
    program = object()
    check_meshes(program, "spmap of f", mesh(a=4, b=2))
    for other in others:
        check_meshes(program, "spmap of g", other)


def test_meshes_that_cut_in_other_places_are_refused():
    program = object()
    check_meshes(program, "spmap of f", mesh(a=4, b=2))
    with pytest.raises(
        NotImplementedError,
        match=r"spmap of g runs on 2 x 4 devices, spmap of f in the same program on "
        r"4 x 2 devices: XLA cannot cut one program both ways. .* one mesh with axes "
        r"of sizes \(2, 2, 2\)",
    ):
        check_meshes(program, "spmap of g", mesh(c=2, d=4))


def test_another_program_begins_anew():
    check_meshes(object(), "spmap of f", mesh(a=4, b=2))
    check_meshes(object(), "spmap of g", mesh(c=2, d=4))


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (4, 1, 2), (2, 2, 2), (2,), (1,)])
def test_arguments_with_each_other_s_cuts_or_on_other_devices(sizes):
    check_arguments("spmap of f", mesh(a=4, b=2), [sizes])


def test_arguments_that_cut_in_other_places_are_refused():
    with pytest.raises(
        NotImplementedError,
        match=r"spmap of f runs on 4 x 2 devices, and an argument of the program is on "
        r"a mesh of 2 x 4 devices: XLA cannot cut one program both ways. Put the "
        r"argument on a mesh with axes of sizes \(2, 2, 2\), or call the map outside",
    ):
        check_arguments("spmap of f", mesh(a=4, b=2), [(8,), (2, 4)])
