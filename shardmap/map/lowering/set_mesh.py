"""The evaluation of a map, under `jax.set_mesh` on that mesh."""

import functools
from typing import Any

from shardmap._jax.types import Param, Value
from shardmap.arrays.running import map_jit
from shardmap.map import contexts
from shardmap.map.lowering.evaluation import evaluate_map, is_debugged
from shardmap.map.primitives.map_primitive import spmap_p


def evaluate_under_mesh(*args: Value, **params: Param) -> list[Any]:
    """`evaluate_map`, on the mesh of `jax.set_mesh` if there is one."""
    if params["mesh"] is None or not contexts.has_mesh():
        return evaluate_map(*args, **params)
    if is_debugged():
        return evaluate_map(*args, **params | {"mesh": None, "mesh_axes": None})
    return _program_under_mesh(**params)(*contexts.place(args))


@functools.lru_cache(maxsize=4096)
def _program_under_mesh(**params: Param) -> Any:
    run = functools.partial(spmap_p.bind, **params)
    return map_jit(run, list(params["mesh"].devices.flat), communicates=True)


spmap_p.def_impl(evaluate_under_mesh)
