"""The memory of a device, and what a machine is called."""

from collections.abc import Sequence

import jax

from shardmap._jax.stages import is_compile_only
from shardmap.explaining.interconnect import CHIPS


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
