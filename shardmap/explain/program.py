"""A function and its arguments as a program: traced, and compiled.

A function is known by what it can do: the mapped functions of this package and what
`jax.jit` or `jax.pmap` gives say themselves how they are traced or lowered.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.extend.core.primitives import cond_p
from jax.sharding import AbstractMesh, Sharding

from shardmap._jax.types import Jaxpr, PyTree
from shardmap.arrays import trees
from shardmap.explain.read import arrays
from shardmap.explain.read.abstract import collectives_of
from shardmap.explain.read.hlo.collectives import compiled_collectives
from shardmap.explain.read.hlo.cost import (
    cost_of,
    largest_at_peak,
    library_bytes,
    steps_are_known,
)
from shardmap.explain.read.hlo.sources import Sources
from shardmap.explain.read.hlo.text import Module, module_of
from shardmap.explain.read.remarks import LARGE
from shardmap.explain.read.source import definition_of
from shardmap.explain.read.visitor import CHUNKED, Facts, facts_of
from shardmap.explain.read.vmaps import marked
from shardmap.explain.report import ArrayLayout, Collective, Cost, Held
from shardmap.units import size


@runtime_checkable
class Lowerable(Protocol):
    """A function that is a program of its own, such as what `jax.pmap` gives."""

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...


@runtime_checkable
class Traceable(Lowerable, Protocol):
    """A mapped function, or what `jax.jit` gives."""

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced: ...


@runtime_checkable
class HasShardings(Protocol):
    """A mapped function, which fixes the shardings of its arrays."""

    def shardings(
        self, args: PyTree, out: PyTree, /
    ) -> tuple[Sequence[Sharding], Sequence[Sharding]]: ...


def trace(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> jax.stages.Traced:
    """Traces the function as a call does: by itself, or by `jax.jit`."""
    if not isinstance(fun, Traceable):
        return jax.jit(fun).trace(*args, **kwargs)
    return _stage(fun.trace(*args, **kwargs), "traced", jax.stages.Traced)


def _lower(
    fun: Callable[..., Any],
    traced: jax.stages.Traced,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> jax.stages.Lowered:
    # A map of several processes knows which of them lower it; its trace does not.
    if isinstance(fun, Lowerable):
        return _stage(fun.lower(*args, **kwargs), "lowered", jax.stages.Lowered)
    return traced.lower()


def _stage(made: Any, name: str, kind: type) -> Any:
    """JAX's own stage. A library's, as of `flax.nnx.jit`, has it as an attribute."""
    inner = getattr(made, name, None)
    return inner if isinstance(inner, kind) else made


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function, compiled unless its mesh is abstract.

    Attributes:
      fun, args, kwargs: the function, and what it is called with.
      traced: its trace.
      meshes: those that it names, the largest first.
      layouts_in, layouts_out: how its arguments and results are sharded.
      is_abstract: whether its devices are not known, so that nothing is compiled.
      module: what was compiled; None without, or where there is no text of it.
      cost: what it takes.
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

    @property
    def jaxpr(self) -> Jaxpr:
        return self.traced.jaxpr.jaxpr

    @property
    def layouts(self) -> list[Any]:
        """The shardings of inputs, then of outputs."""
        return [*self.layouts_in, *self.layouts_out]

    @functools.cached_property
    def _mesh(self) -> Any:
        return arrays.largest_mesh(self.meshes, self.layouts)

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes of the mesh axes."""
        return arrays.axes_of(self._mesh)

    @property
    def devices(self) -> tuple[int, ...]:
        """The ids of the mesh's devices, if they are unusual."""
        return arrays.if_unusual(arrays.devices_of(self._mesh))

    @property
    def num_devices(self) -> int:
        counts = [s.num_devices for s in self.layouts if isinstance(s, Sharding)]
        return max([1, *counts, *(mesh.size for mesh in self.meshes)])

    @functools.cached_property
    def device(self) -> Any:
        """One of its devices; None if they are not known."""
        if self.is_abstract:
            return None
        return arrays.device_of(self.layouts, self.meshes)

    @property
    def available(self) -> int | None:
        """How many devices of that kind there are."""
        if self.device is None:
            return None
        return len(jax.local_devices(backend=self.device.platform))

    @property
    def donates(self) -> bool:
        """Whether a call donates arguments."""
        return any(info.donated for info in jax.tree.leaves(self.traced.args_info))

    @functools.cached_property
    def arrays(self) -> tuple[ArrayLayout, ...]:
        """How each argument and each result is sharded."""
        infos, out_infos = self.traced.args_info, self.traced.out_info
        static = getattr(self.fun, "static_argnums", None) or ()
        static = (static,) if isinstance(static, int) else static
        argnums = [k for k in range(len(self.args)) if k not in static]
        names_in = arrays.input_names(self.fun, infos, argnums)
        names_out = trees.result_names(jax.tree.structure(out_infos))
        return (
            *(
                arrays.array_layout("input", *each)
                for each in zip(
                    names_in, jax.tree.leaves(infos), self.layouts_in, strict=True
                )
            ),
            *(
                arrays.array_layout("output", *each)
                for each in zip(
                    names_out, jax.tree.leaves(out_infos), self.layouts_out, strict=True
                )
            ),
        )

    @functools.cached_property
    def facts(self) -> Facts:
        """The facts of the jaxpr, with the vmaps over the arguments."""
        source = definition_of(self.fun)
        found = facts_of(self.jaxpr, source)
        # Marks would keep a function in pieces from being cut.
        has_vmaps = any(axis.kind == "vmap" for axis in found.axes)
        if not has_vmaps or CHUNKED in found.primitives:
            return found
        try:
            traced = trace(self.fun, *marked((self.args, self.kwargs)))
        except Exception:
            return found  # The function looked for an array and found a mark.
        return facts_of(traced.jaxpr.jaxpr, source)

    @functools.cached_property
    def _sources(self) -> Sources:
        assert self.module is not None
        return Sources(self.module)

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """The collectives of XLA; of the jaxpr if nothing was compiled."""
        if self.is_abstract:
            return collectives_of(self.jaxpr, definition_of(self.fun))
        if self.module is None:
            return []
        asked = self.facts.constraints
        return compiled_collectives(self.module, self._sources, self.mesh, asked)

    @property
    def largest(self) -> tuple[Held, ...]:
        """The largest values at the peak of memory."""
        if self.module is None:
            return ()
        return largest_at_peak(self.module, self._sources)

    def notes(self) -> list[str]:
        """Notes on what is unknown, or known in part."""
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
        if self.module is not None:
            notes += _notes_on_cost(self.module)
            notes += _removed(self.facts, self.collectives)
        if self.collectives and cond_p.name in self.facts.primitives:
            notes.append(
                "Collectives in a branch count as if the branch were always taken."
            )
        return notes


def _notes_on_cost(module: Module) -> list[str]:
    notes = []
    if not steps_are_known(module):
        notes.append(
            "The steps of a loop whose length only the running program knows count "
            "once in flops and bytes accessed."
        )
    besides = library_bytes(module)
    if besides >= LARGE:
        notes.append(
            f"XLA's library for products on CPU may take up to {size(besides)} "
            "besides the memory at the peak."
        )
    return notes


def _removed(facts: Facts, compiled: Sequence[Collective]) -> list[str]:
    """A note on the number of collectives that the compiler removed."""
    kept = {(each.operation, each.source) for each in compiled}
    count = len(facts.collectives - kept)
    if not count:
        return []
    them = "1 collective" if count == 1 else f"{count:,} collectives"
    return [f"XLA removed, merged or replaced {them} of the program."]


def program_of(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Program:
    """Traces a function, and compiles it for the devices that it names.

    A program over an abstract mesh is not compiled: JAX cannot make one of it.
    """
    traced = trace(fun, args, kwargs)
    jaxpr = traced.jaxpr.jaxpr
    meshes = arrays.meshes_of(jaxpr, (args, kwargs))
    given = (fun, args, kwargs, traced, meshes)
    if any(isinstance(mesh, AbstractMesh) for mesh in meshes):
        if isinstance(fun, HasShardings):
            return Program(*given, *fun.shardings(args, traced.out_info), True)
        return Program(*given, *arrays.shardings_in(jaxpr), True)
    compiled = _lower(fun, traced, args, kwargs).compile()
    text = compiled.as_text()
    module = module_of(text) if text else None
    layouts = arrays.compiled_layouts(traced, compiled)
    return Program(*given, *layouts, False, module, cost_of(compiled, module))
