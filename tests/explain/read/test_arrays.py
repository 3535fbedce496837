"""How inputs and outputs are sharded, in words and as specs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap import ShardingSpec

MESH = sm.make_mesh({"data": 4, "model": 2})
AVAL = jax.ShapeDtypeStruct((16, 8), np.float32)


def test_a_layout_has_the_bytes_of_a_piece_and_of_all():
    sharding = NamedSharding(MESH, P("data"))
    x = jax.ShapeDtypeStruct(AVAL.shape, AVAL.dtype, sharding=sharding)
    (layout,) = sm.explain(jnp.sin)(x).inputs
    assert layout.spec == ShardingSpec.from_sharding(sharding, (16, 8))
    assert (layout.shard_shape, layout.shard_bytes, layout.bytes) == ((4, 8), 128, 512)
    assert (layout.num_devices, layout.copies) == (8, 2)
    assert layout.layout == "dimension 0 over 'data' in 4 shards, each on 2 devices"


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
        boxes = re.findall(r'class="shard"[^>]*>([^<]*)', page)
        assert {*map(str, ids)} == {n for box in boxes for n in box.split(",")}


def test_an_argument_that_is_not_used_has_no_layout():
    report = sm.explain(lambda x, w: x + 1)(AVAL, AVAL)
    (layout,) = [each for each in report.inputs if each.path == "w"]
    assert (layout.spec, layout.shard_shape, layout.shard_bytes) == (None, None, None)
    assert (layout.num_devices, layout.copies) == (None, None)
    assert layout.layout == "not used by the program"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "replicated on 8 devices"),
        ((("data", "model"),), "dimension 0 over 'data' and 'model' in 8 shards"),
        (
            ("model", "data"),
            "dimension 0 over 'model' in 2 shards, dimension 1 over 'data' in 4 shards",
        ),
    ],
)
def test_a_layout_in_words(names, words):
    sharding = NamedSharding(MESH, P(*names))
    x = jax.ShapeDtypeStruct(AVAL.shape, AVAL.dtype, sharding=sharding)
    assert sm.explain(jnp.sin)(x).inputs[0].layout == words


def test_results_without_a_name_have_the_names_of_the_mesh():
    """XLA gives no names to what `jax.jit` of a `jax.shard_map` takes and gives."""
    mapped = jax.shard_map(
        lambda x: x * 2,
        mesh=MESH,
        in_specs=P(None, "model"),
        out_specs=P(None, "model"),
    )
    for fun in (mapped, jax.jit(mapped)):
        for array in sm.explain(fun)(AVAL).arrays:
            assert array.layout == (
                "dimension 1 over 'model' in 2 shards, each on 4 devices"
            )
