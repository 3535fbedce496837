"""The plan that most tests run, its result, and a server of S3."""

import contextlib
import socket
import subprocess
import sys
import time

import jax
import pytest

from shardmap.commands.run import free_port
from shardmap.planning.plan import plan
from tests.plan.run.checks import W, X, columns


@pytest.fixture(scope="module")
def shard_plan():
    return plan(columns, X, W, in_slices=({0: 8}, None))


@pytest.fixture(scope="module")
def want():
    return jax.jit(columns)(X, W)


@pytest.fixture
def s3(monkeypatch):
    """A server of S3 on this machine, which the environment names."""
    pytest.importorskip("moto", reason="the server")
    s3fs = pytest.importorskip("s3fs", reason="reads and writes objects")
    address = "127.0.0.1", str(free_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{':'.join(address)}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    command = [sys.executable, "-m", "moto.server", "-H", address[0], "-p", address[1]]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            # Until it answers, s3fs would give up after a few tries.
            end = time.monotonic() + 120
            while server.poll() is None and time.monotonic() < end:
                with contextlib.suppress(OSError), socket.create_connection(address):
                    break
                time.sleep(0.1)
            store = s3fs.S3FileSystem(skip_instance_cache=True, listings_expiry_time=0)
            store.mkdir("bucket")
            yield store
        finally:
            server.kill()
