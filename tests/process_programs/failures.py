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
    rows = np.ones((jax.local_device_count(), 2))
    total(rows)
    if jax.process_index() == 1:
        {"killed": is_killed, "raises": raises}.get(what, stays_away)()
    function = total
    if what == "stays away from a new function":
        function = sm.spmap(lambda x: lax.pmax(x, "i"), "i")
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
