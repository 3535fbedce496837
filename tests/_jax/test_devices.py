"""Devices that only compile are told from those that run."""

from types import SimpleNamespace

import jax

from shardmap._jax.devices import is_compile_only


def test_devices_of_this_process_run():
    assert [is_compile_only(device) for device in jax.devices()] == [False] * 8


def test_devices_of_a_topology_only_compile():
    """As libtpu's and the CUDA compiler's are; there are none without their wheels."""
    client = SimpleNamespace(runtime_type="compile_only_runtime")
    assert is_compile_only(SimpleNamespace(client=client))
