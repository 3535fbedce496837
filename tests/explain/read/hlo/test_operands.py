"""What a device has before a collective and after it, in words."""

import pytest

from shardmap.explain.read.hlo.operands import becomes, types
from shardmap.explain.read.hlo.text import module_of

TEXT = """HloModule jit_f, num_partitions=8

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %q = s32[2]{0} parameter(1)
  %x = $CALL
}
"""
CALLS = {
    "f32[4]{0} all-reduce(%p)": "f32[4] of each device become one, on all",
    "(f32[4]{0}, s32[2]{0}) all-reduce(%p, %q)": (
        "f32[4] and s32[2] of each device become one, on all"
    ),
    "f32[4]{0} collective-permute(%p)": "f32[4] of a device goes to another",
    "(f32[1]{0}, f32[1]{0}) all-to-all(%p, %p)": (
        "2 pieces of f32[1] of a device go to the others, one to each"
    ),
    "f32[32]{0} all-gather(%p), dimensions={0}": (
        "f32[4] on a device becomes f32[32], gathered along dimension 0"
    ),
    "f32[1]{0} reduce-scatter(%p), dimensions={0}": "f32[4] on a device becomes f32[1]",
    "f32[1]{0} reduce-scatter(%z), dimensions={0}": (
        "what dot has on a device becomes f32[1]"
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_becomes_of_it(call):
    module = module_of(TEXT.replace("$CALL", call))
    sent = module.computations["main"][-1]
    assert becomes(module, sent, "dot", None) == CALLS[call]


def test_one_of_several_values():
    call = "(f32[4]{0}, s32[2]{0}) all-reduce(%p, %q)"
    module = module_of(TEXT.replace("$CALL", call))
    sent = module.computations["main"][-1]
    said = "s32[2] of each device become one, on all"
    assert becomes(module, sent, "dot", 1) == said


def test_types_are_counted():
    assert types([("f32", (2, 3)), ("s32", ()), ("f32", (2, 3))]) == (
        "2 pieces of f32[2,3] and s32[]"
    )
