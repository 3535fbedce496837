"""The names and sizes of vmaps, which a jaxpr does not keep.

An equation has only the number of vmaps around it. To find their names and sizes, the
function is traced again, on marked arguments: each array is a pytree node in a pytree
node. `jax.jit` flattens and unflattens its arguments, which removes the outer node; a
`jax.vmap` over them removes the inner one. Then `mark_p` is bound, whose batching rule
records each vmap around it. The sizes of vmaps over other values stay unknown.
"""

from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
from jax.interpreters import ad

from shardmap._jax.primitives import vmaps_around
from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import Equation, PyTree, Value

mark_p = jex_core.Primitive("mark")


class MarkedVmap(NamedTuple):
    """The name, size and mapped dimension of a vmap around a mark."""

    name: str | None
    size: int
    dimension: int | None


@mark_p.def_abstract_eval
def _abstract_eval(aval: Any, **_: Any) -> Any:
    return aval


def _batching_rule(
    vmap: Vmap, operands: Any, dims: Any, *, vmaps: tuple[MarkedVmap, ...]
) -> tuple[Any, Any]:
    # JAX's own objects stand for axes without a name.
    name = vmap.name if isinstance(vmap.name, str) else None
    vmaps = (*vmaps, MarkedVmap(name, vmap.size, dims[0]))
    return mark_p.bind(*operands, vmaps=vmaps), dims[0]


ad.deflinear2(mark_p, lambda cotangent, _, **params: [cotangent])
def_batching(mark_p, _batching_rule)


@jax.tree_util.register_pytree_node_class
class _Marked:
    """A leaf in one or two pytree nodes."""

    def __init__(self, leaf: Value, layers: int = 2) -> None:
        self.leaf, self.layers = leaf, layers

    def tree_flatten(self) -> tuple[tuple[Any], int]:
        return (self.leaf,), self.layers

    @classmethod
    def tree_unflatten(cls, layers: int, children: Any) -> Any:
        (leaf,) = children
        # JAX also unflattens trees with other leaves than arrays.
        if isinstance(leaf, jax.core.Tracer):
            leaf = mark_p.bind(leaf, vmaps=())
        return leaf if layers == 1 else cls(leaf, layers - 1)


def marked(tree: PyTree) -> Any:
    """``tree`` with every array in two pytree nodes."""
    return jax.tree.map(
        lambda leaf: _Marked(leaf) if hasattr(leaf, "shape") else leaf, tree
    )


def vmaps_of(equation: Equation) -> tuple[MarkedVmap, ...]:
    """The vmaps of its jaxpr around a mark, outermost first."""
    if equation.primitive is not mark_p:
        return ()
    # The innermost comes first; those around the jaxpr come last.
    count = vmaps_around(equation)
    inside = equation.params["vmaps"][:count]
    return tuple(reversed(inside)) if len(inside) == count else ()
