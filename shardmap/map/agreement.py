"""Programs over the devices of several processes: do all run the same.

Every process runs the same Python program, and a compiled program over devices of
several of them runs when all have called it. Before the first call of a kind the
processes tell each other what they are about to run, so that one that is elsewhere is
an error and not a hang, or another result.

A map that is called agrees when it is traced. All else agrees when it is lowered: a
program that JAX runs has been lowered by all processes, in one order, while any of them
may trace a function for its shapes alone.
"""

import contextlib
import contextvars
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap._jax.types import AnyMesh, Jaxpr, Value
from shardmap._jax.walk import jaxprs_in
from shardmap._lazy import logging
from shardmap.arrays.processes import TIME_LIMIT, ended, gone, time_limit
from shardmap.map.tracing import per_jaxpr

_MESSAGE_BYTES = 1024
_SECONDS_BEFORE_ASKING = 30.0


def description(params: dict[str, Any]) -> str:
    """What a map is, equal in all processes that run the same program.

    Args:
      params: the parameters of its equation.
    """
    name, size = params["axis_name"], params["axis_size"]
    operands = ", ".join(var.aval.str_short() for var in params["call_jaxpr"].invars)
    axis = f"axis {name!r}" if isinstance(name, str) else "an axis"
    return (
        f"{params['name']}, {axis} of {size}, elements ({operands}), in_axes "
        f"{params['in_axes']}, out_axes {params['out_axes']}, operations "
        f"{operations(params['call_jaxpr'])}"
    )


def operations(jaxpr: Jaxpr) -> str:
    """Eight digits that tell what a jaxpr is made of."""
    return _digest(jaxpr)[:8]


@per_jaxpr
def _digest(jaxpr: Jaxpr) -> str:
    # Another process may share other jaxprs: all are told where they are called.
    steps = []
    for equation in jaxpr.eqns:
        results = " ".join(var.aval.str_short() for var in equation.outvars)
        steps.append(f"{equation.primitive} {results} {_who_talks(equation.params)}")
        steps += map(_digest, jaxprs_in(equation.params))
    return hashlib.sha256("\n".join(steps).encode()).hexdigest()


def _who_talks(params: dict[str, Any]) -> str:
    """What collectives, maps inside and constraints say about their elements."""
    keys = ("axes", "axis_name", "axis_size", "axis_index_groups", "perm", "parts")
    return " ".join(f"{key}={_plain(params[key])}" for key in keys if key in params)


def _plain(value: Value) -> str:
    """The text of names and numbers. Of other objects another process has its own."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, str | int | None) else "?"


def agree(mesh: Mesh, what: str, text: str) -> None:
    """Makes sure that all processes of a mesh are about to run the same.

    Args:
      mesh: the devices of what is about to run.
      what: what it is called in errors.
      text: what it is.

    Raises:
      RuntimeError: they are not, which is known at once; or after the time limit, not
        all of them have come; or one is gone.
    """
    limit = time_limit()
    firsts: dict[int, jax.Device] = {}
    for device in mesh.devices.flat:
        firsts.setdefault(device.process_index, device)
    # Backwards, so that these messages and the collectives of programs that others
    # may be running cannot take each other for their own: they use other connections.
    ours = tuple(reversed(firsts.values()))
    said = _within_time_limit(limit, what, ours, text) if limit else {}
    if len(set(said.values())) > 1:
        listed = "".join(f"\n  * process {k}: {text}" for k, text in said.items())
        raise RuntimeError(
            f"{what}: the processes do not call the same function with equal shapes:"
            f"{listed}\nEvery process must make the same calls in the same order, and "
            "pass equally many elements."
        )
    _agreed.add((mesh, text))


# Never forgotten: one process alone would ask again for what it has forgotten, and
# wait for the others.
_agreed: set[tuple[Mesh, str]] = set()


_Agreement = tuple[Mesh, str, str]


_only_seen: contextvars.ContextVar[list[_Agreement] | None] = contextvars.ContextVar(
    "only_seen", default=None
)


def agree_to_lower(mesh: AnyMesh, what: str, text: Callable[[], str]) -> None:
    """`agree`, in a lowering rule, on what has not been agreed on yet.

    Only once, as JAX may lower a program again in one process, where it has forgotten
    it, and not in another.
    """
    if (
        jax.process_count() == 1
        or not isinstance(mesh, Mesh)
        or len({device.process_index for device in mesh.devices.flat}) == 1
    ):
        return
    said = text()
    if (mesh, said) in _agreed:
        return
    seen = _only_seen.get()
    if seen is None:
        agree(mesh, what, said)
    else:
        seen.append((mesh, what, said))


@contextlib.contextmanager
def lowering_to_look() -> Iterator[Callable[[], None]]:
    """While a program is lowered that one process alone may ask for.

    Yields:
      What agrees on all that has been lowered so, to be called before it runs.
    """
    seen: list[_Agreement] = []
    token = _only_seen.set(seen)

    def agree_on_all() -> None:
        while seen:
            agree_to_lower(*seen[0][:2], lambda: seen[0][2])
            del seen[0]

    try:
        yield agree_on_all
    finally:
        _only_seen.reset(token)


def _within_time_limit(
    limit: float, what: str, devices: tuple[jax.Device, ...], text: str
) -> dict[int, str]:
    said: dict[int, str] = {}
    failed: list[Exception] = []

    def run() -> None:
        try:
            said.update(_exchange(devices, text))
        except Exception as error:
            failed.append(error)

    # In a thread of its own, as only a thread can be left waiting. It also sees no
    # mesh and no trace of its caller's.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(limit, _SECONDS_BEFORE_ASKING))
    taking_part = sorted(device.process_index for device in devices)
    if thread.is_alive() and (at_the_end := ended(taking_part)):
        raise RuntimeError(
            f"{what}: processes {at_the_end} have come to the end of their script, "
            f"and do not call it too: {text}. All of processes {taking_part} must make "
            "the same calls; a shorter last batch in one of them is the usual reason."
        )
    thread.join(max(0, limit - _SECONDS_BEFORE_ASKING))
    if thread.is_alive():
        raise RuntimeError(
            f"{what}: waited {limit:g} s for the other processes to call it "
            f"too: {text}. Processes {taking_part} take "
            "part; one of them has ended, waits elsewhere, or calls nothing. Look at "
            f"its output. The environment variable {TIME_LIMIT} sets the time."
        )
    if failed:
        raise RuntimeError(gone(what)) from failed[0]
    return said


def _exchange(devices: tuple[jax.Device, ...], text: str) -> dict[int, str]:
    """What each process says, by process."""
    here = jax.process_index(devices[0].client)
    logging.debug("shardmap: process %d is about to run %s", here, text)
    encoded = text.encode()
    if len(encoded) > _MESSAGE_BYTES:
        digest = hashlib.sha256(encoded).hexdigest()[:8].encode()
        encoded = encoded[: _MESSAGE_BYTES - 12] + b"... " + digest
    message = np.zeros((1, _MESSAGE_BYTES), np.uint8)
    message[0, : len(encoded)] = list(encoded)
    rows, gather = _gather(devices)
    own = next(device for device in devices if device.process_index == here)
    whole = jax.make_array_from_single_device_arrays(
        (len(devices), _MESSAGE_BYTES), rows, [jax.device_put(message, own)]
    )
    gathered = np.asarray(gather(whole).addressable_data(0))
    return {
        device.process_index: bytes(row).rstrip(b"\0").decode(errors="replace")
        for device, row in sorted(
            zip(devices, gathered, strict=True), key=lambda pair: pair[0].process_index
        )
    }


@functools.lru_cache
def _gather(devices: tuple[jax.Device, ...]) -> tuple[NamedSharding, Any]:
    mesh = Mesh(np.asarray(devices, dtype=object), "process")
    rows, whole = (
        NamedSharding(mesh, PartitionSpec(*names)) for names in (["process"], [])
    )
    return rows, jax.jit(lambda x: x, out_shardings=whole)
