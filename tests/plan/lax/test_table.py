"""The page about plans lists the rules that there are."""

import pathlib
import re

import pytest

from shardmap.plan.lax.table import TABLE, by_kind
from shardmap.plan.notation import rules_of
from tests.plan.plan_programs import SINGLE

RULES = by_kind()  # Before any test registers a collective.
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "plan.md"


def listed():
    rows = re.findall(r"^\| ([^|]*) \| (`[^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    return {kind: set(re.findall(r"`([^`]*)`", names)) for kind, names in rows}


@pytest.mark.parametrize("kind", RULES)
def test_the_page_lists_the_rules_of_a_kind(kind):
    mine, told = set(RULES[kind]), listed()[kind]
    assert mine <= told
    # What is told besides is of another JAX, and has no rule of another kind here.
    assert not (told - mine) & {str(q) for q in TABLE.makers}


def test_the_page_has_no_other_kinds():
    assert listed().keys() == RULES.keys()


@pytest.mark.parametrize("name", SINGLE)
def test_the_rules_of_every_program_can_be_printed(name):
    program = SINGLE[name]
    for line in rules_of(program.fun, *program.args).splitlines():
        assert re.fullmatch(r"[\w\- ]+: (\(\w+\)|.* -> .*)", line), line
