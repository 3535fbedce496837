"""The table of reductions whose state is several arrays, see `Monoid`.

A sum around a centre, such as the mean or the maximum of what is summed, would have to
read it again once the centre is known. For any centre, the state of a piece determines
the sum: the piece is read once, and states combine in any order.

`MOMENTS`: ``sum (x - c)(y - d)``. For the numbers p and q near the means,

    sum (x - c)(y - d)  =  sum (x - p)(y - q)  +  (p - c) sum (y - q)
                        +  sum (x - p) (q - d)  +  n (p - c)(q - d)

which does not subtract large numbers (Chan, Golub and LeVeque). The state is n, p, q,
the sums around these, which rounding leaves, and the sum of products; p, q and their
sums stand once for a square.

`EXPONENTIALS`: ``sum exp(x - c) y``, from the maximum of x and the sum around it.

`LARGEST` and `SMALLEST`: an extremum and its first place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardmap.planning.engine.factors import Factors, Local, out_size
from shardmap.planning.engine.monoids import Monoid, Part, start
from shardmap.planning.engine.nodes import Graph, Operand, PlanPrimitive, Value
from shardmap.planning.engine.rules import Factor, RuleMaker

Arrays = Sequence[Any]


def around(xp: Any, state: Arrays, centres: Arrays) -> tuple[list[Any], Any]:
    """The sums around these centres, and the sum of products."""
    n, *others, products = state
    means, sums = others[: len(centres)], others[len(centres) :]
    far = [mean - centre for mean, centre in zip(means, centres, strict=True)]
    moved = [total + n * by for total, by in zip(sums, far, strict=True)]
    if len(far) == 1:
        more = far[0] * (n * far[0] + 2 * sums[0])
    else:
        more = far[0] * moved[1] + sums[0] * far[1]
    # A sum that is not finite stays so, and is NaN around what is not finite.
    more = xp.where(xp.isfinite(products), more, 0 * sum(far))
    return moved, products + more


def _moments(xp: Any, a: Arrays, b: Arrays) -> Arrays:
    n = a[0] + b[0]
    share = b[0] / xp.maximum(n, 1)
    count = len(a) // 2 - 1
    pairs = zip(a[1 : 1 + count], b[1 : 1 + count], strict=True)
    means = [mean + share * (other - mean) for mean, other in pairs]
    (sums, products), (others, more) = (around(xp, each, means) for each in (a, b))
    pairs = zip(sums, others, strict=True)
    return [n, *means, *(x + y for x, y in pairs), products + more]


def scaled(xp: Any, state: Arrays, centre: Any) -> Any:
    """The sum of exponentials around this centre."""
    largest, total = state
    # Exponentials of -inf are 0, or NaN around -inf.
    is_usual = xp.logical_or(xp.isfinite(largest), largest == -xp.inf)
    return total * xp.exp(xp.where(is_usual, largest, 0) - centre)


def finite(xp: Any, x: Any) -> Any:
    """The same where it is finite, 0 elsewhere."""
    return xp.where(xp.isfinite(x), x, 0)


def _exponentials(xp: Any, a: Arrays, b: Arrays) -> Arrays:
    largest = xp.maximum(a[0], b[0])
    centre = finite(xp, largest)
    return [largest, scaled(xp, a, centre) + scaled(xp, b, centre)]


def _extrema(is_after: str, xp: Any, a: Arrays, b: Arrays) -> Arrays:
    (best, place), (other, at) = a, b
    is_nan, other_is_nan = best != best, other != other
    is_better = getattr(xp, is_after)(other, best)
    is_better = is_better | (other_is_nan & ~is_nan)
    is_same = (other == best) | (other_is_nan & is_nan)
    taken = is_better | (is_same & (at < place))
    return [xp.where(taken, other, best), xp.where(taken, at, place)]


MOMENTS = {
    count: Monoid("moments", ("add",) * (2 * count + 2), _moments) for count in (1, 2)
}
"""By the number of different values that are multiplied."""

EXPONENTIALS = Monoid("exponentials", ("max", "add"), _exponentials)
LARGEST = Monoid("argmax", ("max", "min"), functools.partial(_extrema, "greater"))
SMALLEST = Monoid("argmin", ("min", "min"), functools.partial(_extrema, "less"))

SUM = PlanPrimitive("sum of a state")
"""Computes the state of `MOMENTS` or `EXPONENTIALS`."""

PLACE = PlanPrimitive("place of an extremum")
"""Computes the state of `LARGEST` or `SMALLEST`."""


def add_state(
    graph: Graph,
    primitive: PlanPrimitive,
    monoid: Monoid,
    function: Callable[..., Sequence[jax.Array]],
    operands: Sequence[Operand],
    ins: Sequence[Sequence[Factor]],
    outs: Sequence[Sequence[Factor | None]],
    starts: Sequence[Factor] = (),
) -> tuple[Value, ...]:
    """Adds the state of a monoid to a graph. Factors without a result are reduced.

    ``function`` computes it from the operands and the start of each of ``starts``.
    """
    places = [jax.ShapeDtypeStruct((), jnp.int32) for _ in starts]
    given = [jax.ShapeDtypeStruct(x.shape, x.aval.dtype) for x in operands]
    avals = [
        jax.core.ShapedArray(x.shape, x.dtype)
        for x in jax.eval_shape(function, *given, *places)
    ]
    kept = {factor for row in outs for factor in row}
    gone = [f for f in dict.fromkeys(f for row in ins for f in row) if f not in kept]

    def emitter(local: Local) -> Sequence[Any]:
        if all(local.sizes[factor] for factor in gone):
            return function(*local.values, *(local.starts[f] for f in starts))
        return [
            jnp.full(out_size(local, axes), start(Part(monoid, k), aval.dtype))
            for k, (axes, aval) in enumerate(zip(outs, avals, strict=True))
        ]

    rule = functools.partial(
        Factors,
        ins=ins,
        outs=outs,
        contracted=dict.fromkeys(gone, monoid),
        starts=starts,
        emitter=emitter,
        cheap=False,
        each=4,
    )
    return graph.add(primitive, {"rule": rule}, operands, avals)


RULES: dict[Any, RuleMaker] = dict.fromkeys(
    (SUM, PLACE), lambda node: node.params["rule"](node)
)
