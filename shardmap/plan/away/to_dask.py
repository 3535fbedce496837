"""A plan as arrays of Dask, which join a graph of Dask's."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import sliceable
from shardmap.plan.away.dask import is_dask
from shardmap.plan.away.processes import Elsewhere
from shardmap.plan.away.tasks import run_task
from shardmap.plan.engine.keys import is_key
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box, Interval, shape_of, slices
from shardmap.plan.run.buffers import start_dtype
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.folding import FoldTasks, fold_all
from shardmap.plan.run.shards import Accumulator, Shard, Shards


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


class _Graph:
    def __init__(self, cut_program: CutProgram, leaves: Sequence[Any]) -> None:
        self.dask: Any = importlib.import_module("dask")
        self.da: Any = importlib.import_module("dask.array")
        self.cut_program = cut_program
        acc = Accumulator(cut_program)
        self.work = Elsewhere(None, cut_program, leaves, acc)
        self.blobs: dict[bytes, Any] = {}
        self.made: dict[Value, Any] = {}
        self.fold = self.dask.delayed(fold_all, pure=False)

    def outputs(self) -> PyTree:
        for stage in self.cut_program.stages:
            parts: dict[Value, dict[Box, Any]] = {}
            nodes: dict[Any, Any] = {}
            folds = FoldTasks(self.cut_program, stage)
            for shard in Shards(self.cut_program, [stage]):
                delayed = self.shard(shard)
                for place, (box, combiner, value) in enumerate(shard.writes()):
                    node = nodes[shard.number, place] = delayed[place]
                    if combiner == "insert":
                        parts.setdefault(value, {})[box] = node
                for each in folds.after(shard.number):
                    needs = [nodes.pop(need.key) for need in each.needs]
                    folded = self.fold(each.combiner, each.start(), needs)
                    if each.is_top:
                        parts.setdefault(each.value, {})[each.box] = folded
                    else:
                        nodes[each.key] = folded
            for result in stage.results:
                made = parts.get(result.value, {})
                self.made[result.value] = self.array(result.value, made)
        found = [
            self.made[v]
            if isinstance(v, Value)
            else self.da.asarray(np.asarray(v.value, v.aval.dtype))
            for v in self.cut_program.graph.outputs
        ]
        return jax.tree.unflatten(self.cut_program.out_tree, found)

    def shard(self, shard: Shard) -> Any:
        blob = self.work.functions.of(shard)
        if blob not in self.blobs:
            self.blobs[blob] = self.dask.delayed(blob)
        args = [self.arg(value, box) for value, box in shard.recipe.reads]
        starts = shard.recipe.starts
        args.append(np.asarray(starts, start_dtype(starts)))
        writes = [None for _ in shard.writes()]
        return self.dask.delayed(run_task, pure=False)(self.blobs[blob], args, writes)

    def arg(self, value: Value, box: Box) -> Any:
        if value in self.made and value.producer is not None:
            return self.made[value][slices(box)]
        if value.producer is None and value in self.cut_program.graph.inputs:
            leaf = self.work.leaves[value.number]
            if is_dask(leaf):
                return leaf[slices(box)].astype(value.aval.dtype)
        return self.work.travels.read(value, box) or self.work.held(value, box)

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
        """The array of which these are the blocks."""
        if axis == ndim:
            (block,) = blocks.values()
            return block
        rows: dict[Interval, dict[Box, Any]] = {}
        for box, block in sorted(blocks.items()):
            rows.setdefault(box[axis], {})[box] = block
        parts = [self.joined(row, ndim, axis + 1) for row in rows.values()]
        return self.da.concatenate(parts, axis) if len(parts) > 1 else parts[0]
