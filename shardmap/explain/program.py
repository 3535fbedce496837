"""What becomes of a function and its arguments: its jaxpr, its devices, its HLO."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core.primitives import cond_p
from jax.sharding import AbstractMesh

from shardmap._jax.types import Jaxpr
from shardmap.arrays import trees
from shardmap.explain import functions
from shardmap.explain.read import arrays
from shardmap.explain.read.collectives import collectives_of
from shardmap.explain.read.compiled import cost_of, layouts_of, library_bytes
from shardmap.explain.read.hlo.collectives import compiled_collectives
from shardmap.explain.read.hlo.cost import CostAnalysis, Loops, loops_of
from shardmap.explain.read.hlo.live import largest_at_peak
from shardmap.explain.read.hlo.text import Module, module_of
from shardmap.explain.read.meshes import (
    axes_of,
    device_of,
    devices_of,
    if_unusual,
    largest_mesh,
    meshes_of,
)
from shardmap.explain.read.remarks.on_program import LARGE
from shardmap.explain.read.sent import Sent, missing
from shardmap.explain.read.source import definition_of
from shardmap.explain.read.visitor import CHUNKED, Facts, facts_of
from shardmap.explain.read.vmaps import marked
from shardmap.explain.report import ArrayLayout, Cost, Held
from shardmap.units import size


@dataclasses.dataclass(frozen=True)
class Program:
    """A function as it is traced, and compiled where its devices are there.

    Attributes:
      fun, args, kwargs: the function, and what it is called with.
      traced: its trace.
      meshes: those that it names, the largest first.
      layouts_in, layouts_out: where its arguments and results lie.
      is_abstract: whether its devices are not known, so that nothing is compiled.
      module: what was compiled; None without, or where there is no text of it.
      cost: what it takes.
      steps: how often its loops run.
    """

    fun: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    traced: Any
    meshes: Sequence[Any]
    layouts_in: Sequence[Any]
    layouts_out: Sequence[Any]
    is_abstract: bool
    module: Module | None = None
    cost: Cost | None = None
    steps: Loops | None = None

    @property
    def jaxpr(self) -> Jaxpr:
        return self.traced.jaxpr.jaxpr

    @property
    def layouts(self) -> list[Any]:
        """Of inputs, then of outputs."""
        return [*self.layouts_in, *self.layouts_out]

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes of the mesh axes."""
        return axes_of(largest_mesh(self.meshes, self.layouts))

    @property
    def devices(self) -> tuple[int, ...]:
        """The ids of the mesh's devices, if they are unusual."""
        return if_unusual(devices_of(largest_mesh(self.meshes, self.layouts)))

    @property
    def num_devices(self) -> int:
        counts = map(arrays.device_count, self.layouts)
        return max([1, *counts, *(mesh.size for mesh in self.meshes)])

    @functools.cached_property
    def _device(self) -> Any:
        """One of its devices; None if they are not known."""
        return None if self.is_abstract else device_of(self.layouts, self.meshes)

    @property
    def device_kind(self) -> str | None:
        return None if self._device is None else self._device.device_kind

    @property
    def available(self) -> int | None:
        """How many devices of that kind there are."""
        if self._device is None:
            return None
        return len(jax.local_devices(backend=self._device.platform))

    @property
    def donates(self) -> bool:
        """Whether a call takes arguments away."""
        return any(info.donated for info in jax.tree.leaves(self.traced.args_info))

    @functools.cached_property
    def arrays(self) -> tuple[ArrayLayout, ...]:
        """Where each argument and each result lies."""
        argnums = functions.array_argnums(self.fun, len(self.args))
        infos, out_infos = self.traced.args_info, self.traced.out_info
        names_in = arrays.input_names(self.fun, infos, argnums)
        names_out = trees.result_names(jax.tree.structure(out_infos))
        mesh = largest_mesh(self.meshes, self.layouts)
        return (
            *arrays.array_layouts(
                "input", names_in, jax.tree.leaves(infos), self.layouts_in, mesh
            ),
            *arrays.array_layouts(
                "output", names_out, jax.tree.leaves(out_infos), self.layouts_out, mesh
            ),
        )

    @functools.cached_property
    def facts(self) -> Facts:
        """What the program says of itself, with the vmaps over its arguments."""
        source = definition_of(self.fun)
        found = facts_of(self.jaxpr, source)
        # Marks would keep a function in pieces from being cut.
        has_vmaps = any(axis.kind == "vmap" for axis in found.axes)
        if not has_vmaps or CHUNKED in found.primitives:
            return found
        try:
            traced = functions.traced(self.fun, *marked((self.args, self.kwargs)))
        except Exception:
            return found  # Somebody looked for an array and found a mark.
        return facts_of(traced.jaxpr.jaxpr, source)

    @functools.cached_property
    def collectives(self) -> list[Sent]:
        """What goes between devices, by XLA; over an abstract mesh, by the program."""
        if self.is_abstract:
            return collectives_of(self.jaxpr, definition_of(self.fun))
        if self.module is None:
            return []
        return compiled_collectives(self.module, self.mesh, self.facts.constraints)

    @property
    def largest(self) -> tuple[Held, ...]:
        """The largest values at the peak of memory."""
        return () if self.module is None else largest_at_peak(self.module)

    def notes(self) -> list[str]:
        """What is not known, or is known in part."""
        notes = []
        if self.is_abstract:
            notes.append(
                "Nothing was compiled: the mesh is abstract. Collectives are those of "
                "the program; what the compiler adds, and costs, are not known."
            )
            if self.facts.is_partitioned:
                notes.append(
                    "The partitioner may do the collectives of a map with "
                    "lowering='spmd' in another way."
                )
        if self.steps is not None and not self.steps.all_known:
            notes.append(
                "The steps of a loop whose length only the running program knows count "
                "once in flops and bytes accessed."
            )
        besides = 0 if self.module is None else library_bytes(self.module)
        if besides >= LARGE:
            notes.append(
                f"XLA's library for products on CPU may take up to {size(besides)} "
                "besides the memory at the peak."
            )
        if not self.is_abstract:
            notes += missing(self.facts.collectives, self.collectives)
        if self.collectives and cond_p.name in self.facts.primitives:
            notes.append(
                "Collectives in a branch count as if the branch were always taken."
            )
        return notes


def program_of(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Program:
    """Traces a function, and compiles it if its devices are there."""
    traced = functions.traced(fun, args, kwargs)
    jaxpr = traced.jaxpr.jaxpr
    meshes = meshes_of(jaxpr, (args, kwargs))
    given = (fun, args, kwargs, traced, meshes)
    if any(isinstance(mesh, AbstractMesh) for mesh in meshes):
        if isinstance(fun, functions.HasShardings):
            return Program(*given, *fun.shardings(args, traced.out_info), True)
        return Program(*given, *arrays.shardings_in(jaxpr), True)
    lowered = functions.lowered(fun, traced, args, kwargs)
    compiled = lowered.compile()
    text = compiled.as_text()
    module = module_of(text) if text else None
    steps = Loops(CostAnalysis(1, 1, 1), False) if module is None else loops_of(module)
    layouts = layouts_of(lowered, compiled, traced)
    return Program(*given, *layouts, False, module, cost_of(compiled, steps), steps)
