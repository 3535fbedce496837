"""Comparing meshes, and two versions of a program."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.explaining import api, chips, report


def layer(mesh):
    """A product whose rows are of "data" and whose columns are of "model"."""

    def array(*spec):
        layout = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct((4, 64), np.float32, sharding=layout)

    def step(x, w):
        return (x @ w.T).sum()

    return step, (array("data"), array(None, "model"))


def test_every_way_to_lay_the_devices_is_a_row(capsys):
    comparison = sm.compare_meshes(layer)
    meshes = [dict(row.mesh) for row in comparison.rows]
    assert sorted(mesh["data"] for mesh in meshes) == [1, 2, 4, 8]
    assert all(mesh["data"] * mesh["model"] == 8 for mesh in meshes)
    # Rows of 4 are not 8 shards.
    *rows, last = comparison.rows
    assert dict(last.mesh) == {"data": 8, "model": 1}
    assert (last.report, last.fits) == (None, False)
    assert re.search(r"divisible by 8|partitioned 8 times", last.error)
    assert [row.report.mesh for row in rows] == [row.mesh for row in rows]
    # What is sent grows with the devices that share a product.
    assert [dict(row.mesh)["model"] for row in rows] == [2, 4, 8]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 4 + 3
    assert re.fullmatch(r"compare_meshes: data 8, model 1, \d+ s", told[0])
    assert comparison.best is rows[0]
    assert not any(row.is_quick for row in rows)


def test_a_comparison_is_a_table_a_page_and_json(tmp_path):
    comparison = sm.compare_meshes(layer, axes=("data", "model"))
    text = str(comparison)
    assert text.startswith("layer: 4 meshes, data x model, of cpu, 1 host of 8;")
    assert "Best: data 4, model 2, which sends " in text
    assert repr(comparison) == "<MeshComparison of layer: 4 meshes>"
    comparison.save(tmp_path / "meshes.html")
    page = (tmp_path / "meshes.html").read_text()
    # Each row opens its report.
    assert len(re.findall(r"<summary>\d x \d</summary>", page)) == 3
    assert "Arrays" in page
    assert "Arrays" not in text
    assert "<summary>4 x 2</summary>" in comparison._repr_html_()
    (*_, last) = json.loads(json.dumps(comparison.to_dict()))["rows"]
    assert (last["mesh"], last["report"]) == ({"data": 8, "model": 1}, None)


@pytest.mark.parametrize(
    ("program", "options", "error", "message"),
    [
        (3, {}, TypeError, r"takes a function of a mesh, got 3"),
        (layer, {"axes": ("a", "a")}, ValueError, r"must be different names, such"),
        (layer, {"axes": ()}, ValueError, r"must be different names, such"),
        (lambda mesh: 5, {}, TypeError, r"must return a function and a tuple of its"),
        (lambda mesh: (5, ()), {}, TypeError, r"must return a function and a tuple"),
        (layer, {"devices": "v5e:3x5"}, ValueError, r"Did you mean 'v5e:4x4'"),
        (layer, {"axes": "rows"}, ValueError, r"axis: data of .* is not found in mesh"),
    ],
)
def test_what_cannot_be_compared_is_refused(program, options, error, message):
    with pytest.raises(error, match=message):
        sm.compare_meshes(program, **options)


def training(mesh):
    """A step whose batch all devices share, and its state those along "model"."""

    def array(*spec):
        layout = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct((1024, 1024), np.float32, sharding=layout)

    def step(state, x):
        w, momentum = state
        slope = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
        momentum = 0.9 * momentum + slope
        return w - 0.1 * momentum, momentum

    w = array("model")
    outs = (w.sharding, w.sharding)
    fun = jax.jit(step, donate_argnums=0, out_shardings=outs)
    return fun, ((w, w), array(("data", "model")))


def test_the_state_is_shared_only_where_it_has_no_room(monkeypatch):
    def compared(memory):
        """With the figures of GPUs of so much memory."""
        chip = chips.CHIPS["NVIDIA H100 80GB HBM3"]._replace(memory=memory)
        for module in (api, chips, report):
            monkeypatch.setattr(module, "CHIPS", {**known, "cpu": chip})
        return sm.compare_meshes(training)

    known = chips.CHIPS
    comparison = compared(80 << 30)
    names = [row.name for row in comparison.rows]
    assert names == [f"data {8 // k}, model {k}" for k in (1, 2, 4, 8)]
    assert all(row.fits for row in comparison.rows)
    peaks = [row.report.peak_bytes for row in comparison.rows]
    assert peaks[1] < peaks[0]
    comparison = compared(peaks[0] - 1)
    assert [row.name for row in comparison.rows] == [*names[1:], names[0]]
    assert [row.fits for row in comparison.rows] == [True] * 3 + [False]
    assert comparison.rows[-1].report.fits is False
    assert comparison.reason.startswith("Best: data 4, model 2, which sends ")
    assert "Without room: 1 of 4 meshes; data 8, model 1 needs" in comparison.reason


def test_two_versions_differ_in_what_is_told():
    mesh = sm.make_mesh({"data": 8})
    rows = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)
    before = sm.explain(jax.jit(lambda x: x * 2))(x)
    after = sm.explain(jax.jit(lambda x: x.sum(0)))(x)
    text = str(before.compare(after))
    assert text.startswith("<lambda>: compared with <lambda>")
    assert re.search(r"Sent +0 B +448 B", text)
    assert re.search(
        r"all-reduce over 'data' in .*Before -, After 1 x, 448 B",
        text.replace("\n   ", ""),
    )
    assert "Nothing differs." in str(before.compare(before))
    assert "<table" in before.compare(after)._repr_html_()
