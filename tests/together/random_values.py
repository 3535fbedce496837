"""What the elements of a random program have, and arithmetic of it that is exact.

`d` has any dtype, and holds small whole numbers, so that it is the same however it is
added up; `x` is compared with a tolerance.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DTYPES = ["bool", "int8", "uint16", "float16", "bfloat16", "complex64"]


class State(NamedTuple):
    """What each element has: `x`, some numbers, and `n`, an integer from 0 to 4, which
    branches and loops ask about; `d` from 0 to 4 too, or two such, or a truth value.
    """

    x: Any
    n: Any
    d: Any


def to_integer(d: Any) -> Any:
    if jnp.issubdtype(d.dtype, jnp.complexfloating):
        return (d.real + 5 * d.imag).astype(np.int32)
    return d.astype(np.int32)


def from_integer(number: Any, dtype: Any) -> Any:
    """As `d`, from any whole number that is not negative."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = lax.rem(number, jnp.int32(5)), lax.rem(number // 5, jnp.int32(5))
        return lax.complex(*(part.astype(np.float32) for part in parts))
    most = jnp.int32(2 if dtype == np.bool_ else 5)
    return lax.rem(number, most).astype(dtype)


def bits(d: Any) -> Any:
    """Zeros and ones: hundreds of them can be added up in any dtype."""
    return from_integer(lax.rem(to_integer(d), jnp.int32(2)), d.dtype)


def total(added: Any, dtype: Any) -> Any:
    """As `d`, from a sum of `bits`. What is past 200 is not told apart, as bfloat16
    does not; JAX counts truth values in int32.
    """
    if jnp.issubdtype(added.dtype, jnp.complexfloating):
        parts = [jnp.minimum(part, 200) for part in (added.real, added.imag)]
        return from_integer(to_integer(lax.complex(*parts)), dtype)
    if jnp.issubdtype(added.dtype, jnp.floating):
        added = jnp.minimum(added, jnp.array(200, added.dtype))
    return from_integer(added.astype(np.int32) & 127, dtype)


def together(new: State, old: State) -> State:
    """What the steps of a program hand on."""
    return State(
        new.x * 0.5 + jnp.tanh(old.x),
        lax.rem(new.n + old.n, jnp.int32(5)),
        from_integer(to_integer(new.d) + 2 * to_integer(old.d), old.d.dtype),
    )


def other_branch(state: State) -> State:
    return State(
        jnp.cos(state.x),
        state.n + 1,
        from_integer(to_integer(state.d) + 1, state.d.dtype),
    )


def fold(array: Any, like: Any) -> Any:
    """An array of any shape as one like a state's, each entry with its own weight."""
    if like.dtype not in (np.float32, np.int32):
        folded = fold(to_integer(array), to_integer(like))
        return from_integer(folded, like.dtype)
    length = -(-array.size // like.size) * like.size
    flat = jnp.pad(array.ravel(), (0, length - array.size))
    rows = flat.reshape(-1, like.size)
    weights = np.arange(rows.shape[0])[:, None] + np.arange(like.size) + 1
    if like.dtype == np.int32:
        return (rows * weights.astype(np.int32)).sum(0).reshape(like.shape)
    weights = np.cos(weights).astype(np.float32)
    return (rows * weights).sum(0).reshape(like.shape) / rows.shape[0]


def pieces(value: Any, count: int) -> Any:
    """As many pieces in front, all different."""
    steps = np.arange(count, dtype=np.int32).reshape(-1, *[1] * value.ndim)
    if value.dtype == np.float32:
        return jnp.sin(value[None] * (steps + 1).astype(np.float32))
    if value.dtype == np.int32:
        return value[None] + steps
    return from_integer(to_integer(value)[None] + steps, value.dtype)


def start(size: int, dtype: str) -> Any:
    """`d` of as many elements."""
    numbers = np.arange(size, dtype=np.int32) * 7 % 23
    return jax.device_get(from_integer(jnp.asarray(numbers), jnp.dtype(dtype)))
