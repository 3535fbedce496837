"""Every feature of maps compiles for TPUs and GPUs, and sends what it should."""

import collections
import contextlib
import fractions
import itertools
import re

import jax
import pytest

import shardmap as sm
from tests.compilers import programs

MACHINES = ("v5e:2x4", "h100:8")
COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-reduce|all-gather|all-to-all|collective-permute"
    r"|reduce-scatter|ragged-all-to-all|collective-broadcast)(?:-start)?\("
)

# What the programs send, where they do, by the kind that XLA gives it.
SENDS = {
    "a training step": {"all-reduce": 1},
    "a training step with donation": {"all-reduce": 1},
    "loops of batch size": {"all-reduce": 1},
    "as many as fit": {"all-reduce": 1},
    "the partitioner": {"all-reduce": 1},
    "psum of 32 elements": {"all-reduce": 1},
    "pmax in groups of 32 elements": {"all-reduce": 1},
    "all_gather of 32 elements": {"all-gather": 1},
    "ppermute of 32 elements": {"collective-permute": 1},
    "all_to_all of 32 elements": {"all-to-all": 1},
    "two axes": {"all-reduce": 1},
    "three axes": {"collective-permute": 1, "all-reduce": 1},
    "inner map closes over the outer value": {"all-gather": 1, "all-reduce": 1},
    "data by model": {"all-reduce": 1},
    "named mesh axes": {"all-reduce": 1},
    "blocks of a mesh": {"all-reduce": 1},
    "gradient of blocks of a mesh": {"all-reduce": 2},
    "partitioned blocks of a mesh": {"all-gather": 1},
    "gradient around": {"all-reduce": 1},
    "vmap around": {"all-reduce": 1},
    "linearize around": {"all-reduce": 1},
    "map in a shard map": {"all-reduce": 1},
    "prefix axes": {"all-reduce": 1},
    "keywords and static arguments": {"all-reduce": 1},
    "offloaded residuals": {"all-reduce": 1},
    "chunked inside": {"all-reduce": 1},
    "explicit axes": {"all-reduce": 1},
    "old pmap": {"all-reduce": 1},
    "taps": {"all-reduce": 1},
    "typed keys": {},
    "rbg keys": {},
    "callbacks": {},
    "remote copy": {},
    "flash attention": {},
}
# Kernels for TPUs alone; JAX itself finds no backend for callbacks of these GPUs.
TPU_ONLY = {"flash attention", "remote copy", "taps", "callbacks"}
# Of other machines, a few programs.
OTHERS = ("v4:2x2x1", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "a100:8")
FEW = ("psum of a tree", "ppermute", "small psum_scatter", "all_to_all", "scan", "rbg")
ONE_EACH = [
    *itertools.product(MACHINES, programs.ONE_EACH),
    *itertools.product(OTHERS, FEW),
]
PROGRAMS = [
    (machine, name)
    for machine, name in itertools.product(MACHINES, programs.PROGRAMS)
    if machine != "h100:8" or name not in TPU_ONLY
]
PROGRAMS += itertools.product(OTHERS, ("a training step", "data by model"))


def text(function, arguments):
    return function.lower(*arguments).compile().as_text()


def collectives(compiled):
    """The opcodes and types of the collectives, of which a chain is one."""
    counts, chains = collections.Counter(), set()
    for line in compiled.splitlines():
        if not (read := COLLECTIVE.search(line)):
            continue
        chain = re.findall(r'(?:channel_id=|chain_id=")(\d+)', line)
        if "chain_id" in line:
            if tuple(chain) in chains:
                continue
            chains.add(tuple(chain))
        counts[read["kind"], read["type"]] += 1
    return counts


def kinds(compiled):
    counts = collections.Counter()
    for (kind, _), count in collectives(compiled).items():
        counts[kind] += count
    return dict(counts)


# Which of its compilers for GPUs JAX is to leave is of no concern here.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.filterwarnings("ignore:Using ``pl.pallas_call`` for Mosaic GPU")
@pytest.mark.parametrize(("machine", "name"), ONE_EACH)
def test_a_map_sends_what_a_shard_map_by_hand_sends(machine, name):
    devices = sm.devices(machine)
    ours = collectives(text(*programs.mapped(devices, name)))
    assert ours == collectives(text(*programs.by_hand(devices, name)))


@pytest.mark.parametrize("machine", MACHINES)
def test_a_gradient_of_what_all_share_sends_what_one_by_hand_sends(machine):
    by_hand = kinds(text(*programs.gradient_by_hand(sm.devices(machine))))
    assert by_hand == SENDS["gradient around"]


@pytest.mark.parametrize(("machine", "name"), PROGRAMS)
def test_a_program_compiles_and_explain_counts_what_it_sends(machine, name):
    wide = {"double precision", "long integers"}
    with jax.enable_x64(True) if name in wide else contextlib.nullcontext():
        function, arguments = programs.PROGRAMS[name](sm.devices(machine))
        sent = kinds(text(function, arguments))
        report = sm.explain(function)(*arguments)
    counted = collections.defaultdict(fractions.Fraction)
    for each in report.collectives:
        counted[each.kind] += fractions.Fraction(1, each.together)
    assert counted == sent
    assert sent == SENDS.get(name, sent)
