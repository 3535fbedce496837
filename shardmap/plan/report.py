"""What a plan tells about itself, as text."""

from typing import Any


def summary(plan: Any) -> str:
    return f"ShardPlan of {plan.num_shards} shards"


def explain(plan: Any) -> str:
    return ""
