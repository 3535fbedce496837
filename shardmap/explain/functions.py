"""What is asked of a function that is explained, known by what it can do.

The mapped functions of this package, what `jax.jit` and `jax.pmap` give, and any other
function of arrays stand above this room; nothing here names one of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Sharding

from shardmap._jax.types import PyTree


@runtime_checkable
class Lowerable(Protocol):
    """A function that is a program of its own, such as what `jax.pmap` gives."""

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...


@runtime_checkable
class Traceable(Lowerable, Protocol):
    """A mapped function, or what `jax.jit` gives."""

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced: ...


@runtime_checkable
class HasStatics(Protocol):
    """A function that knows which of its arguments are compile-time constants."""

    @property
    def static_argnums(self) -> int | Sequence[int] | None: ...


@runtime_checkable
class HasShardings(Protocol):
    """A mapped function whose arrays are sharded as it says, whatever it computes."""

    def shardings(
        self, args: PyTree, out: PyTree, /
    ) -> tuple[Sequence[Sharding], Sequence[Sharding]]: ...


@runtime_checkable
class Plan(Protocol):
    """What is cut into shards, and says what became of each cut."""

    @property
    def num_shards(self) -> int: ...

    def explain(self) -> Any: ...


@runtime_checkable
class InPieces(Protocol):
    """A function that works in pieces, and says for a call what became of each cut."""

    def explain(self, *args: Any, **kwargs: Any) -> Any: ...

    def stage_costs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...


def pieces(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Of a function that works in pieces, what became of each cut, and the stages."""
    if not isinstance(fun, InPieces) or isinstance(fun, Lowerable):
        return (), ()
    found = fun.explain(*args, **kwargs)
    return found.pieces, found.stages


def traced(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> jax.stages.Traced:
    """The function as it is traced when it is called, by itself or by `jax.jit`."""
    if isinstance(fun, Traceable):
        return _stage(fun.trace(*args, **kwargs), "traced", jax.stages.Traced)
    return jax.jit(fun).trace(*args, **kwargs)


def lowered(
    fun: Callable[..., Any],
    traced: jax.stages.Traced,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> jax.stages.Lowered:
    """The function as it is lowered when it is called; ``traced`` is its trace."""
    if isinstance(fun, Lowerable):
        return _stage(fun.lower(*args, **kwargs), "lowered", jax.stages.Lowered)
    return traced.lower()


def _stage(made: Any, name: str, kind: type) -> Any:
    """JAX's own stage; that of a library's, such as what `flax.nnx.jit` gives, has it.

    Args:
      made: what the function gave.
      name: the attribute in which a library's has JAX's.
      kind: what JAX's is.
    """
    inner = getattr(made, name, None)
    return inner if isinstance(inner, kind) else made


def array_argnums(fun: Callable[..., Any], count: int) -> list[int]:
    """Which of ``count`` positional arguments are not static, as far as it is known."""
    given = fun.static_argnums if isinstance(fun, HasStatics) else ()
    static = (given,) if isinstance(given, int) else given or ()
    return [argnum for argnum in range(count) if argnum not in static]
