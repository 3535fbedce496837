"""From map equations to programs that run.

The manual lowering: one program per device with explicit collectives, by way of
`jax.shard_map`. A map inside another map walks a mesh axis of its own where there are
devices for it; where there are none its elements are one batched operation.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh

from shardmap.map import placement
from shardmap.map.layout import is_on_mesh, map_shardings, partition_spec
from shardmap.map.primitive import spmap_p
from shardmap.map.tracing import Batch, config_value


def map_jit(fun: Callable[..., Any], mesh: Mesh, **options: Any) -> Any:
    """`jax.jit` for a program with maps over the devices of ``mesh``.

    jaxlib's concurrency-optimised scheduler can hang programs with several
    collectives in flight on more CPU devices than cores.
    """
    if mesh.devices.flat[0].platform == "cpu":
        options["compiler_options"] = {
            "xla_cpu_enable_concurrency_optimized_scheduler": False
        }
    return jax.jit(fun, **options)


# Evaluation


def _implementation(*args: Any, **params: Any) -> list[Any]:
    if config_value("jax_disable_jit") or config_value("jax_debug_nans"):
        return vectorized(**params)(*args)
    jitted, shardings = _program(**params)
    return jitted(*placement.place(args, shardings))


@functools.lru_cache(maxsize=4096)
def _program(**params: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """The compiled form of one equation, and how its operands must lie."""
    run = functools.partial(spmap_p.bind, **params)
    mesh = params["mesh"]
    if mesh is None:
        return jax.jit(run), None
    shardings = map_shardings(
        mesh, params["in_axes"], params["out_axes"], params["call_jaxpr"]
    )
    jitted = map_jit(
        run,
        mesh,
        in_shardings=shardings.operands,
        out_shardings=list(shardings.results),
    )
    return jitted, shardings.operands


# One batched operation


def vectorized(
    *,
    axis_name: Hashable,
    axis_size: int,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    call_jaxpr: Any,
    **_: Any,
) -> Callable[..., list[Any]]:
    """A map as `jax.vmap`: its elements computed together, on one device."""

    def element(*args: Any) -> list[Any]:
        return jax.core.eval_jaxpr(call_jaxpr, (), *args)

    out_dims = [0 if axis is None else axis for axis in out_axes]
    mapped = Batch(axis_name, axis_size).vectorize(element, in_axes, out_dims)

    def run(*args: Any) -> list[Any]:
        return [
            result[0] if axis is None else result
            for result, axis in zip(mapped(*args), out_axes, strict=True)
        ]

    return run


# One program per device


def per_device(
    *,
    axis_name: Hashable,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    call_jaxpr: Any,
    mesh: Any,
    mesh_axis: str,
    **_: Any,
) -> Callable[..., Any]:
    """A map as `jax.shard_map`, one element on each device along ``mesh_axis``."""
    jaxpr = _on_mesh(call_jaxpr, axis_name, mesh, mesh_axis)

    def element(*blocks: Any) -> list[Any]:
        operands = [
            block if axis is None else jax.lax.squeeze(block, (axis,))
            for block, axis in zip(blocks, in_axes, strict=True)
        ]
        results = jax.core.eval_jaxpr(jaxpr, (), *operands)
        return [
            result if axis is None else jax.lax.expand_dims(result, (axis,))
            for result, axis in zip(results, out_axes, strict=True)
        ]

    return jax.shard_map(
        element,
        mesh=mesh,
        in_specs=tuple(partition_spec(mesh_axis, axis) for axis in in_axes),
        out_specs=[partition_spec(mesh_axis, axis) for axis in out_axes],
        axis_names={mesh_axis},
        check_vma=False,
    )


def _on_mesh(jaxpr: Any, axis_name: Hashable, mesh: Any, mesh_axis: str) -> Any:
    """``jaxpr`` with its axis called as the mesh calls it, and maps inside on mesh."""
    level = mesh.axis_names.index(mesh_axis) + 1

    def rename(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rename, value))
        return mesh_axis if value == axis_name else value

    def rewrite(value: Any, shadowed: bool, outermost: bool) -> Any:
        if isinstance(value, tuple):
            items = [rewrite(item, shadowed, outermost) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if hasattr(value, "eqns"):
            return rewrite_jaxpr(value, shadowed, outermost)
        if hasattr(value, "jaxpr") and hasattr(value, "consts"):
            return value.replace(jaxpr=rewrite_jaxpr(value.jaxpr, shadowed, outermost))
        return value

    def rewrite_jaxpr(jaxpr: Any, shadowed: bool, outermost: bool) -> Any:
        equations = [rewrite_equation(e, shadowed, outermost) for e in jaxpr.eqns]
        return jaxpr.replace(
            eqns=equations,
            effects={rewrite_effect(e, shadowed) for e in jaxpr.effects},
        )

    def rewrite_effect(effect: Any, shadowed: bool) -> Any:
        if not shadowed and getattr(effect, "name", None) == axis_name:
            return type(effect)(mesh_axis)
        return effect

    def rewrite_equation(equation: Any, shadowed: bool, outermost: bool) -> Any:
        params = dict(equation.params)
        is_map = equation.primitive is spmap_p
        if is_map:
            if outermost and is_on_mesh(equation, mesh, level):
                params |= {"mesh": mesh, "mesh_axis": mesh.axis_names[level]}
            shadowed = shadowed or params["axis_name"] == axis_name
            params["call_jaxpr"] = rewrite_jaxpr(params["call_jaxpr"], shadowed, False)
        else:
            for key, value in params.items():
                # A number among `axes` is a dimension, not a name.
                is_name = key == "axis_name" or (
                    key == "axes" and not isinstance(axis_name, int)
                )
                if is_name:
                    params[key] = value if shadowed else rename(value)
                else:
                    params[key] = rewrite(value, shadowed, outermost)
        return equation.replace(
            params=params,
            effects={rewrite_effect(e, shadowed) for e in equation.effects},
        )

    return rewrite_jaxpr(jaxpr, False, True)


def _manual_lowering(ctx: Any, *args: Any, **params: Any) -> Any:
    mesh, mesh_axis = params["mesh"], params["mesh_axis"]
    context = ctx.module_context.axis_context
    manual: frozenset[Any] = getattr(context, "manual_axes", frozenset())
    if not manual and mesh is not None:
        return mlir.lower_fun(per_device(**params))(ctx, *args)
    inside_own = (
        mesh is not None
        and context.mesh.axis_names == mesh.axis_names
        and mesh_axis not in manual
    )
    if not inside_own:
        return mlir.lower_fun(vectorized(**params))(ctx, *args)
    inner_mesh = mesh.abstract_mesh.update_axis_types(
        {name: AxisType.Manual for name in manual}
    )
    with jax.sharding.use_abstract_mesh(inner_mesh):
        run = per_device(**(params | {"mesh": inner_mesh}))
        return mlir.lower_fun(run)(ctx, *args)


spmap_p.def_impl(_implementation)
mlir.register_lowering(spmap_p, _manual_lowering)
