"""The names and sizes of vmaps over arguments, which a jaxpr does not keep.

The function is traced again, on marked arguments: each array is a pytree node in a
pytree node. `jax.jit` flattens and unflattens its arguments, which removes the outer
node; a `jax.vmap` over them removes the inner one. Then `mark_p` is bound, whose
batching rule records the vmap around it. Other vmaps leave no trace.
"""

from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
from jax.interpreters import ad

from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import Jaxpr, PyTree, Value
from shardmap._jax.walk import equations
from shardmap.explaining.report import Axis
from shardmap.source import source_of

mark_p = jex_core.Primitive("mark")


class VmapAxis(NamedTuple):
    """The axis of a vmap, and the arguments and their dimensions that it is over."""

    axis: Axis
    over: list[tuple[int, int]]


@mark_p.def_abstract_eval
def _abstract_eval(aval: Any, **_: Any) -> Any:
    return aval


def _batching_rule(vmap: Vmap, operands: Any, dims: Any, **_: Any) -> tuple[Any, Any]:
    # JAX's own objects stand for axes without a name.
    name = vmap.name if isinstance(vmap.name, str) else None
    return mark_p.bind(*operands, over=(name, vmap.size, dims[0])), dims[0]


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
        if layers > 1:
            return cls(leaf, layers - 1)
        is_array = isinstance(leaf, jax.core.Tracer)
        return mark_p.bind(leaf, over=None) if is_array else leaf


def marked(tree: PyTree) -> Any:
    """``tree`` with every array in two pytree nodes."""
    return jax.tree.map(
        lambda leaf: _Marked(leaf) if hasattr(leaf, "shape") else leaf, tree
    )


def vmaps_over(jaxpr: Jaxpr, line: str | None) -> list[VmapAxis]:
    """The vmaps over the arguments of a program that was traced with marks."""
    vmaps: dict[Any, VmapAxis] = {}
    for equation in equations(jaxpr):
        if equation.primitive is not mark_p or equation.params["over"] is None:
            continue
        name, size, dimension = equation.params["over"]
        source = source_of(equation) or line
        axis = Axis(name, size, "vmap", 1, size, 1, source=source)
        vmap = vmaps.setdefault((name, size, source), VmapAxis(axis, []))
        if equation.invars[0] in jaxpr.invars:
            argument = jaxpr.invars.index(equation.invars[0])
            vmap.over.append((argument, dimension))
    return [*vmaps.values()]
