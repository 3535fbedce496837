"""Into how many shards a vmap was cut, by the shapes of the compiled program."""

import pytest

from shardmap.explain.read.hlo.text import module_of
from shardmap.explain.read.hlo.vectorised import Made, Shapes

TEXT = """HloModule jit_f, num_partitions=8

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4,6]{0} parameter(0)
$LINES
}
"""


def shapes(*lines):
    given = "\n".join(
        f'  %x{k} = {kind}[{of}]{{0}} negate(%p), metadata={{op_name="{name}"}}'
        for k, (kind, of, name) in enumerate(lines)
    )
    return Shapes(module_of(TEXT.replace("$LINES", given)))


VMAP = "jit(f)/vmap(g)/sin"


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ("2,6", [8]),
        ("16,6", [1]),
        ("4,6", [4]),
        # 16 elements are not cut into 3, and 6 is not of this vmap.
        ("6,6", []),
        ("16,3", [1]),
        ("2", []),
    ],
)
def test_a_shape_tells_the_cut(shape, cuts):
    found = shapes(("f32", shape, VMAP))
    assert found.cuts([Made(None, "sin", (16, 6))], 16) == cuts


def test_what_is_in_no_vmap_tells_nothing():
    found = shapes(("f32", "2,6", "jit(f)/sin"))
    assert found.cuts([Made(None, "sin", (16, 6))], 16) == []


def test_the_likeliest_is_first_and_the_sure_ones_decide():
    lines = [("f32", shape, f"jit(f)/vmap(g)/{name}") for shape, name in SHAPES]
    made = [Made(None, name, (16, 6)) for name in ("sin", "cos", "tan")]
    assert shapes(*lines).cuts(made, 16) == [8, 4]
    # One operation whose shapes say two things is asked where no other is there.
    both = [each for each in lines if "exp" in each[2]]
    assert shapes(*both).cuts([Made(None, "exp", (16, 6))], 16) == [2, 1]
    assert shapes(*lines).cuts([*made, Made(None, "exp", (16, 6))], 16) == [8, 4]


SHAPES = [
    ("2,6", "sin"),
    ("2,6", "cos"),
    ("4,6", "tan"),
    ("8,6", "exp"),
    ("16,6", "exp"),
]
