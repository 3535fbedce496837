"""Compiling programs over several devices, and running them without a hang on CPU.

On CPU, jaxlib runs the devices' parts of a program on the threads of one pool, and a
collective keeps its thread until all devices have come to it. Two things can then make
every thread wait for one that has none, and never end:

* jaxlib's concurrency-optimised scheduler, which starts several collectives of one
  program at a time; it is switched off;
* several runs in flight, as JAX does not wait for one before it starts the next; runs
  with collectives take turns.

`jax.jit` and `jax.pmap` themselves hang so on a busy machine.
"""

import contextlib
import functools
import itertools
import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core
from jax.sharding import Mesh, Sharding

from shardmap._jax.context import nothing_is_traced
from shardmap._jax.effects import is_callback
from shardmap._jax.errors import is_lost_connection
from shardmap._jax.stages import dispatcher, is_compile_only
from shardmap._jax.types import ClosedJaxpr, Param, TreeDef, Value
from shardmap._jax.walk import constants_of, equations
from shardmap.arrays import processes


class _RunLock:
    """Held by the one program with collectives that runs."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._name: str | None = None
        # Results of a run that has not ended, as an interrupt may leave it.
        self._started: Any = None

    def run(
        self,
        name: str,
        awaited: int | None,
        program: Callable[..., Any],
        /,
        *args: Value,
        **kwargs: Value,
    ) -> Any:
        """Runs a program and waits for its results, which are ready at once.

        ``awaited`` is one that it computes, as to wait for hundreds takes longer than a
        small program; None: it waits for all of them.
        """
        # Python takes threads that it has not started for daemons.
        if threading.current_thread().daemon and is_callback():
            # A callback keeps a thread of the pool. Those of a few devices keep all.
            during = "a program" if self._name is None else self._name
            raise RuntimeError(
                f"{name} is called by a callback on the host while {during} runs: on "
                "CPU runs with collectives take turns. Call it when that has returned, "
                "or do the callback's work with NumPy."
            )
        with self._lock:
            if self._started is not None:
                with contextlib.suppress(Exception):
                    jax.block_until_ready(self._started)
            before, self._name = self._name, name
            try:
                self._started = program(*args, **kwargs)
                results = self._started
                jax.block_until_ready(
                    results if awaited is None else jax.tree.leaves(results)[awaited]
                )
                self._started = None
                return results
            except (RuntimeError, ValueError) as error:
                if is_lost_connection(error):
                    raise RuntimeError(processes.lost_process_message(name)) from error
                raise
            finally:
                self._name = before


_lock = _RunLock()


_ON_SEVERAL_CPUS = {"xla_cpu_enable_concurrency_optimized_scheduler": False}


def compiler_options(devices: Collection[jax.Device]) -> dict[str, Any]:
    """The options of XLA for a program over several devices."""
    return dict(_ON_SEVERAL_CPUS) if next(iter(devices)).platform == "cpu" else {}


def compiled(
    jitted: jax.stages.Wrapped,
    leaves: Sequence[Value],
    devices: Collection[jax.Device],
    in_tree: TreeDef,
    out_tree: TreeDef,
) -> Callable[..., Any]:
    """Compiles a function of flat leaves, ahead of time, for calls of these structures.

    It raises TypeError or ValueError for calls that it is not for, before it runs.
    """
    name = getattr(jitted, "__name__", "a map")
    _check_runs(name, devices)
    traced = jitted.trace(*leaves)
    program = traced.lower().compile()
    call = dispatcher(program, in_tree, out_tree)
    text = program.as_text() if _is_serialized(devices) else ""
    if text is not None and not _COLLECTIVE.search(text):
        return call
    return functools.partial(_lock.run, name, _computed_result(traced.jaxpr), call)


def _computed_result(jaxpr: jax.extend.core.ClosedJaxpr) -> int | None:
    """The position of a result that is no argument, which JAX would pass through."""
    given = {*jaxpr.jaxpr.invars, *jaxpr.jaxpr.constvars}
    for k, var in enumerate(jaxpr.jaxpr.outvars):
        if not isinstance(var, jax.extend.core.Literal) and var not in given:
            return k
    return None


_COLLECTIVE = re.compile(r" (all-|collective-|ragged-all-|reduce-scatter)[\w-]*\(")


def map_jit(
    fun: Callable[..., Any],
    devices: Collection[jax.Device],
    **options: Param,
) -> Callable[..., Any]:
    """`jax.jit` for a program over several devices, which may communicate."""
    name = getattr(fun, "__name__", "a map")
    _check_runs(name, devices)
    jitted = jax.jit(fun, compiler_options=compiler_options(devices), **options)
    if not _is_serialized(devices):
        return jitted
    return functools.partial(_lock.run, name, None, jitted)


def jit_in_turns(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` for a function of arrays that may lie on any devices.

    A call takes a turn if an argument, or what the function closes over in its first
    call, is on several CPU devices.
    """
    name = getattr(fun, "__name__", "a function")
    jitted = jax.jit(fun)
    one_by_one = functools.partial(
        _lock.run, name, None, jax.jit(fun, compiler_options=_ON_SEVERAL_CPUS)
    )
    closes_over_several: bool | None = None

    def call(*args: Value, **kwargs: Value) -> Any:
        nonlocal closes_over_several
        # Inside another program nothing runs, and no compiler options are taken.
        if not (nothing_is_traced() and _has_several_cpus()):
            return jitted(*args, **kwargs)
        if any(map(_is_on_several_cpus, jax.tree.leaves((args, kwargs)))):
            return one_by_one(*args, **kwargs)
        if closes_over_several is None:
            traced = jitted.trace(*args, **kwargs)
            closes_over_several = _names_several_cpus(traced.jaxpr)
        return (one_by_one if closes_over_several else jitted)(*args, **kwargs)

    return call


@functools.cache
def _has_several_cpus() -> bool:
    return jax.device_count("cpu") > 1


def _names_several_cpus(jaxpr: ClosedJaxpr) -> bool:
    """Whether a constant or a parameter of an equation is on several CPU devices."""
    params = (jax.tree.leaves(list(e.params.values())) for e in equations(jaxpr))
    named = [*constants_of(jaxpr), *itertools.chain.from_iterable(params)]
    named += [constant for each in named for constant in constants_of(each)]
    return any(map(_is_on_several_cpus, named))


def _is_on_several_cpus(value: object) -> bool:
    """Whether an array, a sharding or a mesh has several CPU devices."""
    sharding = getattr(value, "sharding", value)
    if isinstance(sharding, Mesh):
        return _is_serialized(list(sharding.devices.flat))
    return (
        isinstance(sharding, Sharding)
        and sharding.num_devices > 1
        and _is_serialized(sharding.device_set)
    )


def _check_runs(name: str, devices: Collection[jax.Device]) -> None:
    """Refuses to run a program on devices that only compile."""
    device = next(iter(devices))
    if is_compile_only(device):
        raise ValueError(
            f"{name} is called, but its {len(devices):,} devices of kind "
            f"{device.device_kind!r} compile only: use its lower or explain."
        )


def _is_serialized(devices: Collection[jax.Device]) -> bool:
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"
