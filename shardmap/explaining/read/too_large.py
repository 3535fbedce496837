"""Programs that a compiler refuses, as a device's memory is too small for them."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.extend.core.primitives import jit_p
from jax.sharding import NamedSharding

from shardmap._jax.primitives import SHARD_MAP
from shardmap._jax.types import Atom, Aval, Equation, Jaxpr, aval_of
from shardmap._jax.walk import jaxprs_in
from shardmap.explaining.report import ArrayLayout, Cost, Held, Remark
from shardmap.map.layout import map_shardings
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.primitives.params import MapParams
from shardmap.source import source_of
from shardmap.units import size_of

# As "the total memory required for HLO temporaries (20.29G) exceeds available HBM
# (15.75G)" and as "Used 20.29G of 15.75G hbm".
_BYTES = r"([\d.]+)([BKMGT]?)"
_REFUSED = (
    re.compile(rf"\({_BYTES}\) exceeds available \w+ \({_BYTES}\)"),
    re.compile(rf"Used {_BYTES} of {_BYTES} \w+"),
)
UNKNOWN = "as the compiler decides"
MOST = 5
"""How many of the largest values are listed."""


def refused(error: jax.errors.JaxRuntimeError) -> tuple[int, int] | None:
    """The bytes that a program needs and that a device has; None for other errors.

    >>> refused(jax.errors.JaxRuntimeError("Used 3.5K of 2.0K hbm. Exceeded"))
    (3584, 2048)
    """
    for pattern in _REFUSED:
        if read := pattern.search(str(error)):
            needed, unit, available, other = read.groups()
            return _bytes(needed, unit), _bytes(available, other)
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** " KMGT".find(unit or " "))


def remarks(refused: tuple[int, int] | None) -> list[Remark]:
    """What to do about a program that is refused."""
    if refused is None:
        return []
    text = (
        f"the compiler refuses the program: it needs {size_of(*refused)} of the memory "
        "of a device. What follows is of the program as it is written"
    )
    advice = (
        "Shard or donate the largest arrays, compute less at once with batch_size=, or "
        "recompute values with jax.checkpoint."
    )
    return [Remark(text, advice, None)]


def cost_of(needed: int) -> Cost:
    """The cost of a program of which only the memory that it needs is known."""
    return Cost(
        flops=None,
        bytes_accessed=None,
        peak_bytes=needed,
        argument_bytes=None,
        output_bytes=None,
        temporary_bytes=None,
    )


def largest(jaxpr: Jaxpr, inputs: Sequence[ArrayLayout]) -> tuple[Held, ...]:
    """The largest arguments and values of a program, as they are on one device.

    Outside of maps the partitioner decides what a device has of a value: there the
    whole is listed.
    """
    held = [
        Held(
            f"{each.dtype}[{','.join(map(str, each.shard_shape or each.shape))}]",
            each.bytes if each.shard_bytes is None else each.shard_bytes,
            f"argument {each.path}",
            None,
        )
        for each in inputs
    ]
    held += _values(jaxpr, (), None)
    held.sort(key=lambda each: -each.bytes)
    return tuple(held[:MOST])


def _values(jaxpr: Jaxpr, block: tuple[int, ...], line: str | None) -> Iterator[Held]:
    """The results of equations.

    Args:
      jaxpr: the program, or a part of it.
      block: how many elements a device has at once, for each map around.
      line: the line of the equation around.
    """
    for equation in jaxpr.eqns:
        here, inside = source_of(equation) or line, block
        if equation.primitive is spmap_p:
            params = MapParams.of(equation)
            inside = (*block, _at_once(params, is_outermost=not block))
        inner = jaxprs_in(equation.params)
        for each in inner:
            yield from _values(each, inside, here)
        if inner and equation.primitive in (jit_p, spmap_p, SHARD_MAP):
            continue  # The results are those of equations inside.
        for var in equation.outvars:
            aval = aval_of(var)
            if hasattr(aval, "dtype") and hasattr(aval, "shape"):
                yield _value(aval, block, equation.primitive.name, here)


def _value(aval: Aval, block: tuple[int, ...], name: str, line: str | None) -> Held:
    shape = (*(count for count in block if count > 1), *aval.shape)
    bytes_ = math.prod(shape) * aval.dtype.itemsize
    return Held(f"{aval.dtype}[{','.join(map(str, shape))}]", bytes_, name, line)


def _at_once(params: MapParams, is_outermost: bool) -> int:
    """How many elements of a map a device computes at once."""
    devices = 1
    if is_outermost and params.mesh is not None and params.mesh_axes is not None:
        devices = math.prod(params.mesh.shape[name] for name in params.mesh_axes)
    each = -(-params.axis_size // devices)
    return min(each, params.batch_size or each)


def shardings_of(jaxpr: Jaxpr) -> tuple[Sequence[Any], Sequence[Any]]:
    """The shardings of inputs and outputs that the maps of a program fix.

    Args:
      jaxpr: the program.

    Returns:
      For inputs and for outputs, each a `NamedSharding` or `UNKNOWN`.
    """
    known: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        ins, outs = _shardings(equation)
        known.update(zip(equation.outvars, outs, strict=True))
        for atom, sharding in zip(equation.invars, ins, strict=True):
            if not isinstance(atom, jex_core.Literal) and sharding != UNKNOWN:
                known.setdefault(atom, sharding)

    def of(atom: Atom) -> Any:
        is_literal = isinstance(atom, jex_core.Literal)
        return UNKNOWN if is_literal else known.get(atom, UNKNOWN)

    return [*map(of, jaxpr.invars)], [*map(of, jaxpr.outvars)]


def _shardings(equation: Equation) -> tuple[Sequence[Any], Sequence[Any]]:
    params = equation.params
    if equation.primitive is spmap_p and params["mesh"] is not None:
        return map_shardings(MapParams.of(equation))
    if equation.primitive is SHARD_MAP:
        return (
            [NamedSharding(params["mesh"], spec) for spec in params["in_specs"]],
            [NamedSharding(params["mesh"], spec) for spec in params["out_specs"]],
        )
    if equation.primitive is jit_p:
        return shardings_of(*jaxprs_in(params))
    return [UNKNOWN] * len(equation.invars), [UNKNOWN] * len(equation.outvars)
