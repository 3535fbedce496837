"""Why a collective is there, by what takes its result."""

import pytest

from shardmap.explain.read.hlo.causes import cause_of
from shardmap.explain.read.hlo.text import module_of

NEEDS = "dot_general needs more of an operand than a device has: f32[2] on a device be"


def gathered(made_by, *taken_by):
    """The cause of a gather of that name, which operations of these names take."""
    takers = [
        f'%t{k} = f32[4]{{0}} negate(%g), metadata={{op_name="jit(f)/{name}"}}'
        for k, name in enumerate(taken_by)
    ]
    module = module_of(
        "\n".join(
            [
                "HloModule jit_f, is_scheduled=true, num_partitions=2",
                "",
                "ENTRY %main (p: f32[2]) -> f32[4] {",
                "  %p = f32[2]{0} parameter(0)",
                "  %g = f32[4]{0} all-gather(%p), replica_groups={{0,1}}, "
                f'dimensions={{0}}, metadata={{op_name="jit(f)/{made_by}"}}',
                *(f"  {each}" for each in takers),
                "}",
            ]
        )
    )
    (found,) = [each for each, _ in module.runs() if each.opcode == "all-gather"]
    return cause_of(module, found, "all-gather")


@pytest.mark.parametrize("made_by", ["dot_general", "add"])
def test_a_gather_is_for_what_takes_it(made_by):
    """XLA of one JAX names it after that, of another after what made the array."""
    cause = gathered(made_by, "dot_general", "dot_general")
    assert cause.text.startswith(NEEDS)


def test_it_may_be_one_of_several_that_take_it():
    assert gathered("dot_general", "mul", "dot_general").text.startswith(NEEDS)


def test_for_which_of_several_it_is_may_be_unknown():
    assert gathered("add", "mul", "dot_general") is None
