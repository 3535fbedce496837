"""What a process sees when another one fails it; test_processes.py starts them.

Process 0 prints the error that it gets. The argument says what process 1 does.
"""

import json
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
from shardmap.map import agreement

agreement._SECONDS_BEFORE_ASKING = 2
OPTIONS = json.loads(os.environ.get("INITIALIZE", "{}"))
jax.distributed.initialize(initialization_timeout=300, **OPTIONS)


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


def leaves_at_once():
    os._exit(1)


def is_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def goes_on():
    pass


FAULTS = {
    "killed": is_killed,
    "raises": raises,
    "leaves at once": leaves_at_once,
    "is stopped": is_stopped,
    "calls another function": goes_on,
    "ends early": sys.exit,
}


def main(what):
    rows = rows_of_one = np.ones((jax.local_device_count(), 2), np.float32)
    # The processes may start apart; only what comes afterwards has a limit.
    limit = os.environ.pop("SHARDMAP_PROCESS_TIMEOUT", "600")
    total(rows)
    os.environ["SHARDMAP_PROCESS_TIMEOUT"] = limit
    if jax.process_index() == 1:
        FAULTS.get(what, stays_away)()
    function = total
    if what == "calls another function":
        chosen = [lax.pmax, lax.pmin][jax.process_index()]
        function = sm.spmap(lambda x: chosen(x, "i"), "i")
    if what in ("stays away from a new function", "ends early"):
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
