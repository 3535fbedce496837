"""Which axes a program is repeated over, and how each of them runs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core.primitives import scan_p, while_p

from shardmap._jax.primitives import (
    SHARD_MAP,
    is_transposed,
    vmaps_around,
    walked_axes,
)
from shardmap._jax.types import Equation, Jaxpr, Var, aval_of
from shardmap._jax.walk import jaxprs_in
from shardmap.explain.read import loops, vmaps
from shardmap.explain.read.hlo.vectorised import Made
from shardmap.explain.read.meshes import is_pmap, map_place, tells_apart
from shardmap.explain.read.source import source_of
from shardmap.explain.report import Axis, AxisKind
from shardmap.map.lowering import decision
from shardmap.map.lowering.decision import ALONE, Around
from shardmap.map.primitives.axis import REPLICAS, UNNAMED, Spread
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.plan.inside.primitive import chunked_p, computed, cut

_ON_NO_DEVICES = ("vmap", "loop", "while")
_SAME = "no in_specs= cut anything along it"
_VMAP = "one batched operation: no parallel processes, all on each device at once"
_CHANGE_VMAP = (
    "Write spmap for vmap to lay it on devices, or jax.lax.map with batch_size= to "
    "bound the memory."
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


class _Around(NamedTuple):
    """What is around a jaxpr.

    Attributes:
      axis: the number of the axis directly around it.
      mesh: that of the outermost map around it.
      inner_axes: the mesh axes left for the maps in it.
      program: what it is a part of.
      line: that of what is around, for what JAX has no line of the user's for.
    """

    axis: int | None = None
    mesh: Any = None
    inner_axes: tuple[str, ...] = ()
    program: Around = ALONE
    line: str | None = None


class Axes(NamedTuple):
    """The axes of a program.

    Attributes:
      axes: each before those inside it.
      made: for the number of each that is vectorised, what is made in it.
      over: for the number of a loop, those of the arguments that it goes over.
    """

    axes: tuple[Axis, ...]
    made: Mapping[int, Sequence[Made]]
    over: Mapping[int, frozenset[int]]


def axes_of(jaxpr: Jaxpr, source: str | None = None) -> Axes:
    """The axes of a program.

    Args:
      jaxpr: the program, traced with or without marks for vmaps.
      source: where the function is, for axes around all of its lines.
    """
    walk = _Walk(loops.Origins(jaxpr))
    walk.scope(jaxpr, _Around(line=source))
    return Axes(tuple(walk.axes), walk.made, walk.over)


class _Walk:
    def __init__(self, origins: loops.Origins) -> None:
        self.axes: list[Axis] = []
        self.made: dict[int, list[Made]] = {}
        self.over: dict[int, frozenset[int]] = {}
        self._origins = origins
        self._seen: dict[Any, int] = {}
        self._walked: set[Any] = set()

    def _add(
        self,
        around: _Around,
        kind: AxisKind,
        name: Any,
        layout: tuple[int | None, int, int | None, int | None],
        equation: Equation,
        running: str,
        change: str,
        in_turn: bool = False,
    ) -> int:
        """Adds an axis, if it is not there already, and gives its number."""
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

    def scope(self, jaxpr: Jaxpr, around: _Around, open_vmaps: int = 0) -> None:
        """Adds the axes in a jaxpr, but its outermost ``open_vmaps`` vmaps."""
        origins = tuple(map(self._origins.of, jaxpr.invars))
        key = (id(jaxpr), around, open_vmaps, origins)
        if key in self._walked:
            return
        self._walked.add(key)
        made_by = {var: e for e in jaxpr.eqns for var in e.outvars}
        # The jaxpr itself, then the vmaps around an equation, with where they end.
        stack: list[tuple[_Around, int]] = [(around, len(jaxpr.eqns))] * (
            1 + open_vmaps
        )
        opened = list(stack)
        rest_of_loop = False
        for number, equation in enumerate(jaxpr.eqns):
            self._origins.note(equation)
            depth = vmaps_around(equation)
            rest_of_loop &= depth > 0
            if rest_of_loop:
                continue
            del stack[depth + 1 :]
            while stack[-1][1] <= number:
                stack.pop()
            if is_transposed(equation):
                # The way back goes through the same vmaps.
                stack += opened[len(stack) : depth + 1]
            if depth >= len(stack):
                begun = vmaps.begin(jaxpr, number, len(stack) - 1)
                for name, size in begun.vmaps:
                    vmap = self._vmap(stack[-1][0], name, size, begun.deduced, equation)
                    stack.append((vmap, begun.end))
                opened = [(each, len(jaxpr.eqns)) for each, _ in stack]
            here, _ = stack[-1]
            here = here._replace(line=source_of(equation) or here.line)
            self._note(equation, here)
            if equation.primitive is scan_p:
                rest_of_loop = self._scan(equation, here, made_by)
            elif equation.primitive is spmap_p:
                self._spmap(equation, here, depth)
            elif equation.primitive is SHARD_MAP:
                self._shard_map(equation, here, is_pmap(jaxpr, equation))
            elif equation.primitive is while_p:
                self._while(equation, here)
            elif equation.primitive is chunked_p:
                self._chunked(equation, here)
            else:
                for inner in jaxprs_in(equation.params):
                    self.scope(inner, here)

    def _note(self, equation: Equation, around: _Around) -> None:
        """Keeps what is made in the vmaps that are directly around an equation."""
        number, line = around.axis, around.line
        while number is not None and self.axes[number].kind in _ON_NO_DEVICES:
            axis = self.axes[number]
            if axis.kind == "vmap" or (axis.vectorised or 1) > 1:
                made = self.made.setdefault(number, [])
                name = equation.primitive.name
                made += [Made(line, name, aval_of(v).shape) for v in equation.outvars]
            number = self.axes[number].inside

    def _vmap(
        self,
        around: _Around,
        name: Any,
        size: int | None,
        deduced: bool,
        equation: Equation,
    ) -> _Around:
        running = _VMAP
        if deduced:
            running += (
                "; its size is deduced from the shapes"
                if size is not None
                else "; its size is not visible in the middle of a program"
            )
        layout = (size, 1, size, 1)
        number = self._add(
            around, "vmap", name, layout, equation, running, _CHANGE_VMAP
        )
        return around._replace(axis=number)

    def _scan(
        self, equation: Equation, around: _Around, made_by: Mapping[Var, Equation]
    ) -> bool:
        """Adds a loop; True if a vmap behind it computes what is left of its axis."""
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
            self.over[number] = self._origins.of(*loops.goes_over(equation))
            self.scope(body, around._replace(axis=number))
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
        self.over[number] = self._origins.of(*loops.goes_over(equation))
        self.scope(body, around._replace(axis=number), open_vmaps=1)
        return size % width != 0

    def _while(self, equation: Equation, around: _Around) -> None:
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
            self.scope(inner, around._replace(axis=number))

    def _chunked(self, equation: Equation, around: _Around) -> None:
        """Adds the loop of each stage of a function in pieces."""
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
        self.scope(params["jaxpr"].jaxpr, around)

    def _waits(self, loop: Equation, around: _Around) -> bool:
        """Whether elements that are vectorised together wait for the slowest."""
        number = around.axis
        while number is not None:
            axis = self.axes[number]
            if axis.kind == "vmap":
                return loops.waits_for_all(loop)
            if axis.vectorised != 1:
                return True
            number = axis.inside
        return False

    def _spmap(self, equation: Equation, around: _Around, depth: int) -> None:
        params = equation.params
        mesh, walk = map_place(equation, around.mesh, around.inner_axes)
        decided = decision.decide(params, mesh, walk, around.program)
        spread = decided.spread
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
            (spread.size, spread.devices, spread.vectorised, spread.steps),
            equation,
            _how_it_runs(spread, decided.branch, replicas),
            change,
        )
        inner_axes = around.inner_axes if walk is None else walk.inner_axes
        # A map that is vectorised has the vmaps around it inside.
        program = decided.inside(mesh, around.program)
        inside = _Around(number, mesh, inner_axes, program, around.line)
        self.scope(params["call_jaxpr"], inside, depth)

    def _shard_map(self, equation: Equation, around: _Around, of_pmap: bool) -> None:
        params = equation.params
        mesh = params["mesh"]
        manual = walked_axes(equation)
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
                _how_it_runs(Spread.of(size, size), "element"),
                "Give jax.pmap devices=; its axis has one element on each of them, "
                "where that of shardmap.spmap may be of any length."
                if of_pmap
                else "The shape of mesh= says how many devices, in_specs= and "
                "out_specs= what they cut.",
            )
            if not of_pmap and not tells_apart(equation, name):
                running = f"{self.axes[number].running}, which all do the same: {_SAME}"
                self.axes[number] = dataclasses.replace(
                    self.axes[number], running=running, is_repeated=True
                )
            around = around._replace(axis=number)
        program = Around(mesh.axis_names, around.program.manual | manual)
        self.scope(params["jaxpr"], around._replace(program=program))


def _how_it_runs(spread: Spread, branch: decision.Branch, replicas: int = 1) -> str:
    if spread.devices == 1:
        parts = ["on one device"]
    else:
        parts = [f"on {spread.devices:,} devices at once"]
        if branch == "partitioned":
            parts[0] += ", cut by the partitioner"
    if replicas > 1:
        parts.append(f"{replicas:,} replicas of each")
    if spread.steps > 1:
        last = -(-spread.size // spread.devices) - spread.vectorised * (
            spread.steps - 1
        )
        parts.append(loops.in_steps(spread.steps, spread.vectorised, last))
    elif spread.vectorised > 1:
        parts.append(f"{spread.vectorised:,} elements are one batched operation")
    return ", ".join(parts)
