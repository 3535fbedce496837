"""Cuts that meet, and reasons."""

from shardmap.plan.engine.rules import Cut, Reason, meet
from tests.plan.engine.toys import CUT, NOT


def test_a_soft_cut_gives_way():
    soft = Cut((1, 3, 5), True, frozenset({(1, 0)}))
    assert meet([CUT, soft]).at == CUT.at
    assert meet([soft, Cut((2,), True)]).at == soft.at
    assert meet([NOT, soft]) == soft
    assert meet([]) == NOT


def test_reasons_print_their_remedy():
    assert str(Reason("it is so", "do that")) == "it is so (do that)"
    assert str(Reason("it is so")) == "it is so"
