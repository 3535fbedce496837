"""The stages of a mapped function: those of JAX, with the specs of its arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from shardmap._jax import context
from shardmap._jax.stages import copy_stage
from shardmap._jax.types import PyTree, without_sharding
from shardmap.api.arguments import Static
from shardmap.api.programs import Args, Call, Kwargs, Programs
from shardmap.arrays import placement
from shardmap.map import agreement
from shardmap.sharding.spec import ShardingSpec


class Lowered(jax.stages.Lowered):
    """A lowered map: all of `jax.stages.Lowered`, and the specs of its arrays.

    Attributes:
      in_specs: a `ShardingSpec` per array, in the structure of the positional
        arguments; behind them, if there are any, a dict of the keyword arguments.
        None stands where an argument is static.
      out_specs: the same in the structure of the result.

    Example:
      >>> import numpy as np, shardmap as sm
      >>> lowered = sm.spmap(lambda x: x + 1).lower(np.ones((8, 3)))
      >>> lowered.in_specs[0]
      ShardingSpec((Chunked((8,)), None), (ShardedAxis(0),))
      >>> lowered.compile()(np.ones((8, 3))).shape
      (8, 3)
    """

    __slots__ = ("_across", "_agree", "_name", "in_specs", "out_specs")

    def __init__(
        self,
        name: str,
        lowered: jax.stages.Lowered,
        in_specs: tuple[Any, ...],
        out_specs: PyTree,
        agree: Callable[[], None],
        across: Callable[[Any], Callable[..., Any]],
    ) -> None:
        """Adds to what JAX has lowered.

        Args:
          name: what is lowered.
          lowered: JAX's own.
          in_specs, out_specs: see the class.
          agree: checks, before the first run, that all processes make it.
          across: wraps the compiled function for the arrays that users pass.
        """
        copy_stage(lowered, self)
        # Without shardings, as `jax.jit` has them for NumPy arrays.
        self.args_info = jax.tree.map(
            lambda info: jax.stages.ArgInfo(without_sharding(info._aval), info.donated),
            lowered.args_info,
        )
        self._name = name
        self.in_specs = in_specs
        self.out_specs = out_specs
        self._agree = agree
        self._across = across

    @property
    def in_avals(self) -> PyTree:
        """The avals of the arguments."""
        return jax.tree.map(without_sharding, super().in_avals)

    def compile(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Compiled:
        """Compiles, as `jax.stages.Lowered.compile` does."""
        compiled = super().compile(*args, **kwargs)
        return _Compiled(self._name, compiled, self._agree, self._across)

    def __repr__(self) -> str:
        return (
            f"<Lowered {self._name}: in_specs={self.in_specs}, "
            f"out_specs={self.out_specs}>"
        )


class _Compiled(jax.stages.Compiled):
    """A compiled map, perhaps over several processes, also under `jax.disable_jit`."""

    def __init__(
        self,
        name: str,
        compiled: jax.stages.Compiled,
        agree: Callable[[], None],
        across: Callable[[Any], Callable[..., Any]],
    ) -> None:
        copy_stage(compiled, self)
        self._name = name
        self._run = across(compiled)
        several = jax.process_count() > 1
        self._agree: Callable[[], None] | None = agree if several else None

    @property
    def in_avals(self) -> PyTree:
        """The avals of the arguments."""
        return jax.tree.map(without_sharding, super().in_avals)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> Any:
        if self._agree is not None:
            self._agree()
            self._agree = None
        if context.config_value("jax_disable_jit"):
            with jax.disable_jit(False):
                return self._run(*args, **kwargs)
        return self._run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Compiled {self._name}>"


def lower(programs: Programs[Any], args: Args, kwargs: Kwargs) -> Lowered:
    """Lowers a call of a mapped function.

    Raises:
      ValueError: inside another map, whose program it would be a part of.
    """
    call = programs.infer_params(programs.read(args, kwargs))
    if call.shardings is None:
        raise ValueError(
            f"{programs.what} of {programs.name} cannot be lowered inside another map: "
            "it is part of that map's program. Lower the outermost one."
        )
    with agreement.postponed() as agree:
        lowered = _traced(programs, call).lower()
    in_specs, out_specs = (
        [
            ShardingSpec.from_named_sharding(sharding, aval.ndim)
            for sharding, aval in zip(shardings, avals, strict=True)
        ]
        for shardings, avals in zip(
            call.shardings, (call.global_avals, call.out_avals), strict=True
        )
    )
    args_specs, kwargs_specs = call.arguments.with_leaves(in_specs)
    by_position = [None if type(arg) is Static else arg for arg in args_specs]
    across = programs.across if call.process_local is not None else _any_sharding
    return Lowered(
        f"{programs.what} of {programs.name}",
        lowered,
        (*by_position, *([kwargs_specs] if kwargs_specs else [])),
        jax.tree.unflatten(call.out_tree, out_specs),
        agree,
        functools.partial(across, call),
    )


def trace(programs: Programs[Any], args: Args, kwargs: Kwargs) -> jax.stages.Traced:
    """Traces the program of a call of a mapped function."""
    return _traced(programs, programs.infer_params(programs.read(args, kwargs)))


def _traced(programs: Programs[Any], call: Call) -> jax.stages.Traced:
    """The program without the static arguments, as compiled functions are called."""
    inside_map = call.shardings is None
    leaves = call.arguments.leaves if inside_map else call.structs()
    args, kwargs = call.arguments.without_statics().with_leaves(leaves)
    program = programs.jitted(call, dropped=call.arguments.statics.keys())
    return program.trace(*args, **kwargs)


def _any_sharding(call: Call, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function that takes arrays of any sharding."""
    assert call.shardings is not None
    shardings: Sequence[Sharding] = call.shardings.operands
    arguments = call.arguments.without_statics()

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        try:
            return compiled(*args, **kwargs)
        except (TypeError, ValueError):  # Raised before the program runs.
            leaves, in_tree = jax.tree.flatten((args, kwargs))
            if in_tree != arguments.in_tree:
                raise
        placed = placement.place(leaves, shardings, uncommitted=True)
        args, kwargs = arguments.with_leaves(placed)
        return compiled(*args, **kwargs)

    return run
