"""Keeping things for functions: found again when equal, gone with the function."""

import functools
import gc
import subprocess
import sys
import threading
import weakref

import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.api.calls import caches
from shardmap.api.calls.caches import MOST, LRUCache, WeakFunction, weak_cache


class Value:
    """Something to keep."""


def test_the_same_function_and_key_find_the_same_value():
    def fun():
        pass

    value = weak_cache(fun, "key", Value)
    assert weak_cache(fun, "key", Value) is value
    assert weak_cache(fun, "other key", Value) is not value
    assert weak_cache(lambda: None, "key", Value) is not value


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


def test_the_programs_of_a_method_go_with_it():
    class Scale:
        def times(self, x):
            return x * 2

    scale = Scale()
    mapped = sm.spmap(scale.times)
    mapped(np.ones(8))
    programs = weakref.ref(mapped._programs)
    del mapped
    gc.collect()
    assert programs() is None


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


def test_callables_without_hash_are_found_by_identity():
    class Unhashable:
        __hash__ = None

        def __eq__(self, other):
            return True

        def __call__(self):
            pass

    one, two = Unhashable(), Unhashable()
    value = weak_cache(one, None, Value)
    assert weak_cache(one, None, Value) is value
    assert weak_cache(two, None, Value) is not value


def test_the_value_goes_with_the_function():
    def fun():
        pass

    value = weak_cache(fun, None, Value)
    reference = weakref.ref(value)
    del fun, value
    gc.collect()
    assert reference() is None


def test_what_has_no_weak_reference_is_made_anew_each_time():
    assert weak_cache(np.add, None, Value) is not weak_cache(np.add, None, Value)
    assert WeakFunction(np.add)() is np.add


def test_weak_functions_give_the_function_while_it_lives():
    class Owner:
        def method(self):
            return self

    def fun():
        pass

    owner = Owner()
    partial = functools.partial(fun)
    assert WeakFunction(fun)() is fun
    assert WeakFunction(partial)() is partial
    method = WeakFunction(owner.method)
    assert method()() is owner
    del owner
    gc.collect()
    assert method() is None


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


MEETING = """
import os, sys, threading
import jax, numpy as np, shardmap as sm
from jax import lax

x, met = np.ones(8, np.float32), set()
total = sm.spmap(lambda x: lax.psum(x, "i"), "i")
total(x)

def meet(where):
    # Another thread maps, and is waited for: no lock may be held here.
    met.add(where)
    done = threading.Event()

    def other():
        total(x)
        done.set()

    threading.Thread(target=other, daemon=True).start()
    if not done.wait(60):
        print("stuck in", where, flush=True)
        os._exit(1)

class Hooks:
    def __init__(self, name):
        self.name = name
    def __hash__(self):
        meet(f"{self.name} __hash__ {stage}")
        return hash(self.name)
    def __eq__(self, other):
        meet(f"{self.name} __eq__ {stage}")
        return isinstance(other, Hooks) and self.name == other.name

class Fun(Hooks):
    @property
    def __signature__(self):
        meet(f"{self.name} __signature__ {stage}")
        raise AttributeError
    def __call__(self, x, k):
        meet(f"{self.name} __call__ {stage}")
        return lax.psum(x, "i")

def use():
    mapped = sm.spmap(first, "i", in_axes=(0, None), static_broadcasted_argnums=1)
    return np.asarray(mapped(x, Hooks("static")))

first, second = Fun("fun"), Fun("fun")
for stage in "made", "found", "once more":
    for _ in range(2):
        use()
        first, second = second, first
print(len(met), sorted(met)[0])
"""


@pytest.mark.deep
def test_no_lock_is_held_while_hooks_of_users_run():
    """In a process of its own, as it would never end."""
    done = subprocess.run(
        [sys.executable, "-c", MEETING], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count, *_ = done.stdout.split()
    assert int(count) >= 10


def test_other_threads_are_not_kept_waiting_by_a_comparison():
    mapped = threading.Event()

    class Waiting(Nested):
        def __hash__(self):
            return 2

        def __eq__(self, other):
            threading.Thread(target=lambda: (sm.spmap(abs), mapped.set())).start()
            return mapped.wait(30)

    first = Waiting()
    weak_cache(first, None, Value)
    weak_cache(Waiting(), None, Value)
    assert mapped.is_set()


def test_of_many_values_the_least_recently_used_go():
    kept = LRUCache()
    for k in range(MOST):
        kept.setdefault(k, f"value {k}")
    assert kept.get(0) == "value 0"
    assert kept.setdefault("one more", "value") == "value"
    assert len(kept) == MOST
    assert kept.get(0) == "value 0"
    assert kept.get(1) is None
    assert kept.setdefault(0, "another") == "value 0"
    kept.drop(0)
    assert kept.get(0) is None


def test_of_one_function_not_all_options_are_kept():
    def fun():
        pass

    first = weak_cache(fun, 0, Value)
    for k in range(1, MOST + 1):
        weak_cache(fun, k, Value)
    assert weak_cache(fun, 0, Value) is not first
