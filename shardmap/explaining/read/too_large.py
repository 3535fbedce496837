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
from shardmap._jax.stages import given_shardings
from shardmap._jax.types import Atom, Aval, Equation, Jaxpr, aval_of
from shardmap._jax.walk import jaxprs_in
from shardmap.explaining.report import ArrayLayout, Held, Remark
from shardmap.map.layout import map_shardings
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.primitives.params import MapParams
from shardmap.source import source_of
from shardmap.units import size, size_of

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


def remarks(
    refused: tuple[int, int] | None, inputs: Sequence[ArrayLayout]
) -> list[Remark]:
    """What to do about a program that is refused.

    Args:
      refused: the bytes that it needs and that there are; None if it is not.
      inputs: its arguments.
    """
    if refused is None:
        return []
    needed, capacity = refused
    held = sum(each.shard_bytes or each.bytes for each in inputs)
    text = (
        f"the compiler refuses the program: it needs {size_of(*refused)} of the memory "
        f"of a device, {size(min(held, needed))} of it for arguments. What follows is "
        "of the program as it is written"
    )
    advice = "Compute less at once with batch_size=, or recompute values"
    advice += " with jax.checkpoint."
    if 2 * held > min(needed, capacity):
        advice = "Shard the largest arguments over more devices, or donate them."
    return [Remark(text, advice, None)]


def largest(
    jaxpr: Jaxpr, inputs: Sequence[ArrayLayout], num_devices: int
) -> tuple[Held, ...]:
    """The largest arguments and values of a program, as they are on one device.

    Outside of maps the partitioner decides what a device has of a value: there the
    whole is listed, as of all devices.
    """
    held = [
        Held(
            f"{each.dtype}[{','.join(map(str, each.shard_shape or each.shape))}]",
            each.shard_bytes or each.bytes,
            f"argument {each.path}",
            None,
        )
        for each in inputs
    ]
    held += _values(jaxpr, (), None, num_devices > 1)
    held.sort(key=lambda each: -each.bytes)
    return tuple(held[:MOST])


def _values(
    jaxpr: Jaxpr, block: tuple[int, ...], line: str | None, is_whole: bool
) -> Iterator[Held]:
    """The results of equations.

    Args:
      jaxpr: the program, or a part of it.
      block: how many elements a device has at once, for each map around.
      line: the line of the equation around.
      is_whole: whether values are those of several devices.
    """
    maps = (spmap_p, SHARD_MAP)
    for equation in jaxpr.eqns:
        here, inside = source_of(equation) or line, block
        if equation.primitive is spmap_p:
            params = MapParams.of(equation)
            inside = (*block, _at_once(params, is_outermost=not block))
        inner = jaxprs_in(equation.params)
        for each in inner:
            whole = is_whole and equation.primitive not in maps
            yield from _values(each, inside, here, whole)
        if inner and equation.primitive in (jit_p, *maps):
            continue  # The results are those of equations inside.
        for var in equation.outvars:
            aval = aval_of(var)
            if hasattr(aval, "dtype") and hasattr(aval, "shape"):
                name = equation.primitive.name + ", of all devices" * is_whole
                yield _value(aval, block, name, here)


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


def shardings_of(traced: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The shardings of inputs and outputs that are known before a program is compiled.

    These are the ones that are given, and those that the maps of the program fix.

    Args:
      traced: the program's trace.

    Returns:
      For inputs and for outputs, each a sharding or `UNKNOWN`.
    """
    given = given_shardings(traced)
    fixed = _fixed(traced.jaxpr.jaxpr)
    ins, outs = (
        [known or each for known, each in zip(*pair, strict=True)]
        for pair in zip(given, fixed, strict=True)
    )
    return ins, outs


def _fixed(jaxpr: Jaxpr) -> tuple[Sequence[Any], Sequence[Any]]:
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
        asked = params["in_shardings"], params["out_shardings"]
        ins, outs = (
            [
                each if isinstance(each, NamedSharding) else inner
                for each, inner in zip(*pair, strict=True)
            ]
            for pair in zip(asked, _fixed(*jaxprs_in(params)), strict=True)
        )
        return ins, outs
    return [UNKNOWN] * len(equation.invars), [UNKNOWN] * len(equation.outvars)
