"""One shard of a plan, the sequence of shards, and the accumulator of results."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, overload

import jax
import numpy as np
from jax import export
from jax.typing import ArrayLike

from shardmap._jax.types import PyTree
from shardmap.planning.arguments import with_statics
from shardmap.planning.engine.monoids import start, together
from shardmap.planning.engine.nodes import (
    Operand,
    Scalar,
    Value,
    box_bytes,
    data_aval,
    is_key,
    key_impl,
)
from shardmap.planning.engine.slices import slices
from shardmap.planning.engine.stages import Stage
from shardmap.planning.run import buffers
from shardmap.planning.run.blocks import sliceable
from shardmap.planning.run.cut_program import CutProgram, arg_avals
from shardmap.planning.run.failures import ShardError, WorkerError
from shardmap.planning.run.tasks import Target, targets
from shardmap.units import error_text, integer_of


class Shard:
    """One independent part of the work of a plan; see `ShardPlan.shards`.

    (`shard_of` is something else: it returns the part of an array on one device.)

    Attributes:
      number: its position in its stage.
      in_slices: what it reads, in the structure of the arguments: a tuple of slices, a
        list of such tuples if it reads several parts, None if it reads nothing.
      out_slices: what it writes, in the structure of the result; None if another shard
        or stage writes it.
      combiner: how each result is combined, in the same structure: "insert", "add",
        "min", "max", "mul", "and", "or" or "xor".

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> import shardmap as sm
      >>> x = np.arange(5, dtype=np.float32)
      >>> shard_plan = sm.plan(lambda x: x[1:] - x[:-1], x, in_slices=({0: 2},))
      >>> acc = None
      >>> for shard in shard_plan.shards:
      ...     acc = shard.reduce(shard.function(*shard.args(x)), acc)
      >>> acc.result()
      array([1., 1., 1., 1.], dtype=float32)
    """

    def __init__(self, cut_program: CutProgram, stage: Stage, number: int) -> None:
        self._cut_program = cut_program
        self._stage = stage
        self.number = number
        self.boxes, self.recipe = stage.recipe(number)

    @property
    def stage(self) -> int:
        """The number of its stage."""
        return self._stage.number

    @property
    def in_slices(self) -> PyTree:
        inputs = self._cut_program.graph.inputs
        parts: dict[Value, list[Any]] = {value: [] for value in inputs}
        for value, box in self.recipe.reads:
            if value in parts:
                parts[value].append(slices(box))
        cuts = [p if len(p) > 1 else next(iter(p), None) for p in parts.values()]
        args, kwargs = jax.tree.unflatten(self._cut_program.in_tree, cuts)
        return (*args, kwargs) if kwargs else args

    def _of_outputs(self, computed: Mapping[Any, Any]) -> PyTree:
        outputs = list(map(computed.get, self._cut_program.graph.outputs))
        return jax.tree.unflatten(self._cut_program.out_tree, outputs)

    @property
    def out_slices(self) -> PyTree:
        return self._of_outputs({value: slices(box) for box, _, value in self.writes})

    @property
    def combiner(self) -> PyTree:
        return self._of_outputs(
            {result.value: result.combiner for result in self._stage.results}
        )

    @property
    def function(self) -> jax.stages.Wrapped:
        """The compiled function of the results of `args`; equal shards share it."""
        return self._cut_program.compiled(self._stage, self.recipe)

    def results(self, args: Sequence[Any]) -> Any:
        """The results of `function`."""
        return self._cut_program.results(self._stage, self.recipe, args)

    def args(
        self,
        *arrays: PyTree,
        values: "Accumulator | None" = None,
        **kwargs: PyTree,
    ) -> tuple[Any, ...]:
        """Reads the arguments of `function`.

        Args:
          *arrays: the arguments of the plan's function.
          values: the last result of `reduce`; required in a plan of several stages.
          **kwargs: the keyword arguments of the plan's function.
        """
        cut_program = self._cut_program
        arguments = with_statics(arrays, kwargs, cut_program.statics)
        leaves = list(map(sliceable, cut_program.leaves(arguments)))
        kept: Mapping[Value, Any] = {}
        if values is not None:
            self._refuse_stranger("values", values)
            values.refuse_unfinished(self)
            kept = values.kept
        return cut_program.read(self.recipe, leaves, kept)

    def reduce(
        self, result: Sequence[ArrayLike], acc: "Accumulator | None" = None
    ) -> "Accumulator":
        """Puts a result of `function` in its place.

        Args:
          result: the result of `function`.
          acc: the result of `reduce` for earlier shards; None for the first.

        Returns:
          ``acc``, changed in place. After the last shard, ``acc.result()`` is the
          result of the function.
        """
        if acc is None:
            acc = Accumulator(self._cut_program)
        self._refuse_stranger("acc", acc)
        acc.mark(self)
        acc.put(self.writes, result)
        return acc

    def export(self) -> export.Exported:
        """Exports `function`, which takes what `args` returns.

        Example:
          >>> import numpy as np, shardmap as sm
          >>> x = np.ones((8, 2), np.float32)
          >>> shard_plan = sm.plan(lambda x: x.sum(1), x, in_slices={0: 4})
          >>> blob = shard_plan.shards[1].export().serialize()
          >>> jax.export.deserialize(blob).call(*shard_plan.shards[1].args(x))
          (Array([2., 2.], dtype=float32),)
        """
        with self._cut_program.settings():
            return export.export(self.function)(*arg_avals(self.recipe))

    def _refuse_stranger(self, name: str, acc: Any) -> None:
        """Refuses what is no accumulator of this plan."""
        if not isinstance(acc, Accumulator):
            raise TypeError(
                f"{name} must be what reduce returned, None at the first, got "
                f"{type(acc).__name__}: plan.run(out=) writes to arrays"
            )
        if acc.cut_program is not self._cut_program:
            raise ValueError(
                f"{name} is of another plan: give what reduce of this plan's shards "
                "returned, None at the first"
            )

    @property
    def writes(self) -> list[Target]:
        """Where each result goes, and how it is combined there."""
        return list(targets(self._stage, self.boxes))

    @property
    def nbytes(self) -> int:
        """The bytes that it reads and writes."""
        boxes = [*self.recipe.reads, *((value, box) for box, _, value in self.writes)]
        return sum(box_bytes(value, box) for value, box in boxes)

    def error(self, cause: Exception, attempts: int) -> ShardError:
        """The error that says that it failed for good."""
        often = f" {attempts} times" if attempts > 1 else ""
        text = str(cause) if isinstance(cause, WorkerError) else error_text(cause)
        return ShardError(
            f"shard {self.number} of stage {self.stage} failed{often}; it reads "
            f"{self._reads}: {text}"
        )

    @property
    def _reads(self) -> str:
        """The parts of arguments that it reads, such as ``args[0][0:4, 0:8]``."""
        inputs, names = self._cut_program.graph.inputs, self._cut_program.names
        named = dict(zip(inputs, names, strict=True))
        parts = [
            f"{named[value]}[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
            for value, box in self.recipe.reads
            if value in named
        ]
        more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
        return ", ".join(parts[:4]) + more or "no argument"

    def __repr__(self) -> str:
        return f"<shard {self.number} of stage {self.stage}: reads {self._reads}>"


def index_of(what: str, index: SupportsIndex, count: int) -> int:
    """An index counted from the beginning."""
    number = integer_of(f"the index of {what}", index)
    if not -count <= number < count:
        raise IndexError(
            f"the index {number} is out of range of {what}: there are {count}"
        )
    return number % count


class Shards(Sequence[Shard]):
    """The shards of some stages, made when they are asked for."""

    def __init__(self, cut_program: CutProgram, stages: Sequence[Stage]) -> None:
        self._cut_program, self._stages = cut_program, stages

    def __len__(self) -> int:
        return sum(stage.num_shards for stage in self._stages)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Shard | list[Shard]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        number = index_of("shards", index, len(self))
        for stage in self._stages:
            if number < stage.num_shards:
                return Shard(self._cut_program, stage, number)
            number -= stage.num_shards
        raise AssertionError(index)

    def __repr__(self) -> str:
        return f"<{len(self)} shards>"


class Accumulator:
    """The results of a plan so far, and the values that later stages need.

    Args:
      cut_program: the plan's program.
      out: array-likes to put the outputs in, by value.
    """

    def __init__(
        self, cut_program: CutProgram, out: dict[Value, Any] | None = None
    ) -> None:
        self.cut_program = cut_program
        self.given = out or {}
        self._combiners = {
            result.value: result.combiner
            for stage in cut_program.stages
            for result in stage.results
        }
        self.kept: dict[Value, Any] = {}
        self._done: dict[int, set[int]] = {}
        self._folds: dict[tuple[Target, ...], buffers.Fold] = {}

    def buffer(self, value: Value) -> Any:
        """The buffer of a value, made when it is first used."""
        if value not in self.kept:
            combiner = self._combiners[value]
            buffer = self.given.get(value)
            if buffer is None:
                buffer = buffers.new_buffer(value, combiner)
            elif combiner != "insert":
                buffer[...] = start(combiner, data_aval(value.aval).dtype)
            self.kept[value] = buffer
        return self.kept[value]

    def put(self, writes: Iterable[Target], result: Sequence[Any]) -> None:
        """Puts the results of a task into their buffers; None is there already."""
        writes = list(writes)
        for places in together((combiner, value) for _, combiner, value in writes):
            targets_of = tuple(writes[k] for k in places)
            parts = [result[k] for k in places]
            (_, combiner, value), *_ = targets_of
            for *_, each in targets_of:
                self.buffer(each)
            if parts[0] is None:
                continue
            if combiner == "insert":
                self._put(targets_of, parts)
                continue
            if targets_of not in self._folds:
                count = self.cut_program.parts[value]
                self._folds[targets_of] = buffers.Fold(combiner, count)
            fold = self._folds[targets_of]
            results = fold.add(list(map(np.asarray, parts)))
            if results is not None:
                self._put(targets_of, results)
            if not fold.left:
                del self._folds[targets_of]

    def _put(self, targets_of: Sequence[Target], parts: Sequence[Any]) -> None:
        """Combines parts of one array, or of a tuple, with what is in their buffers."""
        boxes = [box for box, *_ in targets_of]
        arrays = [self.buffer(value) for *_, value in targets_of]
        buffers.put(arrays, boxes, targets_of[0][1], parts)

    def mark(self, shard: Shard) -> None:
        """Notes that a shard has been reduced, which it is once."""
        done = self._done.setdefault(shard.stage, set())
        if shard.number in done:
            raise ValueError(
                f"shard {shard.number} of stage {shard.stage} has been reduced into "
                "acc already: reduce each shard once, or begin anew with None"
            )
        done.add(shard.number)

    def refuse_unfinished(self, shard: Shard) -> None:
        """Refuses a shard that needs values of shards that have not been reduced."""
        needed = {value for value, _ in shard.recipe.reads}
        for stage in self.cut_program.stages:
            if stage.number >= shard.stage:
                return
            done = len(self._done.get(stage.number, ()))
            makes = any(result.value in needed for result in stage.results)
            if makes and done < stage.num_shards:
                raise ValueError(
                    f"shard {shard.number} of stage {shard.stage} needs what stage "
                    f"{stage.number} makes, but only {done:,} of its "
                    f"{stage.num_shards:,} shards have been reduced into values: "
                    "reduce all of them first"
                )

    def free(self, place: int) -> list[Value]:
        """Frees the values that no stage from this one on needs, and returns them."""
        needed: set[Operand] = {*self.cut_program.graph.outputs}
        needed.update(*(stage.reads for stage in self.cut_program.stages[place:]))
        gone = [value for value in self.kept if value not in needed]
        for value in gone:
            del self.kept[value]
            self.given.pop(value, None)
        return gone

    def flush(self) -> None:
        """Writes mapped arrays to their files, for other processes."""
        for array in self.kept.values():
            if isinstance(array, np.memmap):
                array.flush()

    def result(self) -> PyTree:
        """The function's result."""
        return self.cut_program.result(self.outputs())

    def outputs(self) -> list[Any]:
        """As `result`, flat."""
        # Folds are unfinished if not all shards are done.
        for targets_of, fold in self._folds.items():
            if (parts := fold.rest()) is not None:
                self._put(targets_of, parts)
        outputs: list[Any] = []
        for operand in self.cut_program.graph.outputs:
            if isinstance(operand, Scalar):
                outputs.append(np.asarray(operand.value, operand.aval.dtype))
            elif is_key(operand.aval):
                impl, data = key_impl(operand.aval), self.buffer(operand)
                outputs.append(jax.random.wrap_key_data(data, impl=impl))
            else:
                outputs.append(self.buffer(operand))
        return outputs
