"""Calls of `spmap` over several processes, each of which passes its own elements.

A call is traced for global arrays. The arrays of this process become global ones before
it runs, and its results process-local ones after; see `programs.run_call`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import cast

import jax
from jax.sharding import Mesh

from shardmap._jax.types import Aval, Axes, with_shape
from shardmap.api.arguments import Arguments
from shardmap.api.transformed import Call, ProcessLocal, Transformed
from shardmap.arrays.process_local import processes_along, shardings_along
from shardmap.arrays.processes import is_global_array
from shardmap.map.primitives.map_primitive import MapParams


def global_avals(
    transformed: Transformed,
    devices: Sequence[jax.Device],
    arguments: Arguments,
    avals: Sequence[Aval],
    in_axes: Axes,
) -> tuple[Sequence[Aval], bool]:
    """The avals of the global arrays of a call; whether its data are process-local."""
    # Only mapped arguments count, if there are any; others are equal in all processes.
    mapped = [k for k, axis in enumerate(in_axes) if axis is not None]
    kinds = [
        is_global_array(arguments.leaves[k]) for k in mapped or range(len(in_axes))
    ]
    if mapped and len(set(kinds)) > 1:
        names = transformed.leaf_names(arguments)
        paths = [names[mapped[kinds.index(kind)]] for kind in (True, False)]
        raise ValueError(
            f"spmap maps {paths[0]}, a global array over all processes, together with "
            f"{paths[1]}, which is process-local data. "
            "jax.make_array_from_process_local_data makes a global array of it."
        )
    if any(kinds):
        return avals, False
    times = _check_elements(transformed, devices, in_axes, avals)
    sizes = [
        [n * times if k == axis else n for k, n in enumerate(aval.shape)]
        for aval, axis in zip(avals, in_axes, strict=True)
    ]
    return list(map(with_shape, avals, sizes)), True


def of_process(call: Call, params: MapParams, in_axes: Axes, is_local: bool) -> Call:
    """A call of global arrays that this process has, or of process-local data."""
    if not call.devices:
        return call
    assert call.shardings is not None
    count = processes_along(cast(Mesh, params.mesh), params.mesh_axes or ())
    operands, results = (
        [shardings_along(s, axis, count) for s, axis in zip(each, axes, strict=True)]
        for each, axes in zip(call.shardings, (in_axes, params.out_axes), strict=True)
    )
    local = ProcessLocal(operands, results if is_local else None)
    return dataclasses.replace(call, process_local=local)


def _check_elements(
    transformed: Transformed,
    devices: Sequence[jax.Device],
    in_axes: Axes,
    avals: Sequence[Aval],
) -> int:
    """How many processes pass different elements, each the leaves with these avals."""
    options = transformed.options
    mesh, wanted = cast(Mesh | None, options.mesh), options.axis_size
    mesh_axes = options.mesh_axes or ()
    if mesh is None:
        divisor = count = len({device.process_index for device in devices})
    else:
        count = processes_along(mesh, mesh_axes)
        divisor = math.prod(mesh.shape[n] for n in mesh_axes)
    sizes = (a.shape[k] for a, k in zip(avals, in_axes, strict=True) if k is not None)
    here = next(sizes, None if wanted is None else wanted // count)
    if here is None:  # No argument is mapped, which is refused where it is traced.
        return count
    if here == 0:
        raise ValueError(
            f"{transformed.full_name} over {count} processes needs at least one "
            "element on each."
        )
    if wanted is not None and here * count != wanted:
        raise ValueError(
            f"spmap got axis_size {wanted}, which counts the elements on all "
            f"processes, but {here} on each of {count} are {here * count}. Pass the "
            "elements of each process only, all processes equally many."
        )
    if here * count % divisor:
        raise ValueError(
            f"{transformed.full_name}: {here} elements on each of {count} processes do "
            f"not divide among the {divisor} devices of the mesh that share them. Pass "
            "a multiple, or global arrays."
        )
    return count
