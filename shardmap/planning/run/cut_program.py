"""A cut function, which plans, shards and workers share."""

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from shardmap._jax.context import config_value
from shardmap._jax.types import ClosedJaxpr, PyTree, TreeDef
from shardmap.arrays.trees import result_names
from shardmap.planning.arguments import Arguments
from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.jaxpr_key import jaxpr_key
from shardmap.planning.engine.nodes import Value, data_aval, is_key, key_impl, nbytes
from shardmap.planning.engine.recipe import Recipe, StaticRecipe, emit
from shardmap.planning.engine.rules import Cut
from shardmap.planning.engine.slices import Box, shape_of
from shardmap.planning.engine.stages import Stage, stages_of
from shardmap.planning.lax.per_piece import is_on_host
from shardmap.planning.run.blocks import sliceable
from shardmap.planning.run.buffers import holds, read_box, refuse_masked, start_dtype
from shardmap.planning.sources.labelled import plain
from shardmap.units import shown

IN_MEMORY = 2**20
"""The most bytes of a value that is kept in memory even if there is ``scratch``."""

Spec: TypeAlias = tuple[tuple[int, ...], Any]
"""The shape and dtype of an array."""


def spec(value: Value, box: Box) -> Spec:
    """The shape and dtype of a box of a value as it is stored."""
    aval = data_aval(value.aval)
    return shape_of(box) + tuple(aval.shape[len(box) :]), aval.dtype


def arg_avals(recipe: Recipe) -> list[jax.ShapeDtypeStruct]:
    """The avals of a shard's function: of boxes as they are stored, and of starts."""
    specs = [spec(value, box) for value, box in recipe.reads]
    specs.append(((len(recipe.starts),), start_dtype(recipe.starts)))
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs]


class CutProgram:
    """The graph of a function, its analysis and its stages.

    Args:
      narrowed: by name, the arguments that JAX takes in 32 bits instead of 64, with
        both dtypes.
      chunks_read: by name, of the arguments that lie in chunks, how many pieces read
        each chunk.
      decoded: the most bytes that a store holds while it reads a chunk of an argument.
      statics: the static arguments, by position or name.
      labels: the `Labels` of its results, if arguments have some.

    Attributes:
      parts: the number of partial results of each box of a value.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        analysis: Analysis,
        in_tree: TreeDef,
        out_tree: TreeDef,
        cuts: Sequence[Sequence[Cut]],
        names: Sequence[str],
        scratch: Any = None,
        narrowed: Mapping[str, tuple[np.dtype, np.dtype]] | None = None,
        chunks_read: Mapping[str, float] | None = None,
        decoded: int = 0,
        statics: Collection[int | str] = (),
        labels: Any = None,
    ) -> None:
        self.closed, self.analysis = closed, analysis
        self.graph = analysis.graph
        self.in_tree, self.out_tree = in_tree, out_tree
        self.cuts, self.names = cuts, names
        self.scratch, self.narrowed = scratch, narrowed or {}
        self.chunks_read = chunks_read or {}
        self.decoded, self.statics, self.labels = decoded, statics, labels
        self.x64: bool = config_value("jax_enable_x64")
        self.partitionable: bool = config_value("jax_threefry_partitionable")
        self.stages = stages_of(analysis)
        self.parts = {
            result.value: math.prod(len(stage.loops[k].pieces) for k in result.partial)
            for stage in self.stages
            for result in stage.results
        }
        self._compiled: dict[Hashable, jax.stages.Wrapped] = {}
        self._different: dict[Hashable, jax.stages.Wrapped] = {}

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The settings of JAX with which it was made, whatever is set now."""
        with jax.enable_x64(self.x64), jax.threefry_partitionable(self.partitionable):
            yield

    @property
    def num_shards(self) -> int:
        return sum(stage.num_shards for stage in self.stages)

    @functools.cached_property
    def keywords(self) -> frozenset[str]:
        """The names of the keyword arguments."""
        node: Any = self.in_tree.children()[1].node_data()
        return frozenset(node[1])

    @functools.cached_property
    def result_names(self) -> list[str]:
        """The names in messages of the leaves of the results."""
        return result_names(self.out_tree)

    def result(self, leaves: Sequence[Any]) -> PyTree:
        """The result with these leaves; labelled, if arguments were."""
        bare = jax.tree.unflatten(self.out_tree, leaves)
        return bare if self.labels is None else self.labels.result(bare)

    @functools.cached_property
    def output_names(self) -> dict[Value, str]:
        """The names in messages of the values that the function returns."""
        named = zip(self.graph.outputs, self.result_names, strict=True)
        names: dict[Value, str] = {}
        for value, name in named:
            if isinstance(value, Value):
                names.setdefault(value, name)
        return names

    @functools.cached_property
    def kept(self) -> list[list[Value]]:
        """Per stage, the values held while it runs, besides arguments and results."""
        others = {*self.graph.outputs}
        last = {v: place for place, each in enumerate(self.stages) for v in each.reads}
        held: list[list[Value]] = [[] for _ in self.stages]
        for place, stage in enumerate(self.stages):
            for value in (r.value for r in stage.results if r.value not in others):
                for kept in held[place : max(place, last.get(value, 0)) + 1]:
                    kept.append(value)
        return held

    def is_large(self, value: Value) -> bool:
        """Whether a value is kept in ``scratch`` where there is one."""
        if value.producer is None or value in self.graph.outputs:
            return False
        return nbytes(value) > IN_MEMORY

    def leaves(self, arguments: Arguments) -> list[Any]:
        """The arguments, flat, after a check against those of the plan."""
        leaves, tree = jax.tree.flatten(plain(arguments))
        if tree != self.in_tree:
            planned = len(self.in_tree.children()[0].children())
            given = len(arguments[0])
            if planned != given and not self.keywords:
                raise ValueError(
                    f"the plan was made for {planned} "
                    f"argument{'' if planned == 1 else 's'}, got {given}"
                )
            raise ValueError(
                "the plan was made for arguments of the structure "
                f"{shown(self.in_tree)}, got {shown(tree)}"
            )
        for name, leaf, value in zip(
            self.names, leaves, self.graph.inputs, strict=True
        ):
            if tuple(np.shape(leaf)) != value.shape:
                raise ValueError(
                    f"the plan was made for a shape of {value.shape} in {name}"
                    f", got {np.shape(leaf)}"
                )
            if not holds(leaf, value.aval.dtype):
                told = ""
                if self.x64 != config_value("jax_enable_x64"):
                    told = f"; it was made with jax_enable_x64={self.x64}"
                    told += ": set this for the run too"
                raise ValueError(
                    f"the plan was made for {value.aval.dtype} in {name}, got "
                    f"{getattr(leaf, 'dtype', leaf)}{told}"
                )
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{name} is a jax.ShapeDtypeStruct, which has no elements: give "
                    "an array"
                )
            refuse_masked(leaf, name)
        return leaves

    def read(
        self, recipe: Recipe, leaves: Sequence[Any], kept: Mapping[Value, Any]
    ) -> tuple[Any, ...]:
        """The boxes that a recipe reads, and its starts."""
        boxes = [self.read_one(value, box, leaves, kept) for value, box in recipe.reads]
        return (*boxes, np.asarray(recipe.starts, start_dtype(recipe.starts)))

    def read_one(
        self, value: Value, box: Box, leaves: Sequence[Any], kept: Mapping[Value, Any]
    ) -> Any:
        """A box of an argument, a constant, or a value that was kept."""
        name = "a value that was kept"
        # The buffer of an argument that is also a result may not be written yet.
        if value in kept and value.producer is not None:
            array = kept[value]
        elif value in self.graph.constants:
            array = sliceable(self.graph.constants[value])
        elif value.producer is None:
            array, name = leaves[value.number], self.names[value.number]
        else:
            raise ValueError(
                "a shard of a later stage needs the values of the stages before: "
                "give args(..., values=acc) what reduce returned"
            )
        try:
            return read_box(array, box, value.aval)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def compiled(self, stage: Stage, recipe: Recipe) -> jax.stages.Wrapped:
        """The compiled function of all shards that compute the same, of any stage."""
        key = stage.number, recipe.static, start_dtype(recipe.starts)
        if key not in self._compiled:
            jitted = jax.jit(self.function(stage, recipe.static))
            # JAX caches the trace, and uses it when the function is called.
            alike = jaxpr_key(jitted.trace(*arg_avals(recipe)).jaxpr)
            self._compiled[key] = self._different.setdefault(alike, jitted)
        return self._compiled[key]

    def results(self, stage: Stage, recipe: Recipe, args: Sequence[Any]) -> Any:
        """The results of a shard; XLA does not copy what NumPy computes, or nothing."""
        on_host = all(is_on_host(step.node) for step in recipe.static.steps)
        if on_host and all(isinstance(x, np.ndarray) for x in args):
            return self.function(stage, recipe.static)(*args)
        return self.compiled(stage, recipe)(*args)

    def emitted(
        self, stage: Stage, static: StaticRecipe
    ) -> Callable[[Sequence[Any], Any], list[Any]]:
        """The function ``(boxes, starts) -> results``, None for unwanted results."""
        values = [
            None if ref is None else result.value
            for result, ref in zip(stage.results, static.outs, strict=True)
        ]
        return emit(static, self.analysis.rules, values)

    def function(self, stage: Stage, static: StaticRecipe) -> Callable[..., Any]:
        """The function of `compiled` before `jax.jit`, of stored boxes and starts."""
        inner = self.emitted(stage, static)
        impls = [key_impl(value.aval) for value in static.read_values]

        # Keys come in and go out as their bits, which NumPy and other processes know.
        def shard_function(*args: jax.Array) -> tuple[jax.Array, ...]:
            *reads, starts = args
            reads = [
                x if impl is None else jax.random.wrap_key_data(x, impl=impl)
                for x, impl in zip(reads, impls, strict=True)
            ]
            results = inner(reads, starts)
            return tuple(
                jax.random.key_data(array) if is_key(result.value.aval) else array
                for array, result, ref in zip(
                    results, stage.results, static.outs, strict=True
                )
                if ref is not None
            )

        return shard_function
