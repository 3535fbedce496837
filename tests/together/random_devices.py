"""Random programs on devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm
from tests.together.random_programs import REDUCTIONS, Machine, Scope, Which
from tests.together.random_values import State, other_branch


class OnDevices(Machine):
    """JAX's own collectives and control flow, and a host function that is tapped.

    Args:
      forward: whether any of it is differentiated forward, which JAX does not do with a
        `jax.custom_vjp`.
      recorder: the host function.
      partitions: whether the map has devices for two partitions of each element.
    """

    def __init__(
        self,
        map_: Callable[..., Any],
        differentiable: bool,
        forward: bool,
        recorder: Callable[[Any], None],
        partitions: bool,
    ) -> None:
        super().__init__(map_, differentiable)
        self.forward = forward
        self.recorder = recorder
        self.partitions = partitions

    # Collectives

    def index(self, names: tuple[str, ...]) -> Any:
        return lax.axis_index(names if len(names) > 1 else names[0])

    def count(self, chosen: Which) -> Any:
        return lax.psum(1, chosen.names, axis_index_groups=chosen.groups)

    def reduce(self, kind: str, value: Any, chosen: Which) -> Any:
        reduction = lax.pmean if kind == "mean" else REDUCTIONS[kind]
        return reduction(value, chosen.names, axis_index_groups=chosen.groups)

    def largest(self, value: Any, names: tuple[str, ...]) -> Any:
        return lax.pmax(value, names) if names else value

    def total(self, value: Any, names: tuple[str, ...]) -> Any:
        return lax.psum(value, names)

    def move(self, kind: str, values: Any, chosen: Which, sources: Any) -> Any:
        if kind == "shuffle":
            return lax.pshuffle(values, chosen.names, sources.tolist())
        if kind == "broadcast":
            return lax.pbroadcast(values, chosen.names, int(sources[0]))
        pairs = [(int(start), k) for k, start in enumerate(sources) if start >= 0]
        return lax.ppermute(values, chosen.names, pairs)

    def gather(self, value: Any, chosen: Which, axis: int, tiled: bool) -> Any:
        return lax.all_gather(
            value,
            chosen.names,
            axis=axis,
            axis_index_groups=chosen.groups,
            tiled=tiled,
        )

    def scatter(self, value: Any, chosen: Which, axis: int, tiled: bool) -> Any:
        return lax.psum_scatter(
            value,
            chosen.names,
            scatter_dimension=axis,
            axis_index_groups=chosen.groups,
            tiled=tiled,
        )

    def exchange(
        self, value: Any, chosen: Which, axis: int, to: int, tiled: bool
    ) -> Any:
        return lax.all_to_all(
            value, chosen.names, axis, to, axis_index_groups=chosen.groups, tiled=tiled
        )

    # Control flow

    def in_pieces(self, number: int, fun: Any) -> Any:
        return sm.chunked(fun, {0: 2 + number % 2})

    def tap(self, number: int, n: Any, scope: Scope) -> None:
        if scope.taps:
            sm.tap(self.recorder, self.row(number, n, scope))

    def jit(self, number: int, body: Any, state: State, scope: Scope) -> State:
        return jax.jit(body)(state)

    def parts(self, number: int, body: Any, state: State, scope: Scope) -> State:
        if not self.partitions:
            return body(state)
        cut = State((2,), None, None)
        return sm.sharded_jit(body, (cut if number % 2 else None,), cut)(state)

    def cut_in_two(self, x: Any) -> Any:
        return sm.with_sharding_constraint(x, (2,)) if self.partitions else x

    def checkpoint(self, number: int, body: Any, state: State, scope: Scope) -> State:
        return jax.checkpoint(body)(state)

    def custom(self, number: int, body: Any, state: State, scope: Scope) -> State:
        """A function whose derivative is given, with the collectives that it has."""

        def plain(x: Any, w: Any, n: Any, d: Any, alive: Any) -> State:
            return body(State(x, n, d), scope._replace(w=w, alive=alive))

        def at(others: Any) -> Any:
            return lambda x, w: plain(x, w, *others)

        def derivative(primals: Any, tangents: Any) -> Any:
            x, w, *others = primals
            return jax.jvp(at(others), (x, w), tangents[:2])

        def forward(x: Any, w: Any, *others: Any) -> Any:
            return jax.vjp(at(others), x, w)

        if self.forward or number % 3 == 0:
            function: Any = jax.custom_jvp(plain)
            function.defjvp(derivative)
        else:
            function = jax.custom_vjp(plain)
            function.defvjp(forward, lambda back, ct: (*back(ct), None, None, None))
        return function(state.x, scope.w, state.n, state.d, scope.alive)

    def scan(self, number: int, body: Any, state: State, scope: Scope) -> State:
        def step(state: State, sign: Any) -> tuple[State, Any]:
            new = body(state._replace(x=state.x * sign))
            return new, {"x": new.x, "n": new.n}

        signs = jnp.array([-1, 1], np.float32)
        new, rounds = lax.scan(step, state, signs, reverse=True, unroll=1 + number % 2)
        return new._replace(x=new.x + rounds["x"][1], n=new.n + rounds["n"][0])

    def cond(self, number: int, body: Any, state: State, scope: Scope) -> State:
        largest = self.largest(state.n, scope.free)
        return lax.cond(largest > number % 4, body, other_branch, state)

    def branch(self, number: int, body: Any, state: State, scope: Scope) -> State:
        return lax.cond(state.n > number % 4, body, other_branch, state)

    def switch(self, number: int, body: Any, state: State, scope: Scope) -> State:
        branches = [lambda state: state, body, other_branch]
        return lax.switch(state.n - number % 2, branches, state)

    def rounds(self, number: int, body: Any, state: State, scope: Scope) -> State:
        rounds = number % 3
        if self.differentiable:
            return lax.fori_loop(0, rounds, lambda _, state: body(state), state)
        return self.loop(number, body, state, scope, lambda state: jnp.int32(rounds))

    def while_(self, number: int, body: Any, state: State, scope: Scope) -> State:
        if self.differentiable:
            return body(state)
        rounds = lax.rem(state.n + number, jnp.int32(4))
        return self.loop(number, body, state, scope, lambda state: rounds)

    def agreed(self, number: int, body: Any, state: State, scope: Scope) -> State:
        if self.differentiable:
            return body(state)

        def rounds(state: State) -> Any:
            largest = self.largest(state.n, scope.free)
            return jnp.minimum(2, lax.rem(largest + number, jnp.int32(4)))

        return self.loop(number, body, state, scope, rounds)

    def loop(
        self, number: int, body: Any, state: State, scope: Scope, rounds: Any
    ) -> State:
        def more(carry: Any) -> Any:
            return carry[0] < rounds(carry[1])

        def once(carry: Any) -> Any:
            self.tap(number, carry[0], scope)
            return carry[0] + 1, body(carry[1])

        return lax.while_loop(more, once, (jnp.int32(0), state))[1]
