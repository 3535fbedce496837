"""Caches that live as long as a function.

Compiling is expensive, and ``spmap(f)(x)`` may be in a loop: programs are found by the
function, not by the object that `spmap` returned. They do not keep the function alive.
"""

import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

MOST = 1024
"""The size of the cache of one function."""

V = TypeVar("V")


def keep(cache: OrderedDict[Hashable, V], key: Hashable, value: V) -> V:
    """Stores and returns ``value``, or returns what another thread has stored.

    A cache has at most `MOST` values, the oldest of which are dropped. It has no lock:
    a lookup runs the ``__hash__`` and ``__eq__`` of users, which may look up something
    else, in this thread or in another. Each step is atomic.
    """
    value = cache.setdefault(key, value)
    while len(cache) > MOST:
        cache.popitem(last=False)
    return value


_caches: weakref.WeakKeyDictionary[Callable[..., Any], OrderedDict[Hashable, Any]] = (
    weakref.WeakKeyDictionary()
)


def weak_cache(fun: Callable[..., Any], key: Hashable, make: Callable[[], V]) -> V:
    """The result of ``make()``, cached for equal functions and keys.

    It must not hold ``fun``; use `weak_reference`. Bound methods are not cached, as
    their object may have changed; `jax.jit` traces them anew, too. A map of a map may
    be made again at each call, as in ``spmap(spmap(f))(x)``, so it is not itself what
    things are cached by; see `Mapped.derivation`.
    """
    while hasattr(fun, "derivation"):
        fun, how, _ = fun.derivation()
        key = key, how
    if isinstance(fun, types.MethodType):
        return make()
    try:
        cache = _caches.setdefault(fun, OrderedDict())
    except TypeError:  # It has no hash or no weak reference, such as numpy.ufunc.
        return make()
    value = cache.get(key)
    return keep(cache, key, make()) if value is None else value


def weak_reference(fun: Callable[..., Any]) -> Callable[[], Any]:
    """A function that gives ``fun``, which the mapped function keeps alive.

    Of a map it gives an equal one.
    """
    if hasattr(fun, "derivation"):
        again: Callable[[], Any] = fun.derivation()[2]
        return again
    if isinstance(fun, types.MethodType):
        return weakref.WeakMethod(fun)
    try:
        return weakref.ref(fun)
    except TypeError:  # Such as numpy.ufunc.
        return lambda: fun
