"""Keeping things for functions: found again when equal, gone with the function."""

import functools
import gc
import weakref

import numpy as np

from shardmap.api.calls.kept import WeakFunction, kept_for


class Value:
    """Something to keep."""


def test_the_same_function_and_key_find_the_same_value():
    def fun():
        pass

    value = kept_for(fun, "key", Value)
    assert kept_for(fun, "key", Value) is value
    assert kept_for(fun, "other key", Value) is not value
    assert kept_for(lambda: None, "key", Value) is not value


def test_methods_are_found_by_their_object_and_function():
    class Equal:
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

        def first(self):
            pass

        def second(self):
            pass

    one, two = Equal(), Equal()
    value = kept_for(one.first, None, Value)
    assert kept_for(one.first, None, Value) is value
    assert kept_for(one.second, None, Value) is not value
    assert kept_for(two.first, None, Value) is not value


def test_callables_without_hash_are_found_by_identity():
    class Unhashable:
        __hash__ = None

        def __eq__(self, other):
            return True

        def __call__(self):
            pass

    one, two = Unhashable(), Unhashable()
    value = kept_for(one, None, Value)
    assert kept_for(one, None, Value) is value
    assert kept_for(two, None, Value) is not value


def test_the_value_goes_with_the_function():
    def fun():
        pass

    value = kept_for(fun, None, Value)
    reference = weakref.ref(value)
    del fun, value
    gc.collect()
    assert reference() is None


def test_what_has_no_weak_reference_is_made_anew_each_time():
    assert kept_for(np.add, None, Value) is not kept_for(np.add, None, Value)
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
