"""Running a plan."""

from typing import Any

from shardmap.plan.plan import ShardPlan
from shardmap.plan.shards import Accumulator


def run(plan: ShardPlan, args: Any, out: Any) -> Any:
    acc = Accumulator(plan)
    leaves = plan.leaves(args)
    for k in range(len(plan.stages)):
        for shard in plan.stage_shards(k):
            acc.put(shard, shard.function(*plan.read(shard.recipe, leaves, acc.kept)))
    return acc.result()
