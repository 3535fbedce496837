"""A plan as arrays of Dask, which become part of a graph of Dask."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import sliceable
from shardmap.plan.engine.keys import is_key
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box, Interval, shape_of, slices
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.dask import DaskTasks
from shardmap.plan.run.shards import Accumulator, Shard
from shardmap.plan.run.tasks import all_tasks


def to_dask(cut_program: CutProgram, args: tuple[PyTree, ...]) -> PyTree:
    """See `ShardPlan.to_dask`."""
    try:
        importlib.import_module("dask.array")
    except ImportError as error:
        raise ImportError("to_dask needs dask: pip install 'dask[array]'") from error
    if any(is_key(v.aval) for v in cut_program.graph.outputs):
        raise ValueError(
            "Dask has no random keys, which this function returns: return "
            "jax.random.key_data of them"
        )
    leaves = list(map(sliceable, cut_program.leaves(args)))
    return _Graph(cut_program, leaves).outputs()


class _Graph(DaskTasks):
    """Shards and folds as calls of `dask.delayed`."""

    def __init__(self, cut_program: CutProgram, leaves: Sequence[Any]) -> None:
        super().__init__(None, cut_program, leaves, Accumulator(cut_program))
        self.dask: Any = importlib.import_module("dask")
        self.da: Any = importlib.import_module("dask.array")
        self.functions: dict[bytes, Any] = {}
        self.made: dict[Value, Any] = {}

    def outputs(self) -> PyTree:
        for stage in self.cut_program.stages:
            parts: dict[Value, dict[Box, Any]] = {r.value: {} for r in stage.results}
            for task in all_tasks(self.cut_program, stage):
                made = self.submit(task)
                for place, (box, combiner, value) in enumerate(task.writes):
                    if combiner == "insert":
                        parts[value][box] = made[place]
            self.made.update((v, self.array(v, boxes)) for v, boxes in parts.items())
        found = [
            self.made[v]
            if isinstance(v, Value)
            else self.da.asarray(np.asarray(v.value, v.aval.dtype))
            for v in self.cut_program.graph.outputs
        ]
        return jax.tree.unflatten(self.cut_program.out_tree, found)

    def call(self, function: Any, *args: Any) -> Any:
        return self.dask.delayed(function, pure=False)(*args)

    def function(self, shard: Shard) -> Any:
        blob = super().function(shard)
        if blob not in self.functions:
            self.functions[blob] = self.dask.delayed(blob)
        return self.functions[blob]

    def arg(self, value: Value, box: Box) -> Any:
        if value.producer is not None:
            return self.made[value][slices(box)]
        part = self.of_dask(value, box)
        return super().arg(value, box) if part is None else part

    def array(self, value: Value, parts: Mapping[Box, Any]) -> Any:
        """An array of the boxes that shards make of a value."""
        dtype = value.aval.dtype
        if not parts:
            return self.da.zeros(value.shape, dtype)
        blocks = {
            box: self.da.from_delayed(one, shape_of(box), dtype)
            for box, one in parts.items()
        }
        return self.joined(blocks, len(value.shape))

    def joined(self, blocks: Mapping[Box, Any], ndim: int, axis: int = 0) -> Any:
        """The array with these blocks."""
        if axis == ndim:
            (block,) = blocks.values()
            return block
        rows: dict[Interval, dict[Box, Any]] = {}
        for box, block in sorted(blocks.items()):
            rows.setdefault(box[axis], {})[box] = block
        parts = [self.joined(row, ndim, axis + 1) for row in rows.values()]
        return self.da.concatenate(parts, axis) if len(parts) > 1 else parts[0]
