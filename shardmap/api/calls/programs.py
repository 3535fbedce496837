"""From a call to a program: the same way for every kind of map.

A call is read: its arguments checked, the function traced. Then it is bound, if JAX is
tracing, or run by a `jax.jit` made for calls of its kind.
"""

import abc
import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import jax

from shardmap._jax.types import Aval, PyTree, TreeDef, Value
from shardmap.api.calls import kept, refusals
from shardmap.api.calls.across import AcrossProcesses
from shardmap.api.calls.as_jit import jit_options
from shardmap.api.calls.call import (
    Arguments,
    Call,
    Donated,
    Ready,
    SameShapes,
    with_statics,
)
from shardmap.api.calls.options import Options
from shardmap.arrays import array_likes, placement, trees
from shardmap.arrays.process_local import is_global_array
from shardmap.arrays.programs.running import map_jit
from shardmap.map import contexts, tracing
from shardmap.map.shardings import MapShardings

C = TypeVar("C", bound=Call)
OptionsT = TypeVar("OptionsT", bound=Options)

Args = Sequence[PyTree]
Kwargs = dict[str, PyTree]


class Prepared(NamedTuple):
    """A call ready to run.

    Attributes:
      ready: its program.
      args, kwargs: the arguments, laid out.
      moved: whether any of them had another sharding.
      call: the call, if it has been read just now.
    """

    ready: Ready
    args: Args
    kwargs: Kwargs
    moved: bool
    call: Call | None


# While a call is handed to the tracing of its program, which need not read it.
_just_read: contextvars.ContextVar[tuple[Any, Call] | None] = contextvars.ContextVar(
    "just_read", default=None
)


class Programs(abc.ABC, Generic[C, OptionsT]):
    """All that is made for one function under one set of options.

    It does not hold the function, so it may live as long as the function does.
    """

    what: ClassVar[str]
    """What users call it, for errors."""
    static_parameter: ClassVar[str] = "static_argnums"
    """The parameter that names static arguments."""

    def __init__(self, fun: Callable[..., Any], options: OptionsT) -> None:
        self.fun = kept.WeakFunction(fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.options = options
        self.donate_argnames = trees.keyword_names(fun, options.donate_argnums)
        self._ready: kept.Kept[Ready] = kept.Kept()
        self._jits: kept.Kept[jax.stages.Wrapped] = kept.Kept()

    # What each kind of map says

    @abc.abstractmethod
    def read(
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

    def prepare(self, args: Args, kwargs: Kwargs, anew: bool = False) -> Prepared:
        """The program for a call, and the arguments laid out for it.

        Args:
          args, kwargs: the arguments.
          anew: whether the one that is kept for such calls has refused this one.
        """
        arguments = Arguments.of(args, kwargs)
        leaves, statics = arguments.leaves, arguments.statics
        if statics:
            refusals.check_hashable(self._named(), self.static_parameter, statics)
        are_global = self._are_global(leaves)
        key = arguments.kind(), are_global
        call = None
        if anew:
            self._ready.drop(key)
        ready = self._ready.get(key)
        if ready is None:
            call = self.read(args, kwargs, are_global)
            ready = self._ready.keep(key, self._made_ready(call, bool(kwargs)))
        if any(ready.donated):
            refusals.check_there(
                self._named(),
                leaves,
                ready.donated,
                lambda: trees.leaf_names(
                    self.fun(),
                    arguments.argnums,
                    tuple(args[k] for k in arguments.argnums),
                    kwargs,
                ),
            )
        # `jax.jit` lays out positional arguments, but not keyword arguments.
        placed = placement.place(leaves, ready.shardings, bool(kwargs), ready.donated)
        moved = any(a is not b for a, b in zip(leaves, placed, strict=True))
        if moved:
            args, kwargs = arguments.with_leaves(placed)
        return Prepared(ready, args, kwargs, moved, call)

    def run(self, args: Args, kwargs: Kwargs) -> tuple[PyTree, Prepared]:
        """Runs a call on arguments with any shardings."""
        prepared = self.prepare(args, kwargs)
        try:
            return self._run(prepared), prepared
        except refusals.NeedsAnotherProgram:
            pass  # JAX has another configuration than when it was kept.
        prepared = self.prepare(args, kwargs, anew=True)
        return self._run(prepared), prepared

    def _run(self, prepared: Prepared) -> PyTree:
        ready, args, kwargs, _, call = prepared
        if call is None:
            return ready.program(*args, **kwargs)
        token = _just_read.set((self, call))
        try:
            return ready.program(*args, **kwargs)
        finally:
            _just_read.reset(token)

    def under_mesh(
        self,
        alone: Callable[[Args, Kwargs], PyTree],
        args: Args,
        kwargs: Kwargs,
    ) -> PyTree:
        """Runs the map under `jax.set_mesh`, or ``alone`` if it has other devices."""
        if self.has_other_devices(args, kwargs):
            with jax.set_mesh(contexts.NO_MESH):
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

    def read_alone(self, args: Args, kwargs: Kwargs) -> C:
        """Reads a call that is lowered or traced by itself."""
        arguments = Arguments.of(args, kwargs)
        statics = arguments.statics
        refusals.check_hashable(self._named(), self.static_parameter, statics)
        return self.read(args, kwargs, self._are_global(arguments.leaves))

    def across(
        self, call: C, program: Callable[..., Any], takes_statics: bool = False
    ) -> AcrossProcesses:
        """A program over several processes, to be called as in this call.

        Args:
          call: the call.
          program: a function of global arrays.
          takes_statics: whether it is called with the static arguments.
        """
        donated = self._donated(call.arguments)
        return AcrossProcesses(program, call, donated, takes_statics)

    def _named(self) -> str:
        return f"{self.what} of {self.name}"

    def _are_global(self, leaves: Sequence[Value]) -> tuple[bool, ...] | None:
        """Which leaves are global arrays; None in one process."""
        return tuple(map(is_global_array, leaves)) if self.across_processes() else None

    def _donated(self, arguments: Arguments) -> list[bool]:
        return arguments.donated(self.options.donate_argnums, self.donate_argnames)

    def _made_ready(self, call: C, has_keywords: bool) -> Ready:
        # All processes trace what they call; what is lowered, one of them alone.
        agrees = call.process_local is not None
        program = self.program(call, has_keywords, agrees)
        donated, statics = self._donated(call.arguments), call.arguments.statics
        if call.has_process_local:
            # This lays out its arguments itself, and knows what it is for.
            shapes = SameShapes([aval.shape for aval in call.in_avals])
            across = self.across(call, program, True)
            return Ready(across, with_statics(statics, shapes.fits), None, donated)
        shardings = call.shardings and call.shardings.operands
        probe = call.probe()
        fits = None if probe is None else probe.fits()
        if any(donated):
            wanted = [(k, s) for k, s in enumerate(shardings or ()) if donated[k]]
            fits = Donated(wanted, fits).fits
        return Ready(program, with_statics(statics, fits), shardings, donated)

    # Programs

    def program(
        self, call: C, has_keywords: bool, agrees: bool = False
    ) -> jax.stages.Wrapped:
        """The `jax.jit` that runs calls like this one.

        There is one for each value of the static arguments: a `jax.jit` keeps what it
        has compiled for all of them, and is forgotten as a whole.

        Args:
          call: the call.
          has_keywords: whether arguments are passed by keyword.
          agrees: whether it makes sure, when it is traced, that other processes do the
            same. It must then be traced by calls only, which all of them make.
        """
        arguments = call.arguments
        devices = () if call.shardings is None else tuple(call.devices)
        key = (
            arguments.in_tree,
            arguments.static_argnums,
            call.out_tree,
            call.shardings,
            devices,
            call.communicates,
            has_keywords,
        )
        if call.process_local is not None and not agrees:
            # Agreement is found by lowering: what is kept is not lowered again.
            return self._make_program(agrees, *key)
        kept_key = (*key, arguments.statics)
        program = self._jits.get(kept_key)
        if program is None:
            program = self._jits.keep(kept_key, self._make_program(agrees, *key))
        return program

    def traced(self, call: C, args: Args, kwargs: Kwargs) -> jax.stages.Traced:
        """The program of a call, traced for arguments of which it is the reading."""
        program = self.program(call, bool(kwargs))
        token = _just_read.set((self, call))
        try:
            return program.trace(*args, **kwargs)
        finally:
            _just_read.reset(token)

    def _make_program(
        self,
        agrees: bool,
        in_tree: TreeDef,
        static: tuple[int, ...],
        out_tree: TreeDef,
        shardings: MapShardings | None,
        devices: Sequence[jax.Device],
        communicates: bool,
        has_keywords: bool,
    ) -> jax.stages.Wrapped:
        def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return self.trace_call(args, kwargs, shardings, out_tree, agrees)

        kept.described_like(run, self.fun(), self.name)
        options = jit_options(in_tree, static, out_tree, shardings, has_keywords)
        count = len(in_tree.children()[0].children()) + len(static)
        options |= {
            "donate_argnums": [k for k in self.options.donate_argnums if k < count],
            "donate_argnames": self.donate_argnames,
        }
        if shardings is None:
            return jax.jit(run, **options)
        if not devices:
            raise ValueError(
                f"{self._named()} cannot run on an AbstractMesh, which has no devices. "
                "Give it a jax.sharding.Mesh, such as shardmap.make_mesh makes."
            )
        program: jax.stages.Wrapped = map_jit(run, devices, communicates, **options)
        return program

    def trace_call(
        self,
        args: Args,
        kwargs: Kwargs,
        shardings: MapShardings | None,
        out_tree: TreeDef,
        agrees: bool,
    ) -> PyTree:
        """What JAX traces: the call that was just read, or another, read now."""
        if _just_read.get() is None and contexts.has_mesh():
            raise refusals.NeedsAnotherProgram  # One under that mesh.
        arguments = Arguments.of(args, kwargs)
        call = self._take_just_read(arguments) or self.read(args, kwargs)
        if call.shardings != shardings or call.out_tree != out_tree:
            raise refusals.NeedsAnotherProgram
        if agrees:
            self.agree(call)
        tracing.log_compile("%s: %s", self.name, call.described)
        return self.bind_call(call, arguments.leaves)

    def _take_just_read(self, arguments: Arguments) -> C | None:
        made_by, call = _just_read.get() or (None, None)
        if made_by is not self or call is None or not call.is_equal_to(arguments):
            return None
        _just_read.set(None)
        return cast(C, call)


def called_user(error: Exception) -> bool:
    """Whether an error of a program comes from its tracing, and not from JAX before."""
    return refusals.has_entered(error, Programs.trace_call)
