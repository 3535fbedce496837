"""Digests of plans and arguments: all that counts is in them, and nothing else."""

import functools
import os

import jax
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardmap.extend import register_rule
from shardmap.planning.cutting import cut_function
from shardmap.planning.lax.per_piece import per_piece
from shardmap.planning.plan import plan
from shardmap.planning.run.disk import checkpoint
from shardmap.planning.run.disk.checkpoint import fingerprint, fingerprints
from tests.plan.run.checks import Recorded, X, assert_bytes


def _typed_key(seed):
    key = jax.random.key(seed)
    return lambda x: x + jax.random.uniform(key)


def _inside_a_loop(seed):
    inner = jax.jit(lambda x: x * np.full((1, 8), seed, np.float32))
    return lambda x: jax.lax.scan(lambda s, _: (inner(s), None), x, None, length=2)[0]


def _results(seed):
    """The same nodes, in another order of results."""

    def fun(x):
        total, squares = x.sum(0), (x * x).sum(0)
        return {"a": (total, squares)[seed - 1], "b": (squares, total)[seed - 1]}

    return fun


def _primitive(number):
    """Primitives of one name and one rule that multiply by a number."""
    myop_p = Primitive("myop")
    myop_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    times = mlir.lower_fun(lambda x: number * x, multiple_results=False)
    mlir.register_lowering(myop_p, times)
    register_rule(myop_p, "i j -> i j")
    return myop_p.bind


def _inner_primitive(number):
    bind = _primitive(number)
    return lambda x: jax.lax.fori_loop(0, 2, lambda _, y: bind(y), x)


def _rule(number):
    """Primitives of one name and lowering, with another rule."""
    bind = _primitive(1)

    def fun(x):
        return bind(x).sum(0)

    register_rule(bind.__self__, ("i j -> i j", "i * -> i *")[number - 1])
    return fun


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "make",
    [_typed_key, _inside_a_loop, _results, _primitive, _inner_primitive, _rule],
)
def test_what_a_function_holds_tells_it_from_others(make, tmp_path):
    first, same, other = (plan(make(k), X, in_slices=({0: 8},)) for k in (1, 1, 2))
    want = jax.tree.leaves(first.run(X, checkpoint=tmp_path))
    assert_bytes(jax.tree.leaves(same.run(X, checkpoint=tmp_path)), want)
    with pytest.raises(ValueError, match="belongs to another plan"):
        other.run(X, checkpoint=tmp_path)


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: jax.checkpoint(f)])
def test_a_function_that_calls_the_host_has_no_checkpoint(wrap, tmp_path):
    def host(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def fun(x):
        return jax.lax.fori_loop(0, 2, lambda _, y: wrap(host)(y), x)

    shard_plan = plan(fun, X, in_slices={})
    with pytest.raises(ValueError, match=r"pure_callback at .* calls the host"):
        shard_plan.run(X, checkpoint=tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def by_rows(function):
    return lambda x: per_piece(function, x, x, axes="i * -> i *")


def test_a_function_per_piece_is_known_by_its_text(tmp_path):
    def again(function, folder="one"):
        return plan(by_rows(function), X, in_slices={0: 4}).run(
            X, checkpoint=tmp_path / folder
        )

    np.testing.assert_array_equal(again(np.sort), np.sort(X))
    np.testing.assert_array_equal(again(np.sort), np.sort(X))
    with pytest.raises(ValueError, match="belongs to another plan"):
        again(np.flip)
    for holds in (functools.partial(np.sort, axis=1), lambda x: np.sort(x, tmp_path)):
        with pytest.raises(ValueError, match="a function that closes over nothing"):
            again(holds)


@pytest.mark.parametrize("name", ["shardmap", "jax", "jaxlib", "backend"])
def test_the_folder_of_other_software_is_refused(name, tmp_path, monkeypatch):
    shard_plan = plan(lambda x: x + 1, X, in_slices=({0: 8},))
    shard_plan.run(X, checkpoint=tmp_path)
    now = {**checkpoint.software(), name: "0.0.1"}
    monkeypatch.setattr(checkpoint, "software", lambda: now)
    with pytest.raises(ValueError, match=rf"with {name} .*, and this is {name} 0.0.1"):
        shard_plan.run(X, checkpoint=tmp_path)


def test_plans_of_other_cuts_and_constants_differ():
    def of(fun, pieces):
        return fingerprint(cut_function(fun, ((X,), {}), ({0: pieces},)))

    def plus(table):
        return lambda x: x + table

    ones, twos = (np.full((64, 8), k, np.float32) for k in (1, 2))
    assert of(plus(ones), 8) == of(plus(ones.copy()), 8)
    assert len({of(plus(ones), 8), of(plus(twos), 8), of(plus(ones), 4)}) == 3
    assert of(lambda x: x.sum(0), 8) != of(lambda x: x.max(0), 8)


def test_small_arguments_that_are_read_are_compared(tmp_path):
    shard_plan = plan(lambda x: x * 2, X, in_slices=({0: 8},))
    want = shard_plan.run(Recorded(X), checkpoint=tmp_path)
    assert shard_plan.run(X, checkpoint=tmp_path).tobytes() == want.tobytes()
    with pytest.raises(ValueError, match=r"args\[0\]"):
        shard_plan.run(Recorded(X + 1), checkpoint=tmp_path)


def test_samples_of_large_arguments_are_compared(tmp_path):
    big = np.arange(2**19, dtype=np.float32).reshape(2**10, -1)
    shard_plan = plan(lambda x: x.sum(0), big, in_slices=({0: 4},))
    want = shard_plan.run(big, checkpoint=tmp_path)
    assert_bytes([shard_plan.run(Recorded(big), checkpoint=tmp_path)], [want])
    with pytest.raises(ValueError, match=r"made with other values of args\[0\]"):
        shard_plan.run(big * 5, checkpoint=tmp_path)


def test_files_that_were_written_since_are_other_arguments(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2**10, 2**9), np.float32))
    x = np.load(tmp_path / "x.npy", mmap_mode="r+")
    shard_plan = plan(lambda x: x.sum(0), x, in_slices=({0: 4},))
    shard_plan.run(x, checkpoint=tmp_path / "folder")
    shard_plan.run(x[:], checkpoint=tmp_path / "folder")
    x[1, 100] = 1  # No sample has it.
    x.flush()
    os.utime(tmp_path / "x.npy", ns=(1, 1))
    with pytest.raises(ValueError, match=r"made with other values of args\[0\]"):
        shard_plan.run(x, checkpoint=tmp_path / "folder")


@pytest.mark.parametrize("shape", [(2**19,), (3, 2**18), (2**18, 3), (1, 2**19, 1)])
def test_samples_are_from_everywhere(shape):
    one = np.zeros(shape, np.float32)
    for place in (0, -1):
        other = one.copy()
        other.flat[place] = 1
        assert fingerprints([one]) == fingerprints([one.copy()])
        assert fingerprints([one]) != fingerprints([other])
    keys = jax.random.split(jax.random.key(0), 2**17 + 1)
    assert fingerprints([keys]) != fingerprints([keys[::-1]])
