"""The stages of JAX's compilation: tracing, lowering, compiling and running."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.api_util
from jax._src import config
from jax._src.api_util import InternalFloatingPointError

from shardmap._jax.types import TreeDef

FoundNaN = InternalFloatingPointError
"""The error of a program under `jax.debug_nans`."""


class Mismatch(TypeError):
    """The arguments do not fit a compiled program."""


def _type(aval: Any) -> tuple[Any, ...]:
    return aval.weak_type, getattr(aval, "memory_space", None)


class _Exact:
    """An executable for arguments for which `jax.jit` would not trace again.

    JAX's own ignores weak types, kinds of memory and the configuration.
    """

    def __init__(self, compiled: jax.stages.Compiled) -> None:
        self._executable = compiled._executable
        self._types = list(map(_type, jax.tree.leaves(compiled.in_avals)))
        self._configuration = config.trace_context()

    def call(self, *leaves: Any) -> Any:
        if config.trace_context() != self._configuration:
            raise Mismatch("compiled for another configuration of JAX")
        if list(map(_type, map(jax.typeof, leaves))) != self._types:
            raise Mismatch("compiled for other weak types, or another kind of memory")
        return self._executable.call(*leaves)


def dispatcher(
    compiled: jax.stages.Compiled, in_tree: TreeDef, out_tree: TreeDef
) -> Callable[..., Any]:
    """The C++ function that calls a compiled program, as that of `jax.jit`.

    It raises TypeError or ValueError, before it runs anything, for arguments of another
    structure, type, weak type or sharding, and in another configuration of JAX. Python
    runs only for new signatures. A program that calls the host has no such function.

    The structures are those of calls: JAX would make them of avals and shardings, which
    a user's class may refuse.
    """
    exact: Any = _Exact(compiled)
    params = compiled._params._replace(
        executable=exact,
        in_tree=in_tree,
        out_tree=out_tree,
        in_types=None,
        out_types=None,
    )
    call: Callable[..., Any] | None = compiled._executable.create_cpp_call(params)
    if call is not None:
        return call
    return lambda *args, **kwargs: compiled.call(params, *args, **kwargs)[0]


def is_compile_only(device: jax.Device) -> bool:
    """Whether a device, of `jax.experimental.topologies`, compiles but does not run."""
    return bool(device.client.runtime_type == "compile_only_runtime")


def trace_as(
    traced: Any,
    what: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Sequence[int] = (),
) -> None:
    """Names a function of leaves, in JAX's errors, as a user's function of arguments.

    Of the arguments of a call only the structure is used.
    """
    traced.__fun_debug_info__ = jax.api_util.debug_info(
        what, fun, tuple(args), dict(kwargs), static_argnums=static_argnums
    )


def argument_names(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """The name of each leaf: ``x``, ``params['w']``; ``rest[0]`` of ``*rest``.

    Those by keyword have their keywords: JAX writes ``kwargs['w']`` for ``w``.
    """
    info: Any = jax.api_util.debug_info("call", fun, tuple(args), dict(kwargs))
    names = info.safe_arg_names(len(jax.tree.leaves((args, kwargs))))
    by_keyword = [
        key + jax.tree_util.keystr(path)
        for key in sorted(kwargs)
        for path, _ in jax.tree_util.tree_leaves_with_path(kwargs[key])
    ]
    return [*names[: len(names) - len(by_keyword)], *by_keyword]


def with_params(
    traced: jax.stages.Traced,
    change: Callable[[Mapping[str, Any]], dict[str, Any]],
    change_sharding: Callable[[Any], Any],
) -> jax.stages.Traced:
    """A trace with other parameters, and other shardings of its arguments.

    The parameters are those of an equation of `jax.jit`; an argument's sharding may be
    None.
    """
    changed: Any = copy.copy(traced)
    changed._params = change(changed._params)
    changed._meta_tys_flat = [
        each.replace(sharding=change_sharding(each.sharding))
        for each in changed._meta_tys_flat
    ]
    # What was derived of the old ones.
    for cache in ("_lojax", "_closure_converted"):
        if hasattr(changed, cache):
            setattr(changed, cache, None)
    return cast(jax.stages.Traced, changed)


def given_shardings(traced: Any) -> tuple[list[Any], list[Any]]:
    """The shardings that a trace gives its arguments and results; None for others.

    JAX's public objects have them only when the program is compiled.
    """

    def known(given: Any) -> Any:
        return given if isinstance(given, jax.sharding.Sharding) else None

    params, given = traced._params, traced._meta_tys_flat
    pairs = zip(params["in_shardings"], given, strict=True)
    ins = [known(asked) or known(each.sharding) for asked, each in pairs]
    return ins, list(map(known, params["out_shardings"]))


SLOW_LEADING_SUMS = jax.__version_info__ < (0, 12)
"""Whether the CPU's compiler takes 30 to 60 times too long to sum over leading axes.

Seconds per GiB of float32, 64 rows of 512 x 512: 3 to 7 in JAX 0.10.2, 0.06 in 0.12.
"""
