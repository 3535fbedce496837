"""What a device can do. JAX has no public name for devices that only compile."""

import jax


def is_compile_only(device: jax.Device) -> bool:
    """Whether programs can be compiled for a device, but not run on it.

    Such devices are those of `jax.experimental.topologies`.
    """
    return bool(device.client.runtime_type == "compile_only_runtime")
