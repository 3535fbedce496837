"""The effects of equations: JAX's own, and that of taps.

JAX has private tables of the classes of effects that loops and checkpoint allow, and
that are ordered. The classes of JAX's effects are found on jaxprs that have them.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
from jax._src import callback
from jax.experimental import io_callback
from jax.interpreters import mlir

from shardmap._jax import SUPPORTED
from shardmap._jax.context import LoweringContext
from shardmap._jax.types import Effect, Jaxpr, Value, Var


def _effects_of(fun: Callable[..., Any], *args: Value) -> set[Effect]:
    return set(jax.make_jaxpr(fun, axis_env=[("i", 1)])(*args).jaxpr.effects)


# Names of axes

NO_AXIS = object()
"""The axis of effects that use none."""

[_axis_effect] = _effects_of(lambda: jax.lax.axis_index("i"))
AXIS_EFFECT = type(_axis_effect)
"""The class of the effects of using an axis name."""


def axis_of(effect: Effect) -> Hashable:
    """The axis that an effect is the use of; `NO_AXIS` of other effects."""
    is_use = isinstance(effect, AXIS_EFFECT)
    name: Hashable = getattr(effect, "name", NO_AXIS)
    return name if is_use else NO_AXIS


def axes_used(effects: Collection[Effect]) -> set[Hashable]:
    """The axes that effects are the uses of."""
    return {axis_of(effect) for effect in effects} - {NO_AXIS}


def without_axis(effects: Collection[Effect], name: Hashable) -> set[Effect]:
    """The effects without the use of this axis."""
    return {effect for effect in effects if axis_of(effect) != name}


def with_axis(effect: Effect, name: Hashable) -> Effect:
    """The effect of using another axis."""
    use: Any = effect
    changed: Effect = dataclasses.replace(use, name=name)
    return changed


# Variables


def on_variables(effects: Collection[Effect], new: Callable[[Var], Var]) -> set[Effect]:
    """The effects, with ``new`` of the variable of each, such as a reference."""

    def moved(effect: Any) -> Effect:
        has_variable = hasattr(effect, "input")
        return effect.replace(input=new(effect.input)) if has_variable else effect

    return set(map(moved, effects))


@functools.lru_cache(maxsize=1)
def _references() -> Jaxpr:
    """A jaxpr that makes a reference, and reads, writes and adds to it."""

    def fun(x: Value) -> Any:
        ref = jax.new_ref(x)
        ref[...] = x
        jax.ref.addupdate(ref, ..., x)
        return ref[...] + jax.freeze(ref)

    return jax.make_jaxpr(fun)(jax.ShapeDtypeStruct((), "float32")).jaxpr


def without_references(effects: Collection[Effect]) -> set[Effect]:
    """The effects without those on references made in the same jaxpr."""
    return set(effects) - _references().effects


def has_external_effect(effect: Effect) -> bool:
    """Whether an effect is other than the use of an axis name or a reference."""
    inside = {type(e) for eqn in _references().eqns for e in eqn.effects}
    return axis_of(effect) is NO_AXIS and type(effect) not in inside


# Calls of the host


@functools.lru_cache(maxsize=1)
def io_effects() -> frozenset[Effect]:
    """The effects of `jax.experimental.io_callback`, ordered and not."""
    return frozenset(
        effect
        for ordered in (False, True)
        for effect in _effects_of(
            functools.partial(io_callback, lambda: None, None, ordered=ordered)
        )
    )


CALLBACK_JAXPR = jax.make_jaxpr(
    lambda: io_callback(lambda: (), (), ordered=True)
)().jaxpr
"""JAX's lowering knows the devices of a program if the parameters of an equation have a
jaxpr with a callback of JAX's own."""

[_ordered_io] = CALLBACK_JAXPR.effects
[DEBUG_EFFECT] = _effects_of(lambda: jax.debug.callback(lambda: None))
"""The effect of `jax.debug.callback`."""


def is_callback() -> bool:
    """Whether a running program has called the host, and so this thread.

    It waits for what the thread returns. Threads of other libraries, which Python has
    not started either, wait for nobody; the outermost frame tells them apart.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") in (callback.__name__, __name__)


# JAX has no public names for these classes, so mypy cannot know what they are.
class TapEffect(type(_ordered_io), type(DEBUG_EFFECT)):  # type: ignore[misc]
    """The effect of taps: ordered on each device, and allowed everywhere.

    JAX asks for the class of an effect. It orders effects of the first base class, and
    allows the second in checkpoint and in custom derivatives.
    """

    def __str__(self) -> str:
        return "Tap"


TAP_EFFECT = TapEffect()


def lower_ordered_callback(
    ctx: LoweringContext,
    effect: Effect,
    run: Callable[..., Sequence[Value]],
    operands: Sequence[Value],
    instead: Callable[..., Sequence[Any]] | None,
) -> Any:
    """Lowers one ordered `io_callback` in place of an equation with `TAP_EFFECT`.

    Args:
      ctx: of the equation's lowering rule.
      effect: the equation's only effect, which orders the callback.
      run: calls `io_callback` once, ordered.
      operands: of ``run``.
      instead: a host function of NumPy arrays that the program calls in place of JAX's
        wrapper; None: it calls that.
    """
    token = ctx.tokens_in.get(effect)
    inner = ctx.replace(tokens_in=mlir.TokenSet({_ordered_io: token}), tokens_out=None)
    callbacks = ctx.module_context.host_callbacks
    before = len(callbacks)
    results = mlir.lower_fun(run)(inner, *operands)
    ctx.set_tokens_out(mlir.TokenSet({effect: inner.tokens_out.get(_ordered_io)}))
    if instead is not None:
        if len(callbacks) != before + 1 or not callable(callbacks[before]):
            raise RuntimeError(
                "shardmap.tap looks for its call among those that JAX has noted for "
                f"the program, but there are {len(callbacks) - before} new ones. It "
                f"works with JAX {SUPPORTED}."
            )
        # The program finds what it calls by its place in this list.
        callbacks[before] = lambda token, *values: (token, *instead(*values))
    return results
