"""Programs whose jaxprs are shared, where a walk over all paths would not end."""

import jax


def nested(depth, leaf, x):
    """The jaxpr of a function that calls another twice, and that another, and so on."""
    fun = jax.jit(leaf)
    for _ in range(depth):
        fun = jax.jit(lambda x, inner=fun: inner(inner(x)))
    # JAX's own checks take all paths.
    with jax.enable_checks(False):
        return jax.make_jaxpr(fun)(x).jaxpr


def at_most(count, fun):
    """``fun``, which may be called that often."""
    calls = 0

    def counted(*args):
        nonlocal calls
        calls += 1
        assert calls <= count, f"{fun.__name__} is called more than {count} times"
        return fun(*args)

    return counted
