"""The links between devices, and the least time of collectives on them."""

import dataclasses
import numbers
import types
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from shardmap.units import shown

Groups = Sequence[Sequence[int]]
"""Which devices of a program take part in a collective together."""


@dataclasses.dataclass(frozen=True)
class Interconnect:
    """How fast one device sends to another.

    Attributes:
      bandwidth: the bytes per second that one device can send.
      latency: the seconds that a message to the next device takes.
      name: the name of the interconnect.
      source: the source of the numbers.
      KNOWN: public figures, by name. Bandwidths are the peak of all links of a device
        together. Vendors do not publish latencies: these are orders of magnitude, so
        measure your own.

    Raises:
      TypeError: the bandwidth or the latency is not a number.
      ValueError: the bandwidth is not above 0, or the latency is below 0.

    Example:
      >>> import shardmap as sm
      >>> ours = sm.Interconnect(bandwidth=25e9, latency=2e-6)
      >>> ours.time("all-gather", 10**6, 8)
      0.00028
      >>> sm.Interconnect.KNOWN["nvlink4"].bandwidth
      450000000000.0
    """

    KNOWN: ClassVar[Mapping[str, "Interconnect"]]

    bandwidth: float
    latency: float
    name: str = "given"
    source: str = "the caller"

    def __post_init__(self) -> None:
        for name in ("bandwidth", "latency"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(
                    f"the {name} of an Interconnect must be a number, got "
                    f"{shown(value)} of "
                    f"type {type(value).__name__}: bytes per second and seconds, such "
                    "as Interconnect(25e9, 2e-6)"
                )
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise ValueError(
                "an Interconnect has a bandwidth above 0 bytes per second and a "
                f"latency of at least 0 seconds, got {self.bandwidth} and "
                f"{self.latency}"
            )

    def time(self, kind: str, bytes_in: int, group_size: int, hops: int = 1) -> float:
        """The least seconds of one collective.

        One device puts ``n`` bytes into a collective of ``g`` devices, and sends

        ==================================  ==================
        collective                          a device sends
        ==================================  ==================
        all-reduce                          ``2 n (g-1)/g``
        all-gather                          ``n (g-1)``
        reduce-scatter, all-to-all          ``n (g-1)/g``
        broadcast, collective-permute       ``n``
        ==================================  ==================

        That takes at least ``sent / bandwidth``, and a message to the farthest device
        at least ``hops * latency``: the time is the longer of the two. A ragged
        all-to-all counts as one in which each device sends its whole operand. Nothing
        else is on the wire, all devices arrive at the same time, and reading and adding
        up cost nothing.

        Args:
          kind: XLA's name, such as "all-reduce".
          bytes_in: the bytes of one device's operand.
          group_size: the number of devices in one group.
          hops: how many links a message to the farthest device passes.
        """
        sent = sent_bytes(kind, bytes_in, group_size)
        return max(self.latency * hops, sent / self.bandwidth)


def sent_bytes(kind: str, bytes_in: int, group_size: int) -> int:
    """The bytes that one device sends in one collective; see `Interconnect.time`.

    >>> sent_bytes("all-reduce", 800, 8)
    1400
    """
    if kind == "all-gather":
        return bytes_in * (group_size - 1)
    if kind in ("all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"):
        times = 1 + (kind == "all-reduce")
        return round(times * bytes_in * (group_size - 1) / group_size)
    return bytes_in


_TPU = "Google Cloud TPU documentation, all links of a chip, one direction"
_NVLINK = "NVIDIA product page, half of the bidirectional total"
_PCIE = "PCI-SIG, 16 lanes, one direction"
_LINE = "the line rate"
_DCN = "Google Cloud TPU documentation, data center network, a chip's share"

Interconnect.KNOWN = types.MappingProxyType(
    {
        each.name: each
        for each in (
            Interconnect(300e9, 1e-6, "tpu-v4", f"{_TPU}: 2400 Gbps"),
            Interconnect(200e9, 1e-6, "tpu-v5e", f"{_TPU}: half of 400 GBps"),
            Interconnect(600e9, 1e-6, "tpu-v5p", f"{_TPU}: half of 1200 GBps"),
            Interconnect(400e9, 1e-6, "tpu-v6e", f"{_TPU}: half of 800 GBps"),
            # A chip is two devices, which share its links.
            Interconnect(300e9, 1e-6, "tpu-v7x", f"{_TPU}: a quarter of 1200 GBps"),
            Interconnect(300e9, 2e-6, "nvlink3", f"{_NVLINK} of 600 GB/s (A100)"),
            Interconnect(450e9, 2e-6, "nvlink4", f"{_NVLINK} of 900 GB/s (H100, H200)"),
            Interconnect(900e9, 2e-6, "nvlink5", f"{_NVLINK} of 1800 GB/s (B200)"),
            Interconnect(32e9, 5e-6, "pcie4", f"{_PCIE}: 16 GT/s a lane"),
            Interconnect(64e9, 5e-6, "pcie5", f"{_PCIE}: 32 GT/s a lane"),
            Interconnect(100e9 / 8, 10e-6, "ethernet-100g", _LINE),
            Interconnect(400e9 / 8, 10e-6, "ethernet-400g", _LINE),
            Interconnect(400e9 / 8, 2e-6, "infiniband-ndr", f"{_LINE} of NDR, 4 lanes"),
            Interconnect(50e9 / 8, 10e-6, "dcn-v4", f"{_DCN}: 50 Gbps"),
            Interconnect(25e9 / 8, 10e-6, "dcn-v5e", f"{_DCN}: 6.4 Tbps of 256"),
            Interconnect(50e9 / 8, 10e-6, "dcn-v5p", f"{_DCN}: 50 Gbps"),
            Interconnect(100e9 / 8, 10e-6, "dcn-v6e", f"{_DCN}: 800 Gbps of 8"),
            Interconnect(50e9 / 8, 10e-6, "dcn-v7x", f"{_DCN}: half of 100 Gbps"),
        )
    }
)


def interconnect_of(given: str | Interconnect | None) -> Interconnect | None:
    """The interconnect with a name; an `Interconnect` as it is."""
    if given is None or isinstance(given, Interconnect):
        return given
    if not isinstance(given, str):
        raise TypeError(
            "interconnect must be a name or an Interconnect(bandwidth, latency), got "
            f"{shown(given)} of type {type(given).__name__}"
        )
    if given not in Interconnect.KNOWN:
        raise ValueError(
            f"no interconnect is called {shown(given)}. Known are "
            f"{', '.join(Interconnect.KNOWN)}; for another, give "
            "Interconnect(bandwidth=bytes_per_second, latency=seconds)"
        )
    return Interconnect.KNOWN[given]


class Wiring(NamedTuple):
    """What joins the devices of a program.

    Attributes:
      inside: the links of a slice of TPUs, of a host's GPUs, or of all devices.
      between: the network between slices of TPUs, or between hosts with GPUs; None if
        the devices are of one.
      parts: the slice or host of each device, in the order of the program.
      places: where each device is in the torus of its slice; () for no torus.
      dimensions: how many dimensions the torus has.
      whole: how many devices it has.
    """

    inside: Interconnect
    between: Interconnect | None = None
    parts: tuple[int, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    dimensions: int = 1
    whole: int = 0

    def time(self, kind: str, bytes_in: int, groups: Groups) -> float:
        """The least seconds of one collective, of its slowest group.

        In a torus a message passes at most half of the devices of each dimension that
        a group has, and a collective uses the links of these dimensions: two of a
        device in each, or one between two neighbours alone. An all-to-all sends a half
        of its bytes from one half of a dimension to the other. GPUs of a host are one
        link from each other. Between slices or hosts, each device sends its part.
        """
        spans = {self._span(group) for group in groups}
        if kind == "collective-permute":
            # Together the pairs have the links of all dimensions in which any moves.
            pairs = zip(*(span.lengths for span in spans), strict=True)
            moved = sum(max(lengths) > 1 for lengths in pairs)
            share = moved / max(1, self.dimensions)
            spans = {span._replace(share=share) for span in spans}
        return max((self._time(kind, bytes_in, span) for span in spans), default=0.0)

    def _span(self, group: Sequence[int]) -> "_Span":
        parts = {self.parts[k] for k in group} if self.parts else {0}
        places = [self.places[k] for k in group] if self.places else []
        lengths = tuple(len({*along}) for along in zip(*places, strict=True))
        is_all = len(group) == self.whole
        links = sum(2 - (k == 2 and not is_all) for k in lengths if k > 1)
        share = links / (2 * max(1, self.dimensions))
        return _Span(len(group), len(parts), lengths, share)

    def _time(self, kind: str, n: int, span: "_Span") -> float:
        g, parts, lengths, share = span
        each = g // parts
        is_exchange = kind in ("all-to-all", "ragged-all-to-all")
        hops = sum(length // 2 for length in lengths) or 1
        inside = self.inside
        if share:
            bandwidth = inside.bandwidth * share
            inside = dataclasses.replace(inside, bandwidth=bandwidth)
        if kind == "collective-permute":
            joined = self.between if parts > 1 and self.between else inside
            return joined.time(kind, n, g)
        # In each host or slice, a device has its part of what is sent between them.
        of_part, of_device = n, n // each
        if kind == "all-gather":
            of_part, of_device = n * parts, n
        elif is_exchange:
            of_part, of_device = n // parts, n
        times = [inside.time(kind, of_part, each, hops)]
        if parts > 1 and self.between is not None:
            times.append(self.between.time(kind, of_device, parts))
        if is_exchange and share:
            link = self.inside.bandwidth / (2 * self.dimensions)
            longest = max(lengths)
            ways = 1 if longest == 2 and share < 1 else 2
            times.append(of_part * longest / (4 * ways * link))
        return max(times)


class _Span(NamedTuple):
    """How far a group of devices reaches.

    Attributes:
      size: the devices.
      parts: the slices or hosts that they are of.
      lengths: how many places they have along each dimension of the torus.
      share: the part of a device's links that it uses; 0 for all, outside of a torus.
    """

    size: int
    parts: int
    lengths: tuple[int, ...]
    share: float
