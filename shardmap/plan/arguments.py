"""What a plan may be given, and what tracing needs to know of it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardmap._jax.stages import trace_as
from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import abstract_value, device_dtype, is_array_like
from shardmap.plan.run.buffers import refuse_masked


def aval_of(leaf: Any, name: str) -> Any:
    """What tracing needs to know of an argument, which is not read.

    Raises:
      TypeError: no array of numbers or booleans.
      ValueError: it is masked, or nobody knows how long it is.
    """
    if isinstance(leaf, bool | int | float | complex | jax.Array | np.generic):
        return leaf
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            f"plan takes arrays or what has a shape and a dtype, got {leaf!r} of type "
            f"{type(leaf).__name__} in {name}; what is no array is static: name it in "
            "static_argnames or static_argnums"
        )
    dtype = leaf.dtype
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        if not any(jax.dtypes.issubdtype(dtype, k) for k in (np.number, np.bool_)):
            raise TypeError(
                f"plan takes numbers and booleans, got {dtype} in {name}: give what "
                "it stands for as numbers, such as array.astype('int64')"
            )
        try:
            refuse_masked(leaf)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if is_array_like(leaf):
            dtype = abstract_value(leaf).dtype
        dtype = device_dtype(np.dtype(dtype))
    unknown = [axis for axis, size in enumerate(leaf.shape) if size != size]
    if unknown:  # As of arrays of Dask from which elements were picked.
        raise ValueError(
            f"{name} has the shape {tuple(leaf.shape)}, whose length along axis "
            f"{unknown[0]} is not known: compute it before, as "
            "dask.array's x.compute_chunk_sizes() does"
        )
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def narrowed_dtype(leaf: Any) -> tuple[np.dtype, np.dtype] | None:
    """The 64-bit dtype of an array and the 32-bit one that JAX makes of it, or None."""
    if isinstance(leaf, np.generic) or not hasattr(leaf, "dtype"):
        return None
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return None
    given = np.dtype(leaf.dtype).newbyteorder("=")
    taken = device_dtype(given)
    return None if taken == given else (given, taken)


OPTIONS = frozenset(
    {
        *("out", "executor", "max_in_flight", "progress", "retries", "checkpoint"),
        *("scratch", "task", "values"),
    }
)
"""What a plan's own methods take by name."""


class CallArguments:
    """How the arguments of a function become those of its graph.

    Those given by name are one more argument, a dict. A static one becomes None, in
    which there are no arrays, and keeps its place.

    Args:
      fun: the function.
      args: its positional arguments.
      kwargs: those given by name.
      static_argnums: the positions of arguments that are static.
      static_argnames: the names of arguments that are static.

    Attributes:
      args: as the graph takes them.
      call: the function, of arguments as its graph takes them.

    Raises:
      TypeError: a name is an option of `ShardPlan.run` too, or a static argument has no
        hash.
      ValueError: there is no such static argument.
    """

    def __init__(
        self,
        fun: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
    ) -> None:
        taken = sorted(OPTIONS & kwargs.keys())
        if taken:
            raise TypeError(
                f"plan cannot take the keyword argument {taken[0]!r} of the function, "
                "as a plan has an option of that name: bind it before, with "
                f"functools.partial(fun, {taken[0]}=...)"
            )
        self._fun = fun
        self._names = frozenset(kwargs)
        self._count = len(args)
        self._statics: dict[int | str, Any] = {}
        for key in _static_keys(fun, args, kwargs, static_argnums, static_argnames):
            value = kwargs[key] if isinstance(key, str) else args[key]
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"static arguments must be hashable, got {value!r} of type "
                    f"{type(value).__name__} in {_called(key)}"
                ) from None
            self._statics[key] = value
        self.args = self.given(args, kwargs)
        self.call = self._call(args, kwargs)

    @property
    def positional(self) -> int:
        """How many of ``args`` were not given by name."""
        return self._count

    def given(
        self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
    ) -> tuple[PyTree, ...]:
        """Arguments of the function as its graph takes them.

        Raises:
          TypeError: other names than those of the plan.
          ValueError: a static argument has another value.
        """
        if kwargs.keys() != self._names:
            raise TypeError(
                f"the plan was made for {_told(self._names)}, got {_told(kwargs)}"
            )
        positional, by_name = list(args), dict(kwargs)
        for key, value in self._statics.items():
            if isinstance(key, int) and key >= len(args):
                continue  # Told with the structure.
            own = by_name[key] if isinstance(key, str) else positional[key]
            if own is not value and own != value:
                raise ValueError(
                    f"the plan was made for the static argument {_called(key)} = "
                    f"{value!r}, got {own!r}: make another plan for it"
                )
            if isinstance(key, str):
                del by_name[key]
            else:
                positional[key] = None
        return (*positional, by_name) if self._names else tuple(positional)

    def _call(
        self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
    ) -> Callable[..., PyTree]:
        def call(*given: PyTree) -> PyTree:
            positional = list(given[: self._count])
            by_name = dict(given[self._count]) if self._names else {}
            for key, value in self._statics.items():
                if isinstance(key, str):
                    by_name[key] = value
                else:
                    positional[key] = value
            return self._fun(*positional, **by_name)

        numbers = [key for key in self._statics if isinstance(key, int)]
        names = [key for key in self._statics if isinstance(key, str)]
        trace_as(call, "plan", self._fun, args, kwargs, numbers, names)
        return call


def _called(key: int | str) -> str:
    return f"kwargs[{key!r}]" if isinstance(key, str) else f"args[{key}]"


def _told(names: Mapping[str, Any] | frozenset[str]) -> str:
    return f"the keyword arguments {sorted(names)}" if names else "no keyword arguments"


def _static_keys(
    fun: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    static_argnums: int | Sequence[int],
    static_argnames: str | Sequence[str],
) -> list[int | str]:
    """The static arguments of a call, by position or name as they were given."""
    numbers = [static_argnums] if isinstance(static_argnums, int) else static_argnums
    names = [static_argnames] if isinstance(static_argnames, str) else static_argnames
    found: list[int | str] = []
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"static_argnums names the positional argument {number}, but there are "
                f"{len(args)}"
            )
        found.append(number % len(args))
    known = _parameters(fun)
    for name in names:
        if name in kwargs:
            found.append(name)
        elif name in known[: len(args)]:
            found.append(known.index(name))
        elif name not in known:
            raise ValueError(
                f"static_argnames names {name!r}, which the function was not given"
            )
    return list(dict.fromkeys(found))


def _parameters(fun: Callable[..., PyTree]) -> list[str]:
    """The names of a function's parameters, in their order, as far as it tells."""
    try:
        return list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        return []
