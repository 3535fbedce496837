"""The devices of maps and meshes that name none."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence

import jax

from shardmap._jax.context import traced_apart

_current: contextvars.ContextVar[tuple[jax.Device, ...]] = contextvars.ContextVar(
    "default_devices", default=()
)


@dataclasses.dataclass(frozen=True)
class _Marker:
    devices: tuple[jax.Device, ...]


@contextlib.contextmanager
def set_default_devices(devices: Sequence[jax.Device]) -> Iterator[None]:
    """A context with these default devices, to trace in."""
    token = _current.set(tuple(devices))
    try:
        with traced_apart(_Marker(tuple(devices))):
            yield
    finally:
        _current.reset(token)


def default_devices(backend: str | None = None) -> list[jax.Device]:
    """The default devices that are set here; none if JAX's are to be used.

    Args:
      backend: the platform that is asked for.
    """
    devices = list(_current.get())
    return devices if devices and backend in (None, devices[0].platform) else []


def local_devices() -> list[jax.Device]:
    """The default devices, or else those of this process."""
    return default_devices() or jax.local_devices()
