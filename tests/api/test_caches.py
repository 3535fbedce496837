"""Keeping things for functions: found again when equal, gone with the function."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.api import caches


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mapped", [sm.spmap, lambda f: sm.sharded_jit(f, None, None, 2)]
)
def test_a_method_is_traced_anew_as_its_object_may_have_changed(mapped):
    class Scale:
        factor = 1

        def times(self, x):
            return x * self.factor

    scale = Scale()
    kept_there = mapped(scale.times)
    for scale.factor in (1, 2):
        assert mapped(scale.times)(np.ones(8))[0] == scale.factor
        assert kept_there(np.ones(8))[0] == 1


@pytest.mark.usefixtures("young_heap")
@pytest.mark.few(1)
@pytest.mark.parametrize("communicates", [False, True])
@pytest.mark.parametrize("kind", ["spmap", "mesh_map", "sharded_jit"])
def test_no_more_programs_of_static_values_live_than_are_kept(
    kind, communicates, monkeypatch
):
    monkeypatch.setattr(caches, "MOST", 4)
    mesh = sm.make_mesh({"i": 8})

    def fun(k, x):
        return lax.pmax(x * k, "i") if communicates else x * k

    make = {
        "spmap": lambda fun: sm.spmap(fun, "i", static_broadcasted_argnums=0),
        "mesh_map": lambda fun: sm.mesh_map(
            fun, mesh, ({"i": 0},), {"i": 0}, static_argnums=0
        ),
        "sharded_jit": lambda fun: sm.sharded_jit(
            lambda k, x: (x.max() if communicates else x) * k + 0 * x,
            ((8,),),
            (8,),
            8,
            static_argnums=0,
        ),
    }[kind]
    mapped, x = make(fun), np.ones(8, np.float32)
    client = jax.devices()[0].client
    gc.collect()
    before = len(client.live_executables())
    for k in range(12):
        for _ in range(2):
            mapped(k, x).block_until_ready()
    gc.collect()
    assert 0 < len(client.live_executables()) - before <= 4
    np.testing.assert_array_equal(mapped(0, x), 0 * x)


class Nested:
    """A callable whose hash and comparison map functions themselves."""

    def __call__(self, x):
        return x

    def __hash__(self):
        sm.spmap(abs)
        return 1

    def __eq__(self, other):
        sm.spmap(lambda x: x)
        return isinstance(other, Nested)


def test_functions_may_be_mapped_while_functions_are_compared():
    done = []

    def run():
        sm.spmap(Nested())  # This one is forgotten, perhaps.
        kept = [sm.spmap(Nested()), sm.spmap(Nested())]
        kept += [sm.spmap(abs, axis_name=Nested()), sm.spmap(abs, axis_name=Nested())]
        done.append(kept)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert done


@pytest.mark.deep
def test_threads_may_map_while_old_programs_are_dropped(monkeypatch):
    monkeypatch.setattr(caches, "MOST", 64)
    interval = sys.getswitchinterval()

    def fun(x):
        return x

    def run(thread):
        for k in range(1000):
            mapped = sm.spmap(fun, (thread, k))
        return mapped

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            kept = list(pool.map(run, range(8)))
    finally:
        sys.setswitchinterval(interval)
    x = np.arange(3.0, dtype=np.float32)
    for mapped in kept:
        np.testing.assert_array_equal(mapped(x), x)
