"""One shard of a plan, the sequence of all, and what results are put together in."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardmap.plan.engine import combiners
from shardmap.plan.engine.keys import data_aval, is_key, key_impl
from shardmap.plan.engine.nodes import Scalar, Value
from shardmap.plan.engine.slices import Box, slices
from shardmap.plan.engine.stages import Stage
from shardmap.plan.run import buffers

if TYPE_CHECKING:
    from shardmap.plan.plan import ShardPlan


class Shard:
    """One independent piece of the work. Made by `ShardPlan.shards`.

    Attributes:
      number: its place in its stage.
      in_slices: what it reads, in the structure of the arguments: a tuple of slices, a
        list of such tuples where it reads several parts, None where it reads nothing.
      out_slices: what it writes, in the structure of the result; None where another
        shard does, or another stage.
      combiner: how each result is combined, in the same structure: "insert", "add",
        "min", "max", "mul", "and", "or" or "xor".

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> from shardmap.plan.plan import plan
      >>> x = np.arange(5.0)
      >>> made = plan(lambda x: x[1:] - x[:-1], x, in_slices=({0: 2},))
      >>> out = np.zeros(4, np.float32)
      >>> for shard in made.shards:
      ...     out = shard.reduce(shard.function(*shard.args(x)), out)
      >>> out
      array([1., 1., 1., 1.], dtype=float32)
    """

    def __init__(self, plan: "ShardPlan", stage: Stage, number: int) -> None:
        self._plan = plan
        self._stage = stage
        self.number = number
        self.boxes, self.recipe = stage.recipe(number)

    @property
    def stage(self) -> int:
        """The number of its stage."""
        return self._stage.number

    @property
    def in_slices(self) -> Any:
        found: list[Any] = [None] * len(self._plan.program.inputs)
        places = {v: k for k, v in enumerate(self._plan.program.inputs)}
        for value, box in self.recipe.reads:
            if value in places:
                k = places[value]
                if found[k] is None:
                    found[k] = slices(box)
                else:
                    earlier = found[k] if isinstance(found[k], list) else [found[k]]
                    found[k] = [*earlier, slices(box)]
        return jax.tree.unflatten(self._plan.in_tree, found)

    def _of_outputs(self, made: dict[Value, Any]) -> Any:
        outputs = [
            made.get(v) if isinstance(v, Value) else None
            for v in self._plan.program.outputs
        ]
        return jax.tree.unflatten(self._plan.out_tree, outputs)

    @property
    def out_slices(self) -> Any:
        return self._of_outputs(
            {
                result.value: slices(box)
                for result, box in zip(self._stage.results, self.boxes, strict=True)
                if box is not None
            }
        )

    @property
    def combiner(self) -> Any:
        return self._of_outputs(
            {result.value: result.combiner for result in self._stage.results}
        )

    @property
    def function(self) -> Callable[..., tuple[Any, ...]]:
        """The compiled function of what `args` gives; shards alike share it."""
        return self._plan.compiled(self._stage, self.recipe.static)

    def args(self, *arrays: Any, values: Any = None) -> tuple[Any, ...]:
        """Reads what `function` takes.

        Args:
          *arrays: the arguments of the plan's function.
          values: what `reduce` returned so far; needed in a plan of several stages.
        """
        leaves = self._plan.leaves(arrays)
        kept = values.kept if isinstance(values, Accumulator) else {}
        return self._plan.read(self.recipe, leaves, kept)

    def reduce(self, result: Sequence[Any], acc: Any = None) -> Any:
        """Puts a result of `function` where it belongs.

        Args:
          result: what `function` returned.
          acc: what earlier shards' results are put together in, None at the first. For
            a plan of one stage this may be arrays in the structure of the result.

        Returns:
          ``acc``, changed in place. The last shard's is the function's result; of a
          plan of several stages it is ``acc.result()``.
        """
        if acc is None:
            acc = Accumulator(self._plan)
            if len(self._plan.stages) == 1:
                acc = acc.result(raw=True)
        if isinstance(acc, Accumulator):
            acc.put(self, result)
            return acc
        out = jax.tree.leaves(acc) if not hasattr(acc, "__setitem__") else [acc]
        if isinstance(acc, dict | list):
            out = jax.tree.leaves(acc)
        places = {}
        for value, buffer in zip(self._plan.program.outputs, out, strict=True):
            places[value] = buffer
        for (box, combiner, value), part in zip(self.writes(), result, strict=True):
            if value in places:
                buffers.put(places[value], box, combiner, part)
        return acc

    def writes(self) -> Iterator[tuple[Box, str, Value]]:
        """Where each part of a result goes, and how."""
        for result, box in zip(self._stage.results, self.boxes, strict=True):
            if box is not None:
                yield box, result.combiner, result.value

    def __repr__(self) -> str:
        return (
            f"Shard(stage={self._stage.number}, number={self.number}, "
            f"in_slices={self.in_slices}, out_slices={self.out_slices})"
        )


class Shards(Sequence[Shard]):
    """The shards of some stages, made when they are asked for."""

    def __init__(self, plan: "ShardPlan", stages: Sequence[Stage]) -> None:
        self._plan, self._stages = plan, stages

    def __len__(self) -> int:
        return sum(stage.num_shards for stage in self._stages)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        for stage in self._stages:
            if number < stage.num_shards:
                return Shard(self._plan, stage, number)
            number -= stage.num_shards
        raise AssertionError(index)

    def __repr__(self) -> str:
        return f"<{len(self)} shards>"


class Accumulator:
    """The results of a plan in the making, and what its later stages need.

    Args:
      plan: the plan.
      out: array-likes to put the outputs in, by value.
    """

    def __init__(self, plan: "ShardPlan", out: dict[Value, Any] | None = None) -> None:
        self._plan = plan
        self.kept: dict[Value, Any] = {}
        for stage in plan.stages:
            for result in stage.results:
                given = (out or {}).get(result.value)
                buffer = given
                if given is None:
                    buffer = buffers.new_buffer(result.value, result.combiner)
                elif result.combiner != "insert":
                    dtype = data_aval(result.value.aval).dtype
                    given[...] = combiners.identity(result.combiner, dtype)
                self.kept[result.value] = buffer

    def put(self, shard: Shard, result: Sequence[Any]) -> None:
        for (box, combiner, value), part in zip(shard.writes(), result, strict=True):
            buffers.put(self.kept[value], box, combiner, part)

    def result(self, raw: bool = False) -> Any:
        """The function's result; random keys as their bits if ``raw``."""
        return jax.tree.unflatten(self._plan.out_tree, self.outputs(raw))

    def outputs(self, raw: bool = False) -> list[Any]:
        """As `result`, flat."""
        outputs = []
        for operand in self._plan.program.outputs:
            if isinstance(operand, Scalar):
                outputs.append(np.asarray(operand.value, operand.aval.dtype))
            elif is_key(operand.aval) and not raw:
                impl, data = key_impl(operand.aval), self.kept[operand]
                outputs.append(jax.random.wrap_key_data(data, impl=impl))
            else:
                outputs.append(self.kept[operand])
        return outputs
