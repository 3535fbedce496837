"""Caches that live as long as a function.

Compiling is expensive, and ``spmap(f)(x)`` may be in a loop: programs are found by the
function, not by the object that `spmap` returned. They do not keep the function alive.
"""

import collections
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

MOST = 1024
"""The size of the cache of one function."""

V = TypeVar("V")


class LRUCache(Generic[V]):
    """A dictionary of at most `MOST` values, which drops the least recently used one.

    It has no lock: a lookup runs the ``__hash__`` and ``__eq__`` of users, which may
    look up something else, in this thread or in another. Each step is atomic.
    """

    def __init__(self) -> None:
        self._values: collections.OrderedDict[Hashable, V] = collections.OrderedDict()

    def get(self, key: Hashable) -> V | None:
        """The value of ``key``; None if there is none, or it was dropped."""
        value = self._values.get(key)
        # Hashing a key takes time: while there is room, the order does not matter.
        if value is not None and len(self._values) > MOST // 2:
            try:
                self._values.move_to_end(key)
            except KeyError:  # Another thread has dropped it.
                pass
        return value

    def setdefault(self, key: Hashable, value: V) -> V:
        """Stores and returns ``value``, or returns what another thread has stored."""
        value = self._values.setdefault(key, value)
        while len(self._values) > MOST:
            self._values.popitem(last=False)
        return value


_caches: weakref.WeakKeyDictionary[Callable[..., Any], LRUCache[Any]] = (
    weakref.WeakKeyDictionary()
)


def weak_cache(fun: Callable[..., Any], key: Hashable, make: Callable[[], V]) -> V:
    """The result of ``make()``, cached for equal functions and keys.

    The value must not hold ``fun``; use `weak_reference`. Bound methods are not cached,
    as their object may have changed; `jax.jit` traces them anew, too.
    """
    if isinstance(fun, types.MethodType):
        return make()
    try:
        cache = _caches.setdefault(fun, LRUCache())
    except TypeError:  # It has no hash or no weak reference, such as numpy.ufunc.
        return make()
    value = cache.get(key)
    return cache.setdefault(key, make()) if value is None else value


def weak_reference(fun: Callable[..., Any]) -> Callable[[], Any]:
    """A function that gives ``fun``, which the mapped function keeps alive."""
    if isinstance(fun, types.MethodType):
        return weakref.WeakMethod(fun)
    try:
        return weakref.ref(fun)
    except TypeError:  # Such as numpy.ufunc.
        return lambda: fun
