"""An explanation is its report, and prints, shows and saves it."""

import dataclasses
import inspect
import io
import json
import pickle
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap import Explanation
from shardmap.explaining.report import Report
from tests.explain import explanations


def test_it_has_the_fields_of_a_report_and_no_other():
    names = [field.name for field in dataclasses.fields(Report)]
    fields = dataclasses.fields(Explanation)
    plain = [field.name for field in fields if field.metadata.get("plain", True)]
    assert plain == names
    # The function, for `measure`.
    assert {field.name for field in fields} - {*plain} == {"call"}
    documented = inspect.getdoc(Explanation).partition("Attributes:")[2]
    assert [name for name in names if f"\n  {name}: " not in documented] == []


@pytest.mark.parametrize("name", explanations.BY_NAME)
def test_it_prints_shows_and_saves_itself(name, tmp_path):
    explanation = explanations.BY_NAME[name]()
    parts = {
        "Collectives, on one device": explanation.collectives,
        "Notes": explanation.notes,
    }
    sections = [title for title, part in parts.items() if part]
    explanation.save(tmp_path / "report.html")
    saved = (tmp_path / "report.html").read_text(encoding="utf-8")
    shown = explanation._repr_html_()
    assert [title for title in sections if title not in str(explanation)] == []
    for text in (saved, shown):
        assert [each for each in sections if f"<h2>{each}</h2>" not in text] == []
    assert shown.partition("</style>")[2].removesuffix("\n</div>") in saved


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stdout", [lambda: None, closed, object])
def test_it_is_text_without_a_terminal(stdout, monkeypatch):
    explanation = explanations.with_everything()
    text = str(explanation)
    monkeypatch.setattr(sys, "stdout", stdout())
    assert str(explanation) == text


def test_it_is_plain_data():
    explanation = explanations.with_everything()
    assert pickle.loads(pickle.dumps(explanation)) == explanation
    data = explanation.to_dict()
    assert json.loads(json.dumps(data)) == data
    sent = explanation.collectives[0].link_bytes
    assert data["collectives"][0]["link_bytes"] == sent == 100 * 7168
    assert data["axes"][0]["layout"] == explanation.axes[0].layout
    with pytest.raises(
        dataclasses.FrozenInstanceError, match="cannot assign to field 'name'"
    ):
        explanation.name = "another"


def test_what_is_given_has_a_short_repr():
    x = jnp.ones((16, 4), np.float32)
    report = sm.explain(sm.spmap(lambda x: x - lax.pmean(x, "i"), "i"))(x)
    assert repr(report) == f"<Explanation of <lambda>: {report.summary}>"
    measured = report.measure(x, repeats=2)
    assert repr(measured) == str(measured)
    made = sm.plan(lambda x: x * 2, x, in_slices={0: 4})
    assert repr(sm.explain(made)) == "<Explanation of <lambda>: 4 shards>"
    assert len(repr(sm.explain(made))) < 120


def test_parts_have_reprs_that_one_can_read():
    share = sm.spmap(lambda x: x / lax.psum(x, "i"), "i")
    report = sm.explain(share)(np.ones((16, 4), np.float32))
    parts = (report.axes[0], report.inputs[0], report.collectives[0])
    assert list(map(repr, parts)) == [
        "<axis 'i' of 16 = 8 devices x 2 vectorised x 1 step (spmap)>",
        "<input x, float32[16,4], dimension 0 over 'i' in 8 shards>",
        "<all-reduce psum over 'i', f32[4] -> f32[4]>",
    ]
