"""The page about plans lists the rules that there are."""

import pathlib
import re

from shardmap.plan.lax.table import TABLE, by_kind

RULES = by_kind()  # Before any test registers a collective.
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "plan.md"


def listed():
    rows = re.findall(r"^\| ([^|]*) \| (`[^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    return {kind: set(re.findall(r"`([^`]*)`", names)) for kind, names in rows}


def test_the_page_lists_the_rules_of_each_kind():
    page = listed()
    assert page.keys() == RULES.keys()
    for kind, mine in RULES.items():
        assert not set(mine) - page[kind], kind
        # What is told besides is of another JAX, and has no rule of another kind here.
        assert not (page[kind] - set(mine)) & {str(q) for q in TABLE.makers}
