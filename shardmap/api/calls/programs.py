"""From a call to a program: the same way for every kind of map.

A call is read: its arguments checked, the function traced. Then it is bound, if JAX is
tracing, or compiled ahead of time and run.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
from jax.sharding import Sharding

from shardmap._jax.context import configuration, without_mesh
from shardmap._jax.stages import FoundNaN, Mismatch
from shardmap._jax.types import Aval, PyTree, TreeDef, Value
from shardmap.api.calls import caches, refusals
from shardmap.api.calls.call import (
    Arguments,
    Call,
    with_statics,
    without_statics,
)
from shardmap.api.calls.multiprocess import AcrossProcesses
from shardmap.api.calls.options import Options
from shardmap.arrays import array_likes, placement, trees
from shardmap.arrays.process_local import is_global_array
from shardmap.arrays.programs import running
from shardmap.map import contexts, tracing

C = TypeVar("C", bound=Call)
OptionsT = TypeVar("OptionsT", bound=Options)

Args = Sequence[PyTree]
Kwargs = dict[str, PyTree]


class CompiledEntry(NamedTuple):
    """A compiled program and what calls it is for.

    Attributes:
      call: runs it on positional and keyword arguments as the user passes them, static
        ones included; raises TypeError or ValueError, before it runs, for others.
      shardings: of the leaves; None if it lays them out itself.
      donated: which leaves are donated.
    """

    call: Callable[..., Any]
    shardings: Sequence[Sharding] | None
    donated: Sequence[bool]


class Programs(abc.ABC, Generic[C, OptionsT]):
    """All that is made for one function under one set of options.

    It does not hold the function, so it may live as long as the function does.
    """

    what: ClassVar[str]
    """What users call it, for errors."""
    static_parameter: ClassVar[str] = "static_argnums"
    """The parameter that names static arguments."""

    def __init__(self, fun: Callable[..., Any], options: OptionsT) -> None:
        self.fun = caches.WeakFunction(fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.options = options
        self.donate_argnames = trees.keyword_names(fun, options.donate_argnums)
        self._entries: caches.LRUCache[CompiledEntry] = caches.LRUCache()

    # What each kind of map says

    @abc.abstractmethod
    def infer_params(
        self,
        args: Args,
        kwargs: Kwargs,
        are_global: Sequence[bool] | None = None,
        alone: bool = True,
    ) -> C:
        """Checks the arguments of a call and traces the function.

        Args:
          args: the positional arguments, those that are static each as a `Static`.
          kwargs: the keyword arguments.
          are_global: in a map over several processes, which leaves are global arrays;
            what others hold is process-local data. None: there are no others.
          alone: whether the map is a program of its own, and no part of another.
        """

    @abc.abstractmethod
    def bind_call(self, call: C, leaves: Sequence[Value]) -> PyTree:
        """Adds a call to what is being traced, with these for its leaves."""

    @abc.abstractmethod
    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        """Adds the map to whatever is being traced."""

    @abc.abstractmethod
    def across_processes(self) -> bool:
        """Whether the map may run on devices of more than this process."""

    @abc.abstractmethod
    def has_other_devices(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether it runs on others than those of `jax.set_mesh`, by itself."""

    def agree(self, call: C) -> None:
        """Sees that all processes make this call, before it is lowered."""
        return None

    def bind_part(self, args: Args, kwargs: Kwargs) -> PyTree:
        """`bind`, under `jax.set_mesh`."""
        return self.bind(args, kwargs)

    # Calls

    def run(self, args: Args, kwargs: Kwargs) -> tuple[PyTree, CompiledEntry | None]:
        """Runs a call on arguments with any shardings.

        Returns:
          The results; and the program, if it takes such arguments as they are, and
          refuses others.
        """
        arguments = Arguments.of(args, kwargs)
        leaves, statics = arguments.leaves, arguments.statics
        refusals.check_hashable(self._named(), self.static_parameter, statics)
        are_global = self._are_global(leaves)
        key = arguments.kind(), are_global, configuration()
        entry = self._entries.get(key)
        if entry is None:
            call = self.infer_params(args, kwargs, are_global)
            entry = self._entries.setdefault(key, self._compiled(call))
        if any(entry.donated):
            self.check_donated(entry, args, kwargs)
        placed = placement.place(leaves, entry.shardings, donate=entry.donated)
        moved = any(a is not b for a, b in zip(leaves, placed, strict=True))
        if moved:
            args, kwargs = arguments.with_leaves(placed)
        try:
            results = entry.call(*args, **kwargs)
        except FoundNaN:
            # As `jax.jit`: bound eagerly, it runs operation by operation.
            return self.bind(args, kwargs), None
        # A program of global arrays also takes an array of one process of their shape.
        is_exact = are_global is None or entry.shardings is None
        return results, entry if is_exact and not moved else None

    def check_donated(self, entry: CompiledEntry, args: Args, kwargs: Kwargs) -> bool:
        """Refuses deleted arrays, and a donated one that is passed twice.

        Returns:
          Whether the program may be tried: there are as many leaves, and all donated
          arrays are committed. Others are moved by the program, which does not free
          them.
        """
        arguments = Arguments.of(args, kwargs)
        if len(arguments.leaves) != len(entry.donated):
            return False
        refusals.check_there(
            self._named(),
            arguments.leaves,
            entry.donated,
            lambda: trees.leaf_names(
                self.fun(),
                arguments.argnums,
                tuple(args[k] for k in arguments.argnums),
                kwargs,
            ),
        )
        return all(
            leaf.committed
            for leaf, donated in zip(arguments.leaves, entry.donated, strict=True)
            if donated and isinstance(leaf, jax.Array)
        )

    def under_mesh(
        self,
        alone: Callable[[Args, Kwargs], PyTree],
        args: Args,
        kwargs: Kwargs,
    ) -> PyTree:
        """Runs the map under `jax.set_mesh`, or ``alone`` if it has other devices."""
        if self.has_other_devices(args, kwargs):
            with without_mesh():
                return alone(args, kwargs)
        return self.program_under_mesh(args, kwargs)

    @functools.cached_property
    def program_under_mesh(self) -> contexts.UnderMesh:
        """What runs the function under `jax.set_mesh`."""
        return contexts.UnderMesh(
            self.name,
            self.bind,
            self.options.static_argnums,
            donate_argnums=self.options.donate_argnums,
            donate_argnames=self.donate_argnames,
        )

    def leaf_avals(
        self, leaves: Sequence[Value], names: Callable[[], list[str]]
    ) -> list[Aval]:
        """The kinds of leaves.

        Raises:
          TypeError: one is nothing that JAX can compute with.
        """
        avals = []
        for k, leaf in enumerate(leaves):
            try:
                aval = array_likes.leaf_aval(leaf)
            except TypeError:
                aval = None
            if not isinstance(aval, jax.core.ShapedArray):
                raise refusals.no_array(
                    self.what, names()[k], leaf, aval, self.static_parameter
                )
            avals.append(aval)
        return avals

    def infer_params_alone(self, args: Args, kwargs: Kwargs) -> C:
        """Reads a call that is lowered or traced by itself."""
        arguments = Arguments.of(args, kwargs)
        statics = arguments.statics
        refusals.check_hashable(self._named(), self.static_parameter, statics)
        return self.infer_params(args, kwargs, self._are_global(arguments.leaves))

    def across(self, call: C, program: Callable[..., Any]) -> AcrossProcesses:
        """A program of global arrays, called as in this call over several processes."""
        return AcrossProcesses(program, call, self._donated(call.arguments))

    def _named(self) -> str:
        return f"{self.what} of {self.name}"

    def _are_global(self, leaves: Sequence[Value]) -> tuple[bool, ...] | None:
        """Which leaves are global arrays; None in one process."""
        return tuple(map(is_global_array, leaves)) if self.across_processes() else None

    def _donated(self, arguments: Arguments) -> list[bool]:
        return arguments.donated(self.options.donate_argnums, self.donate_argnames)

    # Programs

    def _compiled(self, call: C) -> CompiledEntry:
        """Compiles a call."""
        if call.process_local is not None:
            self.agree(call)
        arguments, structs = call.arguments, call.structs()
        compiled = functools.partial(
            running.compiled, devices=call.devices, communicates=call.communicates
        )
        if trees.takes_anything(arguments.in_tree, call.out_tree):
            args, kwargs = arguments.with_leaves(structs)
            program = compiled(self.jitted(call), without_statics(args), kwargs)
        else:
            program = compiled(self._jitted_by_leaves(call), structs, {})
            program = _by_leaves(program, arguments.in_tree, call.out_tree)
        shardings = call.shardings and call.shardings.operands
        if call.has_process_local:
            program, shardings = self.across(call, program), None
        program = with_statics(arguments.statics, program)
        return CompiledEntry(program, shardings, self._donated(arguments))

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
        """A call of this process's data, as the call of global arrays that is run."""
        if not call.has_process_local:
            return call
        return self.infer_params(*call.arguments.with_leaves(call.structs()))

    def _jit_options(self, call: C, out_tree: TreeDef) -> dict[str, Any]:
        if call.shardings is None:
            return {}
        if not call.devices:
            raise ValueError(
                f"{self._named()} cannot run on an AbstractMesh, which has no devices. "
                "Give it a jax.sharding.Mesh, such as shardmap.make_mesh makes."
            )
        tracing.log_compile("%s: %s", self.name, call.described)
        return {
            "out_shardings": trees.with_leaves(out_tree, call.shardings.results),
            "compiler_options": running.compiler_options(call.devices),
        }


def _by_leaves(
    program: Callable[..., Any], in_tree: TreeDef, out_tree: TreeDef
) -> Callable[..., Any]:
    """A compiled program of leaves, for classes that JAX cannot describe.

    JAX makes such an object of what it says about its leaves, which are no arrays.
    """

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != in_tree:
            raise Mismatch("compiled for arguments of another structure")
        return jax.tree.unflatten(out_tree, program(*leaves))

    return run
