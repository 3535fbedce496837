"""`python -m shardmap picture`: what it shows, and what it refuses."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap import picture
from shardmap.commands.picture import MOST_DEVICES, main
from tests.command_line import call, refusal
from tests.strategies import specs_and_shapes

SPEC = "ShardingSpec((Chunked(4), None), (ShardedAxis(0), Replicated(2)))"


def page(spec, shape, mesh=None):
    result = call(main, spec, "--shape", shape, *(["--mesh", mesh] if mesh else []))
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.removesuffix("\n")


def test_a_spec_in_every_form():
    assert page(SPEC, "8,64").split("\n\n") == [
        "ShardingSpec((Chunked((4,)), None), (ShardedAxis(0), Replicated(2)))",
        "(8, 64) on 8 devices, (2, 64) on each: dimension 0 down\n"
        "        +-----+\n"
        "    0:2 | 0-1 |\n"
        "    2:4 | 2-3 |\n"
        "    4:6 | 4-5 |\n"
        "    6:8 | 6-7 |\n"
        "        +-----+",
        "OpSharding proto\n"
        "  type: OTHER\n"
        "  tile_assignment_dimensions: 4\n"
        "  tile_assignment_dimensions: 1\n"
        "  tile_assignment_dimensions: 2\n"
        "  replicate_on_last_tile_dim: true\n"
        "  iota_reshape_dims: 8\n"
        "  iota_transpose_perm: 0",
        "HLO\n  {devices=[4,1,2]<=[8] last_tile_dim_replicate}",
        'Shardy\n  sdy.mesh @mesh = <["axis0"=4, "axis1"=2]>\n'
        '  #sdy.sharding<@mesh, [{"axis0"}, {}]>',
    ]


def test_the_names_of_a_mesh_are_those_of_the_shardy_text():
    assert '<["data"=4, "model"=2]>' in page(SPEC, "8,64", "data=4,model=2")


@pytest.mark.parametrize(
    "partitions",
    [("data", None), (None, "data"), (("model", "data"),), ("model", "data"), ()],
)
def test_a_partition_spec_lies_where_jax_puts_it(partitions):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(*partitions))
    text = f"P({', '.join(map(repr, partitions))})"
    result = page(text, "8,16", "data=4,model=2")
    assert picture(sharding, (8, 16)) in result
    assert result.startswith(f"{text} on a mesh of data=4, model=2\nShardingSpec(")


@given(specs_and_shapes(max_devices=12))
def test_any_spec_is_shown(spec_and_shape):
    spec, shape = spec_and_shape
    text = page(repr(spec), repr(shape))
    assert picture(spec, shape) in text
    outside = spec.stacked()
    assert f"\nHLO\n  {outside.hlo_sharding()}\n" in text
    assert "\n  ".join(["Shardy", *outside.sdy().splitlines()]) in text
    assert ("have no Unstacked" in text) == ("Unstacked" in repr(spec))
    fields = text.partition("OpSharding proto\n")[2].partition("\n\n")[0]
    kind = outside.hlo_sharding().to_proto().type.name
    assert fields.startswith(f"  type: {kind}")


def test_a_large_mesh_is_shortened():
    text = page("P(('a', 'b'), 'c')", "4096,64", "a=64,b=64,c=4")
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize("shape", ["8,64", " ( 8 , 64 ) "])
@pytest.mark.parametrize("mesh", ["data=4,model=2", " data = 4 , model=2"])
def test_shapes_and_meshes_may_have_spaces(shape, mesh):
    assert page(SPEC, shape, mesh).splitlines()[2].startswith("(8, 64) on 8 devices")


@pytest.mark.parametrize(
    "spec",
    [
        "jax.sharding.PartitionSpec('x')",
        "PartitionSpec('x')",
        "sm.ShardingSpec([sm.Chunked([2])], mesh_mapping=[sm.ShardedAxis(axis=0)])",
    ],
)
def test_ways_to_write_a_spec(spec):
    assert "{devices=[2]<=[2]}" in page(spec, "4", "x=2")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["P('x')", "--shape", "4"], "a PartitionSpec names the axes of a mesh"),
        (
            ["P('z')", "--shape", "4", "--mesh", "x=2"],
            "z of .* is not found in mesh",
        ),
        (["P('x')", "--shape", "3", "--mesh", "x=2"], "into 2 equal shards"),
        ([SPEC, "--shape", "8"], r"shape \(8,\) has 1 dimensions, but"),
        ([SPEC, "--shape", "8,x"], "--shape needs whole numbers, such as 8,64, got"),
        ([SPEC], "the following arguments are required: --shape"),
        ([SPEC, "--shape", "8,64", "--mseh", "x=2"], "unrecognized arguments: --mseh"),
        ([SPEC, "--shape", "8,64", "--mesh", "x=8"], r"has the shape \(8,\), but the"),
        ([SPEC, "--shape", "8,64", "--mesh", "x"], "--mesh needs a name=size for each"),
        ([SPEC, "--shape", "8,64", "--mesh", "x=2,x=2"], "names that differ"),
        (["Chunked(4)", "--shape", "8"], r"must be a ShardingSpec or a PartitionSpec"),
        (["Chunked(0)", "--shape", "8"], "a number of chunks in Chunked must be at"),
        (["ShardingSpec((", "--shape", "8"], "cannot be read: '[(]' was never closed"),
        (["__import__('os')", "--shape", "8"], "'__import__' is not defined"),
        ([SPEC, "--shape", "8,64", "--two\nlines"], "arguments: --two lines$"),
    ],
)
def test_refusals(arguments, reason):
    given = arguments.split(" ") if isinstance(arguments, str) else arguments
    assert re.search(reason, refusal(main, *given))


@pytest.mark.parametrize("depth", [250, 5000])
@pytest.mark.parametrize("opening", ["(", "-"])
def test_depth_is_refused(opening, depth):
    """Python's own parser gives up in several ways."""
    text = f"P({opening * depth}1{')' * opening.count('(') * depth})"
    said = refusal(main, text, "--shape", "8")
    assert len(said) < 300


def test_odd_strings_give_no_warning():
    """Python warns of the backslash, which here is an error."""
    assert "\\\\d" in page(r"P('\d')", "2", r"\d=1")


def test_too_many_devices_are_refused_before_any_work():
    text = "ShardingSpec((), (Replicated(10**30),))"
    assert f"at most {MOST_DEVICES:,}" in refusal(main, text, "--shape", "()")


def test_too_many_devices_of_a_mesh_are_refused_before_jax_sees_them():
    assert refusal(main, "P('x')", "--shape", "4", "--mesh", "x=99999999999") == (
        "the mesh has 99,999,999,999 devices, and picture draws at most 1,048,576"
    )


def pieces_of_text():
    """Text that is nearly right, or not at all."""
    words = [
        *("P", "ShardingSpec", "Chunked", "Unstacked", "NoSharding", "ShardedAxis"),
        *("Replicated", "(", ")", ",", "[", "]", "{", "}", "'x'", "None", "1", "-1"),
        *("4", "0.5", "=", ":", "lambda", " ", "\n", "\\", "'", "x.y", "\0"),
        *("True", "...", "f'{x}'", "b'x'", "1j", "10" * 9, "\udcff", "é"),
    ]
    return st.one_of(
        st.text(max_size=20), st.lists(st.sampled_from(words)).map("".join)
    )


@given(
    spec=st.one_of(
        pieces_of_text(), st.sampled_from([SPEC, "P('x')", "P(('x', 'y'))"])
    ),
    shape=st.one_of(pieces_of_text(), st.sampled_from(["8,64", "8", "()"])),
    mesh=st.one_of(st.none(), pieces_of_text(), st.sampled_from(["x=2", "x=4,y=2"])),
)
def test_no_input_gives_a_traceback(spec, shape, mesh):
    arguments = [spec, f"--shape={shape}"] + (
        [] if mesh is None else [f"--mesh={mesh}"]
    )
    result = call(main, *arguments)
    assert (result.returncode, bool(result.stderr)) in [(0, False), (2, True)]
    assert result.stderr.count("\n") == (result.returncode == 2)
