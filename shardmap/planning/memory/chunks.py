"""Where the chunks of stores begin, at which a plan within memory cuts."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from shardmap.planning.engine.analysis import joined_classes
from shardmap.planning.engine.nodes import Graph, Node, Value
from shardmap.planning.engine.rules import Rule
from shardmap.planning.in_slices import Asked, Points, times_read
from shardmap.planning.sources.stores import borders


class Chunks:
    """Where chunks begin: of arguments, and of the array-likes of the results.

    A chunk of a result that shards share is read, decoded and written again by each of
    them, so that axes that reach a result are cut where its chunks begin, and only
    there.

    Attributes:
      leaves: the arguments that may lie in chunks.
      out: results, and the array-likes in chunks that they are written to.
    """

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[Node, Rule],
        leaves: Sequence[Any] = (),
        out: Sequence[tuple[Value, Any]] = (),
    ) -> None:
        self.leaves, self.out = leaves, out
        self._inputs = graph.inputs
        self._find = joined_classes(graph, rules).find if out else lambda key: key
        self._written = {
            self._class(value, axis): at
            for value, array in out
            for axis in range(len(value.shape))
            if (at := borders(array, axis)) is not None
        }

    def _class(self, value: Value, axis: int) -> Hashable:
        return self._find((value.number, axis)), value.shape[axis]

    def of(self, k: int, axis: int) -> Points | None:
        """Where they begin along an axis of an argument; None: it has none."""
        if k >= len(self.leaves):
            return None
        key = self._class(self._inputs[k], axis)
        return self._written.get(key, borders(self.leaves[k], axis))

    def read_once(self, k: int, axis: int) -> Points:
        """Those of them that begin a chunk of the argument, too."""
        read = borders(self.leaves[k], axis) if k < len(self.leaves) else None
        return tuple(sorted({*(read or ())}.intersection(self.of(k, axis) or ())))

    def times_read(self, asked: Asked) -> float:
        """How often pieces read each chunk of an argument, on average, at the most."""
        times = map(times_read, self.leaves, asked)  # Values inside have no chunks.
        return max(times, default=1.0)
