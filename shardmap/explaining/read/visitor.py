"""One pass over a jaxpr: its axes and layout constraints."""

from typing import Any, NamedTuple

import jax
from jax.extend.core.primitives import scan_p, sharding_constraint_p, while_p
from jax.sharding import NamedSharding

from shardmap._jax.primitives import (
    SHARD_MAP,
    is_pmap,
    is_transposed,
    manual_axes_of,
    named_axes,
    scan_counts,
)
from shardmap._jax.types import Equation, Jaxpr
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.explaining.report import Axis, AxisKind
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.layout import lay_out_inner
from shardmap.map.lowering import decision
from shardmap.map.lowering.decision import EnclosingProgram
from shardmap.map.primitives.axis import UNNAMED
from shardmap.map.primitives.map_primitive import MapParams, spmap_p
from shardmap.source import source_of

CHUNKED = "chunked"
"""The name of the primitive of functions in pieces."""
_GIVE_ALL_THE_SAME = ("all-reduce", "all-gather")


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
                self._scan(equation, here)
            elif equation.primitive is spmap_p:
                self._spmap(equation, here)
            elif equation.primitive is SHARD_MAP:
                self._shard_map(equation, here)
            elif equation.primitive is while_p:
                inside = self._add(here, equation, "while", (None, 1, 1, None))
                self._visit_all(equation, inside)
            elif equation.primitive.name == CHUNKED:
                self._chunked(equation, here)
            else:
                self._visit_all(equation, here)

    def _visit_all(self, equation: Equation, around: Scope) -> None:
        for inner in jaxprs_in(equation.params):
            self.visit(inner, around)

    def _add(
        self,
        around: Scope,
        equation: Equation,
        kind: AxisKind,
        layout: tuple[int | None, int, int, int | None],
        name: Any = None,
        in_turn: bool = False,
        is_repeated: bool = False,
    ) -> Scope:
        """Adds an axis unless it is known, and returns the scope inside it."""
        size, devices, vectorised, steps = layout
        text = None if name is None or name == UNNAMED else str(name)
        key = (around.axis, kind, text, layout)
        # Differentiation repeats an axis in the backward pass, with other lines.
        place = None if is_transposed(equation) else around.line
        if (key, place) not in self._numbers:
            inside = None if around.axis is None else self.axes[around.axis]
            axis = Axis(
                name=text,
                size=size,
                kind=kind,
                devices=devices,
                vectorised=vectorised,
                steps=steps,
                depth=0 if inside is None else inside.depth + 1,
                inside=around.axis,
                source=around.line,
                in_turn=in_turn,
                is_repeated=is_repeated,
            )
            number = self._numbers[key, place] = len(self.axes)
            self._numbers.setdefault((key, None), number)
            self.axes.append(axis)
        return around._replace(axis=self._numbers[key, place])

    def _scan(self, equation: Equation, around: Scope) -> None:
        length, (_, carried) = equation.params["length"], scan_counts(equation.params)
        if length > 1:
            layout = (length, 1, 1, length)
            around = self._add(around, equation, "loop", layout, in_turn=carried > 0)
        self.visit(equation.params["jaxpr"], around)

    def _chunked(self, equation: Equation, around: Scope) -> None:
        """Adds the loops over the pieces of a function, those of equal length once."""
        # The plan compiler takes long to import, and only this needs it.
        from shardmap.planning.inside.primitive import computed, cut

        params = equation.params
        whole, _ = computed(params["jaxpr"])
        stages = cut(whole, params["asked"], params["options"]).stages
        for count in {stage.num_shards for stage in stages} - {1}:
            self._add(around, equation, "chunked", (count, 1, 1, count))
        self.visit(params["jaxpr"].jaxpr, around)

    def _spmap(self, equation: Equation, around: Scope) -> None:
        params = MapParams.of(equation)
        if around.mesh is not None:
            placed = lay_out_inner(params, around.mesh, around.inner_axes)
            params = placed or params.on(around.mesh)
        decided = decision.decide(params, around.program)
        axis, is_placed = decided.axis, None not in (params.mesh, params.mesh_axes)
        layout = (axis.size, axis.devices, axis.vectorised, axis.steps)
        name = equation.params["axis_name"]
        inside = self._add(around, equation, "spmap", layout, name)._replace(
            mesh=params.mesh,
            inner_axes=params.inner_axes if is_placed else around.inner_axes,
            program=decided.inside(params.mesh, around.program),
        )
        self.visit(equation.params["call_jaxpr"], inside)

    def _shard_map(self, equation: Equation, around: Scope) -> None:
        params, of_pmap = equation.params, is_pmap(equation)
        mesh, manual = params["mesh"], manual_axes_of(equation)
        for name in (name for name in mesh.axis_names if name in manual):
            size = mesh.shape[name]
            around = self._add(
                around,
                equation,
                "pmap" if of_pmap else "shard_map",
                (size, size, 1, 1),
                name,
                is_repeated=not of_pmap and not _tells_apart(equation, name),
            )
        program = around.program.inside(mesh, manual)
        self.visit(params["jaxpr"], around._replace(program=program))


def _tells_apart(shard_map: Equation, name: str) -> bool:
    """Whether the devices along a mesh axis do different work."""
    specs = [spec.partitions for spec in shard_map.params["in_specs"]]
    return name in jax.tree.leaves(specs) or any(
        name in named_axes(each)
        for each in equations(shard_map.params["jaxpr"])
        if each.primitive in COLLECTIVES
        and COLLECTIVES[each.primitive].kind not in _GIVE_ALL_THE_SAME
    )


def _constraint_of(equation: Equation) -> NamedSharding | None:
    """The layout that an equation asks for, or None."""
    # The primitive of `jax.sharding.reshard` has no public name.
    asks = equation.primitive is sharding_constraint_p
    layout = equation.params.get("sharding" if asks else "dst_sharding")
    return layout if isinstance(layout, NamedSharding) else None
