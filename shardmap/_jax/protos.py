"""XLA's own forms of a sharding: `OpSharding`, a proto, and `HloSharding`.

JAX has no public name for them: `jaxlib.xla_client` is JAX's own, and makes no promise.
"""

from jaxlib.xla_client import HloSharding, OpSharding

__all__ = ["HloSharding", "OpSharding"]
