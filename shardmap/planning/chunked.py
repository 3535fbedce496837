"""`chunked`: a function in pieces, one after the other, in one program."""

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import (
    Any,
    Generic,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import jax
import jax.extend.core

from shardmap._jax import api_boundary
from shardmap._jax.errors import explained_errors
from shardmap._jax.stages import argument_names
from shardmap._jax.types import TreeDef
from shardmap.arrays.array_likes import is_array_like, refusal
from shardmap.arrays.running import jit_in_turns
from shardmap.arrays.trees import Flattened, leaf_paths
from shardmap.planning import report
from shardmap.planning.arguments import (
    Arguments,
    of_arguments,
    static_keys,
    with_statics,
)
from shardmap.planning.engine.nodes import Refused
from shardmap.planning.in_slices import InSlices, asked_points
from shardmap.planning.inside import primitive
from shardmap.planning.inside.primitive import (
    Options,
    chunked_p,
    keeping_residuals,
    without_tracers,
)
from shardmap.planning.run.cut_program import CutProgram
from shardmap.units import bytes_of, check_bool, decorator_with_options, shown

P = ParamSpec("P")
R = TypeVar("R")


class ChunkedFunction(Generic[P, R]):
    """A function that runs in pieces; the result of `chunked`."""

    def __init__(
        self,
        fun: Callable[P, R],
        in_slices: InSlices,
        options: Options,
        remat: bool | Callable[..., Any],
        strict: bool,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
    ) -> None:
        # First, as attributes of ``fun`` may have the names of ours.
        functools.update_wrapper(self, fun)
        self._fun, self._in_slices, self._options = fun, in_slices, options
        self._remat, self._strict = remat, strict
        self._statics = static_argnums, static_argnames
        self._warned = False
        self._jitted = jit_in_turns(self._bind)

    @api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments = self._arguments(args, kwargs)
        try:
            return self._jitted(*arguments)
        except Exception:
            self._check_arrays(*arguments)
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        name = getattr(self._fun, "__name__", type(self._fun).__name__)
        return f"<chunked {name}>"

    @api_boundary
    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Explains the pieces of each axis and what they reach, or why it is whole.

        Args:
          *args: the arguments of a call, arrays or `jax.ShapeDtypeStruct`.
          **kwargs: its keyword arguments.

        Returns:
          An `Explanation` of the pieces alone. `shardmap.explain` gives one of all.
        """
        arguments = self._arguments(args, kwargs)
        self._check_arrays(*arguments)
        shared, _, operands, out_tree = self._cut(*arguments)
        names = [*leaf_paths("args", arguments[0]), *leaf_paths("kwargs", arguments[1])]
        held = range(len(operands) - len(names))
        names += [f"closed-over value {number}" for number in held]
        cut_program = copy.copy(shared)  # Other functions may have equal jaxprs.
        cut_program.names, cut_program.out_tree = names, out_tree
        return report.explanation(cut_program, repr(self))

    def _arguments(self, args: Any, kwargs: Any) -> Arguments:
        statics = self._statics
        # Most functions have none.
        keys = static_keys(self._fun, args, kwargs, *statics) if any(statics) else ()
        return with_statics(args, kwargs, keys)

    def _check_arrays(self, args: Any, kwargs: Any) -> None:
        """Raises a TypeError that names an argument which is no array of JAX's."""
        for k, leaf in enumerate(jax.tree.leaves((args, kwargs))):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                continue
            try:
                jax.typeof(leaf)
            except Exception:
                name = argument_names(self._fun, args, kwargs)[k]
                why = refusal(leaf)
                if why is None and is_array_like(leaf):
                    why = "is not in memory. Give np.asarray(x), or use shardmap.plan."
                if why is None:
                    why = (
                        f"of type {type(leaf)} is not a valid JAX type. Give it to the "
                        "function by functools.partial."
                    )
                raise TypeError(f"chunked argument {name} {why}") from None

    def _cut(self, *arguments: Any) -> tuple[CutProgram, Options, list[Any], TreeDef]:
        """The function of a call, cut; how; its operands; the tree of its results.

        Behind the leaves of the arguments come values that the function closes over.
        """
        leaves = jax.tree.leaves(arguments)
        asked = asked_points("chunked", self._in_slices, arguments[0])
        call = of_arguments("chunked", self._fun, arguments)

        @functools.wraps(call)
        def flat(*arguments: Any) -> Flattened:
            return Flattened(*jax.tree.flatten(call(*arguments)))

        with explained_errors():
            jaxpr, result = jax.make_jaxpr(flat, return_shape=True)(*arguments)
        jaxpr, held = without_tracers(jaxpr)
        # Keyword arguments, and what the function closes over, are whole.
        asked += tuple(((),) * aval.ndim for aval in jaxpr.in_avals[len(asked) :])
        options = self._options._replace(asked=asked)
        try:
            cut_program = primitive.cut(jaxpr, options)
        except Refused as error:
            raise ValueError(f"chunked cannot cut {self!r}: {error}") from None
        return cut_program, options, [*leaves, *held], result.tree

    def _bind(self, *arguments: Any) -> Any:
        cut_program, options, operands, out_tree = self._cut(*arguments)
        if report.runs_whole(cut_program):
            text = (
                f"{self!r} runs as a whole: none of the cuts reaches its end. "
                f"{self!r}.explain(*args) says why."
            )
            if self._strict:
                raise ValueError(text)
            if not self._warned:
                self._warned = True
                warnings.warn(text, stacklevel=2)
        jaxpr = cut_program.closed
        if self._remat is True:
            results = chunked_p.bind(*operands, jaxpr=jaxpr, options=options)
        else:
            flat = jax.extend.core.jaxpr_as_fun(jaxpr)
            if self._remat is not False:
                flat = jax.checkpoint(flat, policy=self._remat)
            results = keeping_residuals(flat, operands, options)
        return jax.tree.unflatten(out_tree, results)


class Keywords(TypedDict, total=False):
    """The keyword arguments of `chunked`."""

    memory: int | str | None
    partial: bool
    remat: bool | Callable[..., Any]
    strict: bool
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]


@overload
def chunked(
    fun: Callable[P, R], in_slices: "InSlices" = None, **keywords: Unpack[Keywords]
) -> ChunkedFunction[P, R]: ...


@overload
def chunked(
    fun: None = None, in_slices: "InSlices" = None, **keywords: Unpack[Keywords]
) -> Callable[[Callable[P, R]], ChunkedFunction[P, R]]: ...


@decorator_with_options
def chunked(
    fun: Any = None,
    in_slices: "InSlices" = None,
    *,
    memory: int | str | None = None,
    partial: bool = True,
    remat: bool | Callable[..., Any] = True,
    strict: bool = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Runs a function in pieces, one after the other, so that it needs less memory.

    The function is written for whole arrays. The analysis of `plan` finds what each
    piece of the arguments contributes: partial sums are combined, and borders that
    neighbours need are read twice. The pieces run in loops of one program. The result
    is a JAX function, for `jax.jit`, `jax.grad`, `jax.jvp`, `jax.vmap`, loops, `spmap`,
    `plan` and `chunked`. `Chunked`, an entry of a `ShardingSpec`, is unrelated.

    Args:
      fun: a function of arrays that JAX can trace.
      in_slices: how the positional arguments are cut: a pytree prefix of them whose
        leaves are None (whole), `EACH`, or a dict {axis: cut}. A cut is a number of
        pieces of nearly equal length, a tuple of lengths, a list of (start, stop) pairs
        or slices, `Pieces` of a length, `EACH`, or `AUTO`, as few pieces as fit into
        ``memory``. Keyword arguments are whole. Default: with ``memory``, the axes that
        save the most; otherwise nothing is cut.
      memory: the bytes that a call may use besides its arguments and results: an int,
        or a text such as ``"2 GB"``. It is an upper bound for the loops, computed
        before anything runs.
      partial: whether to cut axes that the function reduces.
      remat: what a backward pass does. True: it recomputes the values, piece by piece.
        False: all values are kept, for reverse-mode differentiation only. One of
        `jax.checkpoint_policies`: the values that it saves are kept.
      strict: whether to raise an error, instead of a warning, if no cut has an effect.
      static_argnums: the positions of arguments that are not arrays, as for `jax.jit`.
        In ``in_slices`` they are None.
      static_argnames: the names of such arguments.

    Returns:
      A function with the arguments and results of ``fun``. Its ``explain(*args)`` says
      what becomes of each cut.

    Raises:
      TypeError: ``fun`` is not callable. When called: ``in_slices`` has something that
        is not a cut.
      ValueError: ``memory`` is not a size. When called: ``in_slices`` does not fit the
        arguments, ``memory`` is too little for any cut, or the function writes to
        references of JAX.

    Example:
      >>> import jax, jax.numpy as jnp, shardmap as sm
      >>> def attention(q, k, v):
      ...     return jax.nn.softmax(q @ k.T) @ v
      >>> attend = sm.chunked(attention, ({0: 4}, None, None))
      >>> q = jnp.ones((8, 2))
      >>> attend(q, q, q).shape
      (8, 2)
    """
    if not callable(fun):
        raise TypeError(f"chunked takes a function, got {shown(fun)}")
    if hasattr(in_slices, "shape"):
        name = getattr(fun, "__name__", "fun")
        raise TypeError(
            f"chunked takes only the function: write chunked({name})(x), not "
            f"chunked({name}, x)"
        )
    check_bool("partial", partial)
    check_bool("strict", strict)
    if not (isinstance(remat, bool) or callable(remat)):
        raise TypeError(
            "remat must be True, False or one of jax.checkpoint_policies, got "
            f"{shown(remat)}"
        )
    room = None if memory is None else bytes_of("memory", memory)
    if in_slices is None and room is None:
        warnings.warn(
            "chunked: nothing is cut: give in_slices or memory.", stacklevel=3
        )
    options = Options(partial, room, finds=in_slices is None)
    statics = static_argnums, static_argnames
    return ChunkedFunction(fun, in_slices, options, remat, strict, *statics)
