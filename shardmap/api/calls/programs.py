"""From a call to a program, for every kind of map.

`Programs.infer_params` checks the arguments and traces the function. Then the call is
bound, if JAX is tracing, or compiled ahead of time and run.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
from jax.sharding import Sharding

from shardmap._jax.context import config_value, configuration, without_mesh
from shardmap._jax.stages import FoundNaN, Mismatch, trace_as
from shardmap._jax.types import Aval, PyTree, TreeDef, Value
from shardmap._lazy import logging
from shardmap.api.calls import caches, refusals
from shardmap.api.calls.call import (
    Arguments,
    Call,
    with_statics,
    without_statics,
)
from shardmap.api.calls.multiprocess import AcrossProcesses
from shardmap.api.calls.options import Options
from shardmap.api.calls.statics import apply_statics
from shardmap.arrays import array_likes, placement, trees
from shardmap.arrays.programs import running
from shardmap.map import contexts, tracing

C = TypeVar("C", bound=Call)
OptionsT = TypeVar("OptionsT", bound=Options)

Args = Sequence[PyTree]
Kwargs = dict[str, PyTree]


class CompiledEntry(NamedTuple):
    """A compiled program, and the arguments that it takes.

    Attributes:
      call: runs it on positional and keyword arguments as the user passes them, static
        ones included; raises TypeError or ValueError, before it runs, for others.
      shardings: of the leaves; None if it lays them out itself.
      donated: which leaves are donated.
      is_exact: whether it raises an error for all other arguments.
    """

    call: Callable[..., Any]
    shardings: Sequence[Sharding] | None
    donated: Sequence[bool]
    is_exact: bool


class FlatFunction:
    """A user's function, from leaves to leaves, to be traced.

    JAX finds a trace again by this object, so there is one for each function, options,
    argument structure and static arguments.
    """

    def __init__(
        self, name: str, fun: caches.WeakFunction, arguments: Arguments
    ) -> None:
        self.__name__ = name
        self._fun = fun
        self._arguments = arguments._replace(leaves=())

    def __call__(self, *leaves: Value) -> tracing.Flattened:
        args, kwargs = self._arguments.with_leaves(leaves)
        result = apply_statics(self._fun(), args, kwargs)
        return tracing.Flattened(*jax.tree.flatten(result))


class Programs(abc.ABC, Generic[C, OptionsT]):
    """The programs of one function under one set of options.

    It has a weak reference to the function, in whose cache it is.
    """

    what: ClassVar[str]
    """The public name of the transformation, for errors."""
    static_parameter: ClassVar[str] = "static_argnums"
    """The parameter that names static arguments."""

    def __init__(self, fun: Callable[..., Any], options: OptionsT) -> None:
        self.fun = caches.WeakFunction(fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.options = options
        self.donate_argnames = trees.keyword_names(fun, options.donate_argnums)
        self._entries: caches.LRUCache[CompiledEntry] = caches.LRUCache()
        self._flat: caches.LRUCache[FlatFunction] = caches.LRUCache()

    # Defined by each kind of map

    @abc.abstractmethod
    def infer_params(self, arguments: Arguments, alone: bool = True) -> C:
        """Checks the arguments of a call and traces the function.

        Args:
          arguments: those of the call.
          alone: whether the map is a program of its own, and no part of another.
        """

    @abc.abstractmethod
    def bind_call(self, call: C, leaves: Sequence[Value]) -> PyTree:
        """Adds a call with these leaves to what is being traced."""

    @abc.abstractmethod
    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        """Adds a call to what is being traced."""

    @abc.abstractmethod
    def has_other_devices(self) -> bool:
        """Whether its devices differ from those of `jax.set_mesh`."""

    @abc.abstractmethod
    def agree(self, call: C) -> None:
        """Checks that all processes make this call, before it is lowered."""

    def bind_part(self, args: Args, kwargs: Kwargs) -> PyTree:
        """`bind`, under `jax.set_mesh`."""
        return self.bind(args, kwargs)

    # Calls

    def run(self, args: Args, kwargs: Kwargs) -> tuple[PyTree, CompiledEntry | None]:
        """Runs a call on arguments with any shardings.

        Returns:
          The results; and the program, if the next call may try it first.
        """
        arguments = self._arguments(args, kwargs)
        leaves = arguments.leaves
        key = arguments.kind(), configuration()
        entry = self._entries.get(key)
        if entry is None:
            entry = self._compiled(self.infer_params(arguments))
            entry = self._entries.setdefault(key, entry)
        if any(entry.donated):
            self.check_donated(entry, arguments)
        placed = placement.place(leaves, entry.shardings, donate=entry.donated)
        moved = any(a is not b for a, b in zip(leaves, placed, strict=True))
        if moved:
            args, kwargs = arguments.with_leaves(placed)
        try:
            results = entry.call(*args, **kwargs)
        except FoundNaN as error:
            if entry.shardings is None:  # Of process-local data.
                raise FloatingPointError(f"{self._named()}: {error}") from None
            # As `jax.jit`: bound eagerly, it runs operation by operation.
            return self.bind(args, kwargs), None
        return results, entry if entry.is_exact and not moved else None

    def check_donated(self, entry: CompiledEntry, arguments: Arguments) -> bool:
        """Refuses deleted arrays, and a donated one that is passed twice.

        Returns:
          Whether the program may be tried: there are as many leaves, and all donated
          arrays are committed. Others are moved by the program, which does not free
          them.
        """
        leaves = arguments.leaves
        if len(leaves) != len(entry.donated):
            return False
        refusals.check_there(
            self._named(),
            leaves,
            entry.donated,
            lambda: self.leaf_names(arguments),
        )
        return all(
            leaf.committed
            for leaf, donated in zip(leaves, entry.donated, strict=True)
            if donated and isinstance(leaf, jax.Array)
        )

    def under_mesh(
        self,
        alone: Callable[[Args, Kwargs], PyTree],
        args: Args,
        kwargs: Kwargs,
    ) -> PyTree:
        """Runs the map under `jax.set_mesh`, or ``alone`` if it has other devices."""
        if self.has_other_devices():
            with without_mesh():
                return alone(args, kwargs)
        return self.program_under_mesh(args, kwargs)

    @functools.cached_property
    def program_under_mesh(self) -> contexts.UnderMesh:
        """The function as a program under `jax.set_mesh`."""
        return contexts.UnderMesh(
            self.name,
            self.bind,
            self.options.static_argnums,
            donate_argnums=self.options.donate_argnums,
            donate_argnames=self.donate_argnames,
        )

    def flat_function(self, arguments: Arguments) -> FlatFunction:
        """The function of the leaves, for such arguments."""
        key = arguments.in_tree, arguments.statics
        flat = self._flat.get(key)
        if flat is None:
            flat = FlatFunction(self.name, self.fun, arguments)
            args, kwargs = arguments.with_leaves(arguments.leaves)
            static = arguments.static_argnums
            trace_as(flat, self.what, self.fun(), args, kwargs, static)
            flat = self._flat.setdefault(key, flat)
        return flat

    def leaf_names(self, arguments: Arguments) -> list[str]:
        """How a caller would write each leaf."""
        args, kwargs = arguments.with_leaves(arguments.leaves)
        dynamic = without_statics(args)
        return trees.leaf_names(self.fun(), arguments.argnums, dynamic, kwargs)

    def leaf_avals(self, arguments: Arguments) -> list[Aval]:
        """The avals of the leaves.

        Raises:
          TypeError: one is nothing that JAX can compute with.
        """
        avals = []
        for k, leaf in enumerate(arguments.leaves):
            try:
                aval = array_likes.leaf_aval(leaf)
            except TypeError:
                aval = None
            if not isinstance(aval, jax.core.ShapedArray):
                name = self.leaf_names(arguments)[k]
                raise refusals.no_array(
                    self.what, name, leaf, aval, self.static_parameter
                )
            avals.append(aval)
        return avals

    def infer_params_alone(self, args: Args, kwargs: Kwargs) -> C:
        """`infer_params`, for a call that is lowered or traced."""
        return self.infer_params(self._arguments(args, kwargs))

    def across(self, call: C, program: Callable[..., Any]) -> AcrossProcesses:
        """A program of global arrays that takes the arrays of this call."""
        return AcrossProcesses(program, call, self._donated(call.arguments))

    def _arguments(self, args: Args, kwargs: Kwargs) -> Arguments:
        arguments = Arguments.of(args, kwargs)
        refusals.check_hashable(self._named(), self.static_parameter, arguments.statics)
        return arguments

    def _named(self) -> str:
        return f"{self.what} of {self.name}"

    def _donated(self, arguments: Arguments) -> list[bool]:
        return arguments.donated(self.options.donate_argnums, self.donate_argnames)

    # Programs

    def _compiled(self, call: C) -> CompiledEntry:
        """Compiles a call."""
        if call.process_local is not None:
            self.agree(call)
        arguments, structs = call.arguments, call.structs()
        compiled = functools.partial(running.compiled, devices=call.devices)
        if trees.takes_anything(arguments.in_tree, call.out_tree):
            args, kwargs = arguments.with_leaves(structs)
            program = compiled(self.jitted(call), without_statics(args), kwargs)
        else:
            program = compiled(self._jitted_by_leaves(call), structs, {})
            program = _by_leaves(program, arguments.in_tree, call.out_tree)
        shardings = call.shardings and call.shardings.operands
        if call.has_process_local:
            program, shardings = self.across(call, program), None
        return CompiledEntry(
            with_statics(arguments.statics, program),
            shardings,
            self._donated(arguments),
            # A program of global arrays also takes process-local data of their shape.
            call.process_local is None or call.has_process_local,
        )

    def jitted(self, call: C) -> jax.stages.Wrapped:
        """A call as `jax.jit`, to be traced for the call's `structs`.

        It takes the arguments that are not static.
        """
        arguments, of_global_arrays = call.arguments, self._of_global_arrays(call)

        def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
            leaves = jax.tree.leaves((args, kwargs))
            return self.bind_call(of_global_arrays, leaves)

        caches.described_like(run, self.fun(), self.name, arguments.static_argnums)
        return jax.jit(
            run,
            donate_argnums=[
                k
                for k, argnum in enumerate(arguments.argnums)
                if argnum in self.options.donate_argnums
            ],
            donate_argnames=self.donate_argnames,
            **self._jit_options(call, call.out_tree),
        )

    def _jitted_by_leaves(self, call: C) -> jax.stages.Wrapped:
        """The same for flat leaves and results."""

        of_global_arrays = self._of_global_arrays(call)

        def run(*leaves: Value) -> list[Value]:
            return jax.tree.leaves(self.bind_call(of_global_arrays, leaves))

        run.__name__ = run.__qualname__ = self.name
        donated = self._donated(call.arguments)
        results = jax.tree.structure([0] * call.out_tree.num_leaves)
        return jax.jit(
            run,
            donate_argnums=[k for k, donate in enumerate(donated) if donate],
            **self._jit_options(call, results),
        )

    def _of_global_arrays(self, call: C) -> C:
        """The call with global arrays in place of process-local data."""
        if not call.has_process_local:
            return call
        arguments = call.arguments._replace(leaves=call.structs(), all_global=True)
        return self.infer_params(arguments)

    def _jit_options(self, call: C, out_tree: TreeDef) -> dict[str, Any]:
        if call.shardings is None:
            return {}
        if not call.devices:
            raise ValueError(
                f"{self._named()} cannot run on an AbstractMesh, which has no devices. "
                "Give it a jax.sharding.Mesh, such as shardmap.make_mesh makes."
            )
        level = logging.WARNING if config_value("jax_log_compiles") else logging.DEBUG
        logging.log(level, "shardmap: compiling %s: %s", self.name, call.described)
        return {
            "out_shardings": trees.with_leaves(out_tree, call.shardings.results),
            "compiler_options": running.compiler_options(call.devices),
        }


def _by_leaves(
    program: Callable[..., Any], in_tree: TreeDef, out_tree: TreeDef
) -> Callable[..., Any]:
    """A compiled program of leaves, for pytrees that take nothing but arrays.

    JAX makes such objects of avals and shardings.
    """

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != in_tree:
            raise Mismatch("compiled for arguments of another structure")
        return jax.tree.unflatten(out_tree, program(*leaves))

    return run
