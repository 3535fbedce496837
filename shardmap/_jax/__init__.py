"""What depends on how JAX is made, with the reason and a check that fails loudly."""

import pathlib

from jax.extend import source_info_util

SUPPORTED = "0.10.2 to 0.12"

# JAX calls the innermost frame outside of such folders the user's: in jaxprs, in
# compiled programs, in errors.
source_info_util.register_exclusion(str(pathlib.Path(__file__).parents[1]))


def other_jax(problem: str) -> ImportError:
    """The error for a JAX that is made otherwise than this package knows.

    Args:
      problem: what was looked for, why, and what was found.
    """
    return ImportError(
        f"{problem}. shardmap works with JAX {SUPPORTED}: install one of these, or a "
        "newer shardmap."
    )
