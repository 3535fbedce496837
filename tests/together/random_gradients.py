"""Random functions of one element, whose gradients `jax.vmap` has too.

A program is a list of steps. Each takes some of the values so far, vectors of three
numbers that elements share or have of their own, and adds one. What `jax.vmap` itself
has wrong, or not at all, is left out: an all_to_all or a permutation of shared values,
and `jax.custom_vjp` whose result is shared, but not all of its arguments. Nor does it
have all gradients of references: there its programs have values instead.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH = 3
ARITHMETIC = ["add", "sub", "mul", "sine", "dot", "select", "join", "turn", "maximum"]
CUSTOM = ["one more", "normalized", "squared", "jvp"]
SUMS = ["sum", "mean", "gather", "largest", "broadcast", "scatter", "own", "grouped"]
OF_EACH = ["exchange", "permute"]
INSIDE = ["jit", "checkpoint", "scan", "cond", "branch", "written", "map", "gradient"]


class Step(NamedTuple):
    """A step.

    Attributes:
      kind: what it does.
      operands: which of the values so far it takes, counted from the first one.
      number: anything more that it needs.
      inside: the steps of a body.
    """

    kind: str
    operands: tuple[int, int]
    number: int
    inside: tuple[Any, ...] = ()


def draw(
    rng: Any, length: int, together: bool, depth: int = 2, known: int = 3
) -> tuple[Step, ...]:
    """A random program on ``known`` values, perhaps with collectives in it."""
    steps = []
    kinds = [ARITHMETIC, ARITHMETIC, CUSTOM, INSIDE, INSIDE, SUMS, SUMS, OF_EACH]
    for _ in range(length):
        of_kind = kinds[rng.integers(len(kinds) if together else 5)]
        if of_kind is INSIDE and not depth:
            of_kind = ARITHMETIC
        kind = str(rng.choice(of_kind))
        operands = tuple(rng.integers(known, size=2).tolist())
        inside = ()
        if of_kind is INSIDE:
            inside = draw(rng, int(rng.integers(1, 4)), together, depth - 1, 2)
        steps.append(Step(kind, operands, int(rng.integers(1000)), inside))
        known += 1
    return tuple(steps)


class Value(NamedTuple):
    """A vector, and whether it may differ between elements of each axis."""

    of: Any
    differs: frozenset[str]


def mean_of_neighbours(x: Any, y: Any) -> Any:
    return (x + jnp.roll(y, 1)) * 0.5


def _rows(x: Any, count: int) -> Any:
    return jnp.sin(x[None] * jnp.arange(1, count + 1, dtype=x.dtype)[:, None])


def _custom(kind: str) -> Any:
    """A function of two vectors with a derivative of its own, that is not linear."""

    def value(x: Any, y: Any) -> Any:
        return jnp.sin(x) + y * 0.5

    if kind == "jvp":
        of_jvp = jax.custom_jvp(value)
        of_jvp.defjvp(lambda p, t: (value(*p), t[0] * jnp.cos(p[1]) + t[1] * p[0]))
        return of_jvp

    def backward(kept: Any, ct: Any) -> Any:
        if kind == "one more":
            return ct + 1, ct - kept
        if kind == "normalized":
            return ct / (jnp.sqrt((ct**2).sum()) + 1), ct * kept
        # Not the square alone, which grows beyond all numbers behind another one.
        return jnp.tanh(ct * ct) * kept, jnp.tanh(ct)

    of_vjp = jax.custom_vjp(value)
    of_vjp.defvjp(lambda x, y: (value(x, y), x), backward)
    return of_vjp


class Machine:
    """Runs programs.

    Args:
      map_: how maps inside are made, as `jax.vmap`.
    """

    def __init__(self, map_: Any) -> None:
        self.map_ = map_

    def run(self, program: Any, values: list[Value], names: tuple[str, ...]) -> Any:
        """All values, after those of the steps."""
        for step in program:
            operands = [values[k % len(values)] for k in step.operands]
            values = [*values, self.step(step, operands, names)]
        return values

    def step(self, step: Step, operands: Any, names: tuple[str, ...]) -> Value:
        (x, a), (y, b) = operands
        both, number = a | b, step.number
        name = names[number % len(names)]
        if step.kind in ARITHMETIC:
            return Value(self.arithmetic(step, x, y), both)
        if step.kind in CUSTOM:
            if a != b and step.kind != "jvp":
                y, both = x, a  # JAX has that of mixed arguments wrong.
            return Value(_custom(step.kind)(x, y), both)
        if step.kind in OF_EACH:
            return self.of_each(step, x + y, both, name)
        if step.kind in SUMS:
            return self.collective(step, x, a, name, names)
        return self.inside(step, operands, names)

    def arithmetic(self, step: Step, x: Any, y: Any) -> Any:
        number = step.number
        if step.kind == "select":
            return jnp.where(jnp.arange(WIDTH) % 2 == number % 2, x, y * 2)
        if step.kind == "join":
            return jnp.concatenate([x, y])[number % WIDTH :][:WIDTH]
        if step.kind == "dot":
            matrix = jnp.outer(jnp.arange(WIDTH, dtype=x.dtype), y) / 3
            return matrix @ x
        return {
            "add": lambda: x + y,
            "sub": lambda: x - y * 3,
            "mul": lambda: x * y,
            "sine": lambda: jnp.sin(x * (number % 3 + 1)),
            "turn": lambda: mean_of_neighbours(x, y),
            "maximum": lambda: jnp.maximum(x, y + 0.1),
        }[step.kind]()

    def collective(
        self, step: Step, x: Any, differs: Any, name: str, names: tuple[str, ...]
    ) -> Value:
        size, number, kind = lax.axis_size(name), step.number, step.kind
        less, more = differs - {name}, differs | {name}
        if kind in ("sum", "mean"):
            several = names if number % 3 == 0 else (name,)
            total = (lax.psum if kind == "sum" else lax.pmean)(x, several)
            return Value(total / 4, differs - {*several})
        if kind == "gather":
            rows = lax.all_gather(x, name, axis=number % 2, tiled=number % 4 == 0)
            weights = jnp.cos(jnp.arange(rows.size, dtype=x.dtype))
            return Value((rows.ravel() * weights).reshape(-1, WIDTH).mean(0), less)
        if kind == "largest":
            top = lax.pmax(lax.stop_gradient(x), name)
            return Value(jnp.sin(x - top), differs)
        if kind == "broadcast":
            return Value(self.broadcast(x.sum(), name, number % size) * x / 3, differs)
        index = lax.axis_index(name)
        if kind == "own":
            return Value(x * (index.astype(x.dtype) + 1) / size, more)
        rows = _rows(x, size)
        if kind == "scatter":
            return Value(lax.psum_scatter(rows, name), more)
        # Of the even elements, and of the odd ones.
        everyone = lax.all_gather(x, name)
        numbers = jnp.arange(size, dtype=index.dtype)
        mine = (numbers % 2 == index % 2).astype(x.dtype)
        return Value((everyone * mine[:, None]).sum(0), more)

    def broadcast(self, scalar: Any, name: str, source: int) -> Any:
        if self.map_ is jax.vmap:  # Which has no derivative of it.
            return lax.all_gather(scalar, name)[source]
        return lax.pbroadcast(scalar, name, source)

    def of_each(self, step: Step, x: Any, differs: Any, name: str) -> Value:
        size, number = lax.axis_size(name), step.number
        x = x * (lax.axis_index(name).astype(x.dtype) + 1)
        if step.kind == "permute":
            pairs = [(k, (k + number) % size) for k in range(size)]
            return Value(lax.ppermute(x, name, pairs), differs | {name})
        rows = _rows(x, size)
        return Value(lax.all_to_all(rows, name, 0, 0).mean(0), differs | {name})

    def inside(self, step: Step, operands: Any, names: tuple[str, ...]) -> Value:
        (x, a), (y, b) = operands
        kind, number = step.kind, step.number
        program = step.inside
        # Elements that disagree need no others.
        if kind == "branch" and a & {*names}:
            program = [s for s in program if s.kind in (*ARITHMETIC, "jvp")]

        def differs_after(first: Any, second: Any) -> Any:
            """What differs of the last value; found with the values themselves."""
            found = []

            def body(x: Any, y: Any) -> Any:
                values = self.run(program, [Value(x, first), Value(y, second)], names)
                found.append(values[-1].differs)
                return values[-1].of

            jax.eval_shape(body, x, y)
            return found[-1]

        def body(first: Any = a, second: Any = b) -> Any:
            def run(x: Any, y: Any) -> Any:
                given = [Value(x, first), Value(y, second)]
                return self.run(program, given, names)[-1].of

            return run

        if kind == "jit":
            return Value(jax.jit(body())(x, y), differs_after(a, b))
        if kind == "checkpoint":
            return Value(jax.checkpoint(body())(x, y), differs_after(a, b))
        if kind == "cond":
            chosen = jnp.int32(number) % 2 == 0
            after = differs_after(a, b) | a
            return Value(lax.cond(chosen, body(), lambda x, y: x * 2, x, y), after)
        if kind == "branch":
            after = a | differs_after(a, b)
            return Value(lax.cond(x[0] > 0, body(), lambda x, y: x * 2, x, y), after)
        if kind == "scan":
            carry = a
            while (after := differs_after(carry, b) | carry) != carry:
                carry = after

            def step_of(x: Any, scale: Any) -> tuple[Any, Any]:
                new = jnp.tanh(body(carry, b)(x, y * scale))
                return new, new * scale

            scales = jnp.array([1, 2], x.dtype)
            last, each = lax.scan(step_of, x, scales)
            return Value(last + each.sum(0), carry)
        if kind == "written":
            new = self.written(x, y, body(frozenset(names), b), names)
            return Value(new, a | b | {*names})
        if kind == "gradient":
            # Of what each element computes for itself.
            def loss(x: Any) -> Any:
                inner = [Value(x, a), Value(y, b)]
                alone = [s for s in step.inside if s.kind in (*ARITHMETIC, "jvp")]
                return jnp.sin(self.run(alone, inner, names)[-1].of).sum()

            return Value(jax.grad(loss)(x), a | b)
        if len(names) > 1:
            return Value(x + y, a | b)
        return self.mapped(step, operands, names)

    def written(self, x: Any, y: Any, body: Any, names: tuple[str, ...]) -> Any:
        """What a reference holds at last, which each element has for itself."""
        if self.map_ is jax.vmap:
            index = sum(lax.axis_index(name) for name in names)
            return body(x + 0 * index.astype(x.dtype), y) + y
        kept = jax.new_ref(x)
        kept[...] = body(kept[...], y)
        jax.ref.addupdate(kept, ..., y)
        return kept[...]

    def mapped(self, step: Step, operands: Any, names: tuple[str, ...]) -> Value:
        """A map over one more axis."""
        (x, a), (y, b) = operands
        size, found = step.number % 2 + 2, []

        def element(x: Any, y: Any) -> Any:
            given = [Value(x, a | {"b"}), Value(y, b)]
            new = self.run(step.inside, given, (*names, "b"))[-1]
            found.append(new.differs)
            return new.of, lax.psum(new.of, "b")

        each = _rows(x, size)
        mapped = self.map_(
            element, in_axes=(0, None), out_axes=(0, None), axis_name="b"
        )
        of_each, total = mapped(each, y)
        differs = found[-1] - {"b"} | (a | b if "b" in found[-1] else frozenset())
        return Value(of_each.mean(0) + total, differs)


def element_of(program: Any, map_: Any, out_axes: list[Any]) -> Any:
    """The function of one element of an axis "a", of two shared vectors and its own.

    ``out_axes`` gets those of its results: None for what all elements share.
    """

    def element(w: Any, v: Any, x: Any) -> Any:
        every, mine = frozenset[str](), frozenset("a")
        given = [Value(w, every), Value(v, every), Value(x, mine)]
        values = Machine(map_).run(program, given, ("a",))[-3:]
        total = lax.psum(jnp.sin(sum(value.of for value in values)), "a")
        out_axes[:] = [0 if value.differs else None for value in values] + [None]
        return [*(value.of for value in values), total]

    return element


def gradients_of(
    program: Any, map_: Any, size: int, twice: bool, **options: Any
) -> Any:
    """The gradients of a loss of a map of a program, or their derivatives.

    Args:
      program: the steps.
      map_: makes the map, with the options, and those inside.
      size: the number of elements.
      twice: whether to differentiate twice.
    """
    vector, out_axes = jax.ShapeDtypeStruct((WIDTH,), np.float64), []
    each = jax.ShapeDtypeStruct((size, WIDTH), np.float64)
    element = element_of(program, jax.vmap, out_axes)
    jax.eval_shape(
        jax.vmap(element, (None, None, 0), axis_name="a"), vector, vector, each
    )
    mapped = map_(
        element_of(program, map_, []),
        axis_name="a",
        in_axes=(None, None, 0),
        out_axes=list(out_axes),
        **options,
    )

    def loss(w: Any, v: Any, x: Any) -> Any:
        results = mapped(w, v, x)
        return sum(jnp.sin(r * (k + 1)).sum() for k, r in enumerate(results))

    first = jax.grad(loss, (0, 1, 2))

    def slopes(w: Any, v: Any, x: Any) -> Any:
        return sum(jnp.sin(each).sum() for each in first(w, v, x))

    return jax.grad(slopes, (0, 1, 2)) if twice else first


def has(program: Any, kinds: Any) -> bool:
    """Whether a step of these kinds is in the program."""
    return any(step.kind in kinds or has(step.inside, kinds) for step in program)
