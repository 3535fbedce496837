"""The table of collectives says of each what JAX says, and all rooms read it."""

import dataclasses
import inspect
import re

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import shardmap as sm
from shardmap._jax import collectives
from shardmap._jax.collectives import ALL_COLLECTIVES, COLLECTIVES, TABLE
from shardmap.explain.read.collectives import collectives_of
from shardmap.map.collectives import reductions, rules
from shardmap.plan.lax import special

X = np.zeros((8, 8), np.float32)

USES = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pmin": lambda x: lax.pmin(x, "i"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i", tiled=True),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
    "ragged_all_to_all": None,  # Takes more than an array; see `traced`.
    "ppermute": lambda x: lax.ppermute(x, "i", [(k, (k + 1) % 8) for k in range(8)]),
    "pbroadcast": lambda x: lax.pbroadcast(x, "i", 0),
    "axis_index": lambda x: x + lax.axis_index("i").astype(x.dtype),
}


def traced(name):
    """The primitives that a use of the collective binds in a map."""
    if name == "ragged_all_to_all":
        offsets = jax.ShapeDtypeStruct((8,), np.int32)
        rows = jax.ShapeDtypeStruct((8, 8), np.float32)
        jaxpr = jax.make_jaxpr(
            lambda *args: lax.ragged_all_to_all(*args, axis_name="i"),
            axis_env=[("i", 8)],
        )(rows, rows, offsets, offsets, offsets, offsets)
    else:
        jaxpr = jax.make_jaxpr(USES[name], axis_env=[("i", 8)])(X)
    return [equation.primitive for equation in jaxpr.eqns]


def test_there_is_one_entry_for_each():
    names = [each.name for each in TABLE]
    assert sorted(names) == sorted(USES)
    assert len(ALL_COLLECTIVES) == len(TABLE) + sum(len(e.variants) for e in TABLE)
    assert all(getattr(lax, each.name) is each.function for each in TABLE)


@pytest.mark.parametrize("name", USES)
def test_an_entry_has_the_primitive_that_its_function_binds(name):
    (found,) = [q for q in traced(name) if q in COLLECTIVES]
    assert COLLECTIVES[found].name == name


@pytest.mark.parametrize("name", sorted({*USES} - {"ragged_all_to_all"}))
def test_what_a_shard_map_binds_is_known_too(name):
    """That it checks what varies makes other primitives of some of them."""
    mesh = AbstractMesh((8,), ("i",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x: jax.tree.map(lambda y: y[None], USES[name](x[0])),
        mesh=mesh,
        in_specs=PartitionSpec("i"),
        out_specs=PartitionSpec("i"),
    )
    (equation,) = jax.make_jaxpr(mapped)(np.zeros((8, 8, 8), np.float32)).jaxpr.eqns
    inside = [inner.primitive for inner in equation.params["jaxpr"].eqns]
    assert name in [ALL_COLLECTIVES[q].name for q in inside if q in ALL_COLLECTIVES]


# XLA's CPU compiler has no ragged_all_to_all, JAX no pbroadcast for it.
COMPILED = [
    each
    for each in TABLE
    if each.kind is not None
    and each.name != "ragged_all_to_all"
    and each.lowers_per_device(jax.typeof(X), "cpu")
]


@pytest.mark.parametrize("each", COMPILED, ids=lambda each: each.name)
def test_the_kind_is_what_xla_calls_it(each):
    mesh = sm.make_mesh({"i": 8})
    spec = PartitionSpec("i")
    mapped = jax.shard_map(
        lambda x: USES[each.name](x[0])[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    text = jax.jit(mapped).lower(np.zeros((8, 8, 8), np.float32)).compile().as_text()
    assert re.search(rf" {each.kind}(-start)?\(", text)


@pytest.mark.parametrize("name", ["psum_scatter", "all_gather", "all_to_all", "psum"])
def test_groups_that_differ_in_size_are_refused_where_the_entry_says_so(name):
    function = getattr(lax, name)
    (entry,) = [each for each in TABLE if each.name == name]
    given = {"split_axis": 0, "concat_axis": 0} if name == "all_to_all" else {}
    groups = [[0, 1, 2], [3]]
    mapped = sm.spmap(
        lambda x: function(x, "i", axis_index_groups=groups, **given), "i"
    )
    try:
        mapped(np.ones((4, 3), np.float32))
    except ValueError:
        refused = True
    else:
        refused = False
    assert refused == entry.of_equal_groups


def test_a_collective_that_jax_does_not_have_is_said_at_once():
    with pytest.raises(ImportError, match=r"primitive no_such, .* 0 primitives of"):
        collectives._registered("no_such")


@pytest.mark.parametrize("each", TABLE, ids=lambda e: e.name)
def test_every_room_has_what_it_needs_of_every_entry(each):
    assert each.name in rules.RULES
    assert (each.primitive in reductions.REDUCTIONS) == each.is_reduction
    rule = special.RULES[each.primitive]
    assert (rule is special.same_shape) == each.is_elementwise


def test_what_explains_reads_the_table(monkeypatch):
    """A changed entry changes what is said: nothing has the names twice."""
    changed = dataclasses.replace(collectives.PSUM, kind="a new kind")
    monkeypatch.setitem(ALL_COLLECTIVES, collectives.PSUM.primitive, changed)
    jaxpr = jax.make_jaxpr(sm.spmap(USES["psum"], "i"))(X).jaxpr
    assert [sent.kind for sent in collectives_of(jaxpr)] == ["a new kind"]


def test_attributes_are_documented():
    fields = [field.name for field in dataclasses.fields(collectives.Collective)]
    text = inspect.getdoc(collectives.Collective)
    assert [name for name in fields if f"\n  {name}: " not in text] == []
