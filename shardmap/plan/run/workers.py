"""Where shards are computed: here, in threads, by an executor elsewhere."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import jax
import numpy as np

from shardmap._jax.context import config_value
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.remote import exported, run_exported
from shardmap.plan.run.shards import Accumulator, Shard


def _settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Gives a thread this thread's settings of JAX that a shard depends on."""
    x64: bool = config_value("jax_enable_x64")
    device = config_value("jax_default_device")

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with jax.enable_x64(x64), jax.default_device(device):
            yield

    return settings


class Work:
    """One way to get the result of a shard."""

    def __init__(
        self,
        cut_program: CutProgram,
        leaves: Sequence[Any],
        acc: Accumulator,
        executor: Executor,
    ) -> None:
        self.cut_program, self.leaves, self.acc = cut_program, leaves, acc
        self.executor = executor
        self.settings = _settings()

    def read(self, shard: Shard) -> tuple[Any, ...]:
        return self.cut_program.read(shard.recipe, self.leaves, self.acc.kept)

    def submit(self, shard: Shard) -> Future[Any]:
        raise NotImplementedError

    def result(self, shard: Shard, future: Future[Any]) -> Any:
        return future.result()


class Here(Work):
    """Reads and starts shards in a thread, while this one waits and writes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        devices = jax.local_devices()
        # CPU devices share their cores: only one gets the work.
        several = len(devices) > 1 and devices[0].platform != "cpu"
        self.devices = itertools.cycle(devices if several else [None])

    def submit(self, shard: Shard) -> Future[Any]:
        return self.executor.submit(self.start, shard, next(self.devices))

    def start(self, shard: Shard, device: jax.Device | None) -> Any:
        with self.settings():
            args = self.read(shard)
            if device is not None:
                args = jax.device_put(args, device)
            return shard.function(*args)

    def result(self, shard: Shard, future: Future[Any]) -> Any:
        return [np.asarray(part) for part in future.result()]


class Threads(Work):
    """Every thread reads, computes and waits for its shard."""

    def submit(self, shard: Shard) -> Future[Any]:
        return self.executor.submit(self.whole, shard)

    def whole(self, shard: Shard) -> Any:
        with self.settings():
            return [np.asarray(part) for part in shard.function(*self.read(shard))]


class Elsewhere(Work):
    """Sends exported functions and NumPy arrays, which are read here."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blobs: dict[Any, bytes] = {}

    def submit(self, shard: Shard) -> Future[Any]:
        args = tuple(np.asarray(arg) for arg in self.read(shard))
        key = shard.stage, shard.recipe.static
        if key not in self.blobs:
            self.blobs[key] = exported(shard.function, args)
        return self.executor.submit(run_exported, self.blobs[key], args)
