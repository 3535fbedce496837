"""Running compiled programs over several devices, without a hang.

On CPU, jaxlib runs the devices' parts of a program on the threads of one pool, and a
collective keeps its thread until all devices have come to it. Two things can then make
every thread wait for one that has none, and never end:

* jaxlib's concurrency-optimised scheduler, which starts several collectives of one
  program at a time; it is switched off;
* several runs in flight, as JAX does not wait for one before it starts the next; runs
  with collectives take turns.

`jax.jit` and `jax.pmap` themselves hang so on a busy machine.

Programs are compiled before they take their turn, and a callback of a program that has
it is told that it cannot have one too.
"""

import contextlib
import functools
import itertools
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardmap._jax.context import config_value
from shardmap._jax.primitives import PURE_CALLBACK
from shardmap._jax.stages import is_lost_connection
from shardmap._jax.types import Jaxpr, Param, Value
from shardmap._jax.walk import equations
from shardmap.arrays import processes
from shardmap.arrays.programs.jits import Jits
from shardmap.later import logging

SECONDS_TO_WAIT_SILENTLY = 30.0


class _NotCompiled(Exception):
    """A program would be traced and compiled while it has the turn."""


class _Running(NamedTuple):
    """Who has the turn.

    Attributes:
      name: the function whose program has it, for what is said to others.
      thread: the name of the thread that runs it.
      calls_host: whether that program may have callbacks.
      started: what it gives, once it has been started.
    """

    name: str
    thread: str
    calls_host: bool
    started: Sequence[Any]


_NOBODY = _Running("no program", "none", False, ())


class _Turn:
    """Held by the one program with collectives that runs."""

    def __init__(self) -> None:
        # A finalizer, which Python runs between any two steps, may run a program.
        self._lock = threading.RLock()
        self._running: _Running | None = None
        self.run_number = self._told = 0
        self._watching = False

    def watch(self) -> None:
        """From now on says of each run of several processes that does not end."""
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        before = self.run_number
        while True:
            time.sleep(SECONDS_TO_WAIT_SILENTLY)
            number, name = self.run_number, self.name
            if name is not None and number == before != self._told:
                self._told = number
                ended = processes.ended(range(jax.process_count()))
                logging.warning(
                    "shardmap: process %d has waited more than %g s for the end of a "
                    "run of %s, which may wait for the other processes to run it too."
                    "%s",
                    jax.process_index(),
                    SECONDS_TO_WAIT_SILENTLY,
                    name,
                    f" Processes {ended} have come to the end of their script."
                    if ended
                    else "",
                )
            before = number

    @property
    def name(self) -> str | None:
        """The function whose program has the turn."""
        running = self._running
        return running and running.name

    def run(
        self,
        name: str,
        calls_host: bool,
        program: Callable[[], Any],
        started: Sequence[Any] = (),
    ) -> Any:
        """Waits for the turn, and gives what ``program()`` does.

        Args:
          name, calls_host, started: see `_Running`.
          program: runs it.

        Raises:
          RuntimeError: this is a callback of a program, and one that runs has the turn.
        """
        if self.name is None:
            with self._lock:
                return self._held(name, calls_host, program, started)
        if self._is_waited_for():
            raise RuntimeError(
                f"{name} is called by a callback on the host while {self.name} runs: "
                "on CPU runs with collectives take turns, and the program that waits "
                "for this callback has the turn. Call it when that has returned, or do "
                "the callback's work with NumPy."
            )
        told = threading.Timer(SECONDS_TO_WAIT_SILENTLY, self._tell, (name,))
        told.daemon = True
        # An interrupt may come between any two steps: it must not leave the turn
        # locked, so there is no time-out, nor a timer that tells of a wait long over.
        try:
            told.start()
            with self._lock:
                told.cancel()
                return self._held(name, calls_host, program, started)
        finally:
            told.cancel()

    def _held(
        self,
        name: str,
        calls_host: bool,
        program: Callable[[], Any],
        started: Sequence[Any],
    ) -> Any:
        outer = self._running
        if outer is not None:
            _wait_for(outer.started)
        thread = threading.current_thread().name
        running = _Running(name, thread, calls_host, started)
        try:
            # One step each, between which an interrupt may come.
            self._running = running
            self.run_number += 1
            return program()
        finally:
            self._running = outer

    def _is_waited_for(self) -> bool:
        """Whether this may be a callback of the program that has the turn.

        Those run on threads of jaxlib's, which Python has not started.
        """
        thread = threading.current_thread()
        running = self._running or _NOBODY
        return running.calls_host and isinstance(thread, threading._DummyThread)

    def _tell(self, name: str) -> None:
        running = self._running or _NOBODY
        logging.warning(
            "shardmap: %s has waited %g s for its turn: %s has it, in thread %s. On "
            "CPU runs with collectives take turns. If that one waits for this one, as "
            "a callback may, neither ends.",
            name,
            SECONDS_TO_WAIT_SILENTLY,
            running.name,
            running.thread,
        )


_turn = _Turn()


class _Compiling(threading.local):
    """Whether what this thread runs may be traced and compiled, and raised there."""

    allowed = True
    failed = False


_compiling = _Compiling()


def map_jit(
    fun: Callable[..., Any],
    devices: Collection[jax.Device],
    communicates: bool,
    **options: Param,
) -> Any:
    """`jax.jit` for a program over several devices.

    Args:
      fun: as for `jax.jit`.
      devices: the devices.
      communicates: whether anything goes between devices.
      **options: as for `jax.jit`.

    Returns:
      What `jax.jit` returns, or a function with its ``lower`` and ``trace`` whose runs
      take turns.
    """
    if next(iter(devices)).platform != "cpu":
        return jax.jit(fun, **options)
    options["compiler_options"] = {
        "xla_cpu_enable_concurrency_optimized_scheduler": False
    }
    if not communicates or len(devices) == 1:
        return jax.jit(fun, **options)
    if len({device.process_index for device in devices}) > 1:
        _turn.watch()
    return _taking_turns(lambda: jax.jit(_only_if_allowed(fun), **options))


def run_and_convert(
    program: Callable[..., Any],
    convert: Callable[[Any], Any],
    args: Sequence[Value],
    kwargs: Mapping[str, Value],
) -> Any:
    """What ``convert`` makes of a program's results, while the program may still run.

    Args:
      program: what `map_jit` gave.
      convert: a function of the results, which need not be there yet.
      args, kwargs: the program's.
    """
    if hasattr(program, "and_convert"):
        return program.and_convert(convert, *args, **kwargs)
    return convert(program(*args, **kwargs))


def _only_if_allowed(fun: Callable[..., Any]) -> Callable[..., Any]:
    """``fun``, which is called to be traced, and that only where it may be compiled."""

    @functools.wraps(fun)
    def traced(*args: Value, **kwargs: Value) -> Any:
        if not _compiling.allowed:
            raise _NotCompiled
        # What it calls takes turns of its own.
        try:
            return fun(*args, **kwargs)
        except Exception:
            _compiling.failed = True
            raise

    return traced


def _calls_host(jaxpr: Jaxpr) -> bool:
    return bool(jaxpr.effects) or any(
        equation.primitive is PURE_CALLBACK for equation in equations(jaxpr)
    )


def _tracing_is_off() -> bool:
    """Whether functions are called each time: under `jax.disable_jit`."""
    return bool(config_value("jax_disable_jit"))


def _compile(
    jitted: jax.stages.Wrapped, args: Sequence[Value], kwargs: Mapping[str, Value]
) -> bool:
    """Compiles a program for its next call; whether it may call the host."""
    # A finalizer may compile while another program runs, or is compiled.
    before = _compiling.allowed, _compiling.failed
    try:
        _compiling.allowed, _compiling.failed = True, False
        traced = jitted.trace(*args, **kwargs)
        lowered = traced.lower()
    except (AttributeError, TypeError, ValueError):
        if _compiling.failed:
            raise
        # A class of the arguments cannot hold what JAX tells of them. The program is
        # compiled while it has the turn.
        return True
    finally:
        _compiling.allowed, _compiling.failed = before
    lowered.compile()
    return _calls_host(traced.jaxpr.jaxpr)


def _wait_for(results: Sequence[Any]) -> None:
    """Waits for a run that was interrupted: the next one must not begin before."""
    while True:
        try:
            jax.block_until_ready(results)
        except KeyboardInterrupt:
            continue
        except Exception:  # It has failed, and so it has ended.
            pass
        return


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """While JAX runs a program for the first time, which it starts in many steps.

    An interrupt between them would leave a run that nobody can wait for.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


def _taking_turns(make: Callable[[], Any]) -> Any:
    jits = Jits(make)
    name, calls_host = jits.first.__name__, False

    def and_convert(
        convert: Callable[[Any], Any], *args: Value, **kwargs: Value
    ) -> Any:
        nonlocal calls_host

        started: list[Any] = []

        def run(jitted: Any, allowed: bool) -> Any:
            before, _compiling.allowed = _compiling.allowed, allowed
            program = functools.partial(jitted, **kwargs) if kwargs else jitted
            try:
                # In one step, after which an interrupt finds what there is to wait for.
                started.extend(itertools.starmap(program, (args,)))
                return jax.block_until_ready(convert(started[0]))
            except BaseException:
                _wait_for(started)
                raise
            finally:
                _compiling.allowed = before

        try:
            if _tracing_is_off():
                return _turn.run(name, True, lambda: run(jits.first, True), started)
            jitted = jits.of(args, kwargs)
            if jitted is not None:
                with contextlib.suppress(_NotCompiled):
                    return _turn.run(
                        name, calls_host, lambda: run(jitted, False), started
                    )
            jitted = jits.new(args, kwargs)
            calls_host |= _compile(jitted, args, kwargs)
            with _interrupts_wait():
                return _turn.run(name, calls_host, lambda: run(jitted, True), started)
        except (RuntimeError, ValueError) as error:
            if is_lost_connection(error):
                raise RuntimeError(processes.gone(name)) from error
            raise

    first = jits.first
    run: Any = functools.partial(and_convert, lambda results: results)
    functools.update_wrapper(run, first)
    run.lower, run.trace, run.and_convert = first.lower, first.trace, and_convert
    return run
