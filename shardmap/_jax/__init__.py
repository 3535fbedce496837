"""What depends on how JAX is made, with the reason and a check that fails loudly."""

SUPPORTED = "0.10.2 to 0.12"


def other_jax(problem: str) -> ImportError:
    """The error for a JAX that is made otherwise than this package knows.

    Args:
      problem: what was looked for, why, and what was found.
    """
    return ImportError(
        f"{problem}. shardmap works with JAX {SUPPORTED}: install one of these, or a "
        "newer shardmap."
    )
