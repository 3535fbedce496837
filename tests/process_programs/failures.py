"""What a process sees when another one fails it; test_processes.py starts them.

Process 0 prints the error that it gets. The argument says what process 1 does.
"""

import os
import signal
import sys
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

jax.distributed.initialize(initialization_timeout=60)


@sm.spmap(axis_name="i")
def total(x):
    return lax.psum(x, "i")


def is_killed():
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def raises():
    raise KeyError("a fault of its own")


def stays_away():
    time.sleep(60)


def main(what):
    rows = rows_of_one = np.ones((jax.local_device_count(), 2), np.float32)
    total(rows)
    if jax.process_index() == 1:
        {"killed": is_killed, "raises": raises}.get(what, stays_away)()
    function = total
    if what == "stays away from a new function":
        function = sm.spmap(lambda x: lax.pmax(x, "i"), "i")
    if what == "stays away from a jit":
        function = jax.jit(sm.spmap(lambda x: lax.pmax(x, "i"), "i"))
        whole = NamedSharding(sm.make_mesh({"i": 2}, jax.devices()), P("i"))
        rows = jax.make_array_from_callback((2, 2), whole, lambda _: rows_of_one)
    start = time.monotonic()
    try:
        function(rows)
    except RuntimeError as error:
        print(f"after {time.monotonic() - start:.0f} s: {error}")
        print(f"because of {error.__cause__}", flush=True)
        time.sleep(2)  # That the other one has ended shall be noticed first.
        os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
