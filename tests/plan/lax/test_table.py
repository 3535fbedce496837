"""The page about plans lists the rules that there are."""

import pathlib
import re

from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.map_primitive import MapPrimitive
from shardmap.planning.engine.nodes import PlanPrimitive
from shardmap.planning.lax.table import KINDS, TABLE

# Before any test registers a collective.
RULES = {
    kind: {str(q) for q in rules if not isinstance(q, PlanPrimitive)}
    for kind, rules in {
        **KINDS,
        "whole or refused": {*KINDS["whole or refused"], *COLLECTIVES},
        "calls": TABLE.jaxprs,
        "decomposed": {q for q in TABLE.rewrites if q is not MapPrimitive},
    }.items()
}
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "plan_reference.md"


def listed():
    rows = re.findall(r"^\| ([^|]*) \| (`[^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    return {kind: set(re.findall(r"`([^`]*)`", names)) for kind, names in rows}


def test_the_page_lists_the_rules_of_each_kind():
    page = listed()
    assert page.keys() == RULES.keys()
    for kind, mine in RULES.items():
        assert not mine - page[kind], kind
        # What is told besides is of another JAX, and has no rule of another kind here.
        assert not (page[kind] - mine) & {str(q) for q in TABLE.makers}
