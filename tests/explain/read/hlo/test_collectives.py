"""Collectives in XLA's text of a compiled program: all that a text can say."""

import pytest

from shardmap.explaining.read.hlo import collectives
from shardmap.explaining.read.hlo.sources import Sources
from shardmap.explaining.read.hlo.text import module_of


def compiled_collectives(text, mesh=()):
    module = module_of(text)
    return collectives.compiled_collectives(module, Sources(module), mesh)


def module(*lines, partitions=8):
    return "\n".join(
        [
            f"HloModule jit_f, is_scheduled=true, num_partitions={partitions}",
            "",
            "ENTRY %main (p: f32[4]) -> f32[4] {",
            *(f"  {line}" for line in lines),
            "}",
        ]
    )


def sent(*lines):
    return [
        (each.kind, each.group_size, each.bytes_in, each.bytes_out)
        for each in compiled_collectives(module(*lines))
    ]


GROUPS = [
    ("{{0,1,2,3},{4,5,6,7}}", 4),
    ("[2,4]<=[8]", 4),
    ("[4,2]<=[2,4]T(1,0)", 2),
    ("mesh['i'=8] {'i'}", 8),
    ("mesh['i'=2,'j'=4] {'j'}", 4),
    ("mesh['i'=2,'j'=4] {'i','j'}", 8),
    ("mesh['i'=8] {'i':(1)2}", 2),
    ("mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}", 2),
    ("{}", 8),
]


@pytest.mark.parametrize(("groups", "size"), GROUPS)
def test_groups_in_every_notation(groups, size):
    line = f"%x = f32[4]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add"
    assert sent(line) == [("all-reduce", size, 16, 16)]


def test_starts_of_those_that_run_on_the_side():
    """As on GPUs: an instruction that starts, and one that waits."""
    groups = "replica_groups={{0,1,2,3}}"
    assert sent(
        f"%a = (f32[2]{{0}}, f32[8]{{0}}) all-gather-start(%p), {groups}",
        "%b = f32[8]{0} all-gather-done(%a)",
        f"%c = f32[2]{{0}} all-reduce-start(%p), {groups}",
        "%d = f32[2]{0} all-reduce-done(%c)",
        "%e = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,1},{1,0}}",
        "%f = f32[2]{0} collective-permute-done(%e)",
    ) == [
        ("all-gather", 4, 8, 32),
        ("all-reduce", 4, 8, 8),
        ("collective-permute", 2, 8, 8),
    ]


@pytest.mark.parametrize(
    ("kind", "operands", "results", "expected"),
    [
        ("all-reduce", "(f32[8]{0})", "f32[8]{0}", [(32, 32)]),
        (
            "all-reduce",
            "(f32[8]{0}, bf16[2]{0})",
            "(f32[8]{0}, bf16[2]{0})",
            [(32, 32), (4, 4)],
        ),
        ("reduce-scatter", "(f32[64]{0})", "f32[8]{0}", [(256, 32)]),
        ("all-gather", "(f32[8]{0})", "f32[64]{0}", [(32, 256)]),
        ("all-to-all", "(f32[8,2]{1,0:T(8,128)})", "f32[8,2]{1,0}", [(64, 64)]),
    ],
)
def test_operands_in_a_tuple_of_their_own_are_not_results(
    kind, operands, results, expected
):
    """As XLA for GPUs types all that it starts, from JAX 0.12 on."""
    collectives = sent(
        f"%s = ({operands}, {results}) {kind}-start(%p), replica_groups={{}}",
        f"ROOT %d = {results} {kind}-done(%s)",
    )
    assert collectives == [(kind, 8, *sizes) for sizes in expected]


def test_axes_are_found_by_the_groups():
    mesh = [("data", 4), ("model", 2)]
    for groups, names in (
        ("[4,2]<=[8]", ("model",)),
        ("{{0,2,4,6},{1,3,5,7}}", ("data",)),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "model")),
        ("[2,4]<=[8]", ("data", "model")),  # Half of one, all of the other.
        ("{{0,4},{2,6},{1,5},{3,7}}", ("data",)),  # Every second.
        ("mesh['a'=4,'b'=2] {'a'}", ("data",)),
        ("mesh['a'=4,'b'=2] {'a','b'}", ("data", "model")),
    ):
        line = f"%x = f32[4]{{0}} all-reduce(%p), replica_groups={groups}"
        (each,) = compiled_collectives(module(line), mesh)
        assert each.axes == names, groups
