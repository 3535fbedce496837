"""One pass over a jaxpr: its axes and layout constraints."""

import collections
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import scan_p, slice_p, while_p

from shardmap._jax.primitives import (
    SHARD_MAP,
    is_pmap,
    is_transposed,
    manual_axes_of,
    named_axes,
    scan_counts,
    vmaps_around,
)
from shardmap._jax.types import Atom, Equation, Jaxpr, aval_of
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.explaining.read.constraints import LayoutConstraint, constraints_of
from shardmap.explaining.read.vmaps import MarkedVmap, vmaps_of
from shardmap.explaining.report import Axis, AxisKind
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.layout import lay_out_inner
from shardmap.map.lowering import decision
from shardmap.map.lowering.decision import Decision, EnclosingProgram
from shardmap.map.primitives.axis import REPLICAS, UNNAMED, AxisLayout
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.primitives.params import MapParams
from shardmap.source import source_of

CHUNKED = "chunked"
"""The name of the primitive of functions in pieces."""
_GIVE_ALL_THE_SAME = ("all-reduce", "all-gather")
_VMAP = "one batched operation: no parallel processes, all on each device at once"
_UNKNOWN_VMAP = "its size is not visible, as it is not over arguments"
_CHANGE_VMAP = (
    "Use spmap to run it on devices, or jax.lax.map with batch_size= to bound the "
    "memory."
)
_CHANGE_MESH = (
    "The shape of mesh= sets the number of devices. in_specs= and out_specs= of "
    "jax.shard_map, or in_axes= and out_axes= of mesh_map, set what is sharded."
)
_CHANGE_PMAP = (
    "Give jax.pmap devices=. Its axis has one element per device; the axis of "
    "shardmap.spmap may have any length."
)
_CHANGE_LOOP = (
    "No step needs the one before: vmap runs all at once, spmap runs them on devices, "
    "and jax.lax.map with batch_size= vectorises some at a time."
)
_CHANGE_BATCHES = (
    "No step needs the one before: a larger batch_size= of jax.lax.map vectorises more "
    "at a time, and spmap runs them on devices."
)
_CHANGE_BATCH = "batch_size= of jax.lax.map sets how many are vectorised at a time."
_CHANGE_PIECES = (
    "in_slices= of chunked sets the cuts, and memory= the memory of a piece. Fewer, "
    "larger pieces need more memory."
)
_CHANGE_IN_TURN = (
    "The steps cannot run at once. Cut or map the work inside a step. If the carry is "
    "only a sum, vmap the rest of the step and add up the results; if the step is "
    "associative, use jax.lax.associative_scan."
)


class Scope(NamedTuple):
    """The loops, maps and mesh axes around an equation.

    Attributes:
      axis: the number of the axis directly around it.
      line: the line of the equation around it. Some equations have no line, such as
        those in the rule of a `jax.custom_vjp` under `jax.checkpoint`.
      mesh: the mesh of the outermost map.
      inner_axes: the mesh axes left for maps inside.
      program: the manual and partitioned axes of the program around it.
      batch_size: how many elements each step of the loop around it vectorises.
    """

    axis: int | None = None
    line: str | None = None
    mesh: Any = None
    inner_axes: tuple[str, ...] = ()
    program: EnclosingProgram = EnclosingProgram()
    batch_size: int | None = None

    def at(self, equation: Equation) -> "Scope":
        """The scope of an equation itself."""
        return self._replace(line=source_of(equation) or self.line)

    def in_shard_map(self, equation: Equation) -> "Scope":
        """The scope of the body of a `jax.shard_map`."""
        mesh, manual = equation.params["mesh"], manual_axes_of(equation)
        return self._replace(program=self.program.inside(mesh, manual))

    def in_map(self, equation: Equation) -> tuple[Decision, "Scope"]:
        """How a map of this package is lowered, and the scope of its function."""
        params = MapParams.of(equation)
        if self.mesh is not None:
            placed = lay_out_inner(params, self.mesh, self.inner_axes)
            params = placed or params.on(self.mesh)
        decided = decision.decide(params, self.program)
        is_placed = params.mesh is not None and params.mesh_axes is not None
        return decided, self._replace(
            mesh=params.mesh,
            inner_axes=params.inner_axes if is_placed else self.inner_axes,
            program=decided.inside(params.mesh, self.program),
        )


class Facts(NamedTuple):
    """The facts of a jaxpr.

    Attributes:
      axes: its axes, each before those inside it.
      over: the arguments and dimensions that each loop or vmap maps over, by its
        number.
      constraints: the layouts that the program asks for.
      primitives: the names of its primitives.
    """

    axes: tuple[Axis, ...]
    over: Mapping[int, frozenset[tuple[int, int]]]
    constraints: tuple[LayoutConstraint, ...]
    primitives: frozenset[str]


def facts_of(jaxpr: Jaxpr, source: str | None = None) -> Facts:
    """Visits all equations of a program, once.

    Args:
      jaxpr: the program, traced with or without marks for vmaps.
      source: the line of the function, for equations without a line.
    """
    visitor = _Visitor(_Origins(jaxpr))
    visitor.visit(jaxpr, Scope(line=source))
    return Facts(
        tuple(visitor.axes),
        {number: frozenset(those) for number, those in visitor.over.items()},
        tuple(visitor.constraints),
        frozenset(visitor.primitives),
    )


class _Visitor:
    """Collects the facts of a jaxpr and of those in its equations."""

    def __init__(self, origins: "_Origins") -> None:
        self.axes: list[Axis] = []
        self.over: dict[int, set[tuple[int, int]]] = {}
        self.constraints: list[LayoutConstraint] = []
        self.primitives: set[str] = set()
        self._origins = origins
        self._numbers: dict[Any, int] = {}
        self._visited: set[Any] = set()

    def visit(self, jaxpr: Jaxpr, around: Scope, vmaps: int = 0) -> None:
        """Visits the equations of a jaxpr.

        Args:
          jaxpr: the jaxpr.
          around: its scope.
          vmaps: the number of vmaps in the equations' metadata that ``around`` has.
        """
        origins = tuple(map(self._origins.of, jaxpr.invars))
        key = (id(jaxpr), around, vmaps, origins)
        if key in self._visited:
            return
        self._visited.add(key)
        self.constraints += constraints_of(jaxpr, around.line)
        opened = _OpenVmaps(around, vmaps)
        for equation in jaxpr.eqns:
            self.primitives.add(equation.primitive.name)
            self._origins.note(equation)
            here = self._in_vmaps(equation, opened).at(equation)
            if equation.primitive is scan_p:
                self._scan(equation, here)
            elif equation.primitive is spmap_p:
                self._spmap(equation, here)
            elif equation.primitive is SHARD_MAP:
                self._shard_map(equation, here)
            elif equation.primitive is while_p:
                self._while(equation, here)
            elif equation.primitive.name == CHUNKED:
                self._chunked(equation, here)
            else:
                for inner in jaxprs_in(equation.params):
                    self.visit(inner, here)

    def _add(
        self,
        around: Scope,
        equation: Equation,
        kind: AxisKind,
        layout: tuple[int | None, int, int | None, int | None],
        *,
        running: str,
        change: str,
        name: Any = None,
        in_turn: bool = False,
        is_repeated: bool = False,
    ) -> Scope:
        """Adds an axis unless it is known, and returns the scope inside it."""
        size, devices, vectorised, steps = layout
        source = source_of(equation) or around.line
        text = None if name is None or name == UNNAMED else str(name)
        key = (around.axis, kind, text, layout, running)
        if is_repeated:
            running += ", which all do the same: nothing is sharded along it"
        # Differentiation repeats an axis in the backward pass, with other lines.
        place = None if is_transposed(equation) else source
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
                source=source,
                running=running,
                change=change,
                in_turn=in_turn,
                is_repeated=is_repeated,
            )
            number = self._numbers[key, place] = len(self.axes)
            self._numbers.setdefault((key, None), number)
            self.axes.append(axis)
        return around._replace(axis=self._numbers[key, place])

    def _in_vmaps(self, equation: Equation, opened: "_OpenVmaps") -> Scope:
        """The scope inside the vmaps around an equation, which are added as axes."""
        opened.close_for(equation)
        depth, marks = vmaps_around(equation), vmaps_of(equation)
        for level in range(opened.depth, depth):
            mark = marks[level] if marks else None
            around = opened.scopes[level]
            name, size = (None, around.batch_size) if mark is None else mark[:2]
            inside = self._add(
                around,
                equation,
                "vmap",
                (size, 1, size, 1),
                running=f"{_VMAP}; {_UNKNOWN_VMAP}" if size is None else _VMAP,
                change=_CHANGE_BATCH if around.batch_size else _CHANGE_VMAP,
                name=name,
            )
            opened.open(inside._replace(batch_size=None), mark)
        for level, mark in enumerate(marks, 1):
            number = opened.scopes[level].axis
            if (
                opened.marks[level]
                and number is not None
                and mark.dimension is not None
            ):
                arguments = self._origins.of(*equation.invars)
                over = self.over.setdefault(number, set())
                over.update((argument, mark.dimension) for argument in arguments)
        return opened.scopes[depth]

    def _scan(self, equation: Equation, around: Scope) -> None:
        length = equation.params["length"]
        in_turn = _is_in_turn(equation)
        batch_size = None if in_turn else _batch_size(equation)
        if length == 1:
            self.visit(equation.params["jaxpr"], around._replace(batch_size=batch_size))
            return
        running = f"{length:,} steps, one after another"
        change = _CHANGE_LOOP
        if in_turn:
            running += ": each takes what the one before gave"
            change = _CHANGE_IN_TURN
        elif batch_size is not None:
            running = f"{length:,} steps of {batch_size:,}, one after another"
            change = _CHANGE_BATCHES
        inside = self._add(
            around,
            equation,
            "loop",
            (length, 1, 1, length),
            running=running,
            change=change,
            in_turn=in_turn,
        )
        assert inside.axis is not None
        first, count = scan_counts(equation.params)
        arguments = self._origins.of(*equation.invars[first + count :])
        self.over[inside.axis] = {(argument, 0) for argument in arguments}
        inside = inside._replace(batch_size=batch_size)
        self.visit(equation.params["jaxpr"], inside)

    def _while(self, equation: Equation, around: Scope) -> None:
        inside = self._add(
            around,
            equation,
            "while",
            (None, 1, 1, None),
            running="steps one after another, as many as the values ask for",
            change="jax.lax.fori_loop or jax.lax.scan have a fixed number of steps.",
        )
        for inner in jaxprs_in(equation.params):
            self.visit(inner, inside)

    def _chunked(self, equation: Equation, around: Scope) -> None:
        """Adds the loops over the pieces of a function, those of equal length once."""
        # The plan compiler takes long to import, and only this needs it.
        from shardmap.planning.inside.primitive import computed, cut

        params = equation.params
        whole, _ = computed(params["jaxpr"])
        stages = cut(whole, params["asked"], params["options"]).stages
        counts = collections.Counter(stage.num_shards for stage in stages)
        counts.pop(1, None)
        for count, times in counts.items():
            running = f"{count:,} pieces, one after another"
            if times > 1:
                running += f", in each of {times:,} stages"
            self._add(
                around,
                equation,
                "loop",
                (count, 1, 1, count),
                running=running,
                change=_CHANGE_PIECES,
            )
        self.visit(params["jaxpr"].jaxpr, around)

    def _spmap(self, equation: Equation, around: Scope) -> None:
        params = equation.params
        decided, inside = around.in_map(equation)
        layout, mesh = decided.axis, inside.mesh
        replicas = 1 if around.mesh or not mesh else mesh.shape.get(REPLICAS, 1)
        if around.mesh is None or params["mesh_axes"] is not None:
            change = "Give devices=, or mesh= and mesh_axes=, for other devices; "
            if layout.vectorised > 1:
                change += "batch_size= to vectorise fewer elements at once; "
            change += "axis_size=, or longer arrays, for more elements."
        else:
            change = (
                "The outermost map has the devices: give it more of them, or give both "
                "maps mesh= and mesh_axes= of one mesh."
            )
        number = self._add(
            around,
            equation,
            "spmap",
            (layout.size, layout.devices, layout.vectorised, layout.steps),
            running=_how_it_runs(layout, decided.branch, replicas),
            change=change,
            name=params["axis_name"],
        ).axis
        # The vmaps around a vectorised map are inside it.
        vmaps = vmaps_around(equation)
        self.visit(params["call_jaxpr"], inside._replace(axis=number), vmaps)

    def _shard_map(self, equation: Equation, around: Scope) -> None:
        params = equation.params
        mesh, manual, of_pmap = (
            params["mesh"],
            manual_axes_of(equation),
            is_pmap(equation),
        )
        for name in (name for name in mesh.axis_names if name in manual):
            size = mesh.shape[name]
            running = _how_it_runs(AxisLayout(name, size, (name,), size), "element")
            is_repeated = not of_pmap and not _tells_apart(equation, name)
            around = self._add(
                around,
                equation,
                "pmap" if of_pmap else "shard_map",
                (size, size, 1, 1),
                running=running,
                change=_CHANGE_PMAP if of_pmap else _CHANGE_MESH,
                name=name,
                is_repeated=is_repeated,
            )
        self.visit(params["jaxpr"], around.in_shard_map(equation))


class _OpenVmaps:
    """The vmaps around the current equation, as a jaxpr is visited in order.

    An equation has the number of vmaps around it. A vmap ends at an equation with
    fewer, or at the mark of another vmap.

    Args:
      around: the scope of the jaxpr.
      given: the number of vmaps that ``around`` has already.

    Attributes:
      scopes: the scope of the jaxpr, then of each vmap, outermost first.
      marks: the mark of each vmap, if any; None for the jaxpr.
    """

    def __init__(self, around: Scope, given: int) -> None:
        self.scopes = [around] * (1 + given)
        self.marks: list[MarkedVmap | None] = [None] * (1 + given)
        self._given = self._forward = given

    @property
    def depth(self) -> int:
        """The number of open vmaps."""
        return len(self.scopes) - 1

    def open(self, inside: Scope, mark: MarkedVmap | None = None) -> None:
        """Adds a vmap inside the others."""
        self.scopes.append(inside)
        self.marks.append(mark)
        self._forward = self.depth

    def close_for(self, equation: Equation) -> None:
        """Ends the vmaps that do not contain an equation."""
        if is_transposed(equation):
            return  # The backward pass goes through the same vmaps.
        self._forward = min(self._forward, vmaps_around(equation))
        kept = self._forward
        for level, mark in enumerate(vmaps_of(equation), 1):
            if self._given < level <= kept:
                known = self.marks[level]
                if known is None or known[:2] != mark[:2]:
                    kept = level - 1
        del self.scopes[kept + 1 :], self.marks[kept + 1 :]


def _how_it_runs(layout: AxisLayout, branch: decision.Branch, replicas: int = 1) -> str:
    if layout.devices == 1:
        parts = ["on one device"]
    else:
        parts = [f"on {layout.devices:,} devices at once"]
        if branch == "partitioned":
            parts[0] += ", partitioned by XLA"
    if replicas > 1:
        parts.append(f"{replicas:,} replicas of each")
    if layout.steps > 1:
        last = layout.block - layout.vectorised * (layout.steps - 1)
        parts.append(_in_steps(layout.steps, layout.vectorised, last))
    elif layout.vectorised > 1:
        parts.append(f"{layout.vectorised:,} elements are one batched operation")
    return ", ".join(parts)


def _in_steps(steps: int, width: int, last: int) -> str:
    """Such as ``4 steps of 3 vectorised and one of 1, one after another``."""
    full = steps if last == width else steps - 1
    text = f"{full:,} step{'s' * (full != 1)} of {width:,}"
    text += " vectorised" * (width > 1)
    if last != width:
        text += f" and one of {last:,}"
    return f"{text}, one after another"


def _tells_apart(shard_map: Equation, name: str) -> bool:
    """Whether the devices along a mesh axis do different work."""
    specs = [spec.partitions for spec in shard_map.params["in_specs"]]
    return name in jax.tree.leaves(specs) or any(
        name in named_axes(each)
        for each in equations(shard_map.params["jaxpr"])
        if each.primitive in COLLECTIVES
        and COLLECTIVES[each.primitive].kind not in _GIVE_ALL_THE_SAME
    )


def _is_in_turn(scan: Equation) -> bool:
    """Whether a step of a `jax.lax.scan` depends on the one before.

    A counter is not such a dependence: its value in each step is known before.
    """
    body: Jaxpr = scan.params["jaxpr"]
    first, count = scan_counts(scan.params)
    carried = body.invars[first : first + count]
    equation_of = {var: equation for equation in body.eqns for var in equation.outvars}
    counters = {
        var
        for var, new in zip(carried, body.outvars[:count], strict=True)
        if new is var or _counts(var, new, equation_of)
    }
    needed = {*carried} - counters
    return any(
        not isinstance(atom, jex_core.Literal) and atom in needed
        for equation in body.eqns
        for atom in equation.invars
    )


def _batch_size(scan: Equation) -> int | None:
    """How many elements each step vectorises, as `jax.lax.map` with ``batch_size=``.

    None: a step does something else.
    """
    body = scan.params["jaxpr"]
    first, count = scan_counts(scan.params)
    shapes = [aval_of(var).shape for var in body.invars[first + count :]]
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) != 1 or not all(map(vmaps_around, body.eqns)):
        return None
    return sizes.pop() if body.eqns else None


def _counts(var: Any, new: Atom, equation_of: dict[Any, Equation]) -> bool:
    """Whether ``new`` is an integer made of ``var`` and of constants alone."""
    if aval_of(var).shape or not jnp.issubdtype(aval_of(var).dtype, jnp.integer):
        return False
    waiting = [new]
    while waiting:
        atom = waiting.pop()
        if isinstance(atom, jex_core.Literal) or atom is var:
            continue
        if atom not in equation_of:
            return False
        waiting += equation_of[atom].invars
    return True


class _Origins:
    """The arguments that values come from, along their first dimension."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._found = {var: frozenset([k]) for k, var in enumerate(jaxpr.invars)}

    def of(self, *atoms: Atom) -> frozenset[int]:
        """The numbers of the arguments."""
        known = [a for a in atoms if not isinstance(a, jex_core.Literal)]
        return frozenset().union(*(self._found.get(a, frozenset()) for a in known))

    def note(self, equation: Equation) -> None:
        """Follows arguments through an equation and into its jaxprs."""
        for var in equation.outvars:
            made_of = [
                atom
                for atom in equation.invars
                if _has_same_rows(aval_of(atom).shape, aval_of(var).shape)
                or (equation.primitive is slice_p and aval_of(var).shape)
            ]
            self._found[var] = self.of(*made_of)
        for inner in jaxprs_in(equation.params):
            if len(inner.invars) == len(equation.invars):
                for var, atom in zip(inner.invars, equation.invars, strict=True):
                    self._found[var] = self.of(atom)


def _has_same_rows(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether the first dimension stays, or is cut into steps and batches."""
    return before[:1] in (after[:1], (math.prod(after[:2]),)) and bool(before)
