"""A traced function as a flat list of nodes, calls looked through.

Nothing here knows a primitive: which ones are calls, and which are written as others,
is in the table that `flatten` gets.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.extend import source_info_util
from jax.extend.source_info_util import SourceInfo
from jax.typing import ArrayLike

from shardmap._jax.types import AnyJaxpr, Atom, Aval, Equation, Params, Primitive, Var
from shardmap._jax.walk import constants_of, opened


class Value:
    """What one variable of a jaxpr stands for.

    Attributes:
      constant: the array that the function closed over, if it is one.
    """

    __slots__ = ("aval", "constant", "number", "producer", "shape")

    def __init__(self, number: int, aval: Aval) -> None:
        self.number = number
        self.aval = aval
        self.producer: Node | None = None
        self.constant: Any = None
        # Shapes may hold NumPy integers, which are no ints.
        self.shape = tuple(map(int, aval.shape))

    @property
    def size(self) -> int:
        return self.aval.size


class Scalar(NamedTuple):
    """A literal, or another constant that every shard gets as it is."""

    value: Any
    aval: Aval

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape


Operand: TypeAlias = Value | Scalar


class Node:
    """One equation.

    Attributes:
      primitive: the primitive, or whatever else a rule is registered for.
      params: its parameters.
      ins: its operands.
      outs: its results.
      source: where the user wrote it.
      source_info: the same as JAX keeps it, for the equations that come of this one.
    """

    __slots__ = (
        "ins",
        "number",
        "outs",
        "params",
        "primitive",
        "source",
        "source_info",
    )

    def __init__(
        self,
        number: int,
        primitive: Hashable,
        params: Params,
        ins: Sequence[Operand],
        outs: Sequence[Value],
        source: str,
        source_info: SourceInfo | None = None,
    ) -> None:
        self.number = number
        self.primitive: Any = primitive
        self.params = params
        self.ins = tuple(ins)
        self.outs = tuple(outs)
        self.source = source
        self.source_info = source_info
        for out in outs:
            out.producer = self

    @property
    def name(self) -> str:
        return str(self.primitive)

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return [out.shape for out in self.outs]

    @property
    def in_shapes(self) -> list[tuple[int, ...]]:
        return [operand.shape for operand in self.ins]


class PlanPrimitive(NamedTuple):
    """What a node is known by that no primitive of JAX computes."""

    name: str

    def __str__(self) -> str:
        return self.name


class Graph:
    """The equations of a function, flat: values, and nodes that make them of others.

    Attributes:
      inputs: what the function's arguments become.
      constants: the arrays that the function closed over, by value.
      nodes: the equations, each after those it depends on.
      outputs: what the function returns.
      effects: one value for each effect, with the axes of all its operands: a part of
        it stands for the effect of parts of them. Nothing is stored of it.
    """

    def __init__(self) -> None:
        self.effects: list[Value] = []
        self.inputs: list[Value] = []
        self.constants: dict[Value, Any] = {}
        self.nodes: list[Node] = []
        self.outputs: list[Operand] = []
        self.source_info: SourceInfo | None = None
        self._values = 0
        self._sources: dict[int, tuple[Any, Value]] = {}

    def value(self, aval: Aval) -> Value:
        self._values += 1
        return Value(self._values - 1, aval)

    def add(
        self,
        primitive: Hashable,
        params: Params,
        ins: Sequence[Operand],
        out_avals: Iterable[Aval],
        source: str,
    ) -> tuple[Value, ...]:
        """Appends an equation and returns its results."""
        outs = [self.value(aval) for aval in out_avals]
        number = len(self.nodes)
        node = Node(number, primitive, params, ins, outs, source, self.source_info)
        self.nodes.append(node)
        return node.outs

    def inline(
        self,
        jaxpr: AnyJaxpr,
        ins: Sequence[Operand],
        source: str,
        calls: "Calls | None" = None,
    ) -> list[Operand]:
        """Appends the equations of a jaxpr as if they stood at ``source``."""
        return _inline(self, jaxpr, ins, calls or Calls({}, {}), source)

    def constant(self, array: ArrayLike) -> Operand:
        """An array that the function closed over, as it is now.

        Raises:
          Refused: it is no array.
        """
        if id(array) in self._sources:
            return self._sources[id(array)][1]
        aval: Any = jax.typeof(array)
        if not isinstance(aval, jax.core.ShapedArray):
            raise Refused(
                f"it closes over {aval.str_short()}, a reference of JAX; pass what is "
                "in it, ref[...], as an argument"
            )
        own = array if isinstance(array, jax.Array) else _copied(array, aval)
        if not aval.shape and not jax.dtypes.issubdtype(
            aval.dtype, jax.dtypes.extended
        ):
            return Scalar(own, aval)
        value = self.value(aval)
        self.constants[value] = value.constant = own
        # Held, so that no other array gets its place in memory.
        self._sources[id(array)] = array, value
        return value


def _copied(array: ArrayLike, aval: Aval) -> np.ndarray:
    """An array that does not change with NumPy's; a file's is too large for that."""
    found = np.asarray(array)
    base: Any = found
    while base is not None:
        if isinstance(base, np.memmap):
            return found
        base = getattr(base, "base", None)
    return np.array(found, aval.dtype)


class Refused(Exception):
    """No plan can run an equation; the message says which, and why."""


Rewrite: TypeAlias = Callable[
    [Graph, Equation, Sequence[Operand], str], Sequence[Operand] | None
]
"""Adds other nodes in the place of an equation; None: leaves it as it is."""


class Calls(NamedTuple):
    """What `flatten` looks through.

    Attributes:
      jaxprs: call primitive -> the name of the parameter that holds its jaxpr.
      rewrites: primitive -> a function that adds other nodes in its place.
      harmless: the effects that a node may have.
      effects: adds nodes for an equation with another effect; None: it is refused.
    """

    jaxprs: Mapping[Primitive, str]
    rewrites: Mapping[Primitive, Rewrite]
    harmless: tuple[type, ...] = ()
    effects: Rewrite | None = None


def flatten(jaxpr: AnyJaxpr, calls: Calls) -> Graph:
    """The graph of a jaxpr, closed or not."""
    graph = Graph()
    inner = opened(jaxpr)
    graph.inputs = [graph.value(aval) for aval in avals(inner.invars)]
    graph.outputs = _inline(graph, jaxpr, graph.inputs, calls)
    return graph


def _inline(
    graph: Graph,
    jaxpr: AnyJaxpr,
    arguments: Sequence[Operand],
    calls: Calls,
    written: str = "",
    outer: str = "",
) -> list[Operand]:
    inner = opened(jaxpr)
    known: dict[Any, Operand] = {}
    known.update(zip(inner.invars, arguments, strict=True))
    known.update(
        (var, graph.constant(array))
        # A jaxpr that is not closed has no constants, and is given none.
        for var, array in zip(inner.constvars, constants_of(jaxpr), strict=False)
    )

    def read(atom: Atom) -> Operand:
        if not isinstance(atom, jex_core.Literal):
            return known[atom]
        aval: Any = atom.aval
        if aval.shape:
            return graph.constant(atom.val)
        return Scalar(atom.val, aval)

    for equation in inner.eqns:
        ins = [read(atom) for atom in equation.invars]
        primitive = equation.primitive
        if not written:
            graph.source_info = equation.source_info
        source = written or source_info_util.summarize(equation.source_info) or outer
        outs: Sequence[Operand] | None = None
        harmful = [e for e in equation.effects if not isinstance(e, calls.harmless)]
        if primitive in calls.jaxprs:
            called = equation.params[calls.jaxprs[primitive]]
            outs = _inline(graph, called, ins, calls, written, source)
        elif harmful:
            if calls.effects is not None:
                outs = calls.effects(graph, equation, ins, source)
        elif primitive in calls.rewrites:
            outs = calls.rewrites[primitive](graph, equation, ins, source)
        if outs is None and harmful:
            effects = ", ".join(sorted(map(str, harmful)))
            raise Refused(
                f"{primitive} at {source} has an effect ({effects}), and nothing says "
                "which shard should have it"
            )
        if outs is None:
            made = avals(equation.outvars)
            outs = graph.add(primitive, equation.params, ins, made, source)
        known.update(zip(equation.outvars, outs, strict=True))
    return [read(atom) for atom in inner.outvars]


def avals(variables: Iterable[Var]) -> list[Aval]:
    """Of variables of a jaxpr, which here are all arrays."""
    return [cast(Aval, var.aval) for var in variables]


def traced(function: Callable[..., Any], ins: Sequence[Operand]) -> AnyJaxpr:
    """The jaxpr of a function of values like the operands."""
    return jax.make_jaxpr(function)(
        *(jax.ShapeDtypeStruct(x.shape, x.aval.dtype) for x in ins)
    )
