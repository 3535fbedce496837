"""One pass over a jaxpr: its axes, collectives and layout constraints."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core.primitives import scan_p, while_p

from shardmap._jax.collectives import named_axes
from shardmap._jax.primitives import (
    SHARD_MAP,
    is_pmap,
    is_transposed,
    manual_axes_of,
    vmaps_around,
)
from shardmap._jax.types import Equation, Jaxpr, Var
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.explain.read import loops
from shardmap.explain.read.abstract import group_size
from shardmap.explain.read.scope import Scope
from shardmap.explain.read.sharded import LayoutConstraint, constraints_of
from shardmap.explain.read.source import source_of
from shardmap.explain.read.vmaps import MarkedVmap, vmaps_of
from shardmap.explain.report import Axis, AxisKind
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.lowering import decision
from shardmap.map.primitives.axis import REPLICAS, UNNAMED, AxisLayout
from shardmap.map.primitives.map_primitive import spmap_p

CHUNKED = "chunked"
"""The name of the primitive of functions in pieces."""
_SAME = "nothing is cut along it"
_GIVE_ALL_THE_SAME = ("all-reduce", "all-gather")
_VMAP = "one batched operation: no parallel processes, all on each device at once"
_UNKNOWN_VMAP = "its size is not visible, as it is not over arguments"
_CHANGE_VMAP = (
    "Write spmap for vmap to lay it on devices, or jax.lax.map with batch_size= to "
    "bound the memory."
)
_CHANGE_MESH = (
    "The shape of mesh= says how many devices; in_specs= and out_specs= of "
    "jax.shard_map, in_axes= and out_axes= of mesh_map what they cut."
)
_CHANGE_LOOP = (
    "jax.lax.map takes batch_size=, how many steps to vectorise; no step needs the one "
    "before, so that vmap does all at once and spmap lays them on devices."
)
_CHANGE_PIECES = (
    "in_slices= of chunked says where to cut, memory= how much a piece may take: fewer "
    "and larger pieces take more."
)
_CHANGE_IN_TURN = (
    "The steps cannot run at once. Cut or map what is inside a step; where the carry "
    "only adds up, vmap the rest of the step and sum; jax.lax.associative_scan takes "
    "an associative step."
)


class Facts(NamedTuple):
    """The facts of a jaxpr.

    Attributes:
      axes: its axes, each before those inside it.
      over: for the number of a loop or a vmap, the arguments that it goes over, each
        with the dimension.
      collectives: the operation and the line of each of its collectives, but of those
        that are left to the partitioner.
      constraints: the layouts that it asks for.
      primitives: the names of all that it has.
      is_partitioned: whether a map leaves its collectives to the partitioner.
    """

    axes: tuple[Axis, ...]
    over: Mapping[int, frozenset[tuple[int, int]]]
    collectives: frozenset[tuple[str, str | None]]
    constraints: tuple[LayoutConstraint, ...]
    primitives: frozenset[str]
    is_partitioned: bool


def facts_of(jaxpr: Jaxpr, source: str | None = None) -> Facts:
    """Visits all equations of a program, once.

    Args:
      jaxpr: the program, traced with or without marks for vmaps.
      source: where the function is, for what JAX has no line of.
    """
    visitor = _Visitor(loops.Origins(jaxpr))
    visitor.visit(jaxpr, Scope(line=source))
    return Facts(
        tuple(visitor.axes),
        {number: frozenset(those) for number, those in visitor.over.items()},
        frozenset(visitor.collectives),
        tuple(visitor.constraints),
        frozenset(visitor.primitives),
        visitor.is_partitioned,
    )


class _OpenVmap(NamedTuple):
    """A vmap around the equations that are visited.

    Attributes:
      scope: what is inside it.
      mark: its name and size, if a mark says them.
      is_given: whether it is that of another equation, such as a loop of batches.
    """

    scope: Scope
    mark: MarkedVmap | None = None
    is_given: bool = False

    def is_of(self, mark: MarkedVmap) -> bool:
        """Whether a mark may be inside this vmap."""
        return self.is_given or (self.mark is not None and self.mark[:2] == mark[:2])


class _Visitor:
    def __init__(self, origins: loops.Origins) -> None:
        self.axes: list[Axis] = []
        self.over: dict[int, set[tuple[int, int]]] = {}
        self.collectives: set[tuple[str, str | None]] = set()
        self.constraints: list[LayoutConstraint] = []
        self.primitives: set[str] = set()
        self.is_partitioned = False
        self._origins = origins
        self._seen: dict[Any, int] = {}
        self._visited: set[Any] = set()

    def _add(
        self,
        around: Scope,
        kind: AxisKind,
        name: Any,
        layout: tuple[int | None, int, int | None, int | None],
        equation: Equation,
        running: str,
        change: str,
        in_turn: bool = False,
    ) -> int:
        """Adds an axis unless it is known, and returns its number."""
        size, devices, vectorised, steps = layout
        source = source_of(equation) or around.line
        text = None if name is None or name == UNNAMED else str(name)
        backward = is_transposed(equation)
        key = (around.axis, kind, text, layout, running, None if backward else source)
        # Differentiation repeats an axis, on the way back.
        forward = (around.axis, kind, text, layout, running, None)
        if key not in self._seen:
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
                source=source,
                running=running,
                change=change,
                in_turn=in_turn,
            )
            self.axes.append(axis)
            self._seen[key] = len(self.axes) - 1
            self._seen.setdefault(forward, len(self.axes) - 1)
        return self._seen[key]

    def visit(self, jaxpr: Jaxpr, around: Scope, open_vmaps: int = 0) -> None:
        """Visits a jaxpr inside ``open_vmaps`` known vmaps."""
        origins = tuple(map(self._origins.of, jaxpr.invars))
        key = (id(jaxpr), around, open_vmaps, origins)
        if key in self._visited:
            return
        self._visited.add(key)
        self.constraints += constraints_of(jaxpr, around.line)
        made_by = {var: e for e in jaxpr.eqns for var in e.outvars}
        # The jaxpr itself, then the vmaps around an equation.
        stack = [_OpenVmap(around, is_given=True)] * (1 + open_vmaps)
        forward = list(stack)
        rest_of_loop = False
        for equation in jaxpr.eqns:
            self.primitives.add(equation.primitive.name)
            self._origins.note(equation)
            depth = vmaps_around(equation)
            rest_of_loop &= depth > 0
            if rest_of_loop:
                continue
            marks = vmaps_of(equation)
            del stack[depth + 1 :]
            for level, mark in enumerate(marks, 1):
                if level < len(stack) and not stack[level].is_of(mark):
                    del stack[level:]
            if is_transposed(equation):
                # The way back goes through the same vmaps.
                stack += forward[len(stack) : depth + 1]
            while len(stack) <= depth:
                known = marks[len(stack) - 1] if marks else None
                scope = self._vmap(stack[-1].scope, known, equation)
                stack.append(_OpenVmap(scope, known))
                forward = list(stack)
            self._goes_over_marks(equation, stack, marks)
            here = stack[-1].scope.at(equation)
            if equation.primitive in COLLECTIVES:
                self._collective(equation, here)
            elif equation.primitive is scan_p:
                rest_of_loop = self._scan(equation, here, made_by)
            elif equation.primitive is spmap_p:
                self._spmap(equation, here, depth)
            elif equation.primitive is SHARD_MAP:
                self._shard_map(equation, here, is_pmap(equation))
            elif equation.primitive is while_p:
                self._while(equation, here)
            elif equation.primitive.name == CHUNKED:
                self._chunked(equation, here)
            else:
                for inner in jaxprs_in(equation.params):
                    self.visit(inner, here)

    def _collective(self, equation: Equation, here: Scope) -> None:
        if not here.program.partitioned and group_size(equation, here) > 1:
            name = COLLECTIVES[equation.primitive].name
            self.collectives.add((name, here.line))

    def _vmap(
        self, around: Scope, known: MarkedVmap | None, equation: Equation
    ) -> Scope:
        name, size = (None, None) if known is None else known[:2]
        running = _VMAP if known is not None else f"{_VMAP}; {_UNKNOWN_VMAP}"
        layout = (size, 1, size, 1)
        number = self._add(
            around, "vmap", name, layout, equation, running, _CHANGE_VMAP
        )
        return around._replace(axis=number)

    def _scan(
        self, equation: Equation, around: Scope, made_by: Mapping[Var, Equation]
    ) -> bool:
        """Adds a loop; True if a vmap after it computes the remainder."""
        length = equation.params["length"]
        body = equation.params["jaxpr"]
        batch = loops.batch_of_map(equation, made_by)
        if batch is None:
            running = f"{length:,} steps, one after another"
            in_turn = loops.is_in_turn(equation)
            if in_turn:
                running += ": each takes what the one before gave"
            layout: Any = (length, 1, 1, length)
            change = _CHANGE_IN_TURN if in_turn else _CHANGE_LOOP
            number = self._add(
                around, "loop", None, layout, equation, running, change, in_turn
            )
            self._goes_over(number, equation)
            self.visit(body, around._replace(axis=number))
            return False
        size, width = batch
        steps = -(-size // width)
        running = loops.in_steps(steps, width, size - width * (steps - 1))
        change = (
            f"Give jax.lax.map another batch_size= than {width}, or write spmap for "
            "it, which lays the elements on devices."
        )
        layout = (size, 1, width, steps)
        number = self._add(around, "loop", None, layout, equation, running, change)
        self._goes_over(number, equation)
        self.visit(body, around._replace(axis=number), open_vmaps=1)
        return size % width != 0

    def _goes_over_marks(
        self,
        equation: Equation,
        stack: Sequence[_OpenVmap],
        marks: Sequence[MarkedVmap],
    ) -> None:
        """Notes the argument and the dimension of each marked vmap."""
        for vmap, mark in zip(stack[1:], marks, strict=False):
            number, dimension = vmap.scope.axis, mark.dimension
            if vmap.mark is None or number is None or dimension is None:
                continue
            for argument in self._origins.of(*equation.invars):
                self.over.setdefault(number, set()).add((argument, dimension))

    def _goes_over(self, number: int, scan: Equation) -> None:
        arguments = self._origins.of(*loops.goes_over(scan))
        self.over[number] = {(argument, 0) for argument in arguments}

    def _while(self, equation: Equation, around: Scope) -> None:
        running = "steps one after another, as many as the values ask for"
        if self._waits(equation, around):
            running += f": {loops.UNTIL_THE_SLOWEST}"
        number = self._add(
            around,
            "while",
            None,
            (None, 1, 1, None),
            equation,
            running,
            "jax.lax.fori_loop or jax.lax.scan have a fixed number of steps.",
        )
        for inner in jaxprs_in(equation.params):
            self.visit(inner, around._replace(axis=number))

    def _chunked(self, equation: Equation, around: Scope) -> None:
        """Adds the loop of each stage of a function in pieces."""
        # What cuts functions is much to load, and only here it is needed.
        from shardmap.plan.inside.primitive import computed, cut

        params = equation.params
        whole, _ = computed(params["jaxpr"])
        for stage in cut(whole, params["asked"], params["options"]).stages:
            count = stage.num_shards
            if count > 1:
                running = f"{count:,} pieces, one after another: stage {stage.number}"
                layout = (count, 1, 1, count)
                self._add(
                    around, "loop", None, layout, equation, running, _CHANGE_PIECES
                )
        self.visit(params["jaxpr"].jaxpr, around)

    def _waits(self, loop: Equation, around: Scope) -> bool:
        """Whether vectorised elements wait for the slowest."""
        number = around.axis
        while number is not None:
            axis = self.axes[number]
            if axis.kind == "vmap":
                return loops.waits_for_all(loop)
            if axis.vectorised != 1:
                return True
            number = axis.inside
        return False

    def _spmap(self, equation: Equation, around: Scope, depth: int) -> None:
        params = equation.params
        decided, inside = around.in_map(equation)
        self.is_partitioned |= decided.branch == "partitioned"
        layout, mesh = decided.axis, inside.mesh
        replicas = 1 if around.mesh or not mesh else mesh.shape.get(REPLICAS, 1)
        if around.mesh is None or params["mesh_axes"] is not None:
            change = (
                "Give devices=, or mesh= and mesh_axes=, for other devices; "
                "batch_size= to vectorise fewer elements at once; axis_size=, or "
                "longer arrays, for more elements."
            )
        else:
            change = (
                "The outermost map has the devices: give it more of them, or give both "
                "maps mesh= and mesh_axes= of one mesh."
            )
        number = self._add(
            around,
            "spmap",
            params["axis_name"],
            (layout.size, layout.devices, layout.vectorised, layout.steps),
            equation,
            _how_it_runs(layout, decided.branch, replicas),
            change,
        )
        if decided.mesh_axes:
            inside = inside.with_sizes([(params["axis_name"], layout.devices)])
        # A map that is vectorised has the vmaps around it inside.
        self.visit(params["call_jaxpr"], inside._replace(axis=number), depth)

    def _shard_map(self, equation: Equation, around: Scope, of_pmap: bool) -> None:
        params = equation.params
        mesh = params["mesh"]
        manual = manual_axes_of(equation)
        for name in mesh.axis_names:
            if name not in manual:
                continue
            size = mesh.shape[name]
            number = self._add(
                around,
                "pmap" if of_pmap else "shard_map",
                name,
                (size, size, 1, 1),
                equation,
                _how_it_runs(AxisLayout(name, size, (name,), size), "element"),
                "Give jax.pmap devices=; its axis has one element on each of them, "
                "where that of shardmap.spmap may be of any length."
                if of_pmap
                else _CHANGE_MESH,
            )
            if not of_pmap and not _tells_apart(equation, name):
                running = f"{self.axes[number].running}, which all do the same: {_SAME}"
                self.axes[number] = dataclasses.replace(
                    self.axes[number], running=running, is_repeated=True
                )
            around = around._replace(axis=number)
        self.visit(params["jaxpr"], around.in_shard_map(equation))


def _how_it_runs(layout: AxisLayout, branch: decision.Branch, replicas: int = 1) -> str:
    if layout.devices == 1:
        parts = ["on one device"]
    else:
        parts = [f"on {layout.devices:,} devices at once"]
        if branch == "partitioned":
            parts[0] += ", cut by the partitioner"
    if replicas > 1:
        parts.append(f"{replicas:,} replicas of each")
    if layout.steps > 1:
        last = layout.block - layout.vectorised * (layout.steps - 1)
        parts.append(loops.in_steps(layout.steps, layout.vectorised, last))
    elif layout.vectorised > 1:
        parts.append(f"{layout.vectorised:,} elements are one batched operation")
    return ", ".join(parts)


def _tells_apart(shard_map: Equation, name: str) -> bool:
    """Whether the devices along a mesh axis do different things."""
    specs = [spec.partitions for spec in shard_map.params["in_specs"]]
    return name in jax.tree.leaves(specs) or any(
        name in named_axes(each)
        for each in equations(shard_map.params["jaxpr"])
        if each.primitive in COLLECTIVES
        and COLLECTIVES[each.primitive].kind not in _GIVE_ALL_THE_SAME
    )
