"""Random layouts."""

import hypothesis.strategies as st

from shardmap import Chunked, Replicated, ShardedAxis, ShardingSpec, Unstacked


@st.composite
def layouts(draw):
    """A spec of up to three dimensions, with a shape that it cuts."""
    kinds = draw(
        st.lists(st.sampled_from(["whole", "chunked", "unstacked"]), max_size=3)
    )
    sharding, shape, sharded = [], [], 0
    for kind in kinds:
        count = draw(st.integers(1, 3))
        if kind == "whole":
            sharding.append(None)
            shape.append(draw(st.integers(0, 3)))
        elif kind == "chunked":
            sharding.append(Chunked(count))
            shape.append(count * draw(st.integers(1, 3)))
        else:
            sharding.append(Unstacked(count))
            shape.append(count)
        sharded += kind != "whole"
    mapping = [ShardedAxis(axis) for axis in range(sharded)]
    mapping += [Replicated(n) for n in draw(st.lists(st.integers(1, 2), max_size=2))]
    mapping = draw(st.permutations(mapping))
    return ShardingSpec(tuple(sharding), tuple(mapping)), tuple(shape)


def places_of(spec, shape):
    """Which elements each device has, and of how many."""
    indices = [
        [range(n)[i] if isinstance(i, slice) else i for i, n in pairs]
        for index in spec.indices(shape).reshape(-1)
        for pairs in [zip(index, shape, strict=True)]
    ]
    return shape, str(indices)
