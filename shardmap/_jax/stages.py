"""What JAX has lowered and compiled: as classes of ours, and how its runs fail."""

from typing import Any

import jax

from shardmap._jax import other_jax


def copy_stage(stage: Any, into: Any) -> None:
    """Makes an object of a derived class the same stage.

    The stages of `jax.stages` are classes to derive from, but what makes them is not
    public. All that they hold is in their slots.

    Args:
      stage: a `jax.stages.Lowered` or `jax.stages.Compiled`.
      into: a new object of a class derived from that.
    """
    for cls in (jax.stages.Lowered, jax.stages.Compiled):
        if isinstance(stage, cls):
            for slot in cls.__slots__:
                setattr(into, slot, getattr(stage, slot))
    if hasattr(stage, "__dict__"):
        vars(into).update(vars(stage))


for _stage in (jax.stages.Lowered, jax.stages.Compiled):
    if not vars(_stage).get("__slots__"):
        raise other_jax(
            f"shardmap adds to jax.stages.{_stage.__name__} by copying its slots, but "
            "it has none"
        )


def is_lost_connection(error: Exception) -> bool:
    """Whether this is how JAX says that the other processes cannot be reached.

    Its errors are XLA's, of one class for all that a run can fail with. On CPU those of
    a collective name the library that connects the processes.
    """
    return "gloo" in str(error).lower()
