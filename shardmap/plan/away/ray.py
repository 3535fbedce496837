"""Ray as an executor: the module `ray` itself, or a pool that speaks its language."""

import types
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class RayExecutor(Executor):
    """Tasks of Ray, as an executor.

    Args:
      ray: the module, of which `ray.init` has been called.
    """

    def __init__(self, ray: Any) -> None:
        self._call = ray.remote(_call)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kw: Any) -> Future[Any]:
        found: Future[Any] = self._call.remote(fn, args, kw).future()
        return found


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def is_ray(executor: Any) -> bool:
    return isinstance(executor, types.ModuleType) and executor.__name__ == "ray"
