"""The uses of private JAX, each with its reason and a test that fails loudly."""

import pathlib

import jax
from jax._src import traceback_util
from jax.extend import source_info_util

SUPPORTED = "0.10.2 to 0.12"

LIBTPU = "0.0.42.1" if jax.__version_info__ < (0, 11) else "0.0.52"
"""The release of libtpu that is tested with this JAX."""

_PACKAGE = str(pathlib.Path(__file__).parents[1])

# In jaxprs and compiled programs, JAX takes the innermost frame outside of such folders
# for the user's. It also removes such frames from tracebacks; that has no public name.
source_info_util.register_exclusion(_PACKAGE)
traceback_util.register_exclusion(_PACKAGE)

api_boundary = traceback_util.api_boundary
"""Decorates what users call: JAX removes its frames and ours from their tracebacks."""


def other_jax(problem: str) -> ImportError:
    """The error for a JAX release that this package does not support.

    Args:
      problem: what is missing, and what it is for.
    """
    return ImportError(
        f"{problem}. shardmap works with JAX {SUPPORTED}: install one of these, or a "
        "newer shardmap."
    )
