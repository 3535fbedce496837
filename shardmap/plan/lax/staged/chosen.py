"""Which equations are written as stages: those at which cuts end."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import primitives as p

from shardmap.plan.engine.nodes import Node, Operand, Rewrite, Value
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.rules import Cut, meet
from shardmap.plan.lax import prefix
from shardmap.plan.lax.control import along
from shardmap.plan.lax.staged import recut, select, sort, tall, top
from shardmap.plan.lax.staged.one_pass import once


class Chosen:
    """What was found so far. An equation is known by the id of its parameters."""

    def __init__(self) -> None:
        self.running: list[tuple[Node, Cut]] = []
        self.largest: list[tuple[Node, Cut]] = []
        self.sorted: list[tuple[Node, Cut]] = []
        self.tall: list[tuple[Node, Cut]] = []
        self.recut: dict[int, tuple[Node, int, Cut]] = {}
        self.selected: list[select.Selections] = []
        self.once: dict[once.Known, once.Change] = {}
        self.scans: dict[int, tuple[Node, Cut]] = {}
        self._may_be_once = True

    def more(self, analysis: Analysis) -> bool:
        """Adds what is to be written in stages, and says whether there was any."""
        ended = list(dict.fromkeys(each.node for each in analysis.ended))
        known = {
            id(node.params) for node, _ in (*self.largest, *self.sorted, *self.tall)
        }

        def new(primitives: Iterable[Any], besides: Iterable[int] = ()) -> list[Node]:
            taken = known.union(besides)
            return [
                node
                for node in ended
                if node.primitive in primitives and id(node.params) not in taken
            ]

        def cut(node: Node, axis: int) -> Cut:
            values = [v for v in node.ins if isinstance(v, Value)]
            return meet([analysis.cuts[v][axis] for v in values])

        selected = select.selections(analysis.graph, new([p.sort_p], self.recut))
        if selected.sorts:
            self.selected.append(selected)
        changed = {
            each: change
            for each, change in recut.changes(analysis).items()
            if each not in self.recut and each not in selected.sorts
        }
        self.recut |= changed
        scans = {
            each: change
            for each, change in along.changes(analysis).items()
            if each not in self.scans
        }
        self.scans |= scans
        running = new(prefix.KINDS)
        self.running += [(node, cut(node, node.params["axis"])) for node in running]
        largest = new([p.top_k_p])
        self.largest += [(node, cut(node, -1)) for node in largest]
        sorts = new([p.sort_p], (*self.recut, *selected.sorts))
        self.sorted += [(node, cut(node, node.params["dimension"])) for node in sorts]
        high = [n for n in new([p.qr_p, p.svd_p], self.recut) if tall.is_tall(n)]
        self.tall += [(node, cut(node, 0)) for node in high]
        wanted = once.changes(analysis) if self._may_be_once else None
        self._may_be_once = wanted is not None
        passes = {k: v for k, v in (wanted or {}).items() if k not in self.once}
        self.once |= passes
        others = sorts or selected.sorts or high or passes or scans
        return bool(changed or running or largest or others)

    def rewrites(self) -> list[Mapping[Any, Rewrite]]:
        """How they are written; where several know a primitive, the last one first."""
        found: list[Mapping[Any, Rewrite]] = [
            prefix.rewrite(self.running),
            top.rewrite(self.largest),
            tall.rewrite(self.tall),
            along.rewrite(self.scans),
        ]
        if self.sorted:
            found.append({p.sort_p: sort.rewrite(self.sorted)})
        found += map(select.rewrites, self.selected)
        found.append(once.rewrite(self.once))
        return [*found, recut.rewrite(self.recut)]


def layered(tables: Iterable[Mapping[Any, Rewrite]]) -> dict[Any, Rewrite]:
    """One table: what the last one leaves as it is, the one before it may write."""
    found: dict[Any, Rewrite] = {}
    for table in tables:
        for primitive, write in table.items():
            first = found.get(primitive)
            found[primitive] = write if first is None else _either(write, first)
    return found


def _either(
    first: Callable[..., Sequence[Operand] | None],
    second: Callable[..., Sequence[Operand] | None],
) -> Rewrite:
    def write(*args: Any) -> Sequence[Operand] | None:
        found = first(*args)
        return second(*args) if found is None else found

    return write
