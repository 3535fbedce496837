"""A traced function as a flat list of nodes, with calls inlined.

This module knows no primitive. The `Calls` that `flatten` gets say which primitives are
calls, and which are rewritten.

At its end: how values are stored. Random keys have dtypes of their own and no NumPy
form, so their bits are stored.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.extend.source_info_util import SourceInfo
from jax.typing import ArrayLike

from shardmap._jax.types import AnyJaxpr, Atom, Aval, Equation, Params, Primitive, Var
from shardmap._jax.walk import as_open_jaxpr, constants_of
from shardmap.planning.engine.slices import Box, volume
from shardmap.source import source_of


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Value:
    """A value of a graph, like a variable of a jaxpr.

    Attributes:
      producer: the node that makes it; None for an argument or a constant.
      constant: the array that the function closed over, if it is one.
    """

    number: int
    aval: Aval
    producer: "Node | None" = None
    constant: Any = None
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        # Shapes may hold NumPy integers, which are no ints.
        self.shape = tuple(map(int, self.aval.shape))

    @property
    def size(self) -> int:
        return self.aval.size


@dataclass(eq=False, repr=False, slots=True)
class Scalar:
    """A literal, or another constant of rank 0, which every shard gets unchanged."""

    value: Any
    aval: Aval
    producer: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape


Operand: TypeAlias = Value | Scalar


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Node:
    """One equation, of a primitive or whatever else a rule is registered for.

    Attributes:
      source: where the user wrote it.
      source_info: the same in JAX's form, for the equations that a plan emits.
    """

    primitive: Any
    params: Params
    ins: tuple[Operand, ...]
    outs: tuple[Value, ...]
    source: str
    source_info: SourceInfo | None = None

    def __post_init__(self) -> None:
        for out in self.outs:
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


def made_by(operand: Operand, primitive: Any) -> Node | None:
    """The node that makes an operand, if it is one of this primitive."""
    node = operand.producer
    return node if node is not None and node.primitive is primitive else None


class PlanPrimitive(NamedTuple):
    """The primitive of nodes that only the planner adds."""

    name: str

    def __str__(self) -> str:
        return self.name


class Graph:
    """The equations of a function, as a flat list of nodes.

    It is only added to; a rewrite makes another one.

    Attributes:
      constants: the arrays that the function closed over, by value.
      nodes: the equations, each after those it depends on.
      source, source_info: of the equation that nodes are added for, see `Node`.
    """

    def __init__(self, calls: "Calls") -> None:
        self.calls = calls
        self.inputs: list[Value] = []
        self.constants: dict[Value, Any] = {}
        self.nodes: list[Node] = []
        self.outputs: list[Operand] = []
        self.source = ""
        self.source_info: SourceInfo | None = None
        self._values = 0
        # What `rewritten` has not visited yet, last to first, and by operand.
        self._ahead: list[Node] = []
        self._users: dict[Operand, dict[Node, None]] = {}
        self._replaced: dict[Operand, Operand] = {}
        self._sources: dict[int, tuple[Any, Value]] = {}

    def value(self, aval: Aval) -> Value:
        self._values += 1
        return Value(self._values - 1, aval)

    def node(
        self,
        primitive: Hashable,
        params: Params,
        ins: Sequence[Operand],
        out_avals: Iterable[Aval],
    ) -> Node:
        """Makes a node without adding it to the graph."""
        outs = tuple(self.value(aval) for aval in out_avals)
        return Node(primitive, params, tuple(ins), outs, self.source, self.source_info)

    def add(
        self,
        primitive: Hashable,
        params: Params,
        ins: Sequence[Operand],
        out_avals: Iterable[Aval],
    ) -> tuple[Value, ...]:
        """Appends an equation and returns its results."""
        self.nodes.append(self.node(primitive, params, ins, out_avals))
        return self.nodes[-1].outs

    def inline(
        self, jaxpr: AnyJaxpr, ins: Sequence[Operand], fixed: bool = True
    ) -> list[Operand]:
        """Appends the equations of a jaxpr. If fixed, they get our ``source``."""
        calls, inner = self.calls, as_open_jaxpr(jaxpr)
        outer = self.source  # For equations without a source of their own.
        known: dict[Any, Operand] = {}
        known.update(zip(inner.invars, ins, strict=True))
        known.update(
            (var, self.constant(array))
            # A jaxpr that is not closed has no constants, and is given none.
            for var, array in zip(inner.constvars, constants_of(jaxpr), strict=False)
        )

        def read(atom: Atom) -> Operand:
            if not isinstance(atom, jex_core.Literal):
                return known[atom]
            aval: Any = atom.aval
            return self.constant(atom.val) if aval.shape else Scalar(atom.val, aval)

        for equation in inner.eqns:
            operands = list(map(read, equation.invars))
            if not fixed:
                self.source = source_of(equation, outer) or outer
                self.source_info = equation.source_info
            outs: Sequence[Operand] | None
            primitive, params = equation.primitive, equation.params
            if primitive in calls.jaxprs:
                outs = self.inline(params[calls.jaxprs[primitive]], operands, fixed)
            else:
                node = self.node(primitive, params, operands, avals(equation.outvars))
                outs = _decomposed(self, node, equation)
                if outs is None:
                    self.nodes.append(node)
                    outs = node.outs
            known.update(zip(equation.outvars, outs, strict=True))
        return list(map(read, inner.outvars))

    def call(
        self, function: Callable[..., Any], ins: Sequence[Operand], fixed: bool = True
    ) -> list[Operand]:
        """Traces a function of the operands, and appends its equations."""
        shapes = (jax.ShapeDtypeStruct(x.shape, x.aval.dtype) for x in ins)
        return self.inline(jax.make_jaxpr(function)(*shapes), ins, fixed)

    def rewritten(self, write: "Rewrite") -> "Graph":
        """Another graph, in which some nodes are replaced. It shares all others.

        ``write`` gets the other graph and each node, first to last, with operands that
        are already replaced. It adds nodes and returns the operands that replace the
        node's results, or None to keep the node. It gets the nodes that it adds too.
        """
        graph = Graph(self.calls)
        graph.inputs, graph.outputs = self.inputs, self.outputs
        graph.constants, graph._sources = {**self.constants}, {**self._sources}
        graph._values = self._values
        end = Node(PlanPrimitive("return"), {}, tuple(self.outputs), (), "")
        graph._visit_next([*self.nodes, end])
        while (node := graph._ahead.pop()) is not end:
            graph.source, graph.source_info = node.source, node.source_info
            ins, before = tuple(map(graph.current, node.ins)), node
            for operand in ins:
                graph._users[operand].pop(before, None)
            if ins != node.ins:
                avals = [out.aval for out in before.outs]
                node = graph.node(node.primitive, node.params, ins, avals)
                graph._replace(before.outs, node.outs)
            first = len(graph.nodes)
            results = write(graph, node)
            if results is None:
                graph.nodes.append(node)
            else:
                graph._visit_next(graph.nodes[first:])
                del graph.nodes[first:]
                graph._replace(node.outs, results)
        graph.outputs = list(map(graph.current, self.outputs))
        graph._replaced, graph._users = {}, {}
        graph.drop_unused()
        return graph

    def _visit_next(self, nodes: Sequence[Node]) -> None:
        self._ahead += reversed(nodes)
        for node in nodes:
            for operand in map(self.current, node.ins):
                self._users.setdefault(operand, {})[node] = None

    def _replace(self, before: Sequence[Operand], after: Sequence[Operand]) -> None:
        self._replaced.update(zip(before, after, strict=True))
        for operand in before:
            users = self._users.pop(operand, {})
            self._users.setdefault(self.current(operand), {}).update(users)

    def drop_unused(self) -> None:
        """Drops the nodes that no output needs."""
        used: set[Operand] = {*self.outputs}
        kept = []
        for node in reversed(self.nodes):
            if not used.isdisjoint(node.outs):
                used.update(node.ins)
                kept.append(node)
        self.nodes = kept[::-1]

    def current(self, operand: Operand) -> Operand:
        """The operand that replaces this one so far, or itself."""
        while operand in self._replaced:
            operand = self._replaced[operand]
        return operand

    def users(self, operand: Operand) -> Collection[Node]:
        """The nodes that take an operand and that `rewritten` has not visited yet.

        The last one, a "return", takes the outputs.
        """
        return self._users.get(operand, {})

    @functools.cached_property
    def places(self) -> dict[Node, int]:
        """The place of each node in the order in which they run."""
        return {node: place for place, node in enumerate(self.nodes)}

    def constant(self, array: ArrayLike) -> Operand:
        """The operand for an array that the function closes over."""
        if id(array) in self._sources:
            return self._sources[id(array)][1]
        aval: Any = jax.typeof(array)
        if not isinstance(aval, jax.core.ShapedArray):
            raise Refused(
                f"it closes over {aval.str_short()}, a reference of JAX; pass what is "
                "in it, ref[...], as an argument"
            )
        fixed = array if isinstance(array, jax.Array) else _copied(array, aval)
        if not aval.shape and not jax.dtypes.issubdtype(
            aval.dtype, jax.dtypes.extended
        ):
            return Scalar(fixed, aval)
        value = self.value(aval)
        self.constants[value] = value.constant = fixed
        # Holds the array, so that no other one gets its id.
        self._sources[id(array)] = array, value
        return value


def _copied(array: ArrayLike, aval: Aval) -> np.ndarray:
    """A copy, which later writes do not change; a memory map is not copied."""
    data = np.asarray(array)
    base: Any = data
    while base is not None:
        if isinstance(base, np.memmap):
            return data
        base = getattr(base, "base", None)
    return np.array(data, aval.dtype)


class Refused(Exception):
    """No plan can run an equation; the message says which, and why."""


Rewrite: TypeAlias = Callable[[Graph, Node], Sequence[Operand] | None]
"""Adds nodes that replace one that is not in the graph yet; None: it is kept."""


@dataclass(eq=False)
class Calls:
    """What `flatten` inlines and rewrites.

    Attributes:
      jaxprs: call primitive -> the name of the parameter that holds its jaxpr.
      rewrites: primitive, or a class of primitives -> a function that adds nodes that
        replace its node.
      otherwise: the same for all other primitives.
      harmless: the effects that a node may have; others are refused.
    """

    jaxprs: Mapping[Primitive, str]
    rewrites: Mapping[Any, Rewrite]
    otherwise: Rewrite
    harmless: tuple[type, ...]


def flatten(jaxpr: AnyJaxpr, calls: Calls, source: str = "") -> Graph:
    """The graph of a jaxpr, closed or not, which stands in this line."""
    graph = Graph(calls)
    graph.source = source
    inner = as_open_jaxpr(jaxpr)
    graph.inputs = [graph.value(aval) for aval in avals(inner.invars)]
    graph.outputs = graph.inline(jaxpr, graph.inputs, fixed=False)
    graph.drop_unused()
    return graph


def _decomposed(
    graph: Graph, node: Node, equation: Equation
) -> Sequence[Operand] | None:
    """The operands that replace the results of a node; None: it stays."""
    calls = graph.calls
    harmful = [e for e in equation.effects if not isinstance(e, calls.harmless)]
    if harmful:
        effects = ", ".join(sorted(map(str, harmful)))
        raise Refused(
            f"{node.name} at {node.source} has an effect ({effects}), and nothing says "
            "which shard should have it: do it outside, with what the function takes "
            "or returns"
        )
    for key in node.primitive, type(node.primitive):
        if key in calls.rewrites:
            return calls.rewrites[key](graph, node)
    return calls.otherwise(graph, node)


def avals(variables: Iterable[Var]) -> list[Aval]:
    """The avals of variables of a jaxpr, which are all arrays."""
    return [cast(Aval, var.aval) for var in variables]


def is_key(aval: Aval) -> bool:
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def data_aval(aval: Aval) -> Aval:
    """The aval of the stored array: random keys are stored as their bits."""
    if is_key(aval):
        return jax.eval_shape(jax.random.key_data, aval)
    return aval


@functools.lru_cache(maxsize=256)
def key_impl(aval: Aval) -> Any:
    """The ``impl`` for `jax.random.wrap_key_data`; None if the aval is no key."""
    impls: list[Any] = [None]
    if is_key(aval):
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), aval)
    return impls[-1]


def itemsize(aval: Aval) -> int:
    """The bytes of one element as it is stored."""
    if is_key(aval):
        data = data_aval(aval)
        return data.dtype.itemsize * data.shape[-1]
    return aval.dtype.itemsize


def box_bytes(value: Value, box: Box) -> int:
    """The bytes of a box of a value as it is stored."""
    return volume(box) * itemsize(value.aval)


def nbytes(value: Value | Atom) -> int:
    """The bytes of a value as it is stored; 0 if it is no array, such as a token."""
    aval: Any = value.aval
    return aval.size * itemsize(aval) if hasattr(aval, "dtype") else 0
