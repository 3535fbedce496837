"""JAX's error for an axis name that no map binds."""

import contextlib
import re
from collections.abc import Collection, Hashable, Iterator

from shardmap._jax.context import casts_refused

_UNBOUND = re.compile(r"(?:Found an )?(unbound axis name: (.*?))(?:\. To fix this.*)?")
_REMEDY = ". Give the map that is meant this axis_name"
_BOUND = ", or use one that is bound here: "


@contextlib.contextmanager
def explained_axis_names(
    *bound: Hashable, mesh_axes: Collection[str] = ()
) -> Iterator[None]:
    """Context in which JAX's error for an unbound axis name lists the bound ones.

    JAX's own text advises `jax.shard_map`.

    Args:
      *bound: the names that are bound here.
      mesh_axes: those that the map is laid over, which collectives do not know.
    """
    try:
        with casts_refused():
            yield
    except NameError as error:
        text = str(error)
        if (unbound := _UNBOUND.fullmatch(text)) is None:
            raise
        if unbound[2] in mesh_axes:
            instead = [repr(name) for name in bound]
            write = f"Write {instead[0]}, or pass" if instead else "Pass"
            error.args = (
                f"{unbound[2]!r} is a mesh axis: collectives in spmap use axis_name. "
                f"{write} axis_name={unbound[2]!r}",
            )
            raise
        if _REMEDY not in text:
            text = unbound[1] + _REMEDY
        for name in bound:
            text += f"{', ' if _BOUND in text else _BOUND}{name!r}"
        error.args = (text,)
        raise
