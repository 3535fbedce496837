"""A user's function under `spmap`, `mesh_map` or `sharded_jit`, and its arguments.

What the three share: names for errors, caches, and how calls are bound.
"""

import abc
import collections
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import jax

from shardmap._jax.stages import argument_names, trace_as
from shardmap._jax.types import Aval, PyTree, TreeDef, Value
from shardmap.api import caches
from shardmap.api.arguments import Arguments, Static
from shardmap.api.calls import Call
from shardmap.arrays import array_likes, trees
from shardmap.arrays.trees import Flattened

Args = Sequence[PyTree]
Kwargs = dict[str, PyTree]
FlatFunction = Callable[..., Flattened]


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
