"""Failures of shards: what users catch, and how one travels from a worker."""

import functools
import pickle
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shardmap.units import error_text

P = ParamSpec("P")
T = TypeVar("T")


class ShardError(RuntimeError):
    """A shard of a plan failed for good. Its ``__cause__`` is the last error.

    `ShardPlan.run` raises it once a shard has failed more often than ``retries`` says.
    The message names the shard, what it reads, and the error. If the error cannot come
    from another process, the cause has its type, its text and its traceback.

    Example:
      >>> import numpy as np, shardmap as sm
      >>> class Broken:
      ...     shape, dtype = (4,), np.dtype("float32")
      ...     def __getitem__(self, index):
      ...         raise OSError("the disk is gone")
      >>> shard_plan = sm.plan(lambda x: x + 1, Broken(), in_slices={0: 2})
      >>> try:
      ...     shard_plan.run(Broken(), retries=1)
      ... except sm.ShardError as error:
      ...     print(str(error)[:33], "...", repr(error.__cause__))
      shard 0 of stage 0 failed 2 times ... OSError('the disk is gone')
    """


class WorkerError(Exception):
    """Stands for an error that cannot leave its worker: its type, text, traceback."""


class ShardFailure(Exception):
    """A shard failed on a worker: its stage, its number, and the error."""


def contained(function: Callable[P, T]) -> Callable[P, T]:
    """A function for workers that raises only errors that its caller can handle.

    One that does not survive pickle would break a pool of processes, and `SystemExit`
    end the program that waits for the result.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, Exception) and _survives_pickle(error):
                raise
            told = WorkerError(error_text(error))
            told.add_note("".join(traceback.format_exception(error)))
            raise told from None

    return run


def _survives_pickle(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False
