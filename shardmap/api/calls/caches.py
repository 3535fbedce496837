"""Caches that live as long as a function.

Compiling is expensive, and ``spmap(f)(x)`` may be in a loop: programs are found by the
function, not by the object that `spmap` returned. They do not keep the function alive.
"""

import collections
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Hashable
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

    def drop(self, key: Hashable) -> None:
        """Forgets ``key``."""
        self._values.pop(key, None)

    def __len__(self) -> int:
        return len(self._values)


_kept: dict["_Owner", LRUCache[Any]] = {}


class WeakFunction:
    """A weak reference to a function, or to a bound method.

    Calling it gives the function, which the caller of the mapped function keeps alive.
    """

    def __init__(self, fun: Callable[..., Any]) -> None:
        self._ref: Callable[[], Any]
        try:
            self._ref = (
                weakref.WeakMethod(fun)
                if isinstance(fun, types.MethodType)
                else weakref.ref(fun)
            )
        except TypeError:  # Such as numpy.ufunc.
            self._ref = lambda: fun

    def __call__(self) -> Callable[..., Any]:
        return self._ref()


class _Owner(weakref.ref[Any]):
    """A weak dictionary key: by equality if its object has a hash, else by identity."""

    __slots__ = ("_by_identity", "_hash")

    def __new__(cls, owner: Any) -> "_Owner":
        return super().__new__(cls, owner, _forget)

    def __init__(self, owner: Any) -> None:
        # `weakref.ref` is complete after __new__.
        try:
            self._by_identity, self._hash = False, hash(owner)
        except TypeError:
            self._by_identity, self._hash = True, id(owner)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, _Owner):
            return False
        mine, its = self(), other()
        if mine is None or its is None:
            return False
        if self._by_identity or other._by_identity:
            return mine is its
        return bool(mine == its)


def weak_cache(fun: Callable[..., Any], key: Hashable, make: Callable[[], V]) -> V:
    """The result of ``make()``, cached for equal functions and keys.

    The value must not hold ``fun``; use `WeakFunction`. Bound methods are not cached,
    as their object may have changed; `jax.jit` traces them anew, too.
    """
    if isinstance(fun, types.MethodType):
        return make()
    try:
        owner = _Owner(fun)
    except TypeError:
        return make()
    kept = _kept.setdefault(owner, LRUCache())
    value = kept.get(key)
    return kept.setdefault(key, make()) if value is None else value


def described_like(
    run: Any, fun: Callable[..., Any], name: str, dropped: Collection[int] = ()
) -> Any:
    """``run``, with the name and signature of ``fun``, which JAX prints.

    Defaults, which may hold ``fun``, are replaced by None.

    Args:
      run: the function to describe.
      fun: the user's.
      name: of ``fun``.
      dropped: the positions of its arguments that ``run`` does not take.
    """
    run.__name__ = run.__qualname__ = name
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # Some builtins have none.
        return run
    empty = inspect.Parameter.empty
    run.__signature__ = inspect.Signature(
        [
            p.replace(annotation=empty, default=empty if p.default is empty else None)
            for k, p in enumerate(signature.parameters.values())
            if k not in dropped or p.kind is p.VAR_POSITIONAL
        ]
    )
    return run


def _forget(owner: _Owner) -> None:
    _kept.pop(owner, None)
