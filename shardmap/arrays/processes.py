"""Devices and arrays of several processes, and the time to wait for other processes."""

import math
import os
from collections.abc import Sequence

import jax

from shardmap.sharding.mesh import default_devices

TIME_LIMIT = "SHARDMAP_PROCESS_TIMEOUT"
"""The environment variable for how many seconds to wait for the other processes; with 0
they are not asked."""


def all_devices(backend: str | None) -> list[jax.Device]:
    """The devices of all processes, those of each together, in process order."""
    return default_devices(backend) or [
        device
        for process in range(jax.process_count(backend))
        for device in jax.local_devices(process, backend)
    ]


def by_process(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """Devices in groups, one for each process, in order; equally many of each."""
    groups: dict[int, list[jax.Device]] = {}
    order = [device.process_index for device in devices]
    if len(set(order)) == 1:
        return [list(devices)]
    for device in devices:
        groups.setdefault(device.process_index, []).append(device)
    together = [k for k, group in groups.items() for _ in group]
    sizes = [len(group) for group in groups.values()]
    if order != together or len(set(sizes)) > 1:
        raise ValueError(
            "each process must have equally many devices, which stand together, as "
            "each has a contiguous, equal part of the elements: got devices of "
            f"processes {order}. Leave devices out, or sort them by process_index and "
            f"give {min(sizes)} of each process."
        )
    return list(groups.values())


def spans_processes(devices: Sequence[jax.Device]) -> bool:
    """Whether these devices are not all this process's own; some have to be."""
    # Tests of programs replace jax.process_index.
    here = devices[0].client.process_index()
    processes = {device.process_index for device in devices}
    if here not in processes:
        raise ValueError(
            f"process {here} has none of these devices, which are on processes "
            f"{sorted(processes)}: only processes that have some can use them."
        )
    return len(processes) > 1


def is_global_array(value: object) -> bool:
    """Whether other processes hold parts of an array."""
    if isinstance(value, jax.core.Tracer):
        return False
    if isinstance(value, jax.Array):
        return not value.is_fully_addressable
    sharding = value.sharding if isinstance(value, jax.ShapeDtypeStruct) else None
    return sharding is not None and not sharding.is_fully_addressable


def time_limit() -> float:
    """The number of seconds to wait for other processes, by default 600."""
    text = os.environ.get(TIME_LIMIT, "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError(
            f"the environment variable {TIME_LIMIT} must be a number of seconds, but "
            f"is {text!r}."
        )
    return seconds


def lost_process_message(name: str) -> str:
    """The message for when the connection to another process has failed."""
    return (
        f"{name}: a collective with the other processes failed. One of them has ended, "
        "or did not come in time, or runs another program. Look at its output first."
    )
