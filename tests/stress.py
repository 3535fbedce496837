"""`make stress MINUTES=20`: maps for a long time in one process; no part of the tests.

Threads run random maps, of functions, shapes and options old and new, some with taps
and callbacks, while the main thread is interrupted. Each result is compared with
NumPy's. It ends with code 1 if a result is wrong, nothing has happened for two minutes,
or memory has grown by more than 1 % over the second half.

Memory is what is allocated while no map runs: bytes by the C library, blocks by Python,
and programs by JAX. What the process has resident is printed too. It contains what the
C library keeps in pieces for later, which depends on the order of all that compilers
allocate: with `--jax`, the same maps are made by `jax.jit(jax.shard_map)`, and nothing
is shardmap's.
"""

import argparse
import contextlib
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
from typing import NamedTuple

os.environ.setdefault("NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm
from shardmap._jax import context

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
LENGTHS = [2, 8, 12, 16, 17]


def one(chosen: random.Random, counter: "itertools.count[int]") -> None:
    """Runs one random map, and compares."""
    fun = chosen.choice(list(WANTED))
    x = np.arange(chosen.choice(LENGTHS) * 3, dtype=np.float32)
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


TURN = threading.Lock()
MESHES = {
    length: jax.sharding.Mesh(np.array(jax.devices()[:size]), ("i",))
    for length, size in zip(LENGTHS, [2, 8, 6, 8, 1], strict=True)
}


def by_jax(fun, length):
    """The same map by JAX alone, elements of a device in a `jax.vmap`."""
    spec = jax.sharding.PartitionSpec

    def of_device(x, scale):
        return jax.vmap(fun, in_axes=(0, None), axis_name="j")(x, scale)

    mapped = jax.shard_map(
        of_device,
        mesh=MESHES[length],
        in_specs=(spec("i"), spec()),
        out_specs=spec("i"),
        check_vma=False,
    )
    return jax.jit(mapped)


BY_JAX = {}
JAX_TAKES = [total, largest, plain, called]


def one_by_jax(chosen: random.Random, counter: "itertools.count[int]") -> None:
    """Runs one random map of JAX's own; runs with collectives take turns here, too."""
    fun = chosen.choice(JAX_TAKES)
    length = chosen.choice(LENGTHS)
    x = np.ones((length, 3), np.float32)
    scale = np.float32(chosen.randint(1, 3))
    mapped = BY_JAX[fun, length]
    if chosen.randrange(20) < 2:  # As often as there are new functions above.
        mapped = by_jax(eval("lambda x, s: f(x, s)", {"f": fun}), length)
    with TURN:
        np.asarray(mapped(x, scale))
    next(counter)


def make_what_is_kept(is_jax: bool) -> None:
    """Runs each map that lives to the end."""
    for length in LENGTHS:
        x = np.ones((length, 3), np.float32)
        if is_jax:
            for fun in JAX_TAKES:
                BY_JAX[fun, length] = by_jax(fun, length)
                BY_JAX[fun, length](x, x[0, 0])
            continue
        for fun, mapped in MAPPED.items():
            mapped(x, x[0, 0])
            sm.spmap(fun, "i", in_axes=(0, None), lowering="spmd")(x, x[0, 0])


def is_tracing() -> bool:
    """Whether this thread traces: an interrupt has left it so.

    JAX notes in Python what is being traced. A map puts back what an interrupt leaves
    there; what is outside of maps, such as the comparison of a result, does not.
    """
    return isinstance(jnp.add(1, 1), jax.core.Tracer)


class Memory(NamedTuple):
    """What is allocated.

    Attributes:
      in_use: bytes, by the C library, without what it keeps for later.
      blocks: of Python's objects.
      programs: that JAX holds.
      resident: bytes of the process.
    """

    in_use: int
    blocks: int
    programs: int
    resident: int

    @classmethod
    def now(cls) -> "Memory":
        for _ in range(3):
            gc.collect()
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        libc.mallinfo2.restype = _Mallinfo
        said = libc.mallinfo2()
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
        return cls(
            said.uordblks + said.hblkhd,
            sys.getallocatedblocks(),
            len(jax.devices()[0].client.live_executables()),
            int(pages) * os.sysconf("SC_PAGE_SIZE"),
        )

    def growth(self, before: "Memory") -> dict[str, float]:
        return {
            name: getattr(self, name) / getattr(before, name) - 1
            for name in self._fields
        }

    def __str__(self) -> str:
        return (
            f"{self.in_use / 2**20:.1f} MiB in use, {self.blocks} blocks, "
            f"{self.programs} programs, {self.resident >> 20} MiB resident"
        )


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks "
            "keepcost"
        ).split()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--jax", action="store_true", help="maps of JAX's own")
    options = parser.parse_args()
    seconds, step = 60 * options.minutes, one_by_jax if options.jax else one
    counter = itertools.count(1)
    failed: list[BaseException] = []
    end = time.monotonic() + seconds
    quiet = threading.Event()
    busy = [threading.Lock() for _ in range(THREADS)]

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        while time.monotonic() < end and not failed:
            while quiet.is_set():
                time.sleep(0.01)
            try:
                with busy[seed]:
                    step(chosen, counter)
            except BaseException as error:
                failed.append(error)
                raise

    # What JAX imports for its first program is not made for interrupts. And all that
    # is kept is there from the start.
    assert not is_tracing()
    make_what_is_kept(options.jax)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    chosen, interrupts, torn, shown = random.Random(-1), 0, 0, 0.0
    memory: list[Memory] = []
    runs_before, progress = -1, time.monotonic()
    while time.monotonic() < end and not failed:
        faulthandler.dump_traceback_later(LONGEST_SILENCE, exit=True)
        timer = threading.Timer(
            chosen.random() / 5, os.kill, (os.getpid(), signal.SIGINT)
        )
        before, line = context.noted(), context.LINES.context
        try:
            if not options.jax:
                timer.start()
            step(chosen, counter)
            while timer.is_alive():
                step(chosen, counter)
            # Python drops an interrupt that comes while it collects garbage.
            time.sleep(0.01)
        except KeyboardInterrupt:
            interrupts += 1
            if is_tracing():
                torn += 1
                context.put_back(before, line)
        if timer.ident is not None:
            timer.join()
        if time.monotonic() > shown + seconds / 20:
            shown = time.monotonic()
            quiet.set()
            with contextlib.ExitStack() as held:
                for lock in busy:
                    held.enter_context(lock)
                sm.taps_barrier()
                memory.append(Memory.now())
            quiet.clear()
            runs = counter.__reduce__()[1][0]
            print(f"{runs} maps, {interrupts} interrupts, {memory[-1]}", flush=True)
            if runs != runs_before:
                runs_before, progress = runs, time.monotonic()
            elif time.monotonic() > progress + LONGEST_SILENCE:
                failed.append(RuntimeError(f"no map for {LONGEST_SILENCE} s"))
    for thread in threads:
        thread.join()
    faulthandler.cancel_dump_traceback_later()
    grown = memory[-1].growth(memory[len(memory) // 2])
    said = ", ".join(f"{name} {value:+.2%}" for name, value in grown.items())
    print(f"over the second half: {said}; {torn} interrupts outside of maps left JAX")
    print(f"tracing; failures: {failed}")
    grown.pop("resident")
    return 1 if failed or max(grown.values()) > MOST_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
