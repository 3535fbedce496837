"""`per_piece`: functions of NumPy and SciPy, with a rule that says how they are cut."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives

from shardmap._jax.primitives import PURE_CALLBACK, callback_of
from shardmap._jax.types import PyTree, TreeDef
from shardmap.planning.engine.factors import Factors, Local, out_size, taken_whole
from shardmap.planning.engine.nodes import Node, PlanPrimitive, Value
from shardmap.planning.engine.rules import Reason
from shardmap.planning.lax.written import factors, parsed
from shardmap.units import shown

OUTSIDE = Reason(
    "code outside of JAX may look at all of its operands",
    "call it by per_piece, which says what it looks at",
)


def per_piece(
    function: Callable[..., PyTree], result: PyTree, *args: PyTree, axes: str
) -> PyTree:
    """Calls a function of NumPy arrays, such as one of SciPy, that plans can cut.

    It is `jax.pure_callback` with a rule. Each shard calls the function with its pieces
    of the arrays. It also works in `jax.jit`, `jax.vmap`, `chunked`, maps, and alone.
    JAX cannot differentiate it.

    Args:
      function: takes NumPy arrays, which it must not change, in the place of ``args``
        and returns arrays with the structure of ``result``. It depends on nothing else,
        and may be called in several threads, and more than once.
      result: the shape and dtype of the whole result: a `jax.ShapeDtypeStruct`, or an
        array that has them, or a pytree of these. What ``function`` returns is cast to
        this dtype within its kind, as from float64 to float32.
      *args: arrays, or pytrees of arrays.
      axes: a name for each axis of each array, as in `extend.register_rule`. The
        function treats an axis that has a name index by index. ``*`` is an axis that it
        needs whole, ``...`` are all leading axes. ``"i * -> i *"`` is a function of
        each row, ``"i j, j -> i; j add"`` one whose results for pieces of ``j`` are
        added.

    Returns:
      What the function returns for whole arrays, as arrays of JAX.

    Raises:
      TypeError: ``function`` is not callable, or returns another structure or dtype.
      ValueError: ``axes`` does not have this form, or does not fit the arrays.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> def medians(x):
      ...     return sm.per_piece(
      ...         lambda rows: np.median(rows, 1),
      ...         jax.ShapeDtypeStruct(x.shape[:1], x.dtype), x, axes="row * -> row")
      >>> x = np.arange(12, dtype=np.float32).reshape(4, 3)
      >>> shard_plan = sm.plan(medians, x, in_slices={0: 2})
      >>> shard_plan.num_shards, shard_plan.run(x)
      (2, array([ 1.,  4.,  7., 10.], dtype=float32))
    """
    if not callable(function):
        raise TypeError(f"per_piece takes a function, got {shown(function)}")
    leaves, in_tree = jax.tree.flatten(args)
    whole, out_tree = jax.tree.flatten(result)
    ins, outs = (tuple(map(_value, each)) for each in (leaves, whole))
    factors(Node(PlanPrimitive("per_piece"), {}, ins, outs, ""), axes)
    dtypes = tuple(np.dtype(each.aval.dtype) for each in outs)
    host = HostFunction(function, axes, in_tree, out_tree, dtypes)
    results = jax.pure_callback(host, whole, *leaves, vmap_method=host.vmap_method)
    return jax.tree.unflatten(out_tree, results)


def _value(array: Any) -> Value:
    return Value(0, jax.typeof(array) if not hasattr(array, "shape") else array)


@dataclass(frozen=True)
class HostFunction:
    """What `per_piece` gives to `jax.pure_callback`: a function of flat arguments."""

    function: Callable[..., PyTree]
    axes: str
    in_tree: TreeDef
    out_tree: TreeDef
    dtypes: tuple[np.dtype, ...]

    @property
    def vmap_method(self) -> str:
        """What treats leading axes index by index takes one more of them."""
        ins, outs, _ = parsed(self.axes)
        is_any = all(row[:1] == ["..."] for row in [*ins, *outs])
        return "broadcast_all" if is_any else "sequential"

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def __call__(self, *leaves: Any) -> list[np.ndarray]:
        args: Any = jax.tree.unflatten(self.in_tree, list(map(np.asarray, leaves)))
        results, tree = jax.tree.flatten(self.function(*args))
        if tree != self.out_tree:
            raise TypeError(
                f"per_piece: {self.name} returned {shown(tree)}, and result= says "
                f"{shown(self.out_tree)}: return arrays with this structure"
            )
        arrays = list(map(np.asarray, results))
        for array, dtype in zip(arrays, self.dtypes, strict=True):
            if not np.can_cast(array.dtype, dtype, "same_kind"):
                raise TypeError(
                    f"per_piece: {self.name} returned {array.dtype}, and result= says "
                    f"{dtype}: give the dtype that it returns, or convert it there"
                )
        pairs = zip(arrays, self.dtypes, strict=True)
        return [array.astype(dtype, copy=False) for array, dtype in pairs]


def text_of(callback: Callable[..., Any]) -> str | None:
    """What tells a function of `per_piece` from others in another process.

    None of other callbacks, and of functions that hold values, which no text tells.
    """
    if not isinstance(callback, HostFunction):
        return None
    function: Any = callback.function
    function = getattr(function, "pyfunc", function)  # Of `numpy.vectorize`.
    name = getattr(function, "__qualname__", None)
    if name is None or any(
        getattr(function, held, None)
        for held in ("__closure__", "__self__", "__defaults__", "__kwdefaults__")
    ):
        return None
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):  # Of compiled functions.
        text = ""
    return f"{function.__module__}.{name}: {text}"


def is_on_host(node: Node) -> bool:
    """Whether a node needs no compiler: a call of `per_piece`, or a copy."""
    if node.primitive is not PURE_CALLBACK:
        return bool(node.primitive is primitives.copy_p)
    return isinstance(callback_of(node.params), HostFunction)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def rule(node: Node) -> Factors:
    """The rule of `jax.pure_callback`: that of `per_piece`, or whole."""
    function = callback_of(node.params)
    if not isinstance(function, HostFunction):
        return taken_whole(node, OUTSIDE)
    written = factors(node, function.axes)

    def emitter(local: Local) -> Sequence[Any]:
        pieces = [
            jax.ShapeDtypeStruct(out_size(local, axes), dtype)
            for axes, dtype in zip(written.outs, function.dtypes, strict=True)
        ]
        if all(isinstance(value, np.ndarray) for value in local.values):
            results = function(*map(_read_only, local.values))
            if [x.shape for x in results] == [x.shape for x in pieces]:
                return results
        method = node.params["vmap_method"]
        return jax.pure_callback(function, pieces, *local.values, vmap_method=method)

    return replace(written, emitter=emitter)
