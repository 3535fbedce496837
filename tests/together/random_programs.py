"""A small language of programs, and the machine that runs them on devices.

A program is a list of steps, each a kind, a number, and perhaps a list of steps to do
inside. `OnDevices` does them with the collectives and the control flow of JAX in maps
as they are to be tested. `ByLoops`, in random_oracle.py, is the oracle: all it asks of
JAX are elementwise functions, `jax.vmap`, and to gather along one axis of that. It has
no control flow; its loops are unrolled, and what a branch or a further round does not
reach is masked.

A state is what each element has: `x`, some numbers, and `n`, an integer from 0 to 4,
which branches and loops ask about: it is exact however the program is compiled.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm

LOCAL = ["sine", "weight", "shift", "random", "tap"]
REDUCTIONS = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
COLLECTIVES = [
    *REDUCTIONS, "mean", "gather", "scatter", "exchange", "permute", "shuffle",
    "broadcast", "index",
]  # fmt: skip


class State(NamedTuple):
    x: Any
    n: Any


class Scope(NamedTuple):
    """What a step finds around it.

    Attributes:
      names: the axes, from the outermost one.
      w: numbers like `x`, perhaps of all elements together.
      alive: whether this is done at all.
      taps: whether to tap.
      level: how many maps of the program are around.
      has_vmap: whether a plain `jax.vmap` is around inside the map.
    """

    names: tuple[str, ...]
    w: Any
    alive: Any
    taps: bool
    level: int
    has_vmap: bool = False


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
    count = rng.integers(1, min(3, len(scope.names)) + 1)
    chosen = rng.permutation(len(scope.names))[:count]
    names = tuple(scope.names[k] for k in chosen)
    total = math.prod(map(lax.axis_size, names))
    if grouped == "none" or rng.random() < 0.4:
        return Which(names, total, None)
    order = rng.permutation(total)
    if grouped == "even" or rng.random() < 0.4:
        sizes = [k for k in range(1, total + 1) if total % k == 0]
        groups = order.reshape(-1, rng.choice(sizes))
    else:
        groups = np.split(order, np.flatnonzero(rng.random(total - 1) < 0.3) + 1)
    return Which(names, total, [group.tolist() for group in groups])


AXIS_NAMES = ["c", "a", "d", "b", "e", "f", "g", "h"]
"""Also what meshes call their axes, in another order."""


def fold(array: Any, like: Any) -> Any:
    """An array of any shape as one like a state's, each entry with its own weight."""
    length = -(-array.size // like.size) * like.size
    flat = jnp.pad(array.ravel(), (0, length - array.size))
    rows = flat.reshape(-1, like.size)
    weights = np.arange(rows.shape[0])[:, None] + np.arange(like.size) + 1
    if like.dtype == np.int32:
        return (rows * weights.astype(np.int32)).sum(0).reshape(like.shape)
    weights = np.cos(weights).astype(np.float32)
    return (rows * weights).sum(0).reshape(like.shape) / rows.shape[0]


def pieces(value: Any, count: int) -> Any:
    """As many pieces in front, all different."""
    if value.dtype == np.int32:
        return jnp.stack([value + k for k in range(count)])
    return jnp.stack([jnp.sin(value * (k + 1)) for k in range(count)])


class Machine:
    """What both machines do in the same way.

    Args:
      map_: ``map_(fun, level, axis_name, in_axes)``; the outermost map has level 0, and
        a plain vmap has None.
      differentiable: whether the program is to be differentiated.
    """

    def __init__(self, map_: Callable[..., Any], differentiable: bool) -> None:
        self.map_ = map_
        self.differentiable = differentiable

    def run(self, program: Any, state: State, scope: Scope) -> State:
        for step in program:
            new = self.step(*step, state=state, scope=scope)
            state = State(
                new.x * 0.5 + jnp.tanh(state.x), lax.rem(new.n + state.n, jnp.int32(5))
            )
        return state

    def step(
        self, kind: str, number: int, inside: Any = None, *, state: State, scope: Scope
    ) -> State:
        if kind in COLLECTIVES:
            return self.collective(kind, number, state, scope)
        if inside is None:
            return self.local(kind, number, state, scope)

        def body(state: State, scope: Scope = scope) -> State:
            return self.run(inside, state, scope)

        if kind in ("vmap", "map"):
            return self.mapped(kind, number, body, state, scope)
        name = "while_" if kind == "while" else kind
        return getattr(self, name)(number, body, state, scope)

    def local(self, kind: str, number: int, state: State, scope: Scope) -> State:
        x, n = state
        if kind == "sine":
            return State(jnp.sin(x * (1 + number % 7)), n)
        if kind == "weight":
            return State(x * scope.w, n)
        if kind == "shift":
            return State(x, n + number % 5)
        if kind == "random":
            key = jax.random.fold_in(jax.random.key(number), n)
            return State(x * jax.random.uniform(key), n)
        self.tap(number, n, scope)
        return state

    def row(self, number: int, n: Any, scope: Scope) -> Any:
        """What is tapped: who taps, where, and what there is."""
        positions = [self.index((name,)) for name in scope.names]
        positions += [jnp.int32(0)] * (len(AXIS_NAMES) - len(positions))
        return jnp.stack([jnp.int32(number), n, *positions])

    def mapped(
        self, kind: str, number: int, body: Any, state: State, scope: Scope
    ) -> State:
        size = number % 5 + 1
        name = AXIS_NAMES[len(scope.names)] if kind == "map" else None
        # Of axes of its own, JAX itself knows few collectives.
        inner = scope._replace(
            names=(*scope.names, name) if kind == "map" else scope.names,
            taps=scope.taps and kind == "map",
            level=scope.level + (kind == "map"),
            has_vmap=scope.has_vmap or kind == "vmap",
        )

        def element(scale: Any, count: Any, w: Any, alive: Any, state: State) -> State:
            start = State(state.x * scale, lax.rem(state.n + count, jnp.int32(5)))
            return body(start, inner._replace(w=w, alive=alive))

        level = scope.level if kind == "map" else None
        result = self.map_(element, level, name, (0, 0, None, None, None))(
            jnp.arange(1, size + 1, dtype=np.float32),
            jnp.arange(size, dtype=np.int32),
            scope.w,
            scope.alive,
            state,
        )
        return State(fold(result.x, state.x), fold(result.n, state.n))

    def collective(self, kind: str, number: int, state: State, scope: Scope) -> State:
        rng = np.random.default_rng(number)
        x, n = state
        if kind == "index":
            index = self.index(which(scope, rng, "none").names)
            return State(x * index.astype(np.float32) / 7, n + index)
        if kind == "mean":
            # JAX divides by the number of elements in the first group.
            return State(self.reduce(kind, x, which(scope, rng, "even")), n)
        if kind in REDUCTIONS:
            chosen = which(scope, rng, "any")
            # JAX has no derivative of the other two.
            x = jnp.sin(x) if kind == "sum" else lax.stop_gradient(x)
            x = jnp.tanh(self.reduce(kind, x, chosen))
            return State(x, self.reduce(kind, n, chosen))
        if kind in ("permute", "shuffle", "broadcast"):
            chosen = which(scope, rng, "none")
            sources = rng.permutation(chosen.total)
            if kind == "permute":
                sources[rng.random(chosen.total) < 0.3] = -1
            elif kind == "broadcast":
                # JAX's derivative of it is of scalars only.
                sources[:], x = sources[0], lax.stop_gradient(x)
            return State(*(self.move(kind, v, chosen, sources) for v in (x, n)))
        # JAX cannot vectorise an all_to_all with groups.
        grouped = "none" if kind == "exchange" and scope.has_vmap else "even"
        chosen = which(scope, rng, grouped)
        first, second = rng.integers(6, size=2).tolist()
        tiled = bool(rng.integers(2))
        results = []
        for value in state:
            if kind == "gather":
                tiled = tiled and value.ndim > 0
                axis = first % (value.ndim + (not tiled))
                result = self.gather(value, chosen, axis, tiled)
            else:
                given = pieces(value, chosen.count * (2 if tiled else 1))
                axis, to = first % given.ndim, second % given.ndim
                given = jnp.moveaxis(given, 0, axis)
                if kind == "scatter":
                    result = self.scatter(given, chosen, axis, tiled)
                else:
                    result = self.exchange(given, chosen, axis, to, tiled)
            results.append(fold(result, value))
        return State(*results)


class OnDevices(Machine):
    """JAX's own collectives and control flow, and a host function that is tapped."""

    def __init__(
        self,
        map_: Callable[..., Any],
        differentiable: bool,
        recorder: Callable[[Any], None],
    ) -> None:
        super().__init__(map_, differentiable)
        self.recorder = recorder

    def index(self, names: tuple[str, ...]) -> Any:
        return lax.axis_index(names if len(names) > 1 else names[0])

    def reduce(self, kind: str, value: Any, chosen: Which) -> Any:
        reduction = lax.pmean if kind == "mean" else REDUCTIONS[kind]
        return reduction(value, chosen.names, axis_index_groups=chosen.groups)

    def move(self, kind: str, value: Any, chosen: Which, sources: Any) -> Any:
        if kind == "shuffle":
            return lax.pshuffle(value, chosen.names, sources.tolist())
        if kind == "broadcast":
            return lax.pbroadcast(value, chosen.names, int(sources[0]))
        pairs = [(int(start), k) for k, start in enumerate(sources) if start >= 0]
        return lax.ppermute(value, chosen.names, pairs)

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

    def tap(self, number: int, n: Any, scope: Scope) -> None:
        if scope.taps:
            sm.tap(self.recorder, self.row(number, n, scope))

    def jit(self, number: int, body: Any, state: State, scope: Scope) -> State:
        return jax.jit(body)(state)

    def checkpoint(self, number: int, body: Any, state: State, scope: Scope) -> State:
        return jax.checkpoint(body)(state)

    def scan(self, number: int, body: Any, state: State, scope: Scope) -> State:
        def step(state: State, sign: Any) -> tuple[State, None]:
            return body(State(state.x * sign, state.n)), None

        return lax.scan(step, state, jnp.array([1, -1], np.float32))[0]

    def cond(self, number: int, body: Any, state: State, scope: Scope) -> State:
        largest = lax.pmax(state.n, scope.names)
        return lax.cond(largest > number % 4, body, other_branch, state)

    def branch(self, number: int, body: Any, state: State, scope: Scope) -> State:
        return lax.cond(state.n > number % 4, body, other_branch, state)

    def rounds(self, number: int, body: Any, state: State, scope: Scope) -> State:
        rounds = number % 3
        if self.differentiable:
            return lax.fori_loop(0, rounds, lambda _, state: body(state), state)
        return self.loop(number, body, state, scope, jnp.int32(rounds))

    def while_(self, number: int, body: Any, state: State, scope: Scope) -> State:
        if self.differentiable:
            return body(state)
        rounds = lax.rem(state.n + number, jnp.int32(4))
        return self.loop(number, body, state, scope, rounds)

    def loop(
        self, number: int, body: Any, state: State, scope: Scope, rounds: Any
    ) -> State:
        def more(carry: Any) -> Any:
            self.tap(number, carry[0], scope)
            return carry[0] < rounds

        def once(carry: Any) -> Any:
            return carry[0] + 1, body(carry[1])

        return lax.while_loop(more, once, (jnp.int32(0), state))[1]


def other_branch(state: State) -> State:
    return State(jnp.cos(state.x), state.n + 1)
