"""The axes of a program, and the layouts that it asks for."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
from jax.extend.core.primitives import scan_p, sharding_constraint_p, while_p
from jax.interpreters import ad
from jax.sharding import NamedSharding

from shardmap._jax.primitives import (
    SHARD_MAP,
    is_pmap,
    is_transposed,
    manual_axes_of,
    scan_counts,
)
from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import Equation, Jaxpr, PyTree, Value
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.explaining.report import Axis, AxisKind
from shardmap.map.collectives.split import gives_all_the_same, is_collective
from shardmap.map.layout import lay_out_inner
from shardmap.map.lowering import decision
from shardmap.map.lowering.decision import EnclosingProgram
from shardmap.map.primitives.axis import UNNAMED
from shardmap.map.primitives.map_primitive import MapParams, spmap_p
from shardmap.source import source_of

CHUNKED = "chunked"
"""The name of the primitive of functions in pieces."""


class Scope(NamedTuple):
    """The loops, maps and mesh axes around an equation.

    Attributes:
      axis: the number of the axis directly around it.
      line: the line of the equation around it. Some equations have no line, such as
        those in the rule of a `jax.custom_vjp` under `jax.checkpoint`.
      mesh: the mesh of the outermost map.
      inner_axes: the mesh axes left for maps inside.
      program: the manual and partitioned axes of the program around it.
    """

    axis: int | None = None
    line: str | None = None
    mesh: Any = None
    inner_axes: tuple[str, ...] = ()
    program: EnclosingProgram = EnclosingProgram()


def facts_of(jaxpr: Jaxpr, source: str | None = None) -> "Facts":
    """The facts of a program; ``source`` is the line of equations without a line."""
    facts = Facts()
    facts.visit(jaxpr, Scope(line=source))
    return facts


class Facts:
    """What a jaxpr and those in its equations have.

    Attributes:
      axes: the axes, each before those inside it.
      constraints: the layouts that the program asks for, each once.
      primitives: the names of the primitives.
    """

    def __init__(self) -> None:
        self.axes: list[Axis] = []
        self.constraints: dict[NamedSharding, None] = {}
        self.primitives: set[str] = set()
        self._numbers: dict[Any, int] = {}
        self._visited: set[Any] = set()

    def visit(self, jaxpr: Jaxpr, around: Scope) -> None:
        """Visits the equations of a jaxpr in a scope."""
        key = (id(jaxpr), around)
        if key in self._visited:
            return
        self._visited.add(key)
        for equation in jaxpr.eqns:
            self.primitives.add(equation.primitive.name)
            if (layout := _constraint_of(equation)) is not None:
                self.constraints[layout] = None
            here = around._replace(line=source_of(equation) or around.line)
            if equation.primitive is scan_p:
                here = self._scan(equation, here)
            elif equation.primitive is spmap_p:
                here = self._spmap(equation, here)
            elif equation.primitive is SHARD_MAP:
                here = self._shard_map(equation, here)
            elif equation.primitive is while_p:
                here = self._add(here, equation, Axis(None, None, "while", 1, 1, None))
            elif equation.primitive.name == CHUNKED:
                self._chunked(equation, here)
            inside = jaxprs_in(equation.params)
            if equation.primitive is spmap_p:
                inside = [equation.params["call_jaxpr"]]
            for inner in inside:
                self.visit(inner, here)

    def _add(self, around: Scope, equation: Equation, axis: Axis) -> Scope:
        """Adds an axis unless it is known, and returns the scope inside it."""
        key = dataclasses.replace(
            axis, inside=around.axis, in_turn=False, is_repeated=False
        )
        # Differentiation repeats an axis in the backward pass, with other lines.
        line = None if is_transposed(equation) else around.line
        if (key, line) not in self._numbers:
            number = self._numbers[key, line] = len(self.axes)
            self._numbers.setdefault((key, None), number)
            depth = 0 if around.axis is None else self.axes[around.axis].depth + 1
            axis = dataclasses.replace(
                axis, depth=depth, inside=around.axis, source=around.line
            )
            self.axes.append(axis)
        return around._replace(axis=self._numbers[key, line])

    def _scan(self, equation: Equation, around: Scope) -> Scope:
        length, (_, carried) = equation.params["length"], scan_counts(equation.params)
        if length <= 1:
            return around
        axis = Axis(None, length, "loop", 1, 1, length, in_turn=carried > 0)
        return self._add(around, equation, axis)

    def _chunked(self, equation: Equation, around: Scope) -> None:
        """Adds the loops over the pieces of a function, those of equal length once."""
        # The plan compiler takes long to import, and only this needs it.
        from shardmap.planning.inside.primitive import computed, cut

        params = equation.params
        whole, _ = computed(params["jaxpr"])
        stages = cut(whole, params["options"]).stages
        for count in {stage.num_shards for stage in stages} - {1}:
            self._add(around, equation, Axis(None, count, "chunked", 1, 1, count))

    def _spmap(self, equation: Equation, around: Scope) -> Scope:
        params, name = MapParams.of(equation), equation.params["axis_name"]
        if around.mesh is not None:
            params = lay_out_inner(params, around.mesh, around.inner_axes)
        decided = decision.decide(params, around.program)
        axis, is_placed = decided.axis, None not in (params.mesh, params.mesh_axes)
        name = None if name is None or name == UNNAMED else str(name)
        counts = axis.devices, axis.vectorised, axis.steps
        return self._add(
            around, equation, Axis(name, axis.size, "spmap", *counts)
        )._replace(
            mesh=params.mesh,
            inner_axes=params.inner_axes if is_placed else around.inner_axes,
            program=decided.inside(params.mesh, around.program),
        )

    def _shard_map(self, equation: Equation, around: Scope) -> Scope:
        mesh, manual = equation.params["mesh"], manual_axes_of(equation)
        kind: AxisKind = "pmap" if is_pmap(equation) else "shard_map"
        for name in (name for name in mesh.axis_names if name in manual):
            size = mesh.shape[name]
            axis = Axis(str(name), size, kind, size, 1, 1)
            if kind == "shard_map" and not _tells_apart(equation, name):
                axis = dataclasses.replace(axis, is_repeated=True)
            around = self._add(around, equation, axis)
        return around._replace(program=around.program.inside(mesh, manual))


def _tells_apart(shard_map: Equation, name: str) -> bool:
    """Whether the devices along a mesh axis do different work."""
    specs = [spec.partitions for spec in shard_map.params["in_specs"]]
    return name in jax.tree.leaves(specs) or any(
        is_collective(each, name) and not gives_all_the_same(each)
        for each in equations(shard_map.params["jaxpr"])
    )


def _constraint_of(equation: Equation) -> NamedSharding | None:
    """The layout that an equation asks for, or None."""
    # The primitive of `jax.sharding.reshard` has no public name.
    asks = equation.primitive is sharding_constraint_p
    layout = equation.params.get("sharding" if asks else "dst_sharding")
    return layout if isinstance(layout, NamedSharding) else None


# Vmaps over arguments, which a jaxpr does not keep

# The function is traced again, on marked arguments: each array is a pytree node in a
# pytree node. `jax.jit` flattens and unflattens its arguments, which removes the outer
# node; a `jax.vmap` over them removes the inner one. Then `mark_p` is bound, whose
# batching rule records the vmap around it. Other vmaps leave no trace.
mark_p = jex_core.Primitive("mark")


class VmapAxis(NamedTuple):
    """The axis of a vmap, and the arguments and their dimensions that it is over."""

    axis: Axis
    over: list[tuple[int, int]]


@mark_p.def_abstract_eval
def _abstract_eval(aval: Any, **_: Any) -> Any:
    return aval


def _batching_rule(vmap: Vmap, operands: Any, dims: Any, **_: Any) -> tuple[Any, Any]:
    # JAX's own objects stand for axes without a name.
    name = vmap.name if isinstance(vmap.name, str) else None
    return mark_p.bind(*operands, over=(name, vmap.size, dims[0])), dims[0]


ad.deflinear2(mark_p, lambda cotangent, _, **params: [cotangent])
def_batching(mark_p, _batching_rule)


@jax.tree_util.register_pytree_node_class
class _Marked:
    """A leaf in one or two pytree nodes."""

    def __init__(self, leaf: Value, layers: int = 2) -> None:
        self.leaf, self.layers = leaf, layers

    def tree_flatten(self) -> tuple[tuple[Any], int]:
        return (self.leaf,), self.layers

    @classmethod
    def tree_unflatten(cls, layers: int, children: Any) -> Any:
        (leaf,) = children
        # JAX also unflattens trees with other leaves than arrays.
        if layers > 1:
            return cls(leaf, layers - 1)
        is_array = isinstance(leaf, jax.core.Tracer)
        return mark_p.bind(leaf, over=None) if is_array else leaf


def marked(tree: PyTree) -> Any:
    """``tree`` with every array in two pytree nodes."""
    return jax.tree.map(
        lambda leaf: _Marked(leaf) if hasattr(leaf, "shape") else leaf, tree
    )


def vmaps_over(jaxpr: Jaxpr, line: str | None) -> list[VmapAxis]:
    """The vmaps over the arguments of a program that was traced with marks."""
    vmaps: dict[Any, VmapAxis] = {}
    for equation in equations(jaxpr):
        if equation.primitive is not mark_p or equation.params["over"] is None:
            continue
        name, size, dimension = equation.params["over"]
        source = source_of(equation) or line
        axis = Axis(name, size, "vmap", 1, size, 1, source=source)
        vmap = vmaps.setdefault((name, size, source), VmapAxis(axis, []))
        if equation.invars[0] in jaxpr.invars:
            argument = jaxpr.invars.index(equation.invars[0])
            vmap.over.append((argument, dimension))
    return [*vmaps.values()]
