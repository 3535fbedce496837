"""Hypothesis strategies: specs, and shapes that fit them; and how many examples."""

import math

from hypothesis import settings
from hypothesis import strategies as st

from shardmap import Chunked, Replicated, ShardedAxis, ShardingSpec, Unstacked


def examples(count: int) -> settings:
    """Settings for `count` examples where a test has 10 by default.

    The profiles of tests/conftest.py have 4, 30 and 300.
    """
    return settings(max_examples=max(1, count * settings.default.max_examples // 10))


@st.composite
def specs(draw, *, max_devices=48, max_ndim=4, unstacked=True):
    """Specs of rank 0 to `max_ndim` over at most `max_devices` devices.

    Any dimension may be whole, chunked along one to three mesh dimensions, or (with
    `unstacked`) unstacked. Copies stand anywhere and mesh dimensions in any order.
    """
    left = max_devices

    def size():
        nonlocal left
        chosen = draw(st.integers(1, min(4, left)))
        left //= chosen
        return chosen

    sharding = []
    axes = 0
    kinds = ["whole", "chunked", "unstacked"] if unstacked else ["whole", "chunked"]
    for _ in range(draw(st.integers(0, max_ndim))):
        kind = draw(st.sampled_from(kinds))
        if kind == "chunked":
            chunks = [size() for _ in range(draw(st.integers(1, 3)))]
            sharding.append(Chunked(chunks))
            axes += len(chunks)
        elif kind == "unstacked":
            sharding.append(Unstacked(size()))
            axes += 1
        else:
            sharding.append(None)
    mapping = [ShardedAxis(axis) for axis in range(axes)]
    mapping += [Replicated(size()) for _ in range(draw(st.integers(0, 2)))]
    return ShardingSpec(sharding, draw(st.permutations(mapping)))


@st.composite
def shapes(draw, spec):
    """Shapes that `spec` can cut, empty dimensions included."""
    shape = []
    for entry in spec.sharding:
        if isinstance(entry, Unstacked):
            shape.append(entry.size)
        else:
            pieces = math.prod(entry.chunks) if entry else 1
            shape.append(pieces * draw(st.integers(0, 3)))
    return tuple(shape)


@st.composite
def specs_and_shapes(draw, **options):
    """Pairs of a spec and a shape that it can cut."""
    spec = draw(specs(**options))
    return spec, draw(shapes(spec))
