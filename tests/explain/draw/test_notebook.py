"""What a notebook shows: reports, specs, array layouts and plans.

The theme of the notebook counts, not the system's, and nothing leaks in."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.explaining.draw.style import PALETTE
from tests.explain import explanations, transformer
from tests.explain.draw.browser import looked_at, needs_browser
from tests.explain.draw.test_html import Nesting, labels

WIDTHS = (390, 1400)
COLOURS = {
    scheme: {name: pair[k] for name, pair in PALETTE.items()}
    for k, scheme in enumerate(("light", "dark"))
}
# How the notebooks mark the body of their page.
BODIES = {
    "JupyterLab": {
        "light": 'data-jp-theme-light="true"',
        "dark": 'data-jp-theme-light="false"',
    },
    "VS Code": {
        "light": 'class="vscode-light"',
        "dark": 'class="vscode-dark"',
        "high contrast": 'class="vscode-high-contrast"',
    },
}
# What every element of a report looks like, and how wide the page is.
STYLES = """(doc) => ({
  wide: doc.documentElement.scrollWidth - doc.documentElement.clientWidth,
  styles: [...doc.querySelectorAll(".shardmap-report, .shardmap-report *")]
    .filter((e) => e.tagName !== "STYLE")
    .map((e) => {
      const s = doc.defaultView.getComputedStyle(e);
      return [e.tagName, s.color, s.backgroundColor, s.fontSize, s.fontFamily,
        s.fontWeight, s.lineHeight, s.textAlign, s.float, s.display, s.position,
        s.marginTop, s.marginBottom, s.paddingTop, s.paddingLeft, s.borderTopWidth,
        s.borderBottomWidth, s.listStyleType, s.whiteSpace].join(" | ");
    }),
})"""


def centred(x, w):
    h = jnp.tanh(x @ w)
    c = h - h.mean(0, keepdims=True)
    return (c**2).sum(1), jnp.cumsum(c, 0)


def made():
    x, w = np.ones((96, 16), np.float32), np.ones((16, 8), np.float32)
    return sm.plan(centred, x, w, in_slices=({0: 12}, None))


@pytest.fixture(scope="module")
def shown():
    return {
        "spec": explanations.ROWS,
        "scalar": explanations.SCALAR,
        "cube": explanations.CUBE,
        "picture": sm.picture(explanations.CUBE, (800, 64, 3, 5)),
        "plan": made(),
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
    # It has no shape: shards are numbered. The picture of an array has its ranges.
    rows = explanations.ROWS.named_sharding(jax.devices())
    array = jax.device_put(jnp.ones((8, 3)), rows)
    for spec in (explanations.ROWS, sm.spec_of(array)):
        assert labels(spec) == list("0123")
    assert labels(sm.picture(array)) == ["0:2", "2:4", "4:6", "6:8"]


def test_a_plan_shows_each_stage_with_its_numbers(shown):
    plan = shown["plan"]
    text = plan._repr_html_()
    assert len(plan.stage_costs) == len(plan.stages) == 4
    for cost, stage in zip(plan.stage_costs, plan.stages, strict=True):
        assert cost.shards == stage.num_shards
        assert f"stage {cost.number}: {cost.shards} shards make" in text
    assert sum(cost.shards for cost in plan.stage_costs) == plan.num_shards
    assert max(cost.shard_bytes + cost.kept_bytes for cost in plan.stage_costs) == (
        plan.peak_bytes
    )
    assert "reads args[0] once, args[1] 12 times" in text
    assert "axis 0: cut into 12 pieces of 8" in text
    assert text == shown["explained plan"]._repr_html_()


def test_a_plan_has_a_short_repr(shown):
    text = repr(shown["plan"])
    assert text.startswith("<ShardPlan: 49 shards in 4 stages")
    assert "\n" not in text


@pytest.mark.deep
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_they_are_readable_in_a_browser(shown, scheme, tmp_path):
    pages = [f"<!DOCTYPE html>{value._repr_html_()}" for value in shown.values()]
    pages.append(transformer.explained("data, model")._repr_html_())
    for width, answers in looked_at(pages, WIDTHS, scheme, tmp_path).items():
        most = 4000 if width == max(WIDTHS) else 5000  # On a phone.
        for name, report in zip([*shown, "model"], answers, strict=True):
            assert report["findings"] == [], name
            assert report["height"] < most, (name, width)


def other(scheme):
    return {"light": "dark", "dark": "light"}[scheme]


def rgb(colour):
    return f"rgb({', '.join(str(int(colour[k : k + 2], 16)) for k in (1, 3, 5))})"


def notebook(theme):
    """The page that nbconvert's template of JupyterLab makes of a report."""
    nbformat = pytest.importorskip("nbformat")
    nbconvert = pytest.importorskip("nbconvert")
    shown = {"text/html": explanations.with_everything()._repr_html_()}
    cell = nbformat.v4.new_code_cell(
        "report", outputs=[nbformat.v4.new_output("display_data", shown)]
    )
    exporter = nbconvert.HTMLExporter(template_name="lab", theme=theme)
    python = {"language_info": {"name": "python", "pygments_lexer": "python"}}
    written = nbformat.v4.new_notebook(cells=[cell], metadata=python)
    text, _ = exporter.from_notebook_node(written)
    # Nothing is to be fetched.
    return re.sub(r"<script.*?</script>", "", text, flags=re.S)


def bare(body):
    report = explanations.with_everything()._repr_html_()
    return f"<!DOCTYPE html><html lang=en><meta charset=utf-8><body {body}>{report}"


@pytest.mark.deep
@needs_browser
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("theme", COLOURS)
def test_a_notebook_page_looks_as_a_page_of_its_own(theme, tmp_path):
    pages = [notebook(theme), bare(BODIES["JupyterLab"][theme])]
    answers = looked_at(pages, WIDTHS, other(theme), tmp_path, STYLES)
    for width, (there, alone) in answers.items():
        assert there["wide"] <= 0, width
        assert len(there["styles"]) > 100
        assert there["styles"] == alone["styles"], width
        assert rgb(COLOURS[theme]["back"]) in there["styles"][0]


@pytest.mark.deep
@needs_browser
@pytest.mark.parametrize("system", COLOURS)
def test_the_theme_of_the_notebook_counts(system, tmp_path):
    themes = [
        ("dark" if theme == "high contrast" else theme, body)
        for bodies in BODIES.values()
        for theme, body in bodies.items()
    ]
    pages = [bare(body) for _, body in themes]
    for answers in looked_at(pages, WIDTHS, system, tmp_path).values():
        for (theme, body), report in zip(themes, answers, strict=True):
            # The probe has looked at contrasts, and at what sticks out.
            assert report["findings"] == [], body
            assert report["texts"] > 100, theme
    styles = looked_at(pages, WIDTHS[:1], system, tmp_path, STYLES)[WIDTHS[0]]
    for (theme, body), report in zip(themes, styles, strict=True):
        assert rgb(COLOURS[theme]["back"]) in report["styles"][0], body
        assert rgb(COLOURS[theme]["text"]) in report["styles"][0], body


@pytest.mark.deep
@needs_browser
def test_a_leak_is_seen(tmp_path):
    """What counts for more than all of a report's own would change it."""
    leak = "<style>.shardmap-report td { text-align: right !important }</style>"
    pages = [bare("") + leak, bare("")]
    ((there, alone),) = looked_at(pages, (1400,), "light", tmp_path, STYLES).values()
    assert there["styles"] != alone["styles"]
