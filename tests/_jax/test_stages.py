"""JAX's stages become those of a class of ours, with all that they hold."""

import jax
import numpy as np
import pytest

from shardmap._jax.stages import copy_stage, is_lost_connection

X = np.ones(3, np.float32)


class OurLowered(jax.stages.Lowered):
    def __init__(self, lowered):
        copy_stage(lowered, self)


class OurCompiled(jax.stages.Compiled):
    def __init__(self, compiled):
        copy_stage(compiled, self)


def test_a_copied_stage_is_the_same_stage():
    lowered = jax.jit(lambda x: {"twice": 2 * x}).lower(X)
    ours = OurLowered(lowered)
    assert ours.as_text() == lowered.as_text()
    assert ours.in_tree == lowered.in_tree
    assert ours.out_info == lowered.out_info
    compiled = OurCompiled(ours.compile())
    np.testing.assert_array_equal(compiled(X)["twice"], 2 * X)
    assert compiled.output_shardings == lowered.compile().output_shardings
    assert compiled.cost_analysis() is not None


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("FAILED_PRECONDITION: Gloo all-reduce failed: Connection reset by peer", True),
        ("[external/gloo/gloo/transport/tcp/pair.cc:538] Read timeout", True),
        ("RESOURCE_EXHAUSTED: out of memory", False),
    ],
)
def test_errors_of_lost_connections_are_told_from_others(message, is_lost):
    assert is_lost_connection(RuntimeError(message)) is is_lost
