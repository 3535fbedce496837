"""The data of an explanation: axes, arrays, collectives, costs and remarks.

Everything here is frozen and plain: strings, numbers, tuples and `ShardingSpec`.
`to_dict` gives it as JSON would; `Explanation` prints and saves it.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from shardmap.explaining.chips import CHIPS
from shardmap.explaining.interconnect import Interconnect, Wiring, sent_bytes
from shardmap.sharding.spec import ShardingSpec
from shardmap.units import duration, size, size_of

AxisKind = Literal[
    "spmap", "vmap", "loop", "while", "chunked", "shard_map", "pmap", "sharding"
]
MAPS: tuple[AxisKind, ...] = ("spmap", "shard_map", "pmap")
"""The kinds of axes that are laid on devices."""


@dataclasses.dataclass(frozen=True, repr=False)
class Axis:
    """An axis that a function is repeated over, and how it runs.

    Attributes:
      name: the axis name in collectives, as text; None if it has no name.
      size: the number of elements; None if only the running program knows.
      kind: what made the axis. "spmap", "shard_map" (also for `mesh_map`), "pmap" and
        "sharding" (only arrays are sharded) run on devices; "vmap" is one batched
        operation; "loop", "while" and "chunked", for the pieces of a function, are
        steps one after another.
      devices: how many devices share the elements, 1 for one program.
      vectorised: how many elements are one batched operation on a device.
      steps: how many batched operations a device does one after another; None if
        only the running program knows.
      depth: how many axes of this explanation are around it.
      inside: the number, in ``axes``, of the axis directly around it, or None.
      source: the line of the program that made it, as ``file:line (function)``.
      in_turn: whether each step takes what the step before gave.
      is_repeated: whether all of its devices do the same work, because nothing is
        sharded along the axis.
    """

    name: str | None
    size: int | None
    kind: AxisKind
    devices: int
    vectorised: int
    steps: int | None
    depth: int = 0
    inside: int | None = None
    source: str | None = None
    in_turn: bool = False
    is_repeated: bool = False

    @property
    def idle_places(self) -> int:
        """The number of places without an element, if the axis does not divide."""
        if self.size is None:
            return 0
        return self.devices * -(-self.size // self.devices) - self.size

    @property
    def last_step(self) -> int | None:
        """The number of elements of a shorter last step, or None."""
        if self.size is None or self.steps is None:
            return None
        before = self.vectorised * (self.steps - 1)
        last = -(-self.size // self.devices) - before
        return last if last < self.vectorised else None

    def __repr__(self) -> str:
        return f"<{self} ({self.kind})>"

    def __str__(self) -> str:
        size = "unknown size" if self.size is None else f"{self.size:,}"
        return f"{self.title} of {size} = {self.layout}"

    @property
    def title(self) -> str:
        """Such as ``axis 'i'``; ``an axis`` without a name."""
        return "an axis" if self.name is None else f"axis {self.name!r}"

    @property
    def layout(self) -> str:
        """How the elements run, such as ``8 devices x 4 vectorised x 1 step``."""
        steps = "unknown" if self.steps is None else f"{self.steps:,}"
        return (
            f"{self.devices:,} device{'s' * (self.devices != 1)} x "
            f"{self.vectorised:,} vectorised x "
            f"{steps} step{'s' * (self.steps != 1)}"
            + ("" if self.last_step is None else f", the last of {self.last_step:,}")
        )


@dataclasses.dataclass(frozen=True, repr=False)
class ArrayLayout:
    """How one input or output is sharded.

    Attributes:
      role: "input" or "output".
      path: its key path, such as ``x['w'][0]`` or ``result[1]``.
      shape: the whole array's shape.
      dtype: the name of its dtype.
      spec: how it is sharded; None if unknown, or if no spec can express it.
      shard_shape: the shape of one device's shard; None if unknown.
      bytes: the size of the whole array.
      shard_bytes: the size of one device's shard; None if unknown.
      layout: how it is sharded, in a few words, also without a spec.
      devices: the ids of the devices, in the order of the spec's mesh; () if they are
        0, 1, 2 and so on, or unknown.
    """

    role: Literal["input", "output"]
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: ShardingSpec | None
    shard_shape: tuple[int, ...] | None
    bytes: int
    shard_bytes: int | None
    layout: str
    devices: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.role} {self.path}, {self.type}, {self.layout}>"

    @property
    def type(self) -> str:
        """Its dtype and shape, such as ``float32[8,64]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def num_devices(self) -> int | None:
        """The number of devices that hold a shard or a copy."""
        return None if self.spec is None else self.spec.num_shards

    @property
    def is_replicated(self) -> bool:
        """Whether several devices hold the whole array."""
        return (self.num_devices or 1) > 1 and self.shard_bytes == self.bytes

    @property
    def copies(self) -> int | None:
        """The number of devices that hold each shard."""
        if self.spec is None:
            return None
        return self.spec.num_shards // math.prod(self.spec.tile_counts)


def describe(spec: ShardingSpec, names: Sequence[Sequence[str]] = ()) -> str:
    """How an array is cut, in a few words.

    Args:
      spec: how it is cut.
      names: the mesh axes of each dimension, if they have names.

    >>> from shardmap import Chunked, Replicated, ShardedAxis
    >>> rows = ShardingSpec((Chunked(2), None), (ShardedAxis(0), Replicated(4)))
    >>> describe(rows, [["data"]])
    "dimension 0 over 'data' in 2 shards, each on 4 devices"
    """
    if spec.num_shards == 1:
        return "on one device"
    cuts = []
    for dimension, count in enumerate(spec.tile_counts):
        along = " and ".join(map(repr, names[dimension])) if names[dimension:] else ""
        over = f" over {along}" if along else ""
        if count > 1:
            cuts.append(f"dimension {dimension}{over} in {count:,} shards")
    copies = spec.num_shards // math.prod(spec.tile_counts)
    if not cuts:
        return f"replicated on {copies:,} devices"
    return ", ".join(cuts) + (f", each on {copies:,} devices" if copies > 1 else "")


def argument_of(path: str) -> str:
    """The argument at the start of a key path, such as ``x`` of ``x['w'][0]``."""
    return re.split(r"[\[.]", path, maxsplit=1)[0]


@dataclasses.dataclass(frozen=True, repr=False)
class Collective:
    """Data that moves between devices at one place of the program.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
        "collective-permute", as XLA calls them.
      operation: the operation of the program, such as "psum"; None if the compiler
        added the collective.
      axes: the names of its axes, as text; () if unknown.
      group_size: the number of devices in the largest group; None if unknown. A group
        may have fewer devices than the axes together.
      count: how often it runs in one call; None if only the running program knows.
      bytes_in: the bytes of one device's operand.
      bytes_out: the bytes of one device's result.
      source: the line of the program, as ``file:line (function)``.
      added_by_partitioner: whether the compiler added it.
      cause: why the compiler added it; None if it did not, or if the cause is unknown.
      advice: how to avoid it; None if the cause is unknown, or if the collective is
        expected, such as a sum over a sharded batch.
      together: the number of collectives that XLA sends as one, this one included.
      before, after: the operand and the result on one device, with dtype and shape as
        XLA writes them, such as ``f32[4,2]``; None if unknown.
      seconds: the least time of all ``count`` runs on the links of the devices; None
        if these, the count or the devices are unknown.
      groups: the devices of each group, by their places in the program; of a
        collective-permute, each sender and its receiver; () if unknown.
    """

    kind: str
    operation: str | None
    axes: tuple[str, ...]
    group_size: int | None
    count: int | None
    bytes_in: int
    bytes_out: int
    source: str | None
    added_by_partitioner: bool
    cause: str | None = None
    advice: str | None = None
    together: int = 1
    before: str | None = None
    after: str | None = None
    seconds: float | None = None
    groups: tuple[tuple[int, ...], ...] = dataclasses.field(
        default=(), metadata={"plain": False}
    )

    def __repr__(self) -> str:
        return f"<{self.kind} {self.title}, {self.before} -> {self.after}>"

    @property
    def title(self) -> str:
        """What is known of operation and axes, such as ``psum over 'data'``."""
        over = f"over {', '.join(map(repr, self.axes))}" if self.axes else ""
        return " ".join(filter(None, (self.operation, over)))

    @property
    def link_bytes(self) -> int | None:
        """The bytes that one device sends in all ``count`` runs.

        None if ``count`` or ``group_size`` is unknown.
        """
        if self.count is None or self.group_size is None:
            return None
        return self.count * sent_bytes(self.kind, self.bytes_in, self.group_size)

    def on(self, wires: Wiring | None) -> "Collective":
        """Returns the collective with its least time on some wires, if known.

        Collectives that XLA sends as one share the latency.
        """
        if wires is None or self.count is None or self.group_size is None:
            return self
        groups = self.groups or (tuple(range(self.group_size)),)
        time = wires.time(self.kind, self.bytes_in * self.together, groups)
        return dataclasses.replace(self, seconds=self.count * time / self.together)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one call on one device, by the compiler. None: unknown.

    Attributes:
      flops: arithmetic operations, by the rules of XLA's cost analysis, in all steps of
        loops of known length, without exponentials, sines and the like. Products of
        convolutions with padding do not count.
      bytes_accessed: bytes read and written in memory. A loop counts as one step.
      peak_bytes: the most bytes in use at once: arguments, results and temporary
        values, less what donated arguments save.
      argument_bytes, output_bytes, temporary_bytes: the parts of ``peak_bytes``.
      donated_bytes: the bytes of results that reuse donated arguments.
      host_bytes: the bytes of the host's memory that the program uses, which
        ``peak_bytes`` does not have; None for none.
    """

    flops: float | None = None
    bytes_accessed: float | None = None
    peak_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temporary_bytes: int | None = None
    donated_bytes: int | None = None
    host_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Held:
    """A value that a device holds at the peak of memory.

    Attributes:
      type: its dtype and shape on the device, as XLA writes them.
      bytes: its size on one device.
      operation: the operation that made it.
      source: the line of the program, or None.
    """

    type: str
    bytes: int
    operation: str
    source: str | None


@dataclasses.dataclass(frozen=True)
class Remark:
    """Something worth changing.

    Attributes:
      text: the finding, with its numbers.
      advice: what to do instead.
      source: a key path or a line of the program, or None.
    """

    text: str
    advice: str
    source: str | None


@dataclasses.dataclass(frozen=True)
class Report:
    """The fields of an `Explanation`; see there."""

    name: str
    mesh: tuple[tuple[str, int], ...] = ()
    num_devices: int = 0
    device_kind: str | None = None
    axes: tuple[Axis, ...] = ()
    arrays: tuple[ArrayLayout, ...] = ()
    collectives: tuple[Collective, ...] = ()
    cost: Cost | None = None
    remarks: tuple[Remark, ...] = ()
    notes: tuple[str, ...] = ()
    largest: tuple[Held, ...] = ()
    busiest: tuple[tuple[str, float], ...] = ()
    available: int | None = None
    pieces: tuple[str, ...] = ()
    stages: tuple[Any, ...] = ()
    title: str | None = None
    interconnect: Interconnect | None = None
    network: Interconnect | None = None
    machine: str | None = None
    capacity: int | None = None
    least_times: tuple[tuple[str, float], ...] = ()
    mesh_devices: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes that a device has in use; None: unknown."""
        return None if self.cost is None else self.cost.peak_bytes

    @property
    def is_refused(self) -> bool:
        """Whether the compiler refuses it: only the memory that it needs is known."""
        return self.cost is not None and self.cost.argument_bytes is None

    @property
    def fits(self) -> bool | None:
        """Whether a device has memory for the peak; None: that is not known."""
        if self.peak_bytes is None or self.capacity is None:
            return None
        return self.peak_bytes <= self.capacity and not self.is_refused

    @property
    def sent_bytes(self) -> int:
        """The bytes that a device sends in a call, in collectives of known count."""
        return sum(each.link_bytes or 0 for each in self.collectives)

    @property
    def least_seconds(self) -> float | None:
        """The least time of a call, by the vendor's figures; None: unknown."""
        return max((seconds for _, seconds in self.least_times), default=None)

    @property
    def bound_by(self) -> str | None:
        """What takes the least time: "arithmetic", "memory" or "interconnect"."""
        longest = max(self.least_times, key=lambda each: each[1], default=(None, 0))
        return longest[0] if longest[1] else None

    @property
    def in_turn(self) -> float | None:
        """The least time of a call in which no collective overlaps; None: unknown."""
        times = dict(self.least_times)
        wires = times.pop("interconnect", 0.0)
        return max(times.values()) + wires if times else None

    @property
    def needed(self) -> str:
        """The memory that a device needs, of how much if that is known, or ""."""
        if self.peak_bytes is None:
            return ""
        if self.capacity is None:
            return size(self.peak_bytes)
        return size_of(self.peak_bytes, self.capacity)

    @property
    def summary(self) -> str:
        """Whether it fits, what is sent and the least time, in one line."""
        says = []
        if self.needed:
            fits = {True: "fits: ", False: "does not fit: ", None: "needs "}[self.fits]
            says.append(f"{fits}{self.needed} a {self._noun}")
        if self.is_refused:
            return "; ".join(says)
        unknown = any(each.count is None for each in self.collectives)
        sent = f"{'at least ' * unknown}{size(self.sent_bytes)} a step"
        says.append(f"sends {sent if self.sent_bytes or unknown else 'nothing'}")
        if self.least_seconds:
            says.append(f"at least {duration(self.least_seconds)}")
        return "; ".join([*says, *filter(None, [self.network_text])])

    @property
    def _noun(self) -> str:
        chip = CHIPS.get(self.device_kind or "")
        return "device" if chip is None else chip.noun

    @property
    def network_text(self) -> str:
        """The network of the times, such as ``400 Gb/s a GPU between hosts``."""
        if self.network is None:
            return ""
        parts = "slices" if (self.device_kind or "").startswith("TPU") else "hosts"
        rate = f"{self.network.bandwidth * 8 / 1e9:,.4g} Gb/s a {self._noun}"
        return f"{rate} between {parts} ({self.network.name})"

    @property
    def seconds(self) -> float | None:
        """The least time of all collectives with a known count, one after another."""
        known = [each.seconds for each in self.collectives if each.seconds is not None]
        return None if self.interconnect is None else sum(known)

    @property
    def inputs(self) -> tuple[ArrayLayout, ...]:
        """The arrays that are inputs."""
        return tuple(array for array in self.arrays if array.role == "input")

    @property
    def outputs(self) -> tuple[ArrayLayout, ...]:
        """The arrays that are outputs."""
        return tuple(array for array in self.arrays if array.role == "output")

    def to_dict(self) -> dict[str, Any]:
        """The explanation as dicts, lists, strings and numbers, as JSON has them.

        It includes derived values: ``layout`` of an axis,
        ``copies`` of an array, ``link_bytes`` of a collective, ``seconds`` of all
        collectives.
        """
        return _plain(self)


_DERIVED: dict[type, tuple[str, ...]] = {
    Axis: ("layout", "idle_places", "last_step"),
    ArrayLayout: ("num_devices", "copies"),
    Collective: ("link_bytes",),
    Report: ("seconds", "fits", "sent_bytes", "least_seconds", "in_turn", "bound_by"),
}


def _plain(value: Any) -> Any:
    if isinstance(value, ShardingSpec):
        return repr(value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        names = [f.name for f in fields if f.metadata.get("plain", True)]
        names += next((d for k, d in _DERIVED.items() if isinstance(value, k)), ())
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
