"""The oracle of random programs: `jax.vmap` and elementwise functions."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.together.random_programs import Machine, Scope, Which
from tests.together.random_values import State, other_branch


class ByLoops(Machine):
    """The oracle. Maps are `jax.vmap`; what would be tapped is a result."""

    def __init__(self, differentiable: bool) -> None:
        super().__init__(self.vmap, differentiable)
        self.tapped: list[tuple[Any, Any]] = []

    def vmap(
        self,
        fun: Any,
        level: int | None,
        name: str | None,
        in_axes: Any,
        out_axes: Any = 0,
        batch_size: int | None = None,
    ) -> Any:
        """`jax.vmap`, from which what is tapped comes as results."""

        def with_taps(*args: Any) -> Any:
            before, self.tapped = self.tapped, []
            result = fun(*args)
            inside, self.tapped = self.tapped, before
            return result, inside

        def mapped(*args: Any) -> Any:
            result, tapped = jax.vmap(
                with_taps, in_axes, (out_axes, 0), axis_name=name
            )(*args)
            self.tapped += tapped
            return result

        return mapped

    def draw(self, keys: Any, n: Any) -> Any:
        # JAX's own vmap of keys of XLA's generators draws with the first one.
        rows = jnp.stack([jax.random.uniform(key) for key in keys])
        return rows[n]

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

    def count(self, chosen: Which) -> Any:
        return chosen.count

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

    def reduce(self, kind: str, values: Any, chosen: Which) -> Any:
        groups = chosen.groups or [list(range(chosen.total))]
        together = np.zeros((chosen.total, chosen.total), bool)
        for group in groups:
            together[np.ix_(group, group)] = True
        mine = jnp.asarray(together)[self.index(chosen.names)]

        def reduced(value: Any) -> Any:
            counted = value.astype(np.int32) if value.dtype == np.bool_ else value
            everyone = self.everyone(counted, chosen.names)
            ours = mine.reshape(-1, *[1] * value.ndim)
            if kind in ("max", "min"):
                wide = counted.dtype in (np.float32, np.int32)
                low, high = (-1000, 1000) if wide else (0, 100)
                other = low if kind == "max" else high
                kept = jnp.where(ours, everyone, jnp.array(other, counted.dtype))
                return kept.max(0) if kind == "max" else kept.min(0)
            total = jnp.where(ours, everyone, jnp.zeros_like(everyone)).sum(0)
            total = total.astype(counted.dtype)
            return total / chosen.count if kind == "mean" else total

        return jax.tree.map(reduced, values)

    def largest(self, value: Any, names: tuple[str, ...]) -> Any:
        return self.everyone(value, names).max()

    def total(self, value: Any, names: tuple[str, ...]) -> Any:
        return self.everyone(value, names).sum(0)

    def move(self, kind: str, values: Any, chosen: Which, sources: Any) -> Any:
        source = jnp.asarray(sources, np.int32)[self.index(chosen.names)]

        def moved(value: Any) -> Any:
            moved = self.everyone(value, chosen.names)[source]
            return jnp.where(source >= 0, moved, jnp.zeros_like(moved))

        return jax.tree.map(moved, values)

    def gather(self, value: Any, chosen: Which, axis: int, tiled: bool) -> Any:
        members, _ = self.members(chosen)
        group = list(self.everyone(value, chosen.names)[members])
        return jnp.concatenate(group, axis) if tiled else jnp.stack(group, axis)

    def scatter(self, value: Any, chosen: Which, axis: int, tiled: bool) -> Any:
        members, place = self.members(chosen)
        total = self.everyone(value, chosen.names)[members].sum(0).astype(value.dtype)
        return self.piece(total, chosen, axis, tiled, place)

    def exchange(
        self, value: Any, chosen: Which, axis: int, to: int, tiled: bool
    ) -> Any:
        members, place = self.members(chosen)
        group = self.everyone(value, chosen.names)[members]
        cut = self.piece(group, chosen, axis + 1, tiled, place)
        return jnp.concatenate(list(cut), to) if tiled else jnp.moveaxis(cut, 0, to)

    def piece(
        self, value: Any, chosen: Which, axis: int, tiled: bool, place: Any
    ) -> Any:
        size = value.shape[axis] // chosen.count
        cut = lax.dynamic_slice_in_dim(value, place * size, size, axis)
        return cut if tiled else cut.squeeze(axis)

    # Control flow

    def in_pieces(self, number: int, fun: Any) -> Any:
        return fun

    def tap(self, number: int, n: Any, scope: Scope) -> None:
        if scope.taps:
            self.tapped.append((self.row(number, n, scope), scope.alive))

    def jit(self, number: int, body: Any, state: State, scope: Scope) -> State:
        return body(state)

    checkpoint = custom = parts = jit

    def cut_in_two(self, x: Any) -> Any:
        return x

    def scan(self, number: int, body: Any, state: State, scope: Scope) -> State:
        first = body(state)
        second = body(first._replace(x=-first.x))
        return second._replace(x=second.x + first.x, n=second.n + second.n)

    def cond(self, number: int, body: Any, state: State, scope: Scope) -> State:
        largest = self.largest(state.n, scope.free)
        return self.either(largest > number % 4, body, state, scope)

    def branch(self, number: int, body: Any, state: State, scope: Scope) -> State:
        return self.either(state.n > number % 4, body, state, scope)

    def switch(self, number: int, body: Any, state: State, scope: Scope) -> State:
        chosen = jnp.clip(state.n - number % 2, 0, 2)
        done = self.either(chosen == 1, body, state, scope)
        return jax.tree.map(lambda a, b: jnp.where(chosen == 0, a, b), state, done)

    def either(self, chosen: Any, body: Any, state: State, scope: Scope) -> State:
        done = body(state, scope._replace(alive=scope.alive & chosen))
        return jax.tree.map(
            lambda a, b: jnp.where(chosen, a, b), done, other_branch(state)
        )

    def rounds(self, number: int, body: Any, state: State, scope: Scope) -> State:
        rounds = jnp.int32(number % 3)
        return self.loop(number, body, state, scope, lambda state: rounds, 2)

    def while_(self, number: int, body: Any, state: State, scope: Scope) -> State:
        if self.differentiable:
            return body(state)
        rounds = lax.rem(state.n + number, jnp.int32(4))
        return self.loop(number, body, state, scope, lambda state: rounds, 3)

    def agreed(self, number: int, body: Any, state: State, scope: Scope) -> State:
        if self.differentiable:
            return body(state)

        def rounds(state: State) -> Any:
            largest = self.largest(state.n, scope.free)
            return jnp.minimum(2, lax.rem(largest + number, jnp.int32(4)))

        return self.loop(number, body, state, scope, rounds, 2)

    def loop(
        self,
        number: int,
        body: Any,
        state: State,
        scope: Scope,
        rounds: Any,
        most: int,
    ) -> State:
        asks = jnp.bool_(True)
        for k in range(most):
            asks &= k < rounds(state)
            there = scope._replace(alive=scope.alive & asks)
            self.tap(number, jnp.int32(k), there)
            new = body(state, there)
            state = jax.tree.map(
                lambda a, b, asks=asks: jnp.where(asks, a, b), new, state
            )
        return state
