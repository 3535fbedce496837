"""How much of a collective goes between devices."""

import re

import pytest

from tests.map.collectives.test_rules import array, both


def between_devices(mapped, *args):
    """How many collectives the compiled program has, by kind."""
    text = mapped.lower(*args).compile().as_text()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf" ({kinds})\(", text)
    return {kind: found.count(kind) for kind in set(found)}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("psum", {"all-reduce": 1}),
        ("pmax", {"all-reduce": 1}),
        ("all_gather", {"all-gather": 1}),
        ("ppermute by 1", {"collective-permute": 1}),
        ("all_to_all", {"all-to-all": 1}),
        ("psum_scatter", {"reduce-scatter": 1}),
        ("axis_index", {}),
    ],
)
def test_one_collective_between_devices(name, expected):
    mapped, _ = both(name, 32)
    assert between_devices(mapped, array(32, 3)) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("psum", {"all-reduce": 1}), ("axis_index", {})]
)
def test_the_partitioner_puts_collectives_in(name, expected):
    mapped, _ = both(name, 32, lowering="spmd")
    assert between_devices(mapped, array(32, 3)) == expected
    assert mapped(array(32, 3)).sharding.spec[0] == "i"


def test_a_shift_sends_one_element_of_each_block():
    mapped, _ = both("ppermute by 1", 32)
    text = mapped.lower(array(32, 3)).compile().as_text()
    (sent,) = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", text)
    assert sent == "1,3"
