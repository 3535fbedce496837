"""What the rules of loops and branches share: the names of their loops."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from shardmap.plan.engine.nodes import Node, Value
from shardmap.plan.engine.propagate import Partial
from shardmap.plan.engine.recipe import Intervals
from shardmap.plan.engine.rules import (
    UNCUT,
    Contraction,
    Cut,
    Factor,
    Forward,
    Link,
    Lost,
    Reason,
    Rule,
    meet,
)
from shardmap.plan.engine.slices import Interval
from shardmap.plan.lax.control.body import InnerBody

ALONG = Reason(
    "each step of the loop needs the one before it", "cut an axis inside of a step"
)
ELSEWHERE = "cut an axis that the body treats index by index"
MIXED = Reason("the body of the loop or branch mixes this axis", ELSEWHERE)
Names: TypeAlias = list[list[Hashable | None]]
"""Per operand or result, and axis: which loop it is, None where it is needed whole."""


class Inner(Rule):
    """What the rules of loops and branches share: the names of their loops.

    Attributes:
      ins: of the operands' axes.
      outs: of the results' axes.
    """

    remedy = ELSEWHERE
    """What would make an axis cuttable that the body mixes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ins: Names = [[None] * len(s) for s in node.in_shapes]
        self.outs: Names = [[None] * len(s) for s in node.out_shapes]
        # Per body: what it calls the loop of each place.
        self._inside: list[tuple[InnerBody, dict[Link, Any]]] = []
        # Operand and axis: why it is needed whole.
        self.why: dict[tuple[int, int], Reason] = {}

    def name_loops(
        self,
        body: InnerBody,
        ins: Mapping[int, tuple[int, int | None]],
        outs: Mapping[int, tuple[int, int | None]],
    ) -> None:
        """Names the axes that the body treats index by index, or sums over.

        Args:
          body: the body.
          ins: input of the body -> (operand, its axis that the input has not).
          outs: output of the body -> (result, its axis that the output has not).
        """
        places: dict[Link, Any] = {}
        for side, operands, numbers, names in (
            ("in", body.graph.inputs, ins, self.ins),
            ("out", body.graph.outputs, outs, self.outs),
        ):
            for k, (number, without) in numbers.items():
                operand = operands[k]
                if not isinstance(operand, Value):
                    continue
                for axis in range(len(operand.shape)):
                    root = body.classes.find((operand.number, axis))
                    place = axis + (without is not None and axis >= without)
                    node = body.broken.get(root)
                    if node is None:
                        names[number][place] = root
                        places[Link(side, number, place)] = root
                    elif side == "in":
                        at = f"{node.name} ({node.source})"
                        why = Reason(f"{MIXED.why} at {at}", self.remedy)
                        self.why.setdefault((number, place), why)
        self._inside.append((body, places))

    def _inner(self, body: int, names: Iterable[Any]) -> dict[Any, Any]:
        """What a body calls some loops -> their names here."""
        wanted = set(names)
        found = {}
        for (side, number, axis), root in self._inside[body][1].items():
            name = (self.ins if side == "in" else self.outs)[number][axis]
            if name in wanted:
                found[root] = name
        return found

    def parts(self, names: Iterable[Any]) -> list[list[Partial | None]] | None:
        """Per body, what its outputs are parts of if these are cut; None: they cannot.

        Bodies are branches of which one runs: what is a part in one of them is one in
        all.
        """
        names = list(names)
        found = []
        for k, (body, _) in enumerate(self._inside):
            inner = self._inner(k, names)
            parts = body.parts(inner)
            if parts is None:
                return None
            row: list[Partial | None] = []
            for part in parts:
                if part is None:
                    row.append(None)
                    continue
                loops = frozenset(inner[loop] for loop in part.loops)
                # Two loops of the body that are one outside: pieces of one would
                # meet only the same pieces of the other.
                if len(loops) < len(part.loops):
                    return None
                row.append(Partial(part.combiner, loops))
            found.append(row)
        for column in zip(*found, strict=True):
            if len({part for part in column if part is not None}) > 1:
                return None
        return found

    def limited(self, loops: Mapping[Factor, Interval]) -> dict[Factor, Interval]:
        """The loops that run over a part only."""
        sizes = {
            name: size
            for axes, shape in zip(self.ins, self.node.in_shapes, strict=True)
            for name, size in zip(axes, shape, strict=True)
        }
        return {name: part for name, part in loops.items() if part != (0, sizes[name])}

    def intervals(self, body: int, loops: Mapping[Factor, Interval]) -> Intervals:
        """Which parts of a body's contracted factors run, for parts of the loops."""
        inner = self._inner(body, loops)
        named = {root: loops[name] for root, name in inner.items()}
        return self._inside[body][0].intervals(named)

    def first_ones(
        self, body: int, limited: Sequence[Factor], starts: Sequence[jax.Array]
    ) -> tuple[list[Partial | None], dict[Factor, jax.Array]]:
        """What a body's results are parts of, and along which loops a shard is first.

        Args:
          body: which.
          limited: the loops that run over a part only.
          starts: positions that end with where these parts start.
        """
        parts = self.parts(limited)
        assert parts is not None
        behind = starts[len(starts) - len(limited) :]
        here = {name: at == 0 for name, at in zip(limited, behind, strict=True)}
        return parts[body], here

    def _joint(self, names: Iterable[Any]) -> list[Any]:
        """Those of the cut loops that can be cut together."""
        found: list[Any] = []
        for name in names:
            if self.parts([*found, name]) is not None:
                found.append(name)
        return found

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        found: dict[Any, list[Cut]] = {}
        at: dict[Any, tuple[int, int]] = {}
        lost = []
        for k, (axes, row) in enumerate(zip(self.ins, cuts, strict=True)):
            for axis, (name, cut) in enumerate(zip(axes, row, strict=True)):
                if name is not None:
                    found.setdefault(name, []).append(cut)
                    at.setdefault(name, (k, axis))
                elif cut.at:
                    lost.append(Lost(cut.origins, self.why.get((k, axis), MIXED)))
        met = {name: cut for name, row in found.items() if (cut := meet(row)).at}
        kept = self._joint(met)
        lost += [Lost(c.origins, MIXED) for name, c in met.items() if name not in kept]
        met = {name: met[name] for name in kept}
        outs = [[met.get(name, UNCUT) for name in axes] for axes in self.outs]
        parts: dict[Any, dict[int, str]] = {}
        for row_of_parts in self.parts(met) or []:
            for number, part in enumerate(row_of_parts):
                if part is not None:
                    for name in part.loops:
                        parts.setdefault(name, {})[number] = part.combiner
        contracted = [
            Contraction(
                name,
                min(parts[name].values()),
                self.node.in_shapes[at[name][0]][at[name][1]],
                *at[name],
                met[name],
                parts[name],
            )
            for name in met
            if name in parts
        ]
        return Forward(outs, contracted, lost)

    def links(self) -> list[list[Link]]:
        groups: dict[Any, list[Link]] = {}
        for side, operands in (("in", self.ins), ("out", self.outs)):
            for k, axes in enumerate(operands):
                for axis, name in enumerate(axes):
                    if name is not None:
                        groups.setdefault(name, []).append(Link(side, k, axis))
        return list(groups.values())
