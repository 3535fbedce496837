"""How plans are tested: any cut gives what the function gives that is not cut."""

import jax
import numpy as np
from hypothesis import strategies as st

from shardmap.planning.plan import plan


@st.composite
def cuts(draw, args):
    """A cut of some axes of some arguments, at least one."""
    axes = [(k, a) for k, x in enumerate(args) for a, n in enumerate(x.shape) if n > 1]
    chosen = draw(st.lists(st.sampled_from(axes), min_size=1, max_size=3, unique=True))
    found = [{} for _ in args]
    for k, axis in chosen:
        size = args[k].shape[axis]
        points = draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=3))
        lengths = tuple(np.diff([0, *sorted(points), size]).tolist())
        found[k][axis] = draw(st.sampled_from([lengths, min(len(lengths), size)]))
    return tuple(found)


def assert_same(got, want, tolerance=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance
        )


def iota(*shape, dtype=np.int32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def check(fun, *args, in_slices, shards=None, stages=1, want=None):
    """Runs the plan, compares it with the function, and returns it."""
    shard_plan = plan(fun, *args, in_slices=in_slices)
    got = shard_plan.run(*args)
    assert_same(got, jax.jit(fun)(*args))
    if want is not None:
        np.testing.assert_array_equal(got, want)
    if shards is not None:
        assert shard_plan.num_shards == len(shard_plan.shards) == shards
    assert len(shard_plan.stages) == stages
    return shard_plan


def slices(*pairs):
    return tuple(slice(*pair) for pair in pairs)


def check_cut(fun, *args, in_slices, tolerance=2e-5, **options):
    """Runs the plan in more than one shard, compares, and returns it."""
    shard_plan = plan(fun, *args, in_slices=in_slices, **options)
    assert_same(shard_plan.run(*args), jax.jit(fun)(*args), tolerance)
    assert shard_plan.num_shards > 1
    return shard_plan


def times_read(shard_plan, arguments=slice(None)):
    """How often those of the arguments are read, the one that is read most."""
    read = dict.fromkeys(shard_plan._cut_program.graph.inputs[arguments], 0)
    for stage in shard_plan.stages:
        for number in range(stage.num_shards):
            for value, box in stage.recipe(number)[1].reads:
                if value in read:
                    read[value] += np.prod([stop - start for start, stop in box])
    return max(count / value.size for value, count in read.items())
