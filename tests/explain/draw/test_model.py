"""A model with an optimiser is two screens of text, and a page that one overlooks."""

import re

import pytest

from shardmap.explain.draw.html import page as html_page
from shardmap.explain.draw.page import page
from tests.explain import transformer
from tests.explain.draw.browser import looked_at, needs_browser

LAYOUTS = ["data", pytest.param("data, model", marks=pytest.mark.deep)]
TWO_SCREENS = 100


@pytest.fixture(scope="module", params=LAYOUTS)
def report(request):
    return transformer.explained(request.param)


def test_the_text_is_two_screens(report):
    assert len(page(report, 80).splitlines()) <= TWO_SCREENS


def test_every_collective_has_the_line_and_the_cause_that_are_its_own(report):
    """XLA sends the gradients as one, and says of that only one line."""
    assert len(report.collectives) > 8
    places = {each.source.partition(" ")[0] for each in report.collectives}
    assert len(places) > 4
    for each in report.collectives:
        assert each.source.startswith("tests/explain/transformer.py:"), each
        assert re.match("(reduce_|dot_general |scatter-add )", each.cause), each
        assert ")" not in each.cause.partition(" ")[0], each


def test_an_advice_is_given_once(report):
    text = page(report, 200)
    assert text.count("The arrays' shardings say how many devices") == 1
    assert text.count("Cut another dimension than the one it goes over.") == 1
    assert html_page(report).count("Cut another dimension than the one it goes") == 1


def test_long_types_are_shortened(report):
    assert max(len(each.type) for each in report.largest) < 100


@pytest.mark.deep
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(report, scheme, tmp_path):
    found = looked_at([html_page(report)], (390, 1400), scheme, tmp_path)
    for width, (seen,) in found.items():
        # The probe has looked at contrasts, and at what sticks out.
        assert seen["findings"] == [], width
        assert seen["width"] == width
        assert seen["contrast"] >= 4.5
        assert seen["height"] < 5000
