"""The class of the functions that `spmap`, `mesh_map` and `sharded_jit` return."""

import functools
import types
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    overload,
)

import jax
from jax.sharding import AbstractMesh, Mesh

from shardmap._jax import api_boundary, context
from shardmap._jax.context import TOP_TRACES, current_trace
from shardmap._jax.stages import FoundNaN
from shardmap._jax.types import AnyMesh, PyTree
from shardmap.api import caches, pickling, programs, stages
from shardmap.api.arguments import wrap_statics
from shardmap.api.options import key_of
from shardmap.api.programs import CompiledCall
from shardmap.api.transformed import Args, Kwargs, Transformed
from shardmap.map import set_mesh

if TYPE_CHECKING:
    from shardmap.explaining.explanation import Explanation

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")


class Mapped(Generic[P, R]):
    """A function mapped over devices; call it like the function.

    It works under `jax.jit`, `jax.grad` and `jax.vmap`, inside other mapped functions,
    as a method, and pickled. It has the name and docs of the function, and the function
    itself as ``__wrapped__``.
    """

    _kind: ClassVar[type[Any]]
    """A class of `Transformed`."""

    def __init__(self, fun: Callable[P, R], options: Any) -> None:
        # `jax.pmap` makes methods such as `lower` attributes of the function.
        attributes = getattr(fun, "__dict__", {}).items()
        vars(self).update({k: v for k, v in attributes if not hasattr(type(self), k)})
        # Last, as the function may have a ``__wrapped__`` of its own.
        functools.update_wrapper(self, fun, updated=())
        kind = self._kind
        self._transformed: Transformed = caches.weak_cache(
            fun, (kind, key_of(options, kind.is_leaf)), lambda: kind(fun, options)
        )
        # Perhaps an equal one, which is kept alive here. One that is made of another
        # keeps that alive, and making it again would make all that are below it.
        self._fun = fun if isinstance(fun, Mapped) else self._transformed.fun()
        self._static = options.static_argnums
        self._donates = bool(options.donate_argnums)
        # The last program for each number of arguments is tried first. It raises an
        # error for arguments that it does not take.
        self._recent: dict[int, CompiledCall] = {}

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given: Args = wrap_statics(args, self._static) if self._static else args
        if current_trace() not in TOP_TRACES:
            return self._transformed.bind(given, kwargs)
        if not kwargs:
            program = self._recent.get(len(given))
            if program is not None and (
                not self._donates or programs.may_donate(given)
            ):
                try:
                    return program.run(*given)
                except (TypeError, ValueError):
                    pass  # Other arguments, or another configuration of JAX.
                except FoundNaN:
                    return programs.find_nan(self._transformed, given, {})
        return self._run(given, kwargs)

    @api_boundary
    def _run(self, args: Args, kwargs: Kwargs) -> Any:
        if set_mesh.has_mesh():
            if self._transformed.is_on_set_mesh():
                return programs.run_on_set_mesh(self._transformed, args, kwargs)
            with context.without_mesh():
                return self._run(args, kwargs)
        if context.config_value("jax_disable_jit"):
            return self._transformed.bind(args, kwargs)
        results, program = programs.run_call(self._transformed, args, kwargs)
        if program is not None and not kwargs:
            self._recent[len(args)] = program
        return results

    @api_boundary
    def lower(self, *args: PyTree, **kwargs: PyTree) -> stages.Lowered:
        """Lowers the function for these arguments, running nothing.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`, as for a call.
          **kwargs: the same, by keyword.

        Returns:
          A `jax.stages.Lowered` with ``in_specs`` and ``out_specs``.
        """
        given = wrap_statics(args, self._static)
        return stages.lower(self._transformed, given, kwargs)

    @api_boundary
    def trace(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Traced:
        """Traces the function for these arguments, as `jax.jit(fun).trace` does."""
        given = self._transformed.read(wrap_statics(args, self._static), kwargs)
        return stages.trace(self._transformed, self._transformed.trace_call(given))

    def explain(self, *args: PyTree, **kwargs: PyTree) -> "Explanation":
        """What runs in parallel for these arguments, and at what cost.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`, as for a call.
          **kwargs: the same, by keyword.

        Returns:
          An `Explanation`; see `shardmap.explain`.
        """
        from shardmap.explaining.api import explain

        explanation: Explanation = explain(self)(*args, **kwargs)
        return explanation

    @property
    def mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh to run on, if one was given; perhaps an abstract one."""
        mesh: AnyMesh | None = getattr(self._transformed.options, "mesh", None)
        return mesh

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(
        self: "Mapped[Concatenate[Any, Q], S]",
        instance: object,
        owner: type | None = None,
    ) -> Callable[Q, S]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Makes a mapped function in a class a method."""
        return self if instance is None else types.MethodType(self, instance)

    def derivation(self) -> Any:
        """The other function, how it is made of it, and what makes it again.

        The last two do not hold the other function.
        """
        transformed, cls = self._transformed, type(self)
        fun, options = transformed.fun, transformed.options
        return self._fun, transformed, lambda: cls(fun(), options)

    def __reduce__(self) -> Any:
        return pickling.reduced(self, self._fun, self._transformed.options)

    def __repr__(self) -> str:
        return f"<{self._transformed.full_name}>"
