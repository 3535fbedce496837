"""How many threads a device has, and who decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.explain.read.hlo.text import module_of
from shardmap.explain.read.hlo.threads import (
    Kernels,
    Threads,
    kernels_of,
    sentence,
    threads_of,
)

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
    assert "over the whole chip" in sentence(module_of(PROGRAM), "tpu")


# As XLA writes them for an NVIDIA GPU: a softmax and a product that it tiled itself, a
# product of cuBLAS, and a fusion of which it says nothing.
ON_A_GPU = """HloModule f

%fused (p.1: f32[127,1000]) -> f32[127,1000] {
  %p.1 = f32[127,1000]{1,0} parameter(0)
  ROOT %exp.1 = f32[127,1000]{1,0} exponential(%p.1)
}

%command_buffer (p.2: f32[127,1000]) -> f32[127,1000] {
  %p.2 = f32[127,1000]{1,0} parameter(0)
  ROOT %loop = f32[127,1000]{1,0} fusion(%p.2), kind=kLoop, calls=%fused
}

ENTRY %main (p: f32[127,1000]) -> f32[127,1000] {
  %p = f32[127,1000]{1,0} parameter(0)
  %softmax = f32[127,1000]{1,0} fusion(%p), kind=kCustom, calls=%fused, \
backend_config={"operation_queue_id":"0","fusion_backend_config":{"kind":"__triton",\
"block_level_fusion_config":{"num_warps":"4","output_tiles":[{"sizes":["2","1024"]}],\
"num_ctas":1,"num_stages":1,"is_tma_allowed":false}}}
  %product = f32[4,127,1000]{2,1,0} fusion(%p), kind=kCustom, calls=%fused, \
backend_config={"fusion_backend_config":{"kind":"__triton_gemm","triton_gemm_config":\
{"block_m":"64","block_n":"128","block_k":"32","split_k":"2","num_stages":"4",\
"num_warps":"8","num_ctas":"1"}}}
  %cublas = (f32[127,1000]{1,0}, s8[4096]{0}) custom-call(%softmax, %product), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{}}
  %g = f32[127,1000]{1,0} get-tuple-element(%cublas), index=0
  ROOT %c = f32[127,1000]{1,0} call(%g), to_apply=%command_buffer
}
"""


def test_what_is_known_of_the_kernels_of_a_gpu():
    module = module_of(ON_A_GPU)
    # 4 x 2 x 8 tiles of 64 x 128, each by two.
    assert kernels_of(module) == Kernels(128, 8, 2, 4, 1)
    text = sentence(module, "gpu")
    assert "XLA tiled 2 of 4, the largest into 128 blocks of 8 warps" in text
    assert "such as cuBLAS or cuDNN, does 1 and decides for itself" in text
    assert text.endswith("the text of the program does not say it.")
    softmax_alone = ON_A_GPU.replace('"block_m"', '"other"')
    assert kernels_of(module_of(softmax_alone)) == Kernels(64, 4, 1, 4, 1)


def test_nothing_is_said_of_what_was_not_compiled():
    mesh = jax.sharding.AbstractMesh((16,), ("i",))
    mapped = sm.spmap(jnp.sin, "i", mesh=mesh, mesh_axes="i")
    assert sm.explain(mapped)(jax.ShapeDtypeStruct((16,), np.float32)).threads is None
