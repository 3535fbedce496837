"""How many threads a device has, and who decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.explain.read.hlo.text import module_of
from shardmap.explain.read.hlo.threads import Threads, sentence, threads_of

LARGE = jax.ShapeDtypeStruct((2048, 2048), np.float32)
PROGRAM = """HloModule f

%fused (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%p.1, %p.1)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused, \
backend_config={"outer_dimension_partitions":["4","2"]}
  %b = f32[8]{0} fusion(%a), kind=kCustom, calls=%fused, \
backend_config={"fusion_config":{"kind":"__ynn_fusion"},"outer_dimension_partitions":[]}
  ROOT %c = f32[8]{0} negate(%b)
}
"""


def test_what_the_text_says_of_threads():
    module = module_of(PROGRAM)
    assert threads_of(module) == Threads(8, 1, 3, 1)
    text = sentence(module, "cpu")
    assert "1 of 3 operations into up to 8 parts" in text
    assert "its library for products and sums does 1" in text


def test_a_planted_number_is_said():
    module = module_of(PROGRAM.replace('["4","2"]', '["4","3"]'))
    assert threads_of(module).most == 12


@pytest.mark.parametrize("looped", [False, True])
def test_a_large_operation_of_a_compiled_program_is_cut(looped):
    def fun(x):
        if looped:
            return lax.scan(lambda c, _: (jnp.tanh(c), None), x, length=5)[0]
        return jnp.tanh(x)

    compiled = jax.jit(fun).lower(LARGE).compile()
    report = sm.explain(fun)(LARGE)
    cut = threads_of(module_of(compiled.as_text())).cut
    assert ("into up to" in report.threads) == (cut > 0)
    assert report.threads in " ".join(str(report).split())
    assert report.threads in report._repr_html_()


def test_small_operations_have_a_thread_each():
    assert "one for each operation" in sm.explain(jnp.tanh)(np.ones(4)).threads


def test_a_chip_is_not_said_to_have_threads_of_a_cpu():
    assert "a kernel over the whole chip" in sentence(module_of(PROGRAM), "gpu")


def test_nothing_is_said_of_what_was_not_compiled():
    mesh = jax.sharding.AbstractMesh((16,), ("i",))
    mapped = sm.spmap(jnp.sin, "i", mesh=mesh, mesh_axes="i")
    assert sm.explain(mapped)(jax.ShapeDtypeStruct((16,), np.float32)).threads is None
