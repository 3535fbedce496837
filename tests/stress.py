"""`make stress MINUTES=20`: maps for a long time in one process; no part of the tests.

Threads run random maps, of functions, shapes and options old and new, some with taps
and callbacks, while the main thread is interrupted. Each result is compared with
NumPy's. It ends with code 1 if a result is wrong, nothing has happened for two minutes,
or memory has grown by more than 1 % over the second half.
"""

import argparse
import ctypes
import faulthandler
import gc
import itertools
import os
import pathlib
import random
import signal
import sys
import threading
import time

os.environ.setdefault("NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm

LONGEST_SILENCE = 120
MOST_GROWTH = 0.01
THREADS = 3


def total(x, scale):
    return lax.psum(x * scale, "i")


def largest(x, scale):
    return lax.pmax(x * scale, "i")


def plain(x, scale):
    return x * scale


def tapped(x, scale):
    return sm.tap(lambda value: None, x) * scale


def called(x, scale):
    x = jax.pure_callback(np.asarray, x, x, vmap_method="sequential")
    return lax.psum(x * scale, "i")


WANTED = {
    total: lambda x, s: np.broadcast_to((x * s).sum(0), x.shape),
    largest: lambda x, s: np.broadcast_to((x * s).max(0), x.shape),
    plain: lambda x, s: x * s,
    tapped: lambda x, s: x * s,
    called: lambda x, s: np.broadcast_to((x * s).sum(0), x.shape),
}
MAPPED = {fun: sm.spmap(fun, "i", in_axes=(0, None)) for fun in WANTED}


def one(chosen: random.Random, counter: "itertools.count[int]") -> None:
    """Runs one random map, and compares."""
    fun = chosen.choice(list(WANTED))
    x = np.arange(chosen.choice([2, 8, 12, 16, 17]) * 3, dtype=np.float32)
    x = x.reshape(-1, 3)
    scale = np.float32(chosen.randint(1, 3))
    mapped = MAPPED[fun]
    match chosen.randrange(20):
        case 0:  # A new function, which is gone afterwards.
            new = eval("lambda x, s: f(x, s)", {"f": fun})
            mapped = sm.spmap(new, "i", in_axes=(0, None))
        case 1:
            mapped = sm.spmap(fun, "i", in_axes=(0, None), lowering="spmd")
        case 2:
            mapped = sm.spmap(lambda x, s: 1 / 0, in_axes=(0, None))
            try:
                mapped(x, scale)
            except ZeroDivisionError:
                return
    result = np.asarray(mapped(x, scale))
    np.testing.assert_allclose(result, WANTED[fun](x, scale), rtol=1e-5)
    next(counter)


def is_tracing() -> bool:
    """Whether this thread traces: an interrupt came as JAX was about to leave a trace.

    JAX notes in Python what is being traced, and never ends that trace then. Nothing
    that it computes in this thread afterwards is a value.
    """
    return isinstance(jnp.add(1, 1), jax.core.Tracer)


def resident() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    seconds = 60 * parser.parse_args().minutes
    counter = itertools.count(1)
    failed: list[BaseException] = []
    end = time.monotonic() + seconds

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        while time.monotonic() < end and not failed:
            try:
                one(chosen, counter)
            except BaseException as error:
                failed.append(error)
                raise

    # What JAX imports for its first program is not made for interrupts.
    assert not is_tracing()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    chosen, interrupts, memory, shown = random.Random(-1), 0, [], 0.0
    runs_before, progress = -1, time.monotonic()
    torn = False
    while time.monotonic() < end and not failed:
        faulthandler.dump_traceback_later(LONGEST_SILENCE, exit=True)
        timer = threading.Timer(
            chosen.random() / 5, os.kill, (os.getpid(), signal.SIGINT)
        )
        try:
            if torn:
                time.sleep(0.2)
            else:
                timer.start()
            while timer.is_alive():
                one(chosen, counter)
            # Python drops an interrupt that comes while it collects garbage.
            time.sleep(0.01)
        except KeyboardInterrupt:
            interrupts += 1
            if torn := is_tracing():
                print("an interrupt left JAX tracing; there are no more of them")
        if timer.ident is not None:
            timer.join()
        if time.monotonic() > shown + seconds / 20:
            shown = time.monotonic()
            # Memory that the C library keeps for later is no growth.
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            memory.append(resident())
            runs = counter.__reduce__()[1][0]
            print(f"{runs} maps, {interrupts} interrupts, {memory[-1] >> 20} MiB")
            if runs != runs_before:
                runs_before, progress = runs, time.monotonic()
            elif time.monotonic() > progress + LONGEST_SILENCE:
                failed.append(RuntimeError(f"no map for {LONGEST_SILENCE} s"))
    for thread in threads:
        thread.join()
    faulthandler.cancel_dump_traceback_later()
    half = memory[len(memory) // 2 :]
    growth = half[-1] / half[0] - 1
    print(f"memory grew by {growth:.2%} over the second half; failures: {failed}")
    return 1 if failed or growth > MOST_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
