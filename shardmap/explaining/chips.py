"""Public figures of kinds of devices, and what joins the devices of a program."""

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardmap._jax.stages import is_compile_only
from shardmap.explaining.interconnect import Interconnect, Wiring


class Gpu(NamedTuple):
    """A kind of GPU, with the names of fields of XLA's ``GpuDeviceInfoProto``.

    The figures are the vendor's, and those that the driver tells. Sizes are in bytes.
    """

    name: str
    compute_capability: tuple[int, int]
    features: str
    links: int
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    device_memory_size: int
    memory_bandwidth: int
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int


_H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    features="ACCELERATED_FEATURES",
    links=18,
    core_count=132,
    fpus_per_core=128,
    clock_rate_ghz=1.98,
    device_memory_size=84_942_979_072,
    memory_bandwidth=3_352_320_000_000,
    l2_cache_size=50 * 2**20,
    shared_memory_per_core=228 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
)

GPUS = {
    "h100": _H100,
    "h200": _H100._replace(
        name="NVIDIA H200",
        # Of 143,771 MiB, the driver keeps as large a part as of the H100's.
        device_memory_size=150_109_106_176,
        memory_bandwidth=4_800_000_000_000,
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        features="NONE",
        links=12,
        core_count=108,
        fpus_per_core=64,
        clock_rate_ghz=1.41,
        device_memory_size=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
        l2_cache_size=40 * 2**20,
        shared_memory_per_core=164 * 2**10,
        shared_memory_per_block_optin=163 * 2**10,
    ),
}


class Chip(NamedTuple):
    """Public figures of a kind of device.

    Attributes:
      interconnect: the name in ``Interconnect.KNOWN`` of the links of a device.
      network: the name of what joins slices of TPUs, or hosts with GPUs.
      dimensions: of the torus of the links; 0 where each device reaches each directly.
      memory: the bytes that XLA lets a program use; None if only a device that runs
        knows, by its ``memory_stats()``.
      flops: floating point operations per second in products, at most, by the type of
        the operands; {} if they are not here.
      memory_bandwidth: the bytes per second between memory and processor, at most.
      noun: what a device is called.
    """

    interconnect: str
    network: str
    dimensions: int = 0
    memory: int | None = None
    flops: Mapping[str, float] = types.MappingProxyType({})
    memory_bandwidth: float | None = None
    noun: str = "device"

    def seconds(self, products: Mapping[str, float]) -> float:
        """The least seconds of products, by the type of their operands."""
        most = max(self.flops.values())
        return sum(n / self.flops.get(type_, most) for type_, n in products.items())


_GIB = 1 << 30


def _tpu(
    name: str,
    dimensions: int,
    memory: float,
    bf16: float,
    int8: float,
    fp8: float,
    bandwidth: float,
    cores: int = 1,
) -> Chip:
    """A TPU, whose chips are several devices if it has several cores.

    A product of float32 is one of bfloat16, or several for a higher precision.
    """
    flops = {"bf16": bf16, "int8": int8, "fp8": fp8, "f32": bf16}
    flops |= {"f32 high": bf16 / 3, "f32 highest": bf16 / 6}
    rates = {type_: rate * 1e12 / cores for type_, rate in flops.items()}
    noun = "device" if cores > 1 else "chip"
    return Chip(
        f"tpu-{name}",
        f"dcn-{name}",
        dimensions,
        # What libtpu 0.0.52 calls the available memory if it refuses a program.
        round(memory * _GIB),
        types.MappingProxyType(rates),
        bandwidth * 1e9 / cores,
        noun,
    )


def _gpu(name: str, links: str, *rates: float) -> Chip:
    """A GPU whose driver has told its figures.

    Products of float32 are of TF32, but for the highest precision.
    """
    types_ = "bf16", "int8", "fp8", "f32", "f32 highest"
    flops = {type_: rate * 1e12 for type_, rate in zip(types_, rates, strict=True)}
    flops["f32 high"] = flops["f32"]
    gpu = GPUS[name]
    return Chip(
        links,
        "infiniband-ndr",
        0,
        gpu.device_memory_size,
        types.MappingProxyType(flops),
        gpu.memory_bandwidth,
        "GPU",
    )


CHIPS: Mapping[str, Chip] = types.MappingProxyType(
    {
        # Without JAX's megacore, a TPU v4 is two devices, and a TPU7x is always.
        "TPU v4": _tpu("v4", 3, 15.25, 275, 275, 275, 1228, cores=2),
        "TPU v5 lite": _tpu("v5e", 2, 15.75, 197, 394, 197, 819),
        "TPU v5": _tpu("v5p", 3, 95.73, 459, 918, 459, 2765),
        "TPU v6 lite": _tpu("v6e", 2, 31.24, 918, 1836, 918, 1638),
        "TPU7x": _tpu("v7x", 3, 94.74, 2307, 4614, 4614, 7380, cores=2),
        GPUS["a100"].name: _gpu("a100", "nvlink3", 312, 624, 312, 156, 19.5),
        GPUS["h100"].name: _gpu("h100", "nvlink4", 989, 1979, 1979, 494.5, 67),
        GPUS["h200"].name: _gpu("h200", "nvlink4", 989, 1979, 1979, 494.5, 67),
        "NVIDIA A100-SXM4-40GB": Chip("nvlink3", "infiniband-ndr", noun="GPU"),
        "NVIDIA B200": Chip("nvlink5", "infiniband-ndr", noun="GPU"),
    }
)
"""Figures by `jax.Device.device_kind`."""


def wiring_of(
    given: Interconnect | None, devices: Sequence[jax.Device]
) -> Wiring | None:
    """What joins the devices of a program; None if it is not known.

    Args:
      given: what the user gives: the network between several slices of TPUs or hosts of
        GPUs, or else the links of all devices. Default: what the kind of device says.
      devices: the devices, in the order of the program.

    Raises:
      ValueError: the interconnect of another kind of chip is given by name.
    """
    chip = CHIPS.get(devices[0].device_kind) if devices else None
    if chip is None:
        return None if given is None else Wiring(given)
    links, network = Interconnect.KNOWN[chip.interconnect], None
    of_chips = {Interconnect.KNOWN[each.interconnect] for each in CHIPS.values()}
    if given in of_chips - {links}:
        raise ValueError(
            f"interconnect={given.name!r} does not join devices of kind "
            f"{devices[0].device_kind}, whose interconnect is {chip.interconnect!r}. "
            "Leave interconnect= out, or give an "
            "Interconnect(bandwidth=bytes_per_second, latency=seconds)"
        )
    parts = tuple(map(part_of, devices))
    if len({*parts}) > 1:
        is_of_chip = given in (None, links)
        network = Interconnect.KNOWN[chip.network] if is_of_chip else given
    elif given is not None:
        links = given
    places: Any = ()
    if chip.dimensions:
        places = tuple(tuple(device.coords) for device in devices)
    whole = len(devices) // len({*parts})
    return Wiring(links, network, parts, places, chip.dimensions, whole)


def part_of(device: Any) -> int:
    """The slice of a TPU, or the host of another device."""
    if device.platform == "tpu":
        return getattr(device, "slice_index", None) or 0
    return int(device.process_index)


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
    first, parts = devices[0], {part_of(device) for device in devices}
    if first.platform != "tpu":
        hosts = f"{len(parts):,} host{'s' * (len(parts) != 1)}"
        return f"{first.device_kind}, {hosts} of {len(devices) // len(parts)}"
    places: list[Any] = [device.coords for device in devices]
    sizes = [max(along) - min(along) + 1 for along in zip(*places, strict=True)]
    while len(sizes) > 2 and sizes[-1] == 1:
        sizes.pop()
    shape = " x ".join(map(str, sizes))
    slices = f"{len(parts):,} slices of " if len(parts) > 1 else ""
    return f"{first.device_kind}, {slices}{shape}"
