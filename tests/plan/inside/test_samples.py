"""Shards that stand for all of a stage: the largest is among them, and few are."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.cutting import cut_function
from shardmap.plan.inside import samples
from shardmap.plan.inside.samples import sample


def stage_of(*cuts):
    shape = [sum(lengths) for lengths in cuts]
    made = cut_function(jnp.sin, (np.zeros(shape),), (dict(enumerate(cuts)),))
    [stage] = made.stages
    return stage


def test_of_few_shards_all_are_looked_at():
    assert list(sample(stage_of((3, 5), (1, 4, 2)))) == list(range(6))


@pytest.mark.parametrize("most", [64, 4])
def test_the_largest_of_many_is_among_few(most, monkeypatch):
    monkeypatch.setattr(samples, "SAMPLED", most)
    rows, columns = (2,) * 30 + (7,) + (2,) * 30, (3, 9, 3)
    stage = stage_of(rows, columns)
    found = list(sample(stage))
    assert len(found) == len(set(found)) <= most
    sizes = [a * b for a, b in itertools.product(rows, columns)]
    assert max(found) < stage.num_shards == len(sizes)
    if most == 64:
        assert max(sizes[k] for k in found) == max(sizes)
        assert {0, len(sizes) - 1} <= {*found}


def test_every_family_has_shards_of_its_own():
    made = cut_function(
        lambda x, y: (jnp.sin(x), jnp.sin(y)),
        (np.zeros(200), np.zeros(300)),
        ({0: 100}, {0: 100}),
    )
    [stage] = made.stages
    found = list(sample(stage))
    assert {0, 99, 100, 199} <= {*found}
    assert len(found) < 20
