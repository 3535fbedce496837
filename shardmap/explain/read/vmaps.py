"""How vmaps are seen. A jaxpr does not have them: a vmap is there, and gone.

What an equation keeps is in how many vmaps it stands, in the names of the
transformations around it. It keeps neither their sizes nor their names. To see those,
the function is traced again on marked arguments: pytree nodes of one leaf. Whoever
flattens and unflattens his arguments, as `jax.vmap`, `jax.jit` and `jax.lax.map` do,
takes off one layer of marks, and leaves an equation of `mark_p`, whose vectorisation
rule is told about each vmap around it.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
from jax.interpreters import ad

from shardmap._jax.primitives import vmaps_around
from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import Equation, Jaxpr, PyTree, Value
from shardmap._jax.walk import jaxprs_in

MOST_LAYERS = 8

mark_p = jex_core.Primitive("mark")


@mark_p.def_abstract_eval
def _abstract_eval(aval: Any, **_: Any) -> Any:
    return aval


def _batching_rule(
    vmap: Vmap, operands: Any, dims: Any, *, vmaps: tuple[Any, ...]
) -> tuple[Any, Any]:
    # JAX's own objects stand for axes without a name.
    name = vmap.name if isinstance(vmap.name, str) else None
    vmaps = (*vmaps, (name, vmap.size))
    return mark_p.bind(*operands, vmaps=vmaps), dims[0]


ad.deflinear2(mark_p, lambda cotangent, _, **params: [cotangent])
def_batching(mark_p, _batching_rule)


@jax.tree_util.register_pytree_node_class
class _Marked:
    """A leaf in some layers of marks."""

    def __init__(self, leaf: Value, layers: int) -> None:
        self.leaf, self.layers = leaf, layers

    def tree_flatten(self) -> tuple[tuple[Any], int]:
        return (self.leaf,), self.layers

    @classmethod
    def tree_unflatten(cls, layers: int, children: Any) -> Any:
        (leaf,) = children
        # Trees are unflattened with other things than arrays in them, too.
        if isinstance(leaf, jax.core.Tracer):
            leaf = mark_p.bind(leaf, vmaps=())
        return leaf if layers == 1 else cls(leaf, layers - 1)


def marked(tree: PyTree, layers: int) -> Any:
    """``tree`` with every array in so many layers of marks."""
    return jax.tree.map(
        lambda leaf: _Marked(leaf, layers) if hasattr(leaf, "shape") else leaf, tree
    )


class Begun(NamedTuple):
    """The vmaps that begin at an equation.

    Attributes:
      vmaps: name and size of each, outermost first; None stands for what is not known.
      deduced: whether the sizes are deduced from the shapes.
      end: the number of the equation where others begin, at the latest.
    """

    vmaps: list[tuple[str | None, int | None]]
    deduced: bool
    end: int


def begin(jaxpr: Jaxpr, first: int, depth: int) -> Begun:
    """The vmaps that begin at an equation of a jaxpr.

    Args:
      jaxpr: the jaxpr.
      first: the number of the equation.
      depth: how many vmaps of this jaxpr are around it already.
    """
    wanted = vmaps_around(jaxpr.eqns[first])
    run = list(
        itertools.takewhile(lambda e: vmaps_around(e) >= wanted, jaxpr.eqns[first:])
    )
    marks = [k for k, equation in enumerate(run) if equation.primitive is mark_p]
    if marks[:1] == [0] and (own := _marked_vmaps(run[0], wanted)):
        others = [k for k in marks if _marked_vmaps(run[k], wanted) != own]
        run = run[: min([len(run), *others])]
        end = first + _reach(run, _results(jaxpr, run), own[-1][1])
        return Begun(own[depth:], False, end)
    # A mark is the first of its vmap.
    run = run[: min([len(run), *marks])]
    if wanted - depth > 1:
        return Begun([(None, None)] * (wanted - depth), True, first + len(run))
    results = _results(jaxpr, run)
    size = _size(run, results, run)
    if size is None:
        # Several vmaps may follow each other.
        parts = [_size(part, results, ()) for _, part in _independent(run)]
        size = next((size for size in parts if size is not None), None)
    return Begun([(None, size)], True, first + _reach(run, results, size))


def _reach(run: list[Any], results: set[Any], size: int | None) -> int:
    """How many equations can be of a vmap of that size: all its results have it."""
    for k, part in _independent(run) if size is not None else ():
        made = results.intersection(var for each in part for var in each.outvars)
        if any(size not in var.aval.shape for var in made):
            return max(k, 1)
    return len(run)


def _marked_vmaps(mark: Equation, count: int) -> list[tuple[str | None, int | None]]:
    """The ``count`` outermost vmaps of the jaxpr that a mark is in, or []."""
    # The innermost comes first; those around the jaxpr come last.
    inside = mark.params["vmaps"][: vmaps_around(mark)]
    return list(reversed(inside))[:count] if len(inside) == vmaps_around(mark) else []


def _independent(run: list[Any]) -> list[tuple[int, list[Any]]]:
    """The equations in parts that take nothing from each other, and where they begin.

    >>> jaxpr = jax.make_jaxpr(lambda x, y: (x * x + 1, y * 2, y))(1.0, 2.0).jaxpr
    >>> [(k, len(part)) for k, part in _independent(jaxpr.eqns)]
    [(0, 2), (2, 1)]
    """
    last_use = {
        atom: k
        for k, equation in enumerate(run)
        for atom in equation.invars
        if not isinstance(atom, jex_core.Literal)
    }
    parts: list[tuple[int, list[Any]]] = []
    needed_until = -1
    for k, equation in enumerate(run):
        if k > needed_until:
            parts.append((k, []))
        parts[-1][1].append(equation)
        uses = [last_use.get(var, k) for var in equation.outvars]
        needed_until = max([needed_until, *uses])
    return parts


def _size(run: list[Any], results: set[Any], differing: Sequence[Any]) -> int | None:
    """The one length that a vmap can have had, by the shapes in it.

    It is a length of one of the operands, and of all values that certainly differ
    between the elements: the results, and what comes from all of the operands.

    Args:
      run: the equations of the vmap.
      results: what is used outside of them.
      differing: those of them to look at for values that come from all operands.
    """
    made: dict[Any, set[Any]] = {}
    operands = {
        atom
        for equation in run
        for atom in equation.invars
        if not isinstance(atom, jex_core.Literal) and atom.aval.ndim
    } - {var for equation in run for var in equation.outvars}
    for equation in run:
        sources: set[Any] = set()
        # What is in another jaxpr may use only some of its operands.
        if not jaxprs_in(equation.params):
            for atom in equation.invars:
                if not isinstance(atom, jex_core.Literal):
                    sources |= made.get(atom, {atom} & operands)
        made |= {var: sources for var in equation.outvars}
    certain = {var for equation in differing for var in equation.outvars}
    shapes = [
        set(var.aval.shape)
        for var, sources in made.items()
        if var in results or (var in certain and sources == operands)
    ]
    lengths = {size for atom in operands for size in atom.aval.shape}
    candidates = lengths.intersection(*shapes) if shapes else set()
    return candidates.pop() if len(candidates) == 1 else None


def _results(jaxpr: Jaxpr, run: list[Any]) -> set[Any]:
    """What equations of a jaxpr make that is used outside of them."""
    inside = {id(equation) for equation in run}
    used = {
        atom
        for atoms in (
            jaxpr.outvars,
            *(e.invars for e in jaxpr.eqns if id(e) not in inside),
        )
        for atom in atoms
        if not isinstance(atom, jex_core.Literal)
    }
    return used & {var for equation in run for var in equation.outvars}
