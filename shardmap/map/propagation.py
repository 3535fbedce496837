"""The mesh axes along which inputs and outputs of a map's function are cut.

Maps inside, and the constraint of `sharded_jit`, cut their operands and results.
Elementwise equations have operands and results that are cut alike, as in the update of
weights by gradients that a map inside has made.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex_core
import jax.extend.core.primitives as p

from shardmap._jax.types import Equation, Jaxpr, Var, aval_of
from shardmap._jax.walk import inline_calls
from shardmap.map.collectives.table import COLLECTIVES

DimToMeshAxes = dict[int, tuple[str, ...]]
"""The mesh axes of each dimension that is cut, major to minor."""

_ELEMENTWISE = frozenset(
    getattr(p, f"{name}_p")
    for name in (
        "abs acos acosh add add_jaxvals and asin asinh atan atan2 atanh cbrt ceil "
        "clamp convert_element_type copy cos cosh div eq erf erf_inv erfc exp exp2 "
        "expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min "
        "mul ne neg nextafter not or pow reduce_precision rem round rsqrt select_n "
        "sign sin sinh sqrt square sub tan tanh xor"
    ).split()
)


def propagate(
    jaxpr: Jaxpr,
    dims_of: Callable[
        [Equation], tuple[Sequence[DimToMeshAxes], Sequence[DimToMeshAxes]] | None
    ],
) -> tuple[list[DimToMeshAxes], list[DimToMeshAxes]]:
    """The mesh axes of the dimensions of inputs and of outputs.

    An input that some equations take cut, and others whole or cut otherwise, is whole.
    ``dims_of`` tells those of operands and results; None: the equation cuts nothing.
    """
    jaxpr = inline_calls(jaxpr, lambda equation: equation.primitive is p.jit_p)
    cuts = [(equation, dims_of(equation)) for equation in jaxpr.eqns]

    def forward(known: dict[Var, DimToMeshAxes]) -> dict[Var, DimToMeshAxes]:
        """Those of results, from the values that an equation takes."""
        for equation, cut in cuts:
            if cut is not None:
                known.update(zip(equation.outvars, cut[1], strict=True))
                continue
            for result, operands in _elementwise_pairs(equation):
                if dims := _agreed(known[x] for x in operands if known.get(x)):
                    known[result] = dims
        return known

    known = forward({})
    asked: dict[Var, list[DimToMeshAxes]] = {}
    for equation, cut in reversed(cuts):
        through: dict[Var, DimToMeshAxes | None] = {}
        for result, operands in _elementwise_pairs(equation) if cut is None else ():
            # Nobody but the caller asks for a result that is only returned.
            of_result = known.get(result) or (
                _agreed(asked[result]) if result in asked else None
            )
            through |= dict.fromkeys(operands, of_result)
        for k, atom in enumerate(equation.invars):
            if isinstance(atom, jex_core.Literal):
                continue
            dims = cut[0][k] if cut is not None else through.get(atom, {})
            if dims is not None:
                asked.setdefault(atom, []).append(dims)
    inputs = {var: _agreed(asked.get(var, ())) for var in jaxpr.invars}
    known = forward(dict(inputs))
    return list(inputs.values()), [
        {} if isinstance(atom, jex_core.Literal) else known.get(atom, {})
        for atom in jaxpr.outvars
    ]


def _agreed(each: Iterable[DimToMeshAxes]) -> DimToMeshAxes:
    """What all of them are; nothing is cut if they differ."""
    first, *others = [*each] or [{}]
    return first if all(other == first for other in others) else {}


def _elementwise_pairs(equation: Equation) -> Iterator[tuple[Var, list[Any]]]:
    """The results that are cut like operands of their shape, with these."""
    collective = COLLECTIVES.get(equation.primitive)
    is_reduction = collective is not None and collective.is_reduction
    if not (is_reduction or equation.primitive in _ELEMENTWISE):
        return
    for result in equation.outvars:
        yield (
            result,
            [
                x
                for x in equation.invars
                if not isinstance(x, jex_core.Literal)
                and aval_of(x).shape == aval_of(result).shape
            ],
        )
