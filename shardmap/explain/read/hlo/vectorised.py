"""Over how many devices the compiler cut what is vectorised, by the shapes it made."""

import collections
from collections.abc import Iterable
from typing import NamedTuple

from shardmap.explain.read.hlo.text import Module

Shape = tuple[int, ...]


class Made(NamedTuple):
    """A result of a program before it is compiled.

    Attributes:
      source, operation: the line that it is of, and what makes it.
      shape: of the whole.
    """

    source: str | None
    operation: str
    shape: Shape


class Shapes:
    """The shapes of what is vectorised in a compiled program, on a device."""

    def __init__(self, module: Module) -> None:
        self._num_devices = module.num_devices
        # The values are as good as sets, and have an order.
        self._shapes: dict[tuple[str | None, str], dict[Shape, None]] = {}
        for instructions in module.computations.values():
            for each in instructions:
                if "vmap(" in each.op_name and len(each.shapes) == 1:
                    # Of what JAX keeps without a line, any line may be meant.
                    for source in (module.source_of(each), None):
                        key = (source, each.operation)
                        self._shapes.setdefault(key, {})[each.shapes[0][1]] = None

    def cuts(self, made: Iterable[Made], size: int) -> list[int]:
        """Into how many shards the elements of a vmap are cut, the likeliest first.

        Args:
          made: the results of the vmap, which have a dimension of its elements.
          size: how many elements it has.
        """
        sure: collections.Counter[int] = collections.Counter()
        unsure: collections.Counter[int] = collections.Counter()
        for each in dict.fromkeys(made):
            found = self._cuts(each, size)
            (sure if len(found) == 1 else unsure).update(found)
        counts = sure or unsure
        # Of those that are as likely the first dimension's, where JAX puts elements.
        return sorted(counts, key=lambda count: -counts[count])

    def _cuts(self, made: Made, size: int) -> list[int]:
        """Into how many shards a dimension of that size may be cut, each once."""
        found: dict[int, None] = {}
        for shape in self._shapes.get((made.source, made.operation), ()):
            if len(shape) != len(made.shape):
                continue
            ratios = [
                self._shards(whole, part)
                for whole, part in zip(made.shape, shape, strict=True)
            ]
            for ratio, whole in zip(ratios, made.shape, strict=True):
                if None not in ratios and whole == size and ratio is not None:
                    found[ratio] = None
        return list(found)

    def _shards(self, whole: int, part: int) -> int | None:
        """How many shards of a length make a whole; None if they do not."""
        if not part:
            return None if whole else 1
        count = -(-whole // part)
        fits = self._num_devices % count == 0 and -(-whole // count) == part
        return count if fits else None
