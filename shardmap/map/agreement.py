"""Do all processes run the same program? They compare it before its first run.

A program over devices of several processes runs when all of them have called it. So
before the first run they tell each other what it is, and one that runs another program
is an error, not a hang.

Top-level calls are compared when traced, all else when lowered: only lowering order is
the same everywhere.
"""

import contextlib
import contextvars
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardmap._jax.types import AnyMesh, Jaxpr, Value
from shardmap._jax.walk import jaxprs_in, per_jaxpr
from shardmap.arrays.processes import TIME_LIMIT, lost_process_message, time_limit
from shardmap.map.primitives.map_primitive import MapParams

_MESSAGE_BYTES = 1024


def description(params: MapParams) -> str:
    """A text about a map that is the same in all processes of a program."""
    name, jaxpr = params.axis_name, params.call_jaxpr
    operands = ", ".join(var.aval.str_short() for var in jaxpr.invars)
    axis = f"axis {name!r}" if isinstance(name, str) else "an axis"
    return (
        f"{params.name}, {axis} of {params.axis_size}, elements ({operands}), in_axes "
        f"{params.in_axes}, out_axes {params.out_axes}, operations {operations(jaxpr)}"
    )


_COMPARED = ("axes", "axis_name", "axis_size", "axis_index_groups", "perm", "parts")
"""The parameters of collectives, maps inside and constraints."""


@per_jaxpr
def operations(jaxpr: Jaxpr) -> str:
    """Eight digits of the hash of a jaxpr's operations."""
    # Processes may share different jaxprs, so each is hashed where it is called.
    steps = []
    for equation in jaxpr.eqns:
        results = [var.aval.str_short() for var in equation.outvars]
        params = equation.params
        compared = {key: _plain(params[key]) for key in _COMPARED if key in params}
        steps.append(f"{equation.primitive} {results} {compared}")
        steps += map(operations, jaxprs_in(params))
    return hashlib.sha256("\n".join(steps).encode()).hexdigest()[:8]


def _plain(value: Value) -> str:
    """The text of names and numbers. Other objects differ between processes."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, str | int | None) else "?"


# Never forgotten: one process alone would ask again for what it has forgotten, and
# wait for the others.
_agreed: set[tuple[Mesh, str]] = set()

_unchecked = contextvars.ContextVar("unchecked", default=False)


def agree(mesh: AnyMesh | None, what: str, text: Callable[[], str]) -> None:
    """Makes sure that all processes of a mesh are about to run the same.

    They compare a program's text once: JAX may lower it again in one process alone. If
    they differ, one is gone, or not all have come in time, it is a RuntimeError.
    """
    if jax.process_count() == 1 or not isinstance(mesh, Mesh):
        return
    firsts: dict[int, jax.Device] = {}
    for device in mesh.devices.flat:
        firsts.setdefault(device.process_index, device)
    own_text = text()
    if len(firsts) == 1 or _unchecked.get() or (mesh, own_text) in _agreed:
        return
    # Backwards, so that these messages and the collectives of programs that others
    # may be running cannot take each other for their own: they use other connections.
    texts = _within_time_limit(what, tuple(reversed(firsts.values())), own_text)
    if len(set(texts.values())) > 1:
        first, told = next(iter(texts.items()))
        other = next(k for k, each in texts.items() if each != told)
        raise RuntimeError(
            f"{what}: the processes do not call the same function with equal shapes, "
            f"in the same order:\n  * process {first}: {told}\n  * process {other}: "
            f"{texts[other]}"
        )
    _agreed.add((mesh, own_text))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """While a program is lowered that one process alone may ask for."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)


def _within_time_limit(
    what: str, devices: tuple[jax.Device, ...], text: str
) -> dict[int, str]:
    """What each process says, by process; nothing if the time limit is 0."""
    if not (limit := time_limit()):
        return {}
    # In a thread of its own, as only a thread can be left waiting. It also sees no
    # mesh and no trace of its caller's.
    texts: Future[dict[int, str]] = Future()

    def run() -> None:
        try:
            texts.set_result(_exchange(devices, text))
        except Exception as error:
            texts.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return texts.result(limit)
    except TimeoutError:
        taking_part = sorted(device.process_index for device in devices)
        raise RuntimeError(
            f"{what}: waited {limit:g} s for the other processes to call it too: "
            f"{text}. Processes {taking_part} take part, and one has ended or waits "
            f"elsewhere. Look at its output, or set {TIME_LIMIT}."
        ) from None
    except Exception as error:
        raise RuntimeError(lost_process_message(what)) from error


def _exchange(devices: tuple[jax.Device, ...], text: str) -> dict[int, str]:
    """The text of each process, by process."""
    # Needed among several processes only.
    from jax.experimental import multihost_utils

    logging.getLogger("shardmap").debug(
        "shardmap: this process is about to run %s", text
    )
    encoded = text.encode()
    if len(encoded) > _MESSAGE_BYTES:
        digest = hashlib.sha256(encoded).hexdigest()[:8].encode()
        encoded = encoded[: _MESSAGE_BYTES - 12] + b"... " + digest
    message = np.frombuffer(encoded.ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
    mesh = Mesh(np.asarray(devices, dtype=object), "process")
    rows = multihost_utils.host_local_array_to_global_array(
        message[None], mesh, PartitionSpec("process")
    )
    gathered = multihost_utils.process_allgather(rows, tiled=True)
    texts = {
        device.process_index: bytes(row).rstrip(b"\0").decode(errors="replace")
        for device, row in zip(devices, gathered, strict=True)
    }
    return dict(sorted(texts.items()))
