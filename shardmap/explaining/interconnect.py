"""The links between devices, the time of collectives on them, and figures of chips."""

import dataclasses
import numbers
import types
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax

from shardmap._jax.stages import is_compile_only
from shardmap.units import shown


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
      >>> ours.time("all-gather", 1000, 8)
      1.428e-05
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

    def time(self, kind: str, bytes_in: int, group_size: int) -> float:
        """The estimated seconds of one collective.

        The devices of a group form a ring, in the order of the mesh. One device puts
        ``n`` bytes into a collective of ``g`` devices; a message to the next device
        costs the latency ``a``, and each sends ``B`` bytes per second. Then

        ===================  ==================  ============  =======================
        collective           a device sends      messages      time
        ===================  ==================  ============  =======================
        all-reduce, ring     ``2 n (g-1)/g``     ``2 (g-1)``   ``messages a + sent/B``
        all-reduce, tree     ``2 n log2 g``      ``2 log2 g``  the same
        all-gather, ring     ``n (g-1)``         ``g-1``       the same
        reduce-scatter       ``n (g-1)/g``       ``g-1``       the same
        all-to-all           ``n (g-1)/g``       ``g-1``       the same
        broadcast, ring      ``n``               ``g-1``       the same
        broadcast, tree      ``n log2 g``        ``log2 g``    the same
        collective-permute   ``n``               ``1``         the same
        ===================  ==================  ============  =======================

        ``log2`` is rounded up. An all-reduce or a broadcast takes the ring or the tree,
        whichever is faster: a tree wins for few bytes. A ragged all-to-all counts as
        an all-to-all, in which each device sends its whole operand. These are lower
        bounds: nothing else is on the wire, all devices arrive at the same time, and
        reading and adding up cost nothing.

        Args:
          kind: XLA's name, such as "all-reduce".
          bytes_in: the bytes of one device's operand.
          group_size: the number of devices in one group.
        """
        return min(
            self.latency * messages + sent / self.bandwidth
            for sent, messages in _ways(kind, bytes_in, group_size)
        )


def sent_bytes(kind: str, bytes_in: int, group_size: int) -> int:
    """The bytes that one device sends in one collective, by the ring formula.

    >>> sent_bytes("all-reduce", 800, 8)
    1400
    """
    (sent, _), *_ = _ways(kind, bytes_in, group_size)
    return round(sent)


def _ways(kind: str, n: int, g: int) -> list[tuple[float, int]]:
    """The bytes that a device sends, and the messages: by a ring, then by a tree."""
    if kind == "all-reduce":
        rounds = 2 * (g - 1).bit_length()
        return [(2 * n * (g - 1) / g, 2 * (g - 1)), (n * rounds, rounds)]
    if kind == "all-gather":
        return [(n * (g - 1), g - 1)]
    if kind == "collective-broadcast":
        rounds = (g - 1).bit_length()
        return [(n, g - 1), (n * rounds, rounds)]
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return [(n * (g - 1) / g, g - 1)]
    return [(n, 1)]


_TPU = "Google Cloud TPU documentation, all links of a chip, one direction"
_NVLINK = "NVIDIA product page, half of the bidirectional total"
_PCIE = "PCI-SIG, 16 lanes, one direction"
_LINE = "the line rate"

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
        )
    }
)


class Chip(NamedTuple):
    """Public figures of a kind of device.

    Attributes:
      interconnect: the name in ``Interconnect.KNOWN`` of what joins such devices.
      memory: the bytes that XLA lets a program use; None if only a device that runs
        knows, by its ``memory_stats()``.
      flops: floating point operations per second, at most: the vendor's figure for
        dense products of bfloat16; None if it is not here.
      memory_bandwidth: the bytes per second between memory and processor, at most.
    """

    interconnect: str
    memory: int | None = None
    flops: float | None = None
    memory_bandwidth: float | None = None


_GIB = 1 << 30

CHIPS: Mapping[str, Chip] = types.MappingProxyType(
    {
        # What libtpu 0.0.52 calls the available memory if it refuses a program. Without
        # JAX's megacore, a TPU v4 is two devices, and a TPU7x is always.
        "TPU v4": Chip("tpu-v4", round(15.25 * _GIB), 275e12 / 2, 1228e9 / 2),
        "TPU v5 lite": Chip("tpu-v5e", round(15.75 * _GIB), 197e12, 819e9),
        "TPU v5": Chip("tpu-v5p", round(95.73 * _GIB), 459e12, 2765e9),
        "TPU v6 lite": Chip("tpu-v6e", round(31.24 * _GIB), 918e12, 1638e9),
        "TPU7x": Chip("tpu-v7x", round(94.74 * _GIB), 2307e12 / 2, 7380e9 / 2),
        # What the driver tells.
        "NVIDIA A100-SXM4-40GB": Chip("nvlink3"),
        "NVIDIA A100-SXM4-80GB": Chip("nvlink3", 85_100_068_864, 312e12, 2039e9),
        "NVIDIA H100 80GB HBM3": Chip("nvlink4", 84_942_979_072, 989e12, 3352e9),
        "NVIDIA H200": Chip("nvlink4"),
        "NVIDIA B200": Chip("nvlink5"),
    }
)
"""Figures by `jax.Device.device_kind`."""


def interconnect_on(
    given: Interconnect | None, devices: Sequence[jax.Device]
) -> Interconnect | None:
    """What joins the devices of a program: what is given, or what their kind says.

    The network between hosts of GPUs is not known, so that of these nothing is chosen.

    Args:
      given: what the user gives.
      devices: the devices; () if there are none.

    Raises:
      ValueError: the interconnect of another kind of chip is given by name.
    """
    if not devices or devices[0].device_kind not in CHIPS:
        return given
    kind = devices[0].device_kind
    name = CHIPS[kind].interconnect
    if given is None:
        hosts = {device.process_index for device in devices}
        is_network = devices[0].platform == "gpu" and len(hosts) > 1
        return None if is_network else Interconnect.KNOWN[name]
    others = {chip.interconnect for chip in CHIPS.values()} - {name}
    if given.name in others and given is Interconnect.KNOWN[given.name]:
        raise ValueError(
            f"interconnect={given.name!r} does not join devices of kind {kind}, whose "
            f"interconnect is {name!r}. Leave interconnect= out, or give an "
            "Interconnect(bandwidth=bytes_per_second, latency=seconds)"
        )
    return given


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


def capacity_of(device: jax.Device) -> int | None:
    """The bytes of a device's memory; None: they are not known."""
    chip = CHIPS.get(device.device_kind)
    # JAX asks only the devices of this process.
    is_here = device.process_index == jax.process_index()
    stats = device.memory_stats() if is_here and not is_compile_only(device) else None
    return (stats or {}).get("bytes_limit") or (chip and chip.memory)


def machine_of(devices: Sequence[jax.Device]) -> str:
    """Of what kind devices are, and how many: along each dimension, or on each host.

    >>> machine_of(jax.devices()[:1])
    'cpu, 1 host of 1'
    """
    first, hosts = devices[0], {device.process_index for device in devices}
    several = "s" * (len(hosts) != 1)
    shape = f"{len(hosts):,} host{several} of {len(devices) // len(hosts)}"
    if first.platform == "tpu":
        places = [device.coords for device in devices]
        sizes = [max(along) - min(along) + 1 for along in zip(*places, strict=True)]
        while len(sizes) > 2 and sizes[-1] == 1:
            sizes.pop()
        shape = " x ".join(map(str, sizes))
    return f"{first.device_kind}, {shape}"
