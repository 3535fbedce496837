"""From a call to a program, for every kind of map.

`Programs.infer_params` checks the arguments of a call and traces the function. The
`Call` is bound, if JAX is tracing, or compiled ahead of time and run.
"""

import abc
import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
from jax.sharding import Sharding

from shardmap._jax.context import config_value, configuration, without_mesh
from shardmap._jax.stages import FoundNaN, Mismatch, argument_names, trace_as
from shardmap._jax.types import AnyMesh, Aval, Jaxpr, PyTree, TreeDef, Value
from shardmap._lazy import logging
from shardmap.api import caches
from shardmap.api.arguments import Arguments, Static
from shardmap.arrays import array_likes, placement, processes, running, trees
from shardmap.arrays.process_local import ProcessShardings, to_global, to_local
from shardmap.map import agreement, contexts, tracing
from shardmap.map.layout import MapShardings
from shardmap.sharding.mesh import mesh_devices

Args = Sequence[PyTree]
Kwargs = dict[str, PyTree]
FlatFunction = Callable[..., tracing.Flattened]


class ProcessLocal(NamedTuple):
    """How this process's data are parts of the global arrays of a call.

    Attributes:
      operands: for each leaf; None: it is a global array.
      results: for each result; None: all of them are global arrays.
    """

    operands: Sequence[ProcessShardings | None]
    results: Sequence[ProcessShardings] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a mapped function, with all that is needed to run or to bind it.

    Attributes:
      arguments: its arguments.
      in_avals: the avals of the leaves, as global arrays.
      out_tree: the structure of the result.
      out_avals: the avals of the results, as global arrays.
      mesh: where it runs; None inside another map.
      jaxpr: what the function computes.
      bind: adds the map of these leaves to what is being traced.
      find_shardings: gives the shardings of leaves and results.
      process_local: how it is called over several processes; None: with global arrays.
    """

    arguments: Arguments
    in_avals: Sequence[Aval]
    out_tree: TreeDef
    out_avals: Sequence[Aval]
    mesh: AnyMesh | None
    jaxpr: Jaxpr
    bind: Callable[[Sequence[Value]], Sequence[Value]]
    find_shardings: Callable[[], MapShardings]
    process_local: ProcessLocal | None = None

    @functools.cached_property
    def shardings(self) -> MapShardings | None:
        """The shardings of leaves and results; None inside another map."""
        return None if self.mesh is None else self.find_shardings()

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of its mesh; none of an abstract one."""
        return mesh_devices(self.mesh)

    def result(self, leaves: Sequence[Value]) -> PyTree:
        """Binds the map of these leaves."""
        return jax.tree.unflatten(self.out_tree, self.bind(leaves))

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The global arrays that the program takes."""
        assert self.shardings is not None
        return [
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
            )
            for aval, sharding in zip(
                self.in_avals, self.shardings.operands, strict=True
            )
        ]

    def description(self) -> str:
        """A text that is equal in all processes that make this call."""
        assert self.mesh is not None
        assert self.shardings is not None
        types = ", ".join(aval.str_short() for aval in self.in_avals)
        specs = [", ".join(str(s.spec) for s in each) for each in self.shardings]
        return (
            f"mesh {dict(self.mesh.shape)}, arguments ({types}), in_specs "
            f"({specs[0]}), out_specs ({specs[1]}), operations "
            f"{agreement.operations(self.jaxpr)}"
        )


class CompiledEntry(NamedTuple):
    """A compiled program, and the arguments that it takes.

    Attributes:
      call: runs it on positional and keyword arguments, the static ones each a
        `Static`; raises TypeError or ValueError, before it runs, for others.
      shardings: of the leaves; None if it lays them out itself.
      donated: which leaves are donated.
    """

    call: Callable[..., Any]
    shardings: Sequence[Sharding] | None
    donated: Sequence[bool]


class Programs(abc.ABC):
    """The programs of one function under one set of options.

    It has a weak reference to the function, in whose cache it is.
    """

    what: ClassVar[str]
    """The public name of the transformation, for errors."""
    static_parameter: ClassVar[str] = "static_argnums"
    """The parameter that names static arguments."""

    def __init__(self, fun: Callable[..., Any], options: Any) -> None:
        self.fun = caches.weak_reference(fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.full_name = f"{self.what} of {self.name}"
        self.options = options
        self.donate_argnames = trees.keyword_names(fun, options.donate_argnums)
        self._entries: collections.OrderedDict[Hashable, CompiledEntry] = (
            collections.OrderedDict()
        )
        self._flat: collections.OrderedDict[Hashable, FlatFunction] = (
            collections.OrderedDict()
        )
        self._under_meshes: collections.OrderedDict[Hashable, Callable[..., PyTree]] = (
            collections.OrderedDict()
        )

    # Defined by each kind of map

    @staticmethod
    def is_leaf(value: object) -> bool:
        """Whether a value is a leaf of the options for arguments and results."""
        return value is None

    @abc.abstractmethod
    def infer_params(self, arguments: Arguments, alone: bool = True) -> Call:
        """Checks the arguments of a call and traces the function.

        Args:
          arguments: those of the call.
          alone: whether the map is a program of its own, and no part of another.
        """

    @abc.abstractmethod
    def devices(self) -> list[jax.Device]:
        """The devices of a call; none if it chooses them itself."""

    def joins_mesh(self) -> bool:
        """Whether a call under `jax.set_mesh` is a program on that mesh."""
        return contexts.is_on_mesh(self.devices())

    # What is bound

    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        """Adds a call to what is being traced."""
        arguments = self.read(args, kwargs)
        return self.infer_params(arguments, alone=False).result(arguments.leaves)

    @functools.cached_property
    def bind_jitted(self) -> jax.stages.Wrapped:
        """`bind` under `jax.jit`, which caches its traces."""

        def run(args: Args, kwargs: Kwargs) -> PyTree:
            return Programs.bind(self, args, kwargs)

        run.__name__ = run.__qualname__ = self.name
        return jax.jit(run)

    def under_mesh(
        self, alone: Callable[[Args, Kwargs], PyTree], args: Args, kwargs: Kwargs
    ) -> PyTree:
        """Runs the map under `jax.set_mesh`, or ``alone`` if it has other devices."""
        if not self.joins_mesh():
            with without_mesh():
                return alone(args, kwargs)
        args, kwargs = contexts.placed((tuple(args), kwargs))
        program = self._jitted_under_mesh(tuple(contexts.current_mesh_devices()))
        return contexts.placed(program(*args, **kwargs))

    def _jitted_under_mesh(
        self, devices: tuple[jax.Device, ...]
    ) -> Callable[..., PyTree]:
        """The map as a `jax.jit` program under `jax.set_mesh` of these devices."""
        if (program := self._under_meshes.get(devices)) is not None:
            return program

        # JAX mistakes a keyword argument for all of them if they have one name.
        def run(*_args: PyTree, **_kwargs: PyTree) -> PyTree:
            return self.bind(_args, _kwargs)

        run.__name__ = run.__qualname__ = self.name
        program = running.map_jit(
            run,
            devices,
            communicates=True,
            donate_argnums=self.options.donate_argnums,
            donate_argnames=self.donate_argnames,
        )
        return caches.keep(self._under_meshes, devices, program)

    # What runs

    def run(self, args: Args, kwargs: Kwargs) -> tuple[PyTree, CompiledEntry | None]:
        """Runs a call on arguments with any shardings.

        Returns:
          The results; and the program, if the next call may try it first.
        """
        arguments = self.read(args, kwargs)
        leaves = arguments.leaves
        key = arguments.cache_key(), configuration()
        entry = self._entries.get(key)
        if entry is None:
            entry = self._compiled(self.infer_params(arguments))
            entry = caches.keep(self._entries, key, entry)
        if any(entry.donated):
            self._check_donated(entry, arguments)
        placed = placement.place(leaves, entry.shardings, donate=entry.donated)
        moved = any(a is not b for a, b in zip(leaves, placed, strict=True))
        if moved:
            args, kwargs = arguments.with_leaves(placed)
        try:
            results = entry.call(*args, **kwargs)
        except FoundNaN as error:
            if entry.shardings is None:  # Over several processes.
                raise FloatingPointError(f"{self.full_name}: {error}") from None
            return self.find_nan(args, kwargs), None
        return results, None if moved or entry.shardings is None else entry

    def find_nan(self, args: Args, kwargs: Kwargs) -> PyTree:
        """Runs a call operation by operation, as `jax.jit` does, to name the NaN.

        Raises:
          FloatingPointError: one gives a NaN, or the arguments have been donated.
        """
        arrays = jax.tree.leaves((args, kwargs))
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
            raise FloatingPointError(
                f"{self.full_name} has a NaN or an infinity in its results, and took "
                "the memory of donated arguments, so it cannot run again to tell which "
                "operation gives it. Leave donate_argnums out to find that."
            )
        return self.bind(args, kwargs)

    def may_donate(self, entry: CompiledEntry, args: Args) -> bool:
        """Whether a program may be tried with these arguments.

        It may if the donated arrays are committed: `run` moves others, and frees them.
        """
        arguments = Arguments.of(args, {})
        if len(arguments.leaves) != len(entry.donated):
            return False
        self._check_donated(entry, arguments)
        return all(
            leaf.committed
            for leaf, donated in zip(arguments.leaves, entry.donated, strict=True)
            if donated and isinstance(leaf, jax.Array)
        )

    def _check_donated(self, entry: CompiledEntry, arguments: Arguments) -> None:
        """Checks that arrays are not deleted, and donated ones are passed once."""
        leaves = arguments.leaves
        gone = [
            k
            for k, leaf in enumerate(leaves)
            if isinstance(leaf, jax.Array)
            and not isinstance(leaf, jax.core.Tracer)
            and leaf.is_deleted()
        ]
        if gone:
            names = self.leaf_names(arguments)
            raise RuntimeError(
                f"{self.full_name}: Array has been deleted: "
                f"{', '.join(names[k] for k in gone)}. Its memory was donated to an "
                "earlier call, or freed; use what that call returned."
            )
        counts = collections.Counter(map(id, leaves))
        for k, leaf in enumerate(leaves):
            if (
                entry.donated[k]
                and counts[id(leaf)] > 1
                and isinstance(leaf, jax.Array)
            ):
                names = self.leaf_names(arguments)
                same = [names[j] for j, other in enumerate(leaves) if other is leaf]
                raise ValueError(
                    f"{self.full_name}: {names[k]} is donated, and the same array is "
                    f"passed more than once, as {', '.join(same)}: its memory can be "
                    "used once. Pass a copy, such as x.copy()."
                )

    def agree(self, call: Call) -> None:
        """Checks that all processes make this call, before it is lowered."""
        agreement.agree(
            call.mesh, self.full_name, lambda: f"{self.name}, {call.description()}"
        )

    # Reading arguments

    def read(self, args: Args, kwargs: Kwargs) -> Arguments:
        """The arguments of a call.

        Raises:
          ValueError: a static one is not hashable.
        """
        arguments = Arguments.of(args, kwargs)
        for argnum, static in arguments.statics.items():
            try:
                hash(static)
            except TypeError:
                raise ValueError(
                    "Non-hashable static arguments are not supported in "
                    f"{self.full_name}: argument {argnum} of type "
                    f"{type(static.value)}. What {self.static_parameter} names needs "
                    "__hash__ and __eq__: pass a tuple for a list or an array, or bind "
                    "the value with functools.partial(fun, ...) and map the result."
                ) from None
        return arguments

    def flat_function(self, arguments: Arguments) -> FlatFunction:
        """The function of the leaves, for such arguments.

        JAX finds a trace again by this object, so there is one for each argument
        structure, with the static arguments in it.
        """
        key = arguments.in_tree, tuple(arguments.statics.values())
        found = self._flat.get(key)
        if found is not None:
            return found
        fun, in_tree = self.fun, arguments.in_tree

        def flat(*leaves: Value) -> tracing.Flattened:
            args, kwargs = jax.tree.unflatten(in_tree, leaves)
            args = [arg.value if type(arg) is Static else arg for arg in args]
            return tracing.Flattened(*jax.tree.flatten(fun()(*args, **kwargs)))

        flat.__name__ = self.name
        args, kwargs = arguments.with_leaves(arguments.leaves)
        trace_as(flat, self.what, fun(), args, kwargs)
        return caches.keep(self._flat, key, flat)

    def leaf_names(self, arguments: Arguments) -> list[str]:
        """The name of each leaf, for errors."""
        args, kwargs = arguments.with_leaves(arguments.leaves)
        return argument_names(self.fun(), args, kwargs)

    def leaf_avals(self, arguments: Arguments) -> list[Aval]:
        """The avals of the leaves.

        Raises:
          TypeError: one is nothing that JAX can compute with.
        """
        avals = []
        for k, leaf in enumerate(arguments.leaves):
            try:
                aval = array_likes.abstract_value(leaf)
            except TypeError:
                aval = None
            if not isinstance(aval, jax.core.ShapedArray):
                name = self.leaf_names(arguments)[k]
                problem = _no_array(leaf, aval, self.static_parameter)
                raise TypeError(f"{self.what} argument {name} {problem}")
            avals.append(aval)
        return avals

    def broadcast_in(
        self, name: str, prefix: PyTree, arguments: Arguments, by_keyword: Any
    ) -> Sequence[Any]:
        """A leaf of an option, such as ``in_axes``, for each leaf of the arguments.

        Args:
          name: the option.
          prefix: a pytree prefix of the positional arguments, with or without entries
            for the static ones.
          arguments: those of a call.
          by_keyword: what leaves of keyword arguments have.
        """
        if isinstance(prefix, tuple) and not self.is_leaf(prefix):
            prefix = arguments.with_statics(prefix)
        positional, keywords = arguments.in_tree.children()
        what = "the positional arguments"
        leaves = trees.broadcast_axes(
            name, prefix, positional, what, self.is_leaf, self.full_name
        )
        return leaves + (by_keyword,) * keywords.num_leaves

    def broadcast_out(
        self, name: str, prefix: PyTree, out_tree: TreeDef
    ) -> Sequence[Any]:
        """A leaf of an option, such as ``out_axes``, for each leaf of the result."""
        return trees.broadcast_axes(
            name, prefix, out_tree, "the result", self.is_leaf, self.full_name
        )

    # Compiling

    def _compiled(self, call: Call) -> CompiledEntry:
        """Compiles a call."""
        self.check_devices(call)
        self.agree(call)
        arguments, structs = call.arguments, call.structs()
        donated = self._donated(arguments)
        compiled = functools.partial(running.compiled, devices=call.devices)
        if trees.takes_anything(arguments.in_tree, call.out_tree):
            args, kwargs = arguments.with_leaves(structs)
            program = compiled(self.jitted(call), args, kwargs)
        else:
            program = compiled(self._jitted_by_leaves(call), structs, {})
            program = _by_leaves(program, arguments.in_tree, call.out_tree)
        shardings = call.shardings and call.shardings.operands
        if call.process_local is not None or processes.several(call.devices):
            program, shardings = _across_processes(program, call, donated), None
        return CompiledEntry(program, shardings, donated)

    def check_devices(self, call: Call) -> None:
        """Refuses to lower a call over an abstract mesh."""
        if not call.devices:
            raise ValueError(
                f"{self.full_name} cannot run on an AbstractMesh, which has no "
                "devices. Give it a jax.sharding.Mesh: shardmap.make_mesh makes one."
            )

    def _donated(self, arguments: Arguments) -> list[bool]:
        return arguments.donated(self.options.donate_argnums, self.donate_argnames)

    def jitted(
        self, call: Call, static_argnums: Collection[int] = ()
    ) -> jax.stages.Wrapped:
        """A call as `jax.jit`, to be traced for the call's `structs`."""

        def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return call.result(jax.tree.leaves((args, kwargs)))

        args, kwargs = call.arguments.with_leaves(call.arguments.leaves)
        trace_as(run, "jit", self.fun(), args, kwargs, tuple(static_argnums))
        return self._jit(
            run,
            call,
            call.out_tree,
            static_argnums=tuple(static_argnums),
            donate_argnums=self.options.donate_argnums,
            donate_argnames=self.donate_argnames,
        )

    def _jitted_by_leaves(self, call: Call) -> jax.stages.Wrapped:
        """The same for flat leaves and results."""

        def run(*leaves: Value) -> list[Value]:
            return list(call.bind(leaves))

        results = jax.tree.structure([0] * call.out_tree.num_leaves)
        donated = self._donated(call.arguments)
        donate_argnums = [k for k, donate in enumerate(donated) if donate]
        return self._jit(run, call, results, donate_argnums=donate_argnums)

    def _jit(
        self, run: Callable[..., Any], call: Call, out_tree: TreeDef, **options: Any
    ) -> jax.stages.Wrapped:
        # Over an abstract mesh a call is only traced.
        if call.shardings is not None and call.devices:
            noted = config_value("jax_log_compiles")
            logging.log(
                logging.WARNING if noted else logging.DEBUG,
                "shardmap: compiling %s: mesh %s, devices %s, arguments (%s)",
                self.name,
                dict(call.mesh.shape) if call.mesh else {},
                [device.id for device in call.devices],
                ", ".join([aval.str_short() for aval in call.in_avals]),
            )
            shardings = call.shardings.results
            options["out_shardings"] = trees.prefix_of(out_tree, shardings)
            if call.mesh is not None and len(call.mesh.axis_names) > 1:
                run = _with_constraints(run, shardings)
            options["compiler_options"] = running.compiler_options(call.devices)
        run.__name__ = run.__qualname__ = self.name
        return jax.jit(run, **options)


def _with_constraints(
    run: Callable[..., PyTree], shardings: Sequence[jax.sharding.Sharding]
) -> Callable[..., PyTree]:
    """``run``, whose results have these shardings inside the program too.

    XLA cuts what is manual along some mesh axes only along others as it likes, which
    JAX refuses if it overrides ``out_shardings``.
    """

    @functools.wraps(run)  # JAX reads the names of arguments.
    def with_constraints(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(run(*args, **kwargs))
        constrained = map(jax.lax.with_sharding_constraint, leaves, shardings)
        return jax.tree.unflatten(tree, constrained)

    return with_constraints


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


def _across_processes(
    program: Callable[..., Any], call: Call, donated: Sequence[bool]
) -> Callable[..., Any]:
    """A program of global arrays, for the arrays of this process."""
    assert call.shardings is not None
    shardings = call.shardings.operands
    local = call.process_local or ProcessLocal([None] * len(shardings), None)

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        arguments = Arguments.of(args, kwargs)
        leaves: list[Value] = []
        for leaf, part, sharding, donate in zip(
            arguments.leaves, local.operands, shardings, donated, strict=True
        ):
            if part is None:
                leaves += placement.place([leaf], [sharding], True, [donate])
            else:
                leaves.append(to_global(leaf, part, donate))
        args, kwargs = arguments.with_leaves(leaves)
        results = program(*args, **kwargs)
        if local.results is None:
            return results
        results, tree = jax.tree.flatten(results)
        return jax.tree.unflatten(tree, map(to_local, results, local.results))

    return run


def _no_array(leaf: Value, aval: Aval | None, static_parameter: str) -> str:
    """What is wrong with an argument that is not an array of numbers.

    Args:
      leaf: the argument.
      aval: what JAX takes it for, if it does.
      static_parameter: which names static arguments.
    """
    if aval is not None:
        return (
            f"is a reference, {aval}, which a map does not take: its elements run on "
            "several devices. Pass its value, x[...], and return what to write to it."
        )
    return array_likes.refusal(leaf) or (
        f"of type {type(leaf)} is not a valid JAX type. Give its position in "
        f"{static_parameter} if it is to be a compile-time constant."
    )
