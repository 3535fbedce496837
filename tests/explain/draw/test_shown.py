"""What a notebook shows of specs, array layouts and plans."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from tests.explain import explanations
from tests.explain.draw.browser import looked_at, needs_browser
from tests.explain.draw.test_html import Nesting


def centred(x, w):
    h = jnp.tanh(x @ w)
    c = h - h.mean(0, keepdims=True)
    return (c**2).sum(1), jnp.cumsum(c, 0)


def made(cut=12):
    x, w = np.ones((96, 16), np.float32), np.ones((16, 8), np.float32)
    return sm.plan(centred, x, w, in_slices=({0: cut}, None))


@pytest.fixture(scope="module")
def shown():
    return {
        "spec": explanations.ROWS,
        "scalar": explanations.SCALAR,
        "cube": explanations.CUBE,
        "array": explanations.array(explanations.BOTH, (16, 64)),
        "unknown array": explanations.array(None, (16, 64)),
        "plan": made(),
        "plan of many": made(48),
        "explained plan": sm.explain(made()),
    }


def test_all_are_one_element_that_is_whole(shown):
    for name, value in shown.items():
        text = value._repr_html_()
        assert text.startswith('<div class="shardmap-report">'), name
        assert "script" not in Nesting(text).tags, name


def test_a_spec_says_what_it_is(shown):
    text = shown["spec"]._repr_html_()
    assert "Dimension 0 in 4 shards, each on 2 devices." in text
    assert "dimension 0 down" in text


def test_a_plan_shows_each_stage_with_its_numbers(shown):
    plan = shown["plan"]
    text = plan._repr_html_()
    assert len(plan.stage_costs) == len(plan.stages) == 4
    for cost, stage in zip(plan.stage_costs, plan.stages, strict=True):
        assert cost.shards == stage.num_shards
        assert f"Stage {cost.number} <span" in text
    assert sum(cost.shards for cost in plan.stage_costs) == plan.num_shards
    assert max(cost.shard_bytes + cost.kept_bytes for cost in plan.stage_costs) == (
        plan.peak_bytes
    )
    assert "12 shards, " in text
    assert "Reads args[0] once, args[1] 12 times." in text
    assert "axis 0: asked to be cut into 12 pieces of 8" in text
    assert text == shown["explained plan"]._repr_html_()


def test_many_shards_are_shortened(shown):
    assert "... 24 more" in shown["plan of many"]._repr_html_()


def widths(text, stage):
    """Of the boxes of a stage's shards."""
    drawn = text.split(f"Stage {stage} <span")[1].split("<svg")[1].split("</svg>")[0]
    return [float(w) for w in re.findall(r'y="1" width="([\d.]+)"', drawn)]


@pytest.mark.parametrize(("cut", "drawn"), [(5, 5), (40, 24)])
def test_a_last_shorter_shard_is_drawn_shorter(cut, drawn):
    x = np.ones((cut * 2 - 1, 64), np.float32)
    plan = sm.plan(lambda x: x * 2, x, in_slices={0: cut})
    assert len(plan.stage_costs[0].moved) == drawn
    *others, last = widths(plan._repr_html_(), 0)
    assert len(others) == drawn - 1
    assert {round(width / last, 1) for width in others} == {2.0}


def test_a_plan_has_a_short_repr(shown):
    text = repr(shown["plan"])
    assert text.startswith("<ShardPlan: 49 shards in 4 stages")
    assert "\n" not in text


@pytest.mark.deep
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_they_are_readable_in_a_browser(shown, scheme, tmp_path):
    pages = [f"<!DOCTYPE html>{value._repr_html_()}" for value in shown.values()]
    for found in looked_at(pages, (390, 1400), scheme, tmp_path).values():
        for name, report in zip(shown, found, strict=True):
            assert report["findings"] == [], name
            assert report["height"] < 5000, name
