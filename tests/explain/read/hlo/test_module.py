"""The record of a compiled program says what its text says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap._jax.hlo import compiled_with_protos, module_proto
from shardmap.explaining.read.hlo.cost import memory_of
from shardmap.explaining.read.hlo.module import Message, Module
from shardmap.explaining.read.hlo.sources import Sources

MESH = sm.make_mesh({"data": 4, "model": 2})


def put(x, *names):
    return jax.device_put(x, NamedSharding(MESH, P(*names)))


def step(x, w):
    def layer(x, w):
        return jnp.tanh(x @ w), x.sum()

    return jax.grad(lambda w: lax.scan(layer, x, w)[0].sum())(w)


@pytest.fixture(scope="module")
def program():
    x = put(jnp.ones((16, 32)), "data", "model")
    w = put(jnp.ones((5, 32, 32)), None, "model")
    compiled, record, buffers = compiled_with_protos(jax.jit(step).lower(x, w))
    return compiled, Module(record), buffers


def test_a_record_has_what_the_text_has(program):
    compiled, module, _ = program
    text = compiled.as_text()
    instructions = re.findall(
        r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\(", text, re.M
    )
    shapes = {name: re.sub(r"\{[\d,]*\}", "", type_) for name, type_, _ in instructions}
    assert {each.name: str(each.shape) for each in module.instructions} == {
        name: type_.replace("/*index=5*/", "") for name, type_ in shapes.items()
    }
    opcodes = {name: opcode for name, _, opcode in instructions}
    assert {each.name: each.opcode for each in module.instructions} == opcodes
    assert module.num_devices == 8
    for each in module.instructions:
        (line,) = re.findall(rf"^\s+(?:ROOT )?%{re.escape(each.name)} = .*", text, re.M)
        called = re.search(rf" {each.opcode}\((.*?)\)(?:,|$)", line)[1]
        if each.opcode not in ("constant", "parameter"):
            names = [operand.name for operand in each.operands]
            assert re.findall(r"%([\w.-]+)", called) == names
        assert (f'op_name="{each.op_name}"' in line) == bool(each.op_name)
    # In the order in which they run.
    entry = text[text.index("ENTRY") :]
    names = re.findall(r"^\s+(?:ROOT )?%(\S+) = ", entry, re.M)
    assert [each.name for each in module.entry.instructions] == names


def test_a_record_has_the_lines_of_the_program(program):
    _, module, _ = program
    first = step.__code__.co_firstlineno
    for each in module.instructions:
        if each.opcode == "dot":
            places = [module.place(frame) for frame in module.stack(each.frame)]
            assert (__file__, first + 2) in [place[:2] for place in places]


def test_a_record_has_the_memory(program):
    compiled, module, buffers = program
    peak = memory_of(buffers, module, Sources(module), "cpu").peak
    sizes = compiled.memory_analysis()
    assert peak >= sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    assert getattr(sizes, "total_allocation_bytes", peak) == peak


def test_names_are_not_taken_for_fields():
    scope = 'body=%x "q" replica_groups={{0}}'

    def fun(x):
        with jax.named_scope(scope):
            return x.sum(0)

    compiled = jax.jit(fun).lower(put(np.ones((8, 4)), "data")).compile()
    module = Module(module_proto(compiled))
    (sent,) = [each for each in module.instructions if each.opcode == "all-reduce"]
    assert scope in sent.op_name
    assert [len(group) for group in sent.groups] == [4, 4]


def test_numbers_have_signs():
    data = bytes([8, *[255] * 9, 1])
    message = Message(data)
    assert message.number(1) == -1
    assert (message.number(7), message.text(7), message.numbers(7)) == (0, "", [])
    assert Message(bytes([18, 3, 3, 129, 1])).numbers(2) == [3, 129]
