"""The meshes of several maps in one program, which XLA takes apart into one.

It cannot where the maps are written per device and neither mesh has all the cuts of
the other, such as 4 x 2 and 2 x 4, and then ends the whole process.
"""

import itertools
import operator
import threading
from typing import Any

from jax.sharding import Mesh


class _Lowered(threading.local):
    """The program that a thread lowers, and the meshes in it with their maps' names."""

    program: Any = None
    meshes: dict[Mesh, str]


_lowered = _Lowered()


def check_meshes(program: Any, name: str, mesh: Mesh) -> None:
    """Refuses a map whose mesh cannot be one with those of other maps.

    Args:
      program: any object that there is one of for each program that is lowered.
      name: what to call the map.
      mesh: that the map runs on.

    Raises:
      NotImplementedError: names both functions, both meshes and a mesh for both.
    """
    if _lowered.program is not program:
        _lowered.program, _lowered.meshes = program, {}
    for other, other_name in _lowered.meshes.items():
        cuts, other_cuts = _cuts(mesh), _cuts(other)
        if other.size == mesh.size and not (cuts <= other_cuts or other_cuts <= cuts):
            both = sorted(cuts | other_cuts)
            sizes = [b // a for a, b in itertools.pairwise(both)]
            raise NotImplementedError(
                f"{name} runs on {_text(mesh)}, {other_name} in the "
                f"same program on {_text(other)}: XLA cannot cut one program both "
                "ways. Give all maps of the program mesh= and mesh_axes= of one mesh "
                f"with axes of sizes {tuple(sizes)}, several axes to a map where it "
                "needs them, or call them outside of your own jax.jit."
            )
    _lowered.meshes.setdefault(mesh, name)


def _cuts(mesh: Mesh) -> set[int]:
    """Into how many groups the devices are cut by the first axis, first two, ..."""
    return {1, *itertools.accumulate(mesh.shape.values(), operator.mul)}


def _text(mesh: Mesh) -> str:
    return " x ".join(str(size) for size in mesh.shape.values()) + " devices"
