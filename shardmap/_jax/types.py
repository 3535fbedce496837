"""Aliases of JAX's public types."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

Jaxpr: TypeAlias = jex_core.Jaxpr
ClosedJaxpr: TypeAlias = jex_core.ClosedJaxpr
"""A jaxpr with its constants. From JAX 0.12 on every jaxpr is one."""

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
Equation: TypeAlias = jex_core.JaxprEqn
Primitive: TypeAlias = jex_core.Primitive
Effect: TypeAlias = jex_core.Effect

Var: TypeAlias = jex_core.Var
Atom: TypeAlias = jex_core.Var | jex_core.Literal
"""An operand of an equation: a variable or a literal."""

Aval: TypeAlias = jax.core.ShapedArray
"""The abstract value of an array: its shape and dtype."""

Value: TypeAlias = Any
"""A JAX value: an array, a tracer, a NumPy array or a number."""


def aval_of(atom: Atom) -> Aval:
    """The aval of an array; not of a token or a reference."""
    return cast(Aval, atom.aval)


def is_inexact(aval: Any) -> bool:
    """Whether an array has floats or complex numbers."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def with_shape(aval: Aval, shape: Iterable[int]) -> Aval:
    """The aval with another shape, in the same memory space, without a sharding."""
    return jax.core.ShapedArray(
        tuple(shape),
        aval.dtype,
        weak_type=aval.weak_type,
        memory_space=aval.memory_space,
    )


def has_explicit_sharding(aval: object) -> bool:
    """Whether an aval has a sharding along Explicit mesh axes."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and AxisType.Explicit in sharding.mesh.axis_types


def without_sharding(aval: Any) -> Aval:
    """The aval without a sharding, with its weak type and memory space."""
    return with_shape(aval, aval.shape)


PyTree: TypeAlias = Any
"""Values in nested containers."""

TreeDef: TypeAlias = jax.tree_util.PyTreeDef
"""The structure of a pytree."""

DType: TypeAlias = Any
"""A dtype of NumPy, or an extended one of JAX."""

Groups: TypeAlias = Sequence[Sequence[int]]
"""The ``axis_index_groups`` of a collective."""

AnyMesh: TypeAlias = Mesh | AbstractMesh

Axes: TypeAlias = tuple[int | None, ...]
"""The mapped axis of each operand or result; None: not mapped."""

Param: TypeAlias = Any
"""A parameter of an equation."""

Params: TypeAlias = Mapping[str, Param]
"""The parameters of an equation of any primitive."""
