"""Traces NumPy's functions as those of `jax.numpy`.

xarray calls NumPy, which asks JAX's tracers for their values. The tracers here call the
function of `jax.numpy` with the same name instead, by NumPy's protocols
``__array_ufunc__`` and ``__array_function__``.

>>> import jax.numpy as jnp, numpy as np
>>> @numpy_functions
... def fun(x):
...     return np.sqrt(np.cumsum(x))
>>> jax.jit(fun)(jnp.ones(4))
Array([1.       , 1.4142135, 1.7320508, 2.       ], dtype=float32)
"""

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, set_current_trace, take_current_trace
from numpy.lib.stride_tricks import sliding_window_view

from shardmap._jax.types import PyTree

ARRAYS = (jax.Array, jax.core.Tracer, np.ndarray)


def numpy_functions(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns ``fun`` with NumPy's functions traced as those of `jax.numpy`."""

    def traced(*args: PyTree) -> PyTree:
        with take_current_trace() as outer:
            trace = _Trace(outer)
            with set_current_trace(trace):
                result = fun(*jax.tree.map(trace.wrap, args))
            return jax.tree.map(trace.unwrap, result)

    return traced


class _Trace(jax.core.Trace):
    """Passes each primitive to the trace around it and wraps the results."""

    def __init__(self, outer: jax.core.Trace) -> None:
        super().__init__()
        self.requires_low = False
        self.outer = outer

    def wrap(self, value: Any) -> "_Tracer":
        return _Tracer(self, value)

    def unwrap(self, value: Any) -> Any:
        is_wrapped = isinstance(value, _Tracer) and value._trace is self
        return value.value if is_wrapped else value

    def stage_value(self, value: Any) -> "_Tracer":
        return self.wrap(self.outer.stage_value(self.unwrap(value)))

    def process_primitive(
        self, primitive: Primitive, args: Any, params: dict[str, Any], /
    ) -> Any:
        with set_current_trace(self.outer):
            outs = primitive.bind(*map(self.unwrap, args), **params)
        if primitive.multiple_results:
            return list(map(self.wrap, outs))
        return self.wrap(outs)

    # Nothing is differentiated at this level: the function itself is enough.
    def process_custom_jvp_call(
        self, primitive: Primitive, fun: Any, *rules_and_args: Any, **_: Any
    ) -> Any:
        with set_current_trace(self):
            return fun.call_wrapped(*rules_and_args[-1])

    process_custom_vjp_call = process_custom_jvp_call


class _Tracer(jax.core.Tracer[_Trace]):
    """A traced array that NumPy's functions take."""

    def __init__(self, trace: _Trace, value: Any) -> None:
        super().__init__(trace, jax.typeof(value))
        self.value = value

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *args: Any, out: Any = None, **kwargs: Any
    ) -> Any:
        if not all(isinstance(x, (*ARRAYS, numbers.Number)) for x in args):
            return NotImplemented
        if out is not None:
            raise TypeError(
                f"numpy.{ufunc.__name__} cannot write a traced array to `out`, an "
                "array of NumPy: use what it returns"
            )
        of_jax = _of_jax(ufunc, "numpy")
        if method != "__call__":
            of_jax = getattr(of_jax, method)
        return _call(of_jax, args, kwargs)

    def __array_function__(
        self, fun: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        if not all(issubclass(each, ARRAYS) for each in types):
            return NotImplemented
        known = inspect.signature(fun).parameters
        kwargs = {
            name: tuple(each) if isinstance(each, list) else each
            for name, each in kwargs.items()
            # jax.numpy may lack the option, or have another default than NumPy.
            if name not in known or each is not known[name].default
        }
        written_here = {sliding_window_view: _windows, np.linalg.lstsq: _lstsq}
        of_jax = written_here.get(fun) or _of_jax(fun, fun.__module__)
        return _call(of_jax, list(map(_operand, args)), kwargs)

    def astype(
        self, dtype: Any = None, copy: bool = False, device: Any = None
    ) -> jax.Array:
        # xarray asks for 64 bits where any will do: JAX would warn that it has 32.
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jnp.astype(self, dtype, copy=copy, device=device)

    # With an array namespace, xarray calls that instead of NumPy, and cannot index by
    # several arrays at once.
    @property
    def __array_namespace__(self) -> Any:
        raise AttributeError("__array_namespace__")

    def __getattr__(self, name: str) -> Any:
        if name == "__array_namespace__":
            raise AttributeError(name)
        return super().__getattr__(name)


def _of_jax(fun: Callable[..., Any], module: str) -> Callable[..., Any]:
    """The function of `jax.numpy` with the name of one of NumPy."""
    names = [*module.split(".")[1:], fun.__name__]
    attribute: Any = jnp
    for name in names:
        attribute = getattr(attribute, name, None)
    if attribute is None:
        raise TypeError(f"jax.numpy has no {'.'.join(names)}: use what it has instead")
    return attribute


def _call(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # Callers of NumPy's function expect NumPy's promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return fun(*args, **kwargs)


def _operand(value: Any) -> Any:
    """The argument; a list of numbers as an array, since `jax.numpy` takes no lists."""
    if not isinstance(value, list) or any(
        isinstance(leaf, ARRAYS) for leaf in jax.tree.leaves(value)
    ):
        return value
    return np.asarray(value)


def _windows(x: jax.Array, window_shape: Any, axis: Any = None) -> jax.Array:
    """`numpy.lib.stride_tricks.sliding_window_view`."""
    sizes = np.atleast_1d(window_shape).tolist()
    axes = range(x.ndim) if axis is None else np.atleast_1d(axis).tolist()
    for size, along in zip(sizes, axes, strict=True):
        x = _windows_along(x, size, along)
    return x


def _windows_along(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Adds the windows of one axis as a new last axis, each from two half windows.

    One slice for each place in a window would be far more operations to compile.
    """
    if size == 1:
        return x[..., None]
    half = (size + 1) // 2
    count, shift = x.shape[axis] - size + 1, size - half
    parts = _windows_along(x, half, axis)
    first = jax.lax.slice_in_dim(parts, 0, count, axis=axis)
    second = jax.lax.slice_in_dim(parts, shift, shift + count, axis=axis)
    return jnp.concatenate([first, second[..., half - shift :]], -1)


def _lstsq(a: Any, b: Any, rcond: float | None = None) -> tuple[Any, Any, Any, Any]:
    """`numpy.linalg.lstsq`; the rank of a matrix of NumPy is known."""
    if not isinstance(a, np.ndarray):
        return jnp.linalg.lstsq(a, b, rcond)
    cutoff = np.finfo(a.dtype).eps * max(a.shape) if rcond is None else rcond
    singular = np.linalg.svd(a, compute_uv=False)
    rank = int((singular > cutoff * singular[0]).sum())
    dot = functools.partial(jnp.matmul, precision="highest")
    solution = dot(np.linalg.pinv(a, cutoff), b)
    rest = jnp.atleast_1d(((b - dot(a, solution)) ** 2).sum(0))
    if rank < a.shape[1] or a.shape[0] <= a.shape[1]:
        rest = rest[:0]
    return solution, rest, rank, singular
