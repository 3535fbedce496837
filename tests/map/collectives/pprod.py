"""A collective of a user's own: the product over mapped axes."""

from jax import lax, make_jaxpr
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

[_use] = make_jaxpr(lambda: lax.axis_index("i"), axis_env=[("i", 1)])().jaxpr.effects
AXIS_EFFECT = type(_use)


def pprod_primitive(says_axis=True):
    """A new primitive, which nobody has registered.

    Args:
      says_axis: whether it has the effect that JAX's collectives over an axis have.
    """
    pprod_p = Primitive("pprod")

    def typed(x, *, axes):
        return x, {AXIS_EFFECT(name) for name in axes if says_axis}

    def batch(axis_data, operands, dims, *, axes):
        (x,), (dim,) = operands, dims
        rest = tuple(name for name in axes if name != axis_data.name)
        if rest == axes:
            return pprod_p.bind(x, axes=axes), dim
        product = x**axis_data.size if dim is None else jnp.prod(x, dim)
        return (pprod_p.bind(product, axes=rest) if rest else product), None

    def jvp(primals, tangents, *, axes):
        (x,), (t,) = primals, tangents
        product = pprod_p.bind(x, axes=axes)
        return product, lax.psum(ad.instantiate_zeros(t) * product / x, axes)

    def on_devices(x, *, axes):
        return jnp.prod(lax.all_gather(x, axes), 0)

    pprod_p.def_effectful_abstract_eval(typed)
    batching.fancy_primitive_batchers[pprod_p] = batch
    ad.primitive_jvps[pprod_p] = jvp
    mlir.register_lowering(pprod_p, mlir.lower_fun(on_devices, multiple_results=False))
    return pprod_p
