"""A small language of programs, and what the machines that run them have in common.

A program is a list of steps, each a kind, a number, and perhaps a list of steps to do
inside. `OnDevices`, in random_devices.py, does them with the collectives and the
control flow of JAX in maps as they are to be tested. `ByLoops`, in random_oracle.py, is
the oracle: all it asks of JAX are functions of one element, derivatives, `jax.vmap`,
and to gather along one axis of that. It has no control flow; its loops are unrolled,
and what a branch or a further round does not reach is masked.
"""

import math
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.together.random_values import (
    State,
    bits,
    fold,
    from_integer,
    pieces,
    to_integer,
    together,
    total,
)

LOCAL = [
    "sine", "weight", "shift", "random", "tap", "sorted", "solved", "running",
    "constraint", "pieces",
]  # fmt: skip
REDUCTIONS = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
COLLECTIVES = [
    *REDUCTIONS, "mean", "gather", "scatter", "exchange", "permute", "shuffle",
    "broadcast", "index", "count",
]  # fmt: skip
DERIVATIVES = ["gradient", "tangent"]
"""Steps that differentiate those inside them."""
PARTITIONS = ["constraint", "parts"]
"""Steps with partitions."""

KEYS = ["threefry2x32", "rbg", "unsafe_rbg"]
"""Whose keys draw."""

AXIS_NAMES = ["c", "a", "d", "b", "e", "f", "g", "h"]
"""Also what meshes call their axes, in another order."""


class Scope(NamedTuple):
    """What a step finds around it.

    Attributes:
      names: the axes, from the outermost one.
      w: numbers like `x`, perhaps of all elements together.
      alive: whether this is done at all.
      taps: whether to tap.
      level: how many maps of the program are around.
      has_vmap: whether a plain `jax.vmap` is around inside the map.
      looped: the axes of maps that run their elements one part after the other, which
        may not need each other on the way.
      indices: the positions along these axes, where control flow may not ask.
    """

    names: tuple[str, ...]
    w: Any
    alive: Any
    taps: bool
    level: int
    has_vmap: bool = False
    looped: tuple[str, ...] = ()
    indices: Mapping[str, Any] = {}

    @property
    def free(self) -> tuple[str, ...]:
        """The axes whose elements may need each other."""
        return tuple(name for name in self.names if name not in self.looped)


def has(program: Any, kinds: Container[str]) -> bool:
    """Whether a step of these kinds is in the program."""
    return any(
        kind in kinds or any(has(inside, kinds) for inside in rest)
        for kind, _, *rest in program
    )


class Which(NamedTuple):
    """The axes of a collective, how many elements they have, and in what groups."""

    names: tuple[str, ...]
    total: int
    groups: list[list[int]] | None

    @property
    def count(self) -> int:
        """The number of elements in a group, if all have as many."""
        return len(self.groups[0]) if self.groups else self.total


def which(scope: Scope, rng: Any, grouped: str) -> Which:
    """Draws axes in any order, and groups: "none", "even" ones or "any"."""
    count = rng.integers(1, min(3, len(scope.free)) + 1)
    chosen = rng.permutation(len(scope.free))[:count]
    names = tuple(scope.free[k] for k in chosen)
    size = math.prod(map(lax.axis_size, names))
    if grouped == "none" or rng.random() < 0.4:
        return Which(names, size, None)
    order = rng.permutation(size)
    if grouped == "even" or rng.random() < 0.4:
        sizes = [k for k in range(1, size + 1) if size % k == 0]
        groups = order.reshape(-1, rng.choice(sizes))
    else:
        groups = np.split(order, np.flatnonzero(rng.random(size - 1) < 0.3) + 1)
    return Which(names, size, [group.tolist() for group in groups])


def _turned(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    """The names in another order."""
    first = number % len(names)
    return names[first:] + names[:first]


def smoothed(numbers: Any) -> Any:
    """Numbers in which each row has some of its neighbours and of them all."""
    near = jnp.concatenate([numbers[1:], numbers[:1]])
    return jnp.tanh(numbers + near * jnp.float32(0.5)) + jnp.sin(numbers).mean(0)[None]


class Machine:
    """What both machines do in the same way.

    Args:
      map_: ``map_(fun, level, axis_name, in_axes, out_axes, batch_size)``; the
        outermost map has level 0, and a plain vmap has None.
      differentiable: whether the program is to be differentiated.
    """

    def __init__(self, map_: Callable[..., Any], differentiable: bool) -> None:
        self.map_ = map_
        self.differentiable = differentiable

    def run(self, program: Any, state: State, scope: Scope) -> State:
        for step in program:
            state = together(self.step(*step, state=state, scope=scope), state)
        return state

    def step(
        self, kind: str, number: int, inside: Any = None, *, state: State, scope: Scope
    ) -> State:
        if kind in COLLECTIVES:
            if not scope.free:
                return state
            return self.collective(kind, number, state, scope)
        if inside is None:
            return self.local(kind, number, state, scope)

        def body(state: State, scope: Scope = scope) -> State:
            return self.run(inside, state, scope)

        if kind in ("vmap", "map"):
            batch_size = number % 3 + 1 if number % 2 else None
            return self.mapped(kind, number, body, state, scope, batch_size)
        name = "while_" if kind == "while" else kind
        return getattr(self, name)(number, body, state, scope)

    def local(self, kind: str, number: int, state: State, scope: Scope) -> State:
        x, n, d = state
        if kind == "sine":
            return state._replace(x=jnp.sin(x * (1 + number % 7)))
        if kind == "weight":
            return state._replace(x=x * scope.w)
        if kind == "shift":
            return state._replace(n=n + number % 5, d=from_integer(n, d.dtype))
        if kind == "random":
            key = jax.random.key(number, impl=KEYS[number % len(KEYS)])
            return state._replace(x=x * self.draw(jax.random.split(key, 5), n))
        if kind == "sorted":
            order = jnp.argsort(jnp.stack([n, to_integer(d), jnp.int32(2)]))
            changed = x.at[lax.rem(n, jnp.int32(2))].multiply(jnp.float32(0.5))
            return State(changed[::-1], n + order[number % 3].astype(np.int32), d)
        if kind == "solved":
            matrix = jnp.outer(jnp.sin(x), jnp.cos(x)) + 3 * np.eye(2, dtype=np.float32)
            return state._replace(x=jnp.linalg.solve(matrix, x))
        if kind == "running":
            numbers = pieces(x, 3 + number % 3)
            numbers = lax.associative_scan(jnp.multiply, numbers + 1, number % 2 == 0)
            return state._replace(x=jnp.tanh(fold(numbers, x)))
        if kind == "pieces":
            numbers = pieces(x, 3 + number % 3)
            return state._replace(x=fold(self.in_pieces(number, smoothed)(numbers), x))
        if kind == "constraint":
            return state._replace(x=self.cut_in_two(x))
        self.tap(number, n, scope)
        return state

    def draw(self, keys: Any, n: Any) -> Any:
        return jax.random.uniform(keys[n])

    def row(self, number: int, n: Any, scope: Scope) -> Any:
        """What is tapped: who taps, where, and what there is."""
        positions = [
            scope.indices[name] if name in scope.indices else self.index((name,))
            for name in scope.names
        ]
        positions += [jnp.int32(0)] * (len(AXIS_NAMES) - len(positions))
        return jnp.stack([jnp.int32(number), n, *positions])

    def mapped(
        self,
        kind: str,
        number: int,
        body: Any,
        state: State,
        scope: Scope,
        batch_size: int | None,
    ) -> State:
        size = number % 5 + 1
        name = AXIS_NAMES[len(scope.names)] if kind == "map" else None
        # Of axes of its own, JAX itself knows few collectives.
        inner = scope._replace(
            names=(*scope.names, name) if kind == "map" else scope.names,
            taps=scope.taps and kind == "map",
            level=scope.level + (kind == "map"),
            has_vmap=scope.has_vmap or kind == "vmap",
            looped=(*scope.looped, name)
            if name is not None and batch_size is not None
            else scope.looped,
        )

        def element(given: Any, w: Any, alive: Any, state: State) -> Any:
            count, key, column = given["count"], *given["key and column"]
            scale = jax.random.uniform(key) + column.sum()
            x, n, d = state
            n = lax.rem(n + count, jnp.int32(5))
            indices = dict(inner.indices)
            if name in inner.looped:
                indices[name] = self.index((name,))
            scope = inner._replace(w=w, alive=alive, indices=indices)
            new = body(State(x * scale, n, d), scope)
            if name is None:
                return new, None, jnp.int32(0)
            return new, None, self.largest(new.n, (name,))

        level = scope.level if kind == "map" else None
        axis = number % 4 - 2
        in_axes = ({"count": 0, "key and column": (0, -1)}, None, None, None)
        out_axes = (State(axis, 0, -1), 0, None)
        given = {
            "count": jnp.arange(size, dtype=np.int32),
            "key and column": (
                jax.random.split(jax.random.key(number), size),
                jnp.sin(jnp.arange(2 * size, dtype=np.float32)).reshape(2, size),
            ),
        }
        mapped = self.map_(element, level, name, in_axes, out_axes, batch_size)
        result, _, largest = mapped(given, scope.w, scope.alive, state)
        x, n, d = map(fold, result, state)
        return State(x, n + largest, d)

    def ending(self, number: int, x: Any, scope: Scope) -> Any:
        """What all elements agree on: a sum over all axes, perhaps in one more map."""
        names = scope.names
        # No loop adds up what is in a map inside.
        if number % 3 or scope.looped:
            return self.total(jnp.cos(x), _turned(names, number))
        name = AXIS_NAMES[len(names)]

        def element(scale: Any, x: Any) -> Any:
            added = self.total(jnp.cos(x * scale), _turned((*names, name), number))
            return added, jnp.sin(added)

        in_axes, out_axes = (0, None), (None, number % 2)
        # What is mapped has a cotangent for each element, to be added up first.
        looped = number % 5 == 0 and not self.differentiable
        batch_size = 2 if looped else None
        mapped = self.map_(element, scope.level, name, in_axes, out_axes, batch_size)
        added, each = mapped(1 + jnp.arange(3, dtype=np.float32), x)
        return added + each.sum(number % 2)

    def gradient(self, number: int, body: Any, state: State, scope: Scope) -> State:
        def loss(x: Any) -> Any:
            new = body(state._replace(x=x))
            return jnp.sin(new.x).sum(), new

        slope, new = jax.grad(loss, has_aux=True)(state.x)
        return new._replace(x=jnp.tanh(slope))

    def tangent(self, number: int, body: Any, state: State, scope: Scope) -> State:
        def value(x: Any) -> Any:
            new = body(state._replace(x=x))
            return new.x, new

        _, slope, new = jax.jvp(value, (state.x,), (jnp.cos(state.x),), has_aux=True)
        return new._replace(x=jnp.tanh(slope))

    def collective(self, kind: str, number: int, state: State, scope: Scope) -> State:
        rng = np.random.default_rng(number)
        x, n, d = state
        if kind == "index":
            index = self.index(which(scope, rng, "none").names)
            return State(x * index.astype(np.float32) / 7, n + index, d)
        if kind == "count":
            count = self.count(which(scope, rng, "even"))
            return State(x * np.float32(np.sin(count)), n + np.int32(count), d)
        if kind == "mean":
            # JAX divides by the number of elements in the first group.
            return State(self.reduce(kind, x, which(scope, rng, "even")), n, d)
        if kind in REDUCTIONS:
            chosen = which(scope, rng, "any")
            # JAX has no derivative of the other two, and no order of complex numbers.
            x = jnp.sin(x) if kind == "sum" else lax.stop_gradient(x)
            if kind != "sum" and number % 4 == 0:
                largest = self.reduce(kind, jnp.where(n == 3, jnp.nan, x), chosen)
                x = jnp.where(jnp.isnan(largest), x, largest)
            if kind != "sum" and jnp.issubdtype(d.dtype, jnp.complexfloating):
                x, n = self.reduce(kind, (x, n), chosen)
                return State(jnp.tanh(x), n, d)
            reduced = {"x": x, "others": [n, bits(d) if kind == "sum" else d]}
            reduced = self.reduce(kind, reduced, chosen)
            n, added = reduced["others"]
            new = total(added, d.dtype) if kind == "sum" else added.astype(d.dtype)
            return State(jnp.tanh(reduced["x"]), n, new)
        if kind in ("permute", "shuffle", "broadcast"):
            chosen = which(scope, rng, "none")
            sources = rng.permutation(chosen.total)
            if kind == "permute":
                sources[rng.random(chosen.total) < 0.3] = -1
            elif kind == "broadcast":
                # JAX's derivative of it is of scalars only.
                sources[:], x = sources[0], lax.stop_gradient(x)
            return self.move(kind, State(x, n, d), chosen, sources)
        return self.cut(kind, rng, state, scope)

    def cut(self, kind: str, rng: Any, state: State, scope: Scope) -> State:
        # JAX cannot vectorise an all_to_all with groups.
        grouped = "none" if kind == "exchange" and scope.has_vmap else "even"
        chosen = which(scope, rng, grouped)
        first, second = rng.integers(6, size=2).tolist()
        tiled = bool(rng.integers(2))
        negative = bool(rng.integers(2))
        results = []
        for value in state:
            if kind == "gather":
                tiled = tiled and value.ndim > 0
                ndim = value.ndim + (not tiled)
                axis = first % ndim - (ndim if negative else 0)
                result = self.gather(value, chosen, axis, tiled)
            else:
                given = pieces(value, chosen.count * (2 if tiled else 1))
                axis, to = first % given.ndim, second % given.ndim
                given = jnp.moveaxis(given, 0, axis)
                if kind == "exchange":
                    result = self.exchange(given, chosen, axis, to, tiled)
                elif value.dtype in (np.float32, np.int32):
                    result = self.scatter(given, chosen, axis, tiled)
                elif value.dtype == np.bool_:
                    # JAX does not count truth values here.
                    result = value
                else:
                    result = self.scatter(bits(given), chosen, axis, tiled)
                    result = total(result, value.dtype)
            results.append(fold(result, value))
        return State(*results)
