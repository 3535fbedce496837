"""What a plan says of chunks and of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm

X = np.random.default_rng(0).standard_normal((400, 500)).astype(np.float32)


class Chunks:
    """An array that lies in chunks, as those of zarr do."""

    chunks = (100, 250)

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.read = 0

    def __getitem__(self, index):
        edges = zip(index, self.chunks, strict=True)
        self.read += np.prod([-(-k.stop // n) - k.start // n for k, n in edges])
        return self.values[index]


@pytest.mark.parametrize(
    ("cut", "often"),
    [({0: sm.AS_CHUNKED}, "once"), ({1: sm.Pieces(50)}, "5 times"), ({1: 2}, "once")],
)
def test_chunks_are_counted_as_often_as_they_are_read(cut, often):
    x = Chunks(X)
    shard_plan = sm.plan(lambda x: x * 2, x, in_slices=cut)
    shard_plan.run(x)
    assert x.read == {"once": 8, "5 times": 40}[often]
    assert f"together the shards read args[0] {often}" in str(shard_plan)
    told = "chunks of args[0] are decoded 5 times: cut it AS_CHUNKED" in str(shard_plan)
    assert told == (often != "once")


@pytest.mark.few(1)
@pytest.mark.parametrize("given", [{"static_argnums": 1}, {"static_argnames": "n"}])
def test_chunked_takes_static_arguments(given):
    traced = []

    @sm.chunked(in_slices=({0: 2}, None), **given)
    def power(x, n, *, by=None):
        traced.append(n)
        return x**n if isinstance(n, int) else x

    x = jnp.arange(4.0)
    for n in (2, 3, 2):
        np.testing.assert_array_equal(power(x, n), x**n)
    assert traced == [2, 3]
    assert "reaches axis 0" in str(power.explain(x, 2))
    np.testing.assert_array_equal(jax.grad(lambda x: power(x, 2).sum())(x), 2 * x)
    with pytest.raises(TypeError, match=r"must be hashable, got \[2\] .*in args\[1\]"):
        power(x, [2])


def test_where_nothing_is_cut_or_left_to_run_it_is_told():
    with pytest.warns(UserWarning, match=r"plan: nothing is cut: give in_slices, ou"):
        sm.plan(jnp.sin, X)
    with pytest.warns(UserWarning, match="chunked: nothing is cut: give in_slices or"):
        sm.chunked(jnp.sin)
    with pytest.warns(UserWarning, match=r"no shard has anything to do.*as arguments"):
        sm.plan(lambda: X.sum(), memory="1 MB")


def test_the_page_of_a_plan_begins_with_its_function_and_memory():
    shard_plan = sm.plan(lambda x: (x - x.mean(0)[None]) * 2, X, memory="200 kB")
    first, holds, *_ = str(shard_plan).splitlines()
    assert first == f"<lambda>: {shard_plan.num_shards} shards"
    for page in str(shard_plan.explain()), shard_plan._repr_html_():
        assert holds.strip() in page
        assert "as asked" not in page


@pytest.mark.parametrize("wrong", [(0,), (-1,), (2,)])
def test_a_cut_that_is_suggested_is_taken(wrong):
    with pytest.raises(TypeError, match=r"give None, EACH or a dict") as caught:
        sm.plan(jnp.sin, X, in_slices=wrong)
    assert ("such as {0: 2}" in str(caught.value)) == (wrong == (2,))


def test_a_shard_has_a_repr_that_one_can_read():
    first, *_ = sm.plan(jnp.sin, X, in_slices={0: 2}).shards
    assert repr(first) == "<shard 0 of stage 0: reads args[0][0:200, 0:500]>"
