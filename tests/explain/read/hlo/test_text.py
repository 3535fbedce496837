"""XLA's text as instructions in computations: what each is, takes, and how often."""

import pytest

from shardmap.explain.read.hlo.text import module_of, nbytes, shapes_in
from tests.explain.read.hlo.test_collectives import LOOP, MERGED, TABLES


def names(instructions):
    return [each.name for each in instructions]


def test_instructions_stand_in_their_computations():
    module = module_of(LOOP)
    assert {k: names(v) for k, v in module.computations.items()} == {
        "add": ["c"],
        "inner": ["x"],
        "body": ["y"],
        "cond": ["z"],
        "main": ["v", "w"],
    }
    assert (module.entry, module.num_devices) == ("main", 8)
    (root,) = module.computations["inner"]
    assert (root.opcode, root.type, root.is_root) == ("all-reduce", "f32[4]{0}", True)
    assert root.bytes == 16


def test_an_instruction_takes_what_others_made():
    module = module_of(MERGED)
    sent = module.computations["main"][-1]
    assert names(module.operands_of(sent)) == ["a", "b", "c", "p"]
    assert names(module.users_of(module.computations["main"][0])) == [
        "a",
        "b",
        "c",
        "d",
    ]
    assert sent.op_name.startswith("jit(f)/(jvp(g)/dot:")


@pytest.mark.parametrize(
    ("trips", "count"), [(', "known_trip_count":{"n":"7"}', 7), ("", None)]
)
def test_what_runs_and_how_often(trips, count):
    runs = module_of(LOOP.replace("$TRIPS", trips)).runs()
    counts = [(each.name, times) for each, times in runs]
    assert counts.count(("x", count)) == 1
    assert counts.count(("x", 1)) == 2
    assert ("w", 1) in counts


def test_shapes_and_their_bytes():
    shapes = shapes_in("(f32[2,3]{1,0}, /*index=1*/s8[], bf16[0])")
    assert shapes == [("f32", (2, 3)), ("s8", ()), ("bf16", (0,))]
    assert [nbytes(*shape) for shape in shapes] == [24, 1, 0]
    assert nbytes("pred", (3,)) == 3
    assert nbytes("u4", (3,)) == 2


def test_an_instruction_has_the_line_of_its_frame():
    module = module_of(TABLES)
    instructions = module.computations["main"]
    sources = [module.source_of(each) for each in instructions[1:3]]
    assert sources == [
        "/home/user/model.py:7 (Model.loss)",
        "/home/user/train.py:12 (<module>)",
    ]
