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
    made = plan(fun, *args, in_slices=in_slices)
    got = made.run(*args)
    assert_same(got, jax.jit(fun)(*args))
    if want is not None:
        np.testing.assert_array_equal(got, want)
    if shards is not None:
        assert made.num_shards == len(made.shards) == shards
    assert len(made.stages) == stages
    return made


def slices(*pairs):
    return tuple(slice(*pair) for pair in pairs)


def check_cut(fun, *args, in_slices, tolerance=2e-5, **options):
    """Runs the plan in more than one shard, compares, and returns it."""
    made = plan(fun, *args, in_slices=in_slices, **options)
    assert_same(made.run(*args), jax.jit(fun)(*args), tolerance)
    assert made.num_shards > 1
    return made


def times_read(made, arguments=slice(None)):
    """How often those of the arguments are read, the one that is read most."""
    read = dict.fromkeys(made._cut_program.graph.inputs[arguments], 0)
    for stage in made.stages:
        for number in range(stage.num_shards):
            for value, box in stage.recipe(number)[1].reads:
                if value in read:
                    read[value] += np.prod([stop - start for start, stop in box])
    return max(count / value.size for value, count in read.items())
