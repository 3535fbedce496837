"""How inputs and outputs are sharded, in words and as specs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.explain.read import arrays
from shardmap.sharding.spec import Chunked, Replicated, ShardedAxis, ShardingSpec
from tests.shared_jaxprs import at_most, nested

MESH = sm.make_mesh({"data": 4, "model": 2})
AVAL = jax.ShapeDtypeStruct((16, 8), np.float32)


def test_a_layout_has_the_bytes_of_a_piece_and_of_all():
    sharding = NamedSharding(MESH, P("data"))
    (found,) = arrays.array_layouts("input", ["x"], [AVAL], [sharding])
    assert found.spec == ShardingSpec.from_sharding(sharding, (16, 8))
    assert (found.shard_shape, found.shard_bytes, found.bytes) == ((4, 8), 128, 512)
    assert (found.num_devices, found.copies) == (8, 2)
    assert found.layout == "dimension 0 in 4 shards, each on 2 devices"


PERMUTED = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4).T, ("data", "model"))
LAST = sm.make_mesh({"i": 4}, jax.devices()[4:])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("fun", "ids"),
    [
        (sm.spmap(lambda x: x * 2), ()),
        (sm.spmap(lambda x: x * 2, devices=jax.devices()[4:]), (4, 5, 6, 7)),
        (
            jax.jit(lambda x: x * 2, in_shardings=NamedSharding(PERMUTED, P("data"))),
            (0, 4, 1, 5, 2, 6, 3, 7),
        ),
        (
            jax.shard_map(
                lambda x: x * 2, mesh=LAST, in_specs=P("i"), out_specs=P("i")
            ),
            (4, 5, 6, 7),
        ),
    ],
)
def test_pictures_have_the_numbers_of_the_devices(fun, ids):
    report = sm.explain(fun)(AVAL)
    assert report.devices == ids
    assert [array.devices for array in report.arrays] == [ids, ids]
    if ids:
        x = jax.jit(fun, out_shardings=None)(np.ones((16, 8), np.float32))
        # The first rows are on the first of them.
        first = {
            d.id
            for d, index in x.sharding.devices_indices_map(x.shape).items()
            if index[0].start in (0, None)
        }
        drawn = re.search(r"0:\d+ \| *([\d,-]+) *\|", str(report))
        assert {*map(int, drawn[1].split(","))} == first
        page = report._repr_html_().replace("<wbr>", "")
        boxes = re.findall(r'class="shard [^>]*>([^<]*)', page)
        assert {*map(str, ids)} == {n for box in boxes for n in box.split(",")}


@pytest.mark.parametrize("word", [arrays.UNUSED, arrays.UNKNOWN])
def test_where_nobody_knows_a_word_says_so(word):
    (found,) = arrays.array_layouts("output", ["result"], [AVAL], [word])
    assert (found.spec, found.shard_shape, found.shard_bytes) == (None, None, None)
    assert (found.num_devices, found.copies, found.layout) == (None, None, word)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ShardingSpec((None,), ()), "on one device"),
        (ShardingSpec((None,), (Replicated(8),)), "replicated on 8 devices"),
        (ShardingSpec((Chunked(8),), (ShardedAxis(0),)), "dimension 0 in 8 shards"),
        (
            ShardingSpec((Chunked(2), Chunked((2, 2))), map(ShardedAxis, range(3))),
            "dimension 0 in 2 shards, dimension 1 in 4 shards",
        ),
    ],
)
def test_a_spec_in_words(spec, words):
    assert arrays.describe(spec) == words


def test_names_are_those_of_the_parameters():
    def fun(x, w, *, k):
        return x

    info = (AVAL, {"a": AVAL}), {"k": AVAL}
    assert arrays.input_names(fun, info, [0, 1]) == ["x", "w['a']", "k"]
    # Which parameter a position is of is not known where some are static.
    assert arrays.input_names(fun, info, [0]) == ["args[0]", "args[1]['a']", "k"]


def test_a_program_over_an_abstract_mesh_says_how_its_maps_want_arrays():
    mesh = jax.sharding.AbstractMesh((16,), ("i",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()
    )
    x = jax.ShapeDtypeStruct((16, 3), np.float32)
    for fun in (mapped, jax.jit(mapped)):
        ins, outs = arrays.shardings_in(jax.make_jaxpr(fun)(x).jaxpr)
        assert [s.spec for s in (*ins, *outs)] == [P("i"), P()]
    ins, outs = arrays.shardings_in(
        jax.make_jaxpr(lambda x: mapped(x + 1) * 2)(x).jaxpr
    )
    assert (ins, outs) == ((arrays.UNKNOWN,), (arrays.UNKNOWN,))


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (NamedSharding(MESH, P()), 8),
        (ShardingSpec((None,), (Replicated(4),)), 4),
        (arrays.UNUSED, 1),
    ],
)
def test_how_many_devices_a_layout_has(layout, count):
    assert arrays.device_count(layout) == count


def test_what_is_shared_is_read_once(monkeypatch):
    monkeypatch.setattr(arrays, "jaxprs_in", at_most(200, arrays.jaxprs_in))
    mapped = sm.spmap(jnp.sin)
    ins, outs = arrays.shardings_in(nested(30, lambda x: mapped(x), np.ones(8)))
    assert [sharding.num_devices for sharding in (*ins, *outs)] == [8, 8]
