"""Random compositions: a seed gives a program, its arguments and cuts of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

UNARY = [
    jnp.tanh,
    jnp.sin,
    lambda x: x * 0.5,
    lambda x: -x,
    lambda x: jnp.where(x > 0, x, 0.1),
    lambda x: jnp.round(x * 4) / 4,
]
SHAPED = [
    lambda x: x.T,
    lambda x: x[::-1],
    lambda x: x[1:] if x.shape[0] > 1 else x,
    lambda x: x[::2],
    lambda x: x[:, : max(1, x.shape[1] - 2)],
    lambda x: jnp.pad(x, ((1, 0), (0, 2)))[:8, :8],
    lambda x: jnp.pad(x, ((0, 1), (1, 0)), constant_values=0.3)[:9, :9],
    lambda x: x.reshape(x.shape[1], x.shape[0]),
    lambda x: x.reshape(-1)[: x.size // 2 * 2].reshape(2, -1),
    lambda x: x.reshape(1, -1)[:, :40].reshape(-1, 1)[:12],
    lambda x: jnp.roll(x, 1, 0),
    lambda x: jnp.concatenate([x, x[:1]], 0)[:9],
    lambda x: jnp.repeat(x, 2, 1)[:, :8],
    lambda x: jnp.tile(x, (1, 2))[:, :9],
    lambda x: jnp.sort(x, 0),
    lambda x: jnp.cumsum(x, 1) * 0.3,
    lambda x: lax.cummax(x, 0),
    lambda x: x[jnp.arange(x.shape[0])[::-1] // 2],
    lambda x: x.at[jnp.array([0, 1, 0])].add(0.5),
    lambda x: x.at[:, 0].set(0.25),
    lambda x: x + jnp.arange(x.shape[1], dtype=x.dtype)[None] * 0.1,
    lambda x: x * (jnp.arange(x.shape[0], dtype=x.dtype)[:, None] % 3),
    lambda x: jnp.tril(x),
    lambda x: lax.dynamic_slice(x, (x.shape[0] // 3, 0), (max(1, x.shape[0] // 2), 1)),
    lambda x: lax.scan(lambda c, r: (c * 0.5 + r, jnp.sin(c)), x[0], x)[1],
    lambda x: lax.map(lambda r: r - r.max(), x),
    lambda x: lax.fori_loop(0, 2, lambda i, c: c * 0.5 + i, x),
    lambda x: lax.cond(x[0, 0] > 0, lambda y: y * 2, jnp.sin, x),
    lambda x: x + jax.random.uniform(jax.random.key(3), x.shape),
    lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"),
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 1), "SAME"),
    lambda x: jnp.convolve(x.reshape(-1), jnp.array([0.5, -0.2, 0.1])).reshape(1, -1),
    lambda x: jax.checkpoint(lambda y: jax.nn.relu(y) + 1)(x),
]
REDUCED = [
    lambda x: x.sum(0, keepdims=True),
    lambda x: x.mean(1, keepdims=True),
    lambda x: x.max(0, keepdims=True),
    lambda x: x.min(keepdims=True),
    lambda x: jax.nn.logsumexp(x, 1, keepdims=True),
    lambda x: jax.nn.softmax(x, 0),
    lambda x: (x - x.mean(0)[None]) / (x.std(0)[None] + 1),
    lambda x: jnp.argmax(jnp.round(x, 2), 0)[None].astype(x.dtype) * 0.1,
    lambda x: (x > 0).any(1, keepdims=True).astype(x.dtype) * 0.5,
    lambda x: jnp.prod(jnp.clip(x, 0.5, 1.5), 0, keepdims=True),
    lambda x: (x.T @ x) * 0.1,
    lambda x: (x @ x.T) * 0.1,
    lambda x: jnp.einsum("ij,ij->i", x, x)[:, None],
    lambda x: x.sum(0, keepdims=True) - x.sum(0, keepdims=True).mean(),
    lambda x: x + x.sum(1, keepdims=True),
]


def fit(x, shape):
    """The top left of ``x``, padded if it is too small."""
    x = x[: shape[0], : shape[1]]
    return jnp.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)])


JOINED = [
    lambda a, b: a + fit(b, a.shape),
    lambda a, b: a * fit(b, a.shape),
    lambda a, b: jnp.maximum(a, fit(b, a.shape)),
    lambda a, b: a - fit(b.T, a.shape),
    lambda a, b: (a @ fit(b, (a.shape[1], 5))) * 0.2,
    lambda a, b: jnp.concatenate([a, fit(b, (2, a.shape[1]))], 0)[:9],
    lambda a, b: a + b[:1, :1],
    lambda a, b: jnp.where(a > 0, a, fit(b, a.shape)),
]


def random_program(seed: int, steps: int = 6):
    """Returns ``fun, args, in_slices``."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(2, 9, 2)) for _ in range(2)]
    args = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    plans = []
    for _ in range(rng.integers(2, steps + 1)):
        kind = rng.integers(5)
        table = (UNARY, SHAPED, SHAPED, REDUCED, JOINED)[kind]
        plans.append(
            (kind == 4, table[rng.integers(len(table))], *rng.integers(9, size=2))
        )
    outputs = rng.integers(1, 3)

    def fun(a, b):
        pool = [a, b]
        for joined, step, i, j in plans:
            one, other = pool[-1 - i % min(3, len(pool))], pool[j % len(pool)]
            made = step(one, other) if joined else step(one)
            pool.append(jnp.clip(made, -50, 50) if joined else made)
        return {str(k): pool[-1 - k] for k in range(outputs)}

    def random_cut(size):
        if rng.random() < 0.5:
            return int(rng.integers(1, size + 1))
        points = np.flatnonzero(rng.random(size - 1) < 0.4) + 1
        return tuple(int(n) for n in np.diff([0, *points, size]))

    in_slices = tuple(
        {k: random_cut(n) for k, n in enumerate(shape) if rng.random() < 0.6}
        for shape in shapes
    )
    return fun, args, in_slices
