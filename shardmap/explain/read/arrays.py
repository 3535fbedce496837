"""How the inputs and outputs of a program are sharded."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jex_core
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from shardmap._jax.primitives import SHARD_MAP
from shardmap._jax.types import Atom, Aval, Equation, Jaxpr, PyTree, aval_of
from shardmap._jax.walk import jaxprs_in
from shardmap.arrays import trees
from shardmap.explain.read.meshes import devices_of, if_unusual
from shardmap.explain.report import ArrayLayout
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.shardings import map_shardings
from shardmap.map.tracing import per_jaxpr
from shardmap.sharding.spec import ShardingSpec

UNUSED = "not used by the program"
UNKNOWN = "as the compiler decides"


def input_names(
    fun: Callable[..., Any], info: PyTree, argnums: Sequence[int]
) -> list[str]:
    """The key path of each input.

    Args:
      fun: the function.
      info: positional and keyword arguments, as trees.
      argnums: the positions of the positional ones, if that is known.
    """
    args, kwargs = info
    if len(args) != len(argnums):
        paths = jax.tree_util.tree_leaves_with_path(args)
        names = [f"args{jax.tree_util.keystr(path)}" for path, _ in paths]
        return names + trees.leaf_names(fun, (), (), kwargs)
    return trees.leaf_names(fun, argnums, args, kwargs)


def array_layouts(
    role: Literal["input", "output"],
    names: Sequence[str],
    avals: Sequence[Any],
    layouts: Sequence[Any],
    mesh: Any = None,
) -> list[ArrayLayout]:
    """The layouts of some arrays.

    Args:
      role: what they are.
      names: their key paths.
      avals: their shapes and dtypes.
      layouts: for each a `ShardingSpec`, a sharding, or a word that there is none.
      mesh: what those are on that are a spec.
    """
    return [
        _array(role, name, aval, layout, mesh)
        for name, aval, layout in zip(names, avals, layouts, strict=True)
    ]


def _array(
    role: Literal["input", "output"], name: str, aval: Aval, layout: Any, mesh: Any
) -> ArrayLayout:
    shape = tuple(aval.shape)
    itemsize = aval.dtype.itemsize
    spec, shard_shape = None, None
    devices: Sequence[int] = ()
    if isinstance(layout, ShardingSpec):
        spec = layout
        devices = devices_of(mesh)
    elif isinstance(layout, Sharding):
        shard_shape = layout.shard_shape(shape)
        try:
            spec = ShardingSpec.from_sharding(layout, shape)
            devices = _ids(layout, shape)
        except ValueError:
            layout = str(layout)
    if spec is not None:
        shard_shape = spec.shard_shape(shape)
        layout = describe(spec)
    return ArrayLayout(
        role=role,
        path=name,
        shape=shape,
        dtype=str(aval.dtype),
        spec=spec,
        shard_shape=None if shard_shape is None else tuple(shard_shape),
        bytes=math.prod(shape) * itemsize,
        shard_bytes=None if shard_shape is None else math.prod(shard_shape) * itemsize,
        layout=layout,
        devices=if_unusual(devices) if spec and len(devices) == spec.num_shards else (),
    )


def _ids(sharding: Sharding, shape: tuple[int, ...]) -> list[int]:
    """The ids of its devices, in the order of its spec; [] without devices."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return []
    devices: list[Any] = [*sharding.devices_indices_map(shape)]
    return [device.id for device in devices]


def describe(spec: ShardingSpec) -> str:
    """How an array is cut, in a few words.

    >>> from shardmap import Chunked, Replicated, ShardedAxis
    >>> describe(ShardingSpec((Chunked(2), None), (ShardedAxis(0), Replicated(4))))
    'dimension 0 in 2 shards, each on 4 devices'
    >>> describe(ShardingSpec((None,), (Replicated(4),)))
    'replicated on 4 devices'
    """
    if spec.num_shards == 1:
        return "on one device"
    cuts = [
        f"dimension {dimension} in {count:,} shards"
        for dimension, count in enumerate(spec.tile_counts)
        if count > 1
    ]
    copies = spec.num_shards // math.prod(spec.tile_counts)
    if not cuts:
        return f"replicated on {copies:,} devices"
    return ", ".join(cuts) + (f", each on {copies:,} devices" if copies > 1 else "")


@per_jaxpr
def shardings_in(jaxpr: Jaxpr) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """How inputs and outputs of a program are sharded, as far as its maps say it.

    An input that goes straight to a map lies as the map wants it, and a result that
    comes straight from one as it makes it.

    Args:
      jaxpr: the program.

    Returns:
      For inputs and for outputs, each a `NamedSharding` or `UNKNOWN`.
    """
    taken: dict[Any, Any] = {}
    made: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        ins, outs = _equation_shardings(equation)
        for atom, sharding in zip(equation.invars, ins, strict=True):
            if not isinstance(atom, jex_core.Literal) and sharding is not UNKNOWN:
                taken.setdefault(atom, sharding)
        made.update(zip(equation.outvars, outs, strict=True))

    def layout(atom: Atom, known: dict[Any, Any]) -> Any:
        if isinstance(atom, jex_core.Literal):
            return UNKNOWN
        return known.get(atom, UNKNOWN)

    return (
        tuple(layout(var, taken) for var in jaxpr.invars),
        tuple(layout(atom, made) for atom in jaxpr.outvars),
    )


def _equation_shardings(equation: Equation) -> tuple[Sequence[Any], Sequence[Any]]:
    params = equation.params
    if equation.primitive is spmap_p and params["mesh"] is not None:
        shardings = map_shardings(params)
        return shardings.operands, shardings.results
    if equation.primitive is SHARD_MAP:
        mesh = params["mesh"]
        return (
            [NamedSharding(mesh, spec) for spec in params["in_specs"]],
            [NamedSharding(mesh, spec) for spec in params["out_specs"]],
        )
    inner = jaxprs_in(params)
    if len(inner) == 1 and _calls(equation, inner[0]):
        return shardings_in(inner[0])
    return [UNKNOWN] * len(equation.invars), [UNKNOWN] * len(equation.outvars)


def _calls(equation: Equation, jaxpr: Jaxpr) -> bool:
    """Whether the equation only calls the jaxpr, as `jax.jit` does."""
    return all(
        [aval_of(atom).shape for atom in outside]
        == [aval_of(atom).shape for atom in inside]
        for outside, inside in (
            (equation.invars, jaxpr.invars),
            (equation.outvars, jaxpr.outvars),
        )
    )


def device_count(sharding: Any) -> int:
    """How many devices a sharding has."""
    if isinstance(sharding, ShardingSpec):
        return sharding.num_shards
    return sharding.num_devices if isinstance(sharding, Sharding) else 1
