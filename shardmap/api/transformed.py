"""A user's function under `spmap`, `mesh_map` or `sharded_jit`, and its arguments.

What the three share: names for errors, caches, and how calls are bound. A call is
traced, which each does in its way. If JAX is tracing, it is bound; else it is compiled
and run, as `programs` tells.
"""

import abc
import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import jax
from jax.sharding import AxisType

from shardmap._jax.context import NO_MESH
from shardmap._jax.stages import argument_names, trace_as
from shardmap._jax.types import AnyMesh, Aval, Jaxpr, PyTree, TreeDef, Value
from shardmap.api import caches
from shardmap.api.arguments import Arguments, Static
from shardmap.arrays import array_likes, trees
from shardmap.arrays.process_local import ProcessShardings
from shardmap.arrays.trees import Flattened
from shardmap.map import agreement
from shardmap.map.layout import MapShardings
from shardmap.map.primitives import explicit_sharding
from shardmap.sharding.mesh import mesh_devices

Args = Sequence[PyTree]
Kwargs = dict[str, PyTree]
FlatFunction = Callable[..., Flattened]


class ProcessLocal(NamedTuple):
    """How this process's data are parts of the global arrays of a call.

    Attributes:
      operands: for each leaf.
      results: for each result; None: all of them are global arrays.
    """

    operands: Sequence[ProcessShardings]
    results: Sequence[ProcessShardings] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A traced call, with all that is needed to run or to bind it.

    Attributes:
      arguments: its arguments.
      in_avals: the avals of the leaves, as global arrays.
      out_tree: the structure of the result.
      out_avals: the avals of the results, as global arrays.
      mesh: where it runs; None inside another map.
      jaxpr: what the function computes.
      emit: adds the map of these leaves to what is being traced.
      find_shardings: gives the shardings of leaves and results.
      process_local: how it is called over several processes; None: with global arrays.
    """

    arguments: Arguments
    in_avals: Sequence[Aval]
    out_tree: TreeDef
    out_avals: Sequence[Aval]
    mesh: AnyMesh | None
    jaxpr: Jaxpr
    emit: Callable[..., Sequence[Value]]
    find_shardings: Callable[[], MapShardings]
    process_local: ProcessLocal | None = None

    @functools.cached_property
    def shardings(self) -> MapShardings | None:
        """The shardings of leaves and results; None inside another map."""
        return None if self.mesh is None else self.find_shardings()

    @functools.cached_property
    def devices(self) -> list[jax.Device]:
        """The devices of its mesh; none of an abstract one."""
        return mesh_devices(self.mesh)

    def result(self, leaves: Sequence[Value]) -> PyTree:
        """Binds the map of these leaves."""
        return jax.tree.unflatten(self.out_tree, self.emit(*leaves))

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


class Transformed(abc.ABC):
    """A user's function under one set of options.

    It has a weak reference to the function, in whose cache it is.

    Attributes:
      fun: gives the function.
      options: a named tuple, with ``donate_argnums``.
      name: the function's.
      full_name: with the public name of the transformation, for errors.
      donate_argnums, donate_argnames: the donated arguments.
      programs: what has been compiled, by the key of a call.
    """

    what: ClassVar[str]
    """The public name of the transformation."""

    static_parameter: ClassVar[str] = "static_argnums"
    """The parameter that names static arguments."""

    def __init__(self, fun: Callable[..., Any], options: Any) -> None:
        self.fun = caches.weak_reference(fun)
        self.options = options
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.full_name = f"{self.what} of {self.name}"
        self.donate_argnums = tuple(options.donate_argnums)
        self.donate_argnames = trees.keyword_names(fun, self.donate_argnums)
        self.programs: collections.OrderedDict[Hashable, Any] = (
            collections.OrderedDict()
        )
        self._flat: collections.OrderedDict[Hashable, FlatFunction] = (
            collections.OrderedDict()
        )

    @staticmethod
    @abc.abstractmethod
    def is_leaf(value: Any) -> bool:
        """Whether a value is a leaf of the options for arguments and results."""

    @abc.abstractmethod
    def is_on_set_mesh(self) -> bool:
        """Whether a call under `jax.set_mesh` is a program on that mesh."""

    @abc.abstractmethod
    def trace_call(self, arguments: Arguments, is_top_level: bool = True) -> Call:
        """Checks the arguments of a call and traces the function.

        ``is_top_level``: whether it is a program, and not a part of another.
        """

    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        """Adds a call to what is being traced."""
        return self._jitted(tuple(args), kwargs)

    @functools.cached_property
    def _jitted(self) -> Callable[[Args, Kwargs], PyTree]:
        """Binds calls under `jax.jit`, which caches its traces."""

        def run(args: Args, kwargs: Kwargs) -> PyTree:
            arguments = self.read(args, kwargs)
            return self.trace_call(arguments, False).result(arguments.leaves)

        run.__name__ = run.__qualname__ = self.name
        return jax.jit(run)

    def read(self, args: Args, kwargs: Kwargs) -> Arguments:
        """The arguments of a call; static ones must be hashable."""
        arguments = Arguments.of(args, kwargs)
        for argnum, static in arguments.statics.items():
            try:
                hash(static)
            except TypeError:
                raise ValueError(
                    "Non-hashable static arguments are not supported in "
                    f"{self.full_name}: argument {argnum} of type "
                    f"{type(static.value)}. Pass a tuple, or what has __hash__ and "
                    "__eq__, or map functools.partial(fun, ...) of it."
                ) from None
        return arguments

    def flat_function(self, arguments: Arguments) -> FlatFunction:
        """The function of the leaves, for such arguments.

        JAX finds a trace again by this object, so there is one for each structure.
        """
        key = arguments.in_tree, tuple(arguments.statics.values())
        known = self._flat.get(key)
        if known is not None:
            return known
        fun, in_tree = self.fun, arguments.in_tree

        def flat(*leaves: Value) -> Flattened:
            args, kwargs = jax.tree.unflatten(in_tree, leaves)
            args = [arg.value if type(arg) is Static else arg for arg in args]
            return Flattened(*jax.tree.flatten(fun()(*args, **kwargs)))

        flat.__name__ = self.name
        args, kwargs = arguments.with_leaves(arguments.leaves)
        trace_as(flat, self.what, fun(), args, kwargs)
        return caches.keep(self._flat, key, flat)

    def leaf_names(self, arguments: Arguments) -> list[str]:
        """The name of each leaf, for errors."""
        args, kwargs = arguments.with_leaves(arguments.leaves)
        return argument_names(self.fun(), args, kwargs)

    def leaf_avals(self, arguments: Arguments) -> list[Aval]:
        """The avals of the leaves."""
        avals = []
        for k, leaf in enumerate(arguments.leaves):
            try:
                aval = array_likes.abstract_value(leaf)
            except TypeError:
                aval = None
            if not isinstance(aval, jax.core.ShapedArray):
                problem = array_likes.refusal(leaf) or (
                    f"of type {type(leaf)} is not a valid JAX type. Give its position "
                    f"in {self.static_parameter} if it is to be a compile-time "
                    "constant."
                )
                if aval is not None:
                    problem = (
                        f"is a reference, {aval}, which a map does not take: its "
                        "elements run on several devices. Pass its value, x[...], and "
                        "return what to write to it."
                    )
                name = self.leaf_names(arguments)[k]
                raise TypeError(f"{self.what} argument {name} {problem}")
            avals.append(aval)
        return avals

    def broadcast_in(
        self, name: str, prefix: PyTree, arguments: Arguments, by_keyword: Any
    ) -> Sequence[Any]:
        """A leaf of an option, such as ``in_axes``, for each leaf of the arguments.

        Its prefix is one of the positional arguments, with or without the static ones.
        Leaves of keyword arguments all have ``by_keyword``.
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


def types_of_mesh_around() -> AbstractContextManager[Any]:
    """A context in which types have no mesh but that of a `jax.shard_map` around."""
    there = jax.sharding.get_abstract_mesh()
    return jax.sharding.use_abstract_mesh(there if there.manual_axes else NO_MESH)


def bind_without_types(
    bind: Callable[..., Sequence[Value]], *leaves: Value
) -> list[Any]:
    """Binds a map to leaves without shardings in their types, nor those of a mesh."""
    operands = list(map(explicit_sharding.drop_sharding, leaves))
    with types_of_mesh_around():
        results = bind(*operands)
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return list(map(explicit_sharding.drop_sharding_p.bind, results))
    return list(results)
