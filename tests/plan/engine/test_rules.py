"""Cuts that meet, reasons, and what the engine may ask of any rule."""

import pathlib
import re

import jax.numpy as jnp

from shardmap.plan.engine import rules
from shardmap.plan.engine.rules import Cut, Forward, Need, Reason, Rule, meet
from tests.plan.engine.test_factors import dot, node_of
from tests.plan.engine.toys import CUT, NOT

PLAN = pathlib.Path(rules.__file__).parent.parent


class Code(Rule):
    """A rule that is no data."""

    def __init__(self):
        self.node = node_of(jnp.dot, (4, 6), (6, 5))

    def forward(self, cuts):
        return Forward([[NOT, NOT]])

    def links(self):
        return []

    def backward(self, boxes, loops):
        return Need((None, None))

    def emit(self, values, static, starts):
        return []


def test_a_soft_cut_gives_way():
    soft = Cut((1, 3, 5), True, frozenset({(1, 0)}))
    assert meet([CUT, soft]).at == CUT.at
    assert meet([soft, Cut((2,), True)]).at == soft.at
    assert meet([NOT, soft]) == soft
    assert meet([]) == NOT


def test_reasons_print_their_remedy():
    assert str(Reason("it is so", "do that")) == "it is so (do that)"
    assert str(Reason("it is so")) == "it is so"


def test_a_rule_that_is_no_data_answers_all_that_is_asked():
    rule = Code()
    assert rule.elements() == 4 * 6 + 6 * 5 + 4 * 5
    assert rule.fraction((), [(2, 6), (6, 5)]) == (12 + 30, 24 + 30)
    assert rule.fraction((), [None, (3, 5)]) == (15, 30)
    assert rule.windows() == []
    assert rule.wholes == {}
    assert rule.passes("add", frozenset({0})) is None
    assert str(rule) == "(code)"


def test_a_shard_has_a_fraction_of_the_pairs_of_a_product():
    need = dot().backward([((0, 4), (1, 3))], {"k": (2, 4)})
    assert dot().fraction(need.static, [(4, 2), (2, 2)]) == (4 * 2 * 2, 4 * 6 * 5)


def test_rules_are_asked_and_not_looked_into():
    """Which class a rule is of matters where only data says which axes are rows."""
    look = re.compile(r"isinstance\([^)]*\bFactors\b|getattr\(\w*rule")
    found = {p.name for p in PLAN.rglob("*.py") if look.search(p.read_text())}
    assert found == {"running.py"}
