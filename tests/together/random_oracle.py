"""The oracle of random programs: `jax.vmap` and elementwise functions."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.together.random_programs import Machine, Scope, State, Which, other_branch


class ByLoops(Machine):
    """The oracle. Maps are `jax.vmap`; what would be tapped is a result."""

    def __init__(self, differentiable: bool) -> None:
        super().__init__(self.vmap, differentiable)
        self.tapped: list[tuple[Any, Any]] = []

    def vmap(self, fun: Any, level: int | None, name: str | None, in_axes: Any) -> Any:
        """`jax.vmap`, from which what is tapped comes as results."""

        def with_taps(*args: Any) -> Any:
            before, self.tapped = self.tapped, []
            result = fun(*args)
            inside, self.tapped = self.tapped, before
            return result, inside

        def mapped(*args: Any) -> Any:
            result, tapped = jax.vmap(with_taps, in_axes, 0, axis_name=name)(*args)
            self.tapped += tapped
            return result

        return mapped

    # Collectives

    def everyone(self, value: Any, names: tuple[str, ...]) -> Any:
        """The values of all elements in front, the first name's the major axis."""
        total = math.prod(map(lax.axis_size, names))
        shape = value.shape
        for name in reversed(names):
            value = lax.all_gather(value, name)
        return value.reshape(total, *shape)

    def index(self, names: tuple[str, ...]) -> Any:
        index = jnp.int32(0)
        for name in names:
            index = index * lax.axis_size(name) + lax.axis_index(name)
        return index

    def members(self, chosen: Which) -> tuple[Any, Any]:
        """Who is in this element's group, in order, and its own place there."""
        groups = chosen.groups or [list(range(chosen.total))]
        members = np.zeros((chosen.total, chosen.count), np.int32)
        places = np.zeros(chosen.total, np.int32)
        for group in groups:
            for place, index in enumerate(group):
                members[index], places[index] = group, place
        me = self.index(chosen.names)
        return jnp.asarray(members)[me], jnp.asarray(places)[me]

    def reduce(self, kind: str, value: Any, chosen: Which) -> Any:
        groups = chosen.groups or [list(range(chosen.total))]
        together = np.zeros((chosen.total, chosen.total), bool)
        for group in groups:
            together[np.ix_(group, group)] = True
        mine = jnp.asarray(together)[self.index(chosen.names)]
        mine = mine.reshape(-1, *[1] * value.ndim)
        everyone = self.everyone(value, chosen.names)
        if kind == "max":
            return jnp.where(mine, everyone, -1000).max(0)
        if kind == "min":
            return jnp.where(mine, everyone, 1000).min(0)
        total = jnp.where(mine, everyone, 0).sum(0)
        return total / chosen.count if kind == "mean" else total

    def move(self, kind: str, value: Any, chosen: Which, sources: Any) -> Any:
        source = jnp.asarray(sources, np.int32)[self.index(chosen.names)]
        moved = self.everyone(value, chosen.names)[source]
        return jnp.where(source >= 0, moved, 0)

    def gather(self, value: Any, chosen: Which, axis: int, tiled: bool) -> Any:
        members, _ = self.members(chosen)
        group = list(self.everyone(value, chosen.names)[members])
        return jnp.concatenate(group, axis) if tiled else jnp.stack(group, axis)

    def scatter(self, value: Any, chosen: Which, axis: int, tiled: bool) -> Any:
        members, place = self.members(chosen)
        total = self.everyone(value, chosen.names)[members].sum(0)
        return self.piece(total, chosen, axis, tiled, place)

    def exchange(
        self, value: Any, chosen: Which, axis: int, to: int, tiled: bool
    ) -> Any:
        members, place = self.members(chosen)
        group = [
            self.piece(given, chosen, axis, tiled, place)
            for given in self.everyone(value, chosen.names)[members]
        ]
        return jnp.concatenate(group, to) if tiled else jnp.stack(group, to)

    def piece(
        self, value: Any, chosen: Which, axis: int, tiled: bool, place: Any
    ) -> Any:
        cut = jnp.stack(jnp.split(value, chosen.count, axis))[place]
        return cut if tiled else cut.squeeze(axis)

    # Control flow

    def tap(self, number: int, n: Any, scope: Scope) -> None:
        if scope.taps:
            self.tapped.append((self.row(number, n, scope), scope.alive))

    def jit(self, number: int, body: Any, state: State, scope: Scope) -> State:
        return body(state)

    checkpoint = jit

    def scan(self, number: int, body: Any, state: State, scope: Scope) -> State:
        state = body(state)
        return body(State(-state.x, state.n))

    def cond(self, number: int, body: Any, state: State, scope: Scope) -> State:
        largest = self.everyone(state.n, scope.names).max()
        return self.either(largest > number % 4, body, state, scope)

    def branch(self, number: int, body: Any, state: State, scope: Scope) -> State:
        return self.either(state.n > number % 4, body, state, scope)

    def either(self, chosen: Any, body: Any, state: State, scope: Scope) -> State:
        done = body(state, scope._replace(alive=scope.alive & chosen))
        return jax.tree.map(
            lambda a, b: jnp.where(chosen, a, b), done, other_branch(state)
        )

    def rounds(self, number: int, body: Any, state: State, scope: Scope) -> State:
        rounds = jnp.int32(number % 3)
        return self.loop(number, body, state, scope, rounds, 2)

    def while_(self, number: int, body: Any, state: State, scope: Scope) -> State:
        if self.differentiable:
            return body(state)
        rounds = lax.rem(state.n + number, jnp.int32(4))
        return self.loop(number, body, state, scope, rounds, 3)

    def loop(
        self,
        number: int,
        body: Any,
        state: State,
        scope: Scope,
        rounds: Any,
        most: int,
    ) -> State:
        for k in range(most + 1):
            asked = scope._replace(alive=scope.alive & (k <= rounds))
            self.tap(number, jnp.int32(k), asked)
            if k < most:
                goes_on = k < rounds
                new = body(state, scope._replace(alive=scope.alive & goes_on))
                state = jax.tree.map(
                    lambda a, b, goes_on=goes_on: jnp.where(goes_on, a, b), new, state
                )
        return state
