"""What XLA for TPU and for GPUs writes is read as what it does; see `programs.py`."""

import collections

import pytest

from shardmap.explaining.read.hlo import cost
from shardmap.explaining.read.hlo.collectives import compiled_collectives, unseen
from shardmap.explaining.read.hlo.sources import Sources
from shardmap.explaining.read.hlo.text import module_of
from tests.explain.texts.programs import RELEASES, text_of

KB, MB = 1 << 10, 1 << 20


class Compiled:
    def __init__(self, text):
        self.module = module_of(text)
        self.sources = Sources(self.module)
        self.collectives = compiled_collectives(self.module, self.sources, [("i", 8)])
        self.largest = cost.largest_at_peak(self.module, self.sources)

    @property
    def sent(self):
        """How many are of a kind and function, of how many steps and bytes."""
        return collections.Counter(
            (each.kind, each.operation, each.count, each.bytes_in, each.bytes_out)
            for each in self.collectives
        )


@pytest.fixture(params=RELEASES)
def compiled(request):
    return lambda name: Compiled(text_of(name, request.param))


SENT = {
    # A gather is in three fusions, each with a part of it.
    "tpu_fsdp": {
        ("all-gather", "all_gather", 1, 64 * KB, 512 * KB): 3,
        ("reduce-scatter", "psum_scatter", 1, MB, 128 * KB): 3,
    },
    # In each of the eight steps of a scan, in bfloat16.
    "tpu_ring": {("collective-permute", "ppermute", 8, 32 * KB, 32 * KB): 2},
    "tpu_small": {
        ("all-reduce", "psum_scatter", 1, 4 * KB, 4 * KB): 1,
        ("all-reduce", "all_gather", 1, 32, 32): 1,
    },
    "tpu_double": {("all-gather", "psum", 1, 4 * KB, 32 * KB): 2},
    "tpu_ragged": {("ragged-all-to-all", "ragged_all_to_all", 1, 32 * KB, 32 * KB): 1},
    "tpu_offload": {},
    "tpu_kernel": {},
    "tpu_counted": {
        ("all-reduce", "psum", 21, 4 * KB, 4 * KB): 1,
        ("all-reduce", "pmax", None, 4 * KB, 4 * KB): 1,
    },
    "tpu_doubled": {("all-reduce", "psum", None, 4 * KB, 4 * KB): 1},
    "cuda_ring": {("collective-permute", "ppermute", 8, 64 * KB, 64 * KB): 2},
    "cuda_large_fsdp": {
        ("all-gather", "all_gather", 1, 8 * MB, 64 * MB): 3,
        ("reduce-scatter", "psum_scatter", 1, 64 * MB, 8 * MB): 3,
    },
    "cuda_data_parallel": {("all-reduce", "psum", 1, 64 * MB, 64 * MB): 3},
    "cuda_ragged": {("ragged-all-to-all", "ragged_all_to_all", 1, 32 * KB, 32 * KB): 1},
    "cuda_broadcast": {("collective-broadcast", "pbroadcast", 1, 256, 256): 1},
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent_is_counted_once(name, compiled):
    program = compiled(name)
    assert program.sent == SENT[name]
    for each in program.collectives:
        assert not each.added_by_partitioner
        assert each.axes == ("i",)
        assert each.group_size == 8
        assert each.source.startswith("tests/explain/texts/programs.py:")


def test_operands_have_types(compiled):
    types = {(each.before, each.after) for each in compiled("cuda_ragged").collectives}
    assert types == {("f32[64,128]", "f32[64,128]")}
    collectives = compiled("cuda_large_fsdp").collectives
    assert {(each.before, each.after) for each in collectives} == {
        ("f32[512,4096]", "f32[4096,4096]"),
        ("f32[4096,4096]", "f32[512,4096]"),
    }


def test_what_is_not_named_is_not_said_to_need_another_sharding():
    text = text_of("tpu_small", "0.12").replace("reduce_scatter", "add")
    module = module_of(text.replace("dynamic-update-slice(", "add("))
    for each in compiled_collectives(module, Sources(module)):
        assert each.cause == "XLA does not say for which operation"
        assert each.advice.startswith("Explain parts of the function alone")


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("tpu_kernel", ["Kernels, such as those of Pallas,", "What callbacks send to"]),
        ("tpu_ragged", ["A ragged all-to-all counts as if"]),
        ("cuda_ragged", ["A ragged all-to-all counts as if"]),
        ("tpu_ring", []),
    ],
)
def test_what_cannot_be_counted_is_noted(name, notes, compiled):
    texts = unseen(compiled(name).module)
    assert len(texts) == len(notes)
    for note, start in zip(texts, notes, strict=True):
        assert note.startswith(start)


def test_products_count_in_every_step(compiled):
    ring = 8 * 2 * (2 * 128**3)
    for name, flops in (
        ("tpu_ring", ring),
        ("cuda_ring", ring),  # Of which it makes parts, and adds them up.
        ("tpu_fsdp", 8 * 2 * 64 * 512**2),
        ("cuda_large_fsdp", 8 * 2 * 64 * 4096**2),
    ):
        assert cost.flops_of(compiled(name).module) == flops


# Loops


def steps_of(test, start="0", more="add(%k, %one)"):
    """The steps of a loop with the counter ``%k``, as XLA for TPU writes it."""
    module = module_of(f"""HloModule m, num_partitions=8

%test (c.1: (s32[], f32[4])) -> pred[] {{
  %nine = s32[] constant(9)
  %c.1 = (s32[], f32[4]) parameter(0)
  %k.1 = s32[] get-tuple-element(%c.1), index=0
  ROOT %t = pred[] {test}
}}

%body (c: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %one = s32[] constant(1)
  %two = s32[] constant(2)
  %c = (s32[], f32[4]) parameter(0)
  %k = s32[] get-tuple-element(%c), index=0
  %x = f32[4] get-tuple-element(%c), index=1
  %more = s32[] {more}
  ROOT %out = (s32[], f32[4]) tuple(%more, %x)
}}

ENTRY %main (p: s32[], x.1: f32[4]) -> (s32[], f32[4]) {{
  %p = s32[] parameter(0)
  %x.1 = f32[4] parameter(1)
  %zero = s32[] constant({start})
  %copied = s32[] copy(%zero)
  %in = (s32[], f32[4]) tuple(%{"copied" if start != "p" else "p"}, %x.1)
  ROOT %w = (s32[], f32[4]) while(%in), condition=%test, body=%body
}}
""")
    (loop,) = cost.loops_of(module)
    return module.trips(loop)


LESS = "compare(%k.1, %nine), direction=LT"


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"test": LESS}, 9),
        ({"test": LESS, "start": "4"}, 5),
        ({"test": LESS, "start": "20"}, 0),
        ({"test": LESS, "more": "add(%k, %two)"}, 5),
        ({"test": LESS, "start": "p"}, None),
        ({"test": LESS, "more": "multiply(%k, %two)"}, None),
        ({"test": LESS, "more": "add(%k, %k)"}, None),
        ({"test": "compare(%k.1, %nine), direction=NE"}, None),
        ({"test": "compare(%nine, %k.1), direction=LT"}, None),
        ({"test": "and(%k.1, %nine)"}, None),
    ],
)
def test_steps_are_known_only_of_a_counter(options, steps):
    assert steps_of(**options) == steps


# Memory


def test_what_is_held_is_in_the_memory_of_the_device(compiled):
    """Not what is on the chip or on the host, and of a copy not what is copied."""
    largest = compiled("tpu_offload").largest
    assert [(each.type, each.bytes) for each in largest] == [
        ("f32[256,512], f32[256,512]", MB),
        ("f32[256,512]", 512 * KB),
    ]
    assert largest[1].operation == "copy"
    for name in ("tpu_ring", "tpu_fsdp", "tpu_small"):
        for each in compiled(name).largest:
            assert each.bytes <= 128 * KB
            assert each.bytes > 0


def test_what_starts_and_ends_is_held_once(compiled):
    largest = compiled("cuda_data_parallel").largest
    assert {(each.type, each.bytes) for each in largest} == {
        ("f32[4096,4096]", 64 * MB)
    }
    (permuted,) = [
        each for each in compiled("cuda_ring").largest if each.operation == "ppermute"
    ]
    assert (permuted.type, permuted.bytes) == (
        "f32[128,128], f32[128,128]",
        128 * KB,
    )
    # The numbers of memories of a GPU are of parts of its main one.
    assert "f32[64,128]" in {each.type for each in compiled("cuda_ragged").largest}


def test_a_fusion_that_starts_has_parts():
    """As XLA for GPUs writes a sum of values of 64 bits."""
    module = module_of("""HloModule m, num_partitions=8

%sum (x: f64[8]) -> f64[8] {
  %x = f64[8]{0} parameter(0)
  ROOT %s = f64[8]{0} all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add
}

ENTRY %main (p: f64[8]) -> f64[8] {
  %p = f64[8]{0} parameter(0)
  %f = ((f64[8]{0}), f64[8]{0}) fusion-start(%p), kind=kCustom, calls=%sum
  ROOT %d = f64[8]{0} fusion-done(%f)
}
""")
    (sent,) = compiled_collectives(module, Sources(module))
    assert (sent.kind, sent.bytes_in) == ("all-reduce", 64)
    assert module.fusion_of(module.by_name["s"]) is module.by_name["f"]
    (held,) = cost.largest_at_peak(module, Sources(module))
    assert held.bytes == 64
