"""Collectives in the record of a compiled program: all that a record can say."""

import pytest
from jaxlib._hlo import hlo_module_from_text

from shardmap.explaining.read.hlo import collectives
from shardmap.explaining.read.hlo.loops import steps_of
from shardmap.explaining.read.hlo.module import Module
from shardmap.explaining.read.hlo.sources import Sources


def module_of(text):
    """The record of a program that is written by hand, on 8 devices."""
    module = Module(hlo_module_from_text(text).as_serialized_hlo_module_proto())
    module.num_devices = 8
    return module


def compiled_collectives(*lines, mesh=()):
    module = module_of(
        "\n".join(
            [
                "HloModule jit_f",
                "%add (a: f32[], b: f32[]) -> f32[] {",
                "  %a = f32[] parameter(0)",
                "  %b = f32[] parameter(1)",
                "  ROOT %sum = f32[] add(%a, %b)",
                "}",
                "ENTRY %main (p: f32[8], q: bf16[2]) -> f32[] {",
                "  %p = f32[8] parameter(0)",
                "  %q = bf16[2] parameter(1)",
                *lines,
                "  ROOT %result = f32[] constant(0)",
                "}",
            ]
        )
    )
    return collectives.compiled_collectives(module, Sources(module), mesh)


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
    line = f"%x = f32[8] all-reduce(%p), replica_groups={groups}, to_apply=%add"
    (each,) = compiled_collectives(line)
    assert (each.kind, each.group_size) == ("all-reduce", size)
    assert (each.bytes_in, each.bytes_out) == (32, 32)
    assert {*map(len, each.groups)} == {size}
    assert sorted(sum(each.groups, ())) == [*range(8)]


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        (
            "%a = (f32[8], f32[64]) all-gather-start(%p), dimensions={0}",
            [("all-gather", 32, 256)],
        ),
        ("%a = f32[8] all-reduce-start(%p), to_apply=%add", [("all-reduce", 32, 32)]),
        (
            "%a = (f32[8], bf16[2]) all-reduce(%p, %q), to_apply=%add",
            [("all-reduce", 32, 32), ("all-reduce", 4, 4)],
        ),
        # A sum of bfloat16 that comes out as float32.
        ("%a = f32[2] all-reduce(%q), to_apply=%add", [("all-reduce", 4, 8)]),
    ],
)
def test_what_is_put_in_and_comes_out(started, expected):
    sent = compiled_collectives(f"{started}, replica_groups={{}}")
    assert [(each.kind, each.bytes_in, each.bytes_out) for each in sent] == expected
    assert {each.group_size for each in sent} == {8}


def test_an_operation_that_runs_on_the_side_counts_once():
    """As on GPUs: an instruction that starts it, and one that waits."""
    module = module_of("""HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
%sent (x: f32[8]) -> f32[1] {
  %x = f32[8] parameter(0)
  ROOT %s = f32[1] reduce-scatter(%x), replica_groups={}, to_apply=%add, dimensions={0}
}
ENTRY %main (p: f32[8]) -> f32[1] {
  %p = f32[8] parameter(0)
  %start = ((f32[8]), f32[1]) async-start(%p), calls=%sent
  ROOT %done = f32[1] async-done(%start)
}
""")
    (each,) = collectives.compiled_collectives(module, Sources(module))
    assert (each.kind, each.bytes_in, each.bytes_out) == ("reduce-scatter", 32, 4)
    assert each.count == 1


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
        ("mesh['model'=2,'data'=4] {'data'}", ("data",)),  # In another order.
    ):
        line = f"%x = f32[8] all-reduce(%p), replica_groups={groups}, to_apply=%add"
        (each,) = compiled_collectives(line, mesh=mesh)
        assert each.axes == names, groups


def steps(
    test="compare(%k.1, %end), direction=LT",
    start=0,
    end=9,
    more="add(%k, %one)",
    kept="%end.1",
):
    """The steps of a loop with a counter and an end, as XLA for TPU writes them."""
    module = module_of(f"""HloModule m
%test (c.1: (s32[], s32[])) -> pred[] {{
  %c.1 = (s32[], s32[]) parameter(0)
  %k.1 = s32[] get-tuple-element(%c.1), index=0
  %end = s32[] get-tuple-element(%c.1), index=1
  %three = s32[] constant(3)
  ROOT %t = pred[] {test}
}}
%one_more (x: s32[]) -> s32[] {{
  %x = s32[] parameter(0)
  %one.1 = s32[] constant(1)
  ROOT %sum = s32[] add(%x, %one.1)
}}
%body (c: (s32[], s32[])) -> (s32[], s32[]) {{
  %c = (s32[], s32[]) parameter(0)
  %k.2 = s32[] get-tuple-element(%c), index=0
  %k = s32[] copy(%k.2)
  %end.1 = s32[] get-tuple-element(%c), index=1
  %one = s32[] constant(1)
  %two = s32[] constant(2)
  %more = s32[] {more}
  ROOT %out = (s32[], s32[]) tuple(%more, {kept})
}}
ENTRY %main (p: s32[]) -> (s32[], s32[]) {{
  %p = s32[] parameter(0)
  %from = s32[] constant({0 if start is None else start})
  %to = s32[] constant({end})
  %copied = s32[] copy({"%p" if start is None else "%from"})
  %in = (s32[], s32[]) tuple(%copied, %to)
  ROOT %w = (s32[], s32[]) while(%in), condition=%test, body=%body
}}
""")
    (loop,) = [each for each in module.instructions if each.opcode == "while"]
    return steps_of(loop)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 9),
        ({"start": 4}, 5),
        ({"start": 20}, 0),
        ({"more": "add(%two, %k)"}, 5),
        ({"more": "fusion(%k), kind=kLoop, calls=%one_more"}, 9),
        ({"test": "compare(%end, %k.1), direction=GE"}, 10),
        ({"test": "compare(%k.1, %three), direction=LT"}, 3),
        ({"test": "compare(%k.1, %end), direction=NE"}, 9),
        ({"test": "compare(%k.1, %end), direction=NE", "more": "add(%k, %two)"}, None),
        (
            {
                "test": "compare(%k.1, %three), direction=GT",
                "start": 9,
                "more": "subtract(%k, %two)",
            },
            3,
        ),
        ({"start": None}, None),
        ({"kept": "%k"}, None),
        ({"more": "multiply(%k, %two)"}, None),
        ({"more": "add(%k, %k)"}, None),
        ({"more": "add(%end.1, %one)"}, None),
        ({"test": "compare(%k.1, %k.1), direction=LT"}, None),
        ({"more": "subtract(%k, %one)"}, None),
    ],
)
def test_steps_are_known_only_of_a_counter(options, expected):
    assert steps(**options) == expected
