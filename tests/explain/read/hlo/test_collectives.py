"""Collectives in XLA's text of a compiled program: all that a text can say."""

import pytest

from shardmap.explain.read.hlo import collectives
from shardmap.explain.read.hlo.sources import Sources
from shardmap.explain.read.hlo.text import module_of


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


def test_what_goes_in_and_out():
    groups = "replica_groups={{0,1,2,3}}"
    assert sent(
        f"%a = f32[8]{{0}} all-gather(%p), {groups}, dimensions={{0}}",
        f"%b = f32[2]{{0}} reduce-scatter(%a), {groups}, dimensions={{0}}",
        f"%c = (f32[2]{{0}}, f32[2]{{0}}, /*index=2*/f32[2]{{0}}) all-to-all(%a, %a), "
        f"{groups}",
        f"%d = f32[] all-reduce(%e), {groups}",
    ) == [
        ("all-gather", 4, 8, 32),
        ("reduce-scatter", 4, 32, 8),
        ("all-to-all", 4, 24, 24),
        ("all-reduce", 4, 4, 4),
    ]


def test_several_values_of_one_instruction():
    found = compiled_collectives(
        module("%x = (f32[3]{0}, f32[]) all-reduce(%p, %q), replica_groups={{0,1}}")
    )
    assert [each.bytes_in for each in found] == [12, 4]
    assert [each.together for each in found] == [2, 2]


def test_permutations_count_those_that_take_part():
    pairs = "source_target_pairs={{0,1},{1,2},{2,0}}"
    line = f"%x = f32[2]{{0}} collective-permute(%p), channel_id=1, {pairs}"
    assert sent(line) == [("collective-permute", 3, 8, 8)]
    pairs = "source_target_pairs={{0,0},{1,1}}"
    line = f"%x = f32[2]{{0}} collective-permute(%p), channel_id=1, {pairs}"
    assert sent(line) == []


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


def test_groups_of_one_send_nothing():
    assert sent("%x = f32[4]{0} all-reduce(%p), replica_groups={{0},{1}}") == []


LOOP = """HloModule jit_f, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

%inner (p: f32[4]) -> f32[4] {
  ROOT %x = f32[4]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}

%body (p: f32[4]) -> f32[4] {
  ROOT %y = f32[4]{0} call(%p), to_apply=%inner
}

%cond (p: f32[4]) -> pred[] {
  ROOT %z = pred[] constant(true)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %v = f32[4]{0} while(%p), condition=%cond, body=%body$TRIPS
  ROOT %w = f32[4]{0} conditional(%i, %v), branch_computations={%inner, %inner}
}
"""


@pytest.mark.parametrize(
    ("trips", "counts"),
    [
        (', backend_config={"known_trip_count":{"n":"7"}}', [7, 1, 1]),
        ("", [None, 1, 1]),
    ],
)
def test_loops_and_branches(trips, counts):
    found = compiled_collectives(LOOP.replace("$TRIPS", trips))
    assert [each.count for each in found] == counts


TABLES = """HloModule jit_f, num_partitions=8

FileNames
1 "/home/user/train.py"
2 "/home/user/model.py"

FunctionNames
1 "<module>"
2 "Model.loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=2}
2 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=17 end_column=17}
3 {file_name_id=3 function_name_id=2 line=1 end_line=1 column=17 end_column=17}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} all-reduce(%p), replica_groups={{0,1}}, metadata={stack_frame_id=2}
  %b = f32[4]{0} all-reduce(%a), replica_groups={{0,1}}, metadata={stack_frame_id=3}
  %c = f32[4]{0} all-reduce(%b), replica_groups={{0,1}}, metadata={op_name="x"}
  ROOT %d = f32[4]{0} negate(%c), metadata={op_name="y" stack_frame_id=1}
}
"""


def test_lines_are_found_by_the_tables_of_the_text():
    """The last has none of its own: it is for what takes its result."""
    found = compiled_collectives(TABLES)
    model, train = "/home/user/model.py:7 (Model.loss)", "/home/user/train.py:12"
    assert [each.source for each in found] == [
        model,
        f"{train} (<module>)",
        f"{train} (<module>)",
    ]


MERGED = """HloModule jit_f, num_partitions=8

FileNames
1 "/home/user/model.py"

FunctionNames
1 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=2 end_column=2}
2 {file_name_id=1 function_name_id=1 line=2 end_line=2 column=2 end_column=2}
3 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=2 end_column=2}

StackFrames
1 {file_location_id=1}
2 {file_location_id=2}
3 {file_location_id=3}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} copy(%p), metadata={op_name="jit(f)/jvp(g)/dot" stack_frame_id=1}
  %b = f32[] copy(%p), metadata={op_name="jit(f)/jvp(g)/reduce_sum" stack_frame_id=2}
  %c = f32[] copy(%p), metadata={op_name="jit(f)/jvp(g)/reduce_sum" stack_frame_id=3}
  ROOT %d = (f32[4]{0}, f32[], f32[], f32[]) all-reduce(%a, %b, %c, %p), \
replica_groups={{0,1}}, metadata={op_name=\
"jit(f)/(jvp(g)/dot:jvp(g)/reduce_sum:jvp(g)/reduce_sum:psum)" stack_frame_id=1}
}
"""


def test_values_sent_as_one_are_each_of_their_own_line_and_cause():
    """Also where two lines have one name; and one is known by that of all alone."""
    found = compiled_collectives(MERGED)
    lines = [each.source.partition(" ")[0].rpartition(":")[2] for each in found]
    assert lines == ["1", "2", "3", "1"]
    assert [each.together for each in found] == [4] * 4
    causes = [each.cause or "" for each in found]
    assert [("dot" in cause, "reduce_sum" in cause) for cause in causes] == [
        (True, False),
        (False, True),
        (False, True),
        (False, False),
    ]


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
