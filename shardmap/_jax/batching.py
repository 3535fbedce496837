"""`jax.vmap` of a function, and which of its results are batched."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from shardmap._jax.context import check_vma_off
from shardmap._jax.types import Value


class VmapAxis(NamedTuple):
    """The axis of a vmap."""

    name: Hashable
    size: int

    def vectorize(
        self, fun: Callable[..., Any], in_dims: Sequence[int | None], out_dims: Any
    ) -> Callable[..., Any]:
        """`jax.vmap` of ``fun``; all operands may be unmapped.

        JAX's own batching rules must know its collectives over this axis.
        """
        vmap = functools.partial(
            jax.vmap, out_axes=out_dims, axis_name=self.name, axis_size=self.size
        )
        if any(dim is not None for dim in in_dims):
            return vmap(fun, in_axes=tuple(in_dims))
        # jax.vmap requires a mapped operand.
        mapped = vmap(lambda _, *args: fun(*args), in_axes=(0, *in_dims))
        # In `jax.export` the size may be a symbol, which NumPy does not know.
        zeros = np.zeros if isinstance(self.size, int) else jnp.zeros
        return lambda *args: mapped(zeros(self.size, bool), *args)


def batch_observer(tell: Callable[[tuple[bool, ...]], None]) -> Callable[..., Any]:
    """An identity. Under `jax.vmap` it tells which operands are batched."""

    # The batching rule of a custom_vmap is told.
    @jax.custom_batching.custom_vmap
    def observe(*operands: Value) -> Any:
        return operands

    @observe.def_vmap
    def observe_vmap(_size: int, in_batched: Any, *operands: Value) -> Any:
        tell(tuple(in_batched))
        return operands, tuple(in_batched)

    return cast(Callable[..., Any], observe)


def batched_results_of(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    axis: VmapAxis,
    dims: Sequence[int | None],
) -> tuple[bool, ...]:
    """Which results of ``fun`` are batched under `jax.vmap`.

    Args:
      fun: takes and returns flat values.
      avals: of its operands without the batch.
      axis, dims: the vmap's axis, and where each operand has it.
    """
    batched: tuple[bool, ...] = ()

    def tell(in_batched: tuple[bool, ...]) -> None:
        nonlocal batched
        batched = in_batched

    observe = batch_observer(tell)

    def observed(*args: Value) -> Any:
        nonlocal batched
        results = fun(*args)
        batched = (False,) * len(results)
        return observe(*results) if results else ()

    structs = []
    for aval, dim in zip(avals, dims, strict=True):
        shape = list(aval.shape)
        if dim is not None:
            shape.insert(dim, axis.size)
        structs.append(jax.ShapeDtypeStruct(shape, aval.dtype))
    with check_vma_off():
        jax.eval_shape(axis.vectorize(observed, dims, 0), *structs)
    return batched
