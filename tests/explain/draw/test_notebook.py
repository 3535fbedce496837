"""Reports in a notebook: its theme counts, not the system's, and nothing leaks in."""

import re

import pytest

from shardmap.explain.draw.html import fragment
from shardmap.explain.draw.style import DARK, LIGHT
from tests.explain import explanations
from tests.explain.draw.browser import looked_at, needs_browser

WIDTHS = (390, 1400)
COLOURS = {"light": LIGHT, "dark": DARK}
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
        s.borderBottomWidth, s.listStyleType, s.whiteSpace, s.fill].join(" | ");
    }),
})"""


def other(scheme):
    return {"light": "dark", "dark": "light"}[scheme]


def rgb(colour):
    return f"rgb({', '.join(str(int(colour[k : k + 2], 16)) for k in (1, 3, 5))})"


def notebook(theme):
    """The page that nbconvert's template of JupyterLab makes of a report."""
    nbformat = pytest.importorskip("nbformat")
    nbconvert = pytest.importorskip("nbconvert")
    shown = {"text/html": fragment(explanations.with_everything())}
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
    report = fragment(explanations.with_everything())
    return f"<!DOCTYPE html><html lang=en><meta charset=utf-8><body {body}>{report}"


@pytest.mark.deep
@needs_browser
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("theme", COLOURS)
def test_a_notebook_page_looks_as_a_page_of_its_own(theme, tmp_path):
    pages = [notebook(theme), bare(BODIES["JupyterLab"][theme])]
    found = looked_at(pages, WIDTHS, other(theme), tmp_path, STYLES)
    for width, (there, alone) in found.items():
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
    for found in looked_at(pages, WIDTHS, system, tmp_path).values():
        for (theme, body), report in zip(themes, found, strict=True):
            # The probe has looked at contrasts, and at what sticks out.
            assert report["findings"] == [], body
            assert report["texts"] > 100, theme
    styles = looked_at(pages, WIDTHS[:1], system, tmp_path, STYLES)[WIDTHS[0]]
    for (theme, body), report in zip(themes, styles, strict=True):
        assert rgb(COLOURS[theme]["back"]) in report["styles"][0], body
        assert rgb(COLOURS[theme]["text"]) in report["styles"][0], body


@needs_browser
def test_a_leak_is_seen(tmp_path):
    """What counts for more than all of a report's own would change it."""
    leak = "<style>.shardmap-report td { text-align: right !important }</style>"
    pages = [bare("") + leak, bare("")]
    ((there, alone),) = looked_at(pages, (1400,), "light", tmp_path, STYLES).values()
    assert there["styles"] != alone["styles"]
