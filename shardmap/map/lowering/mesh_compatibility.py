"""The meshes in one program, which XLA takes apart into one.

It cannot where neither mesh has all the cuts of the other, such as 4 x 2 and 2 x 4, and
then ends the whole process: where maps on both are written per device, and where a map
is that only along some axes and an argument is on the other mesh.
"""

import itertools
import operator
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh

from shardmap.map.contexts import CutOtherwise


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
      CutOtherwise: names both functions, both meshes and a mesh for both.
    """
    if _lowered.program is not program:
        _lowered.program, _lowered.meshes = program, {}
    for other, other_name in _lowered.meshes.items():
        ours, theirs = tuple(mesh.shape.values()), tuple(other.shape.values())
        if sizes := _sizes_for_both(ours, theirs):
            raise CutOtherwise(
                f"{name} runs on {_text(ours)}, {other_name} in the "
                f"same program on {_text(theirs)}: XLA cannot cut one program both "
                "ways. Give all maps of the program mesh= and mesh_axes= of one mesh "
                f"with axes of sizes {sizes}, several axes to a map where it "
                "needs them, or call them outside of your own jax.jit."
            )
    _lowered.meshes.setdefault(mesh, name)


def check_arguments(name: str, mesh: Mesh, meshes: Iterable[Sequence[int]]) -> None:
    """Refuses a map per device along some axes, where arguments are cut otherwise.

    Args:
      name: what to call the map.
      mesh: that the map runs on.
      meshes: the sizes of the axes of those that arguments of the program are on.

    Raises:
      CutOtherwise: names the function, both meshes and a mesh for the argument.
    """
    ours = tuple(mesh.shape.values())
    for theirs in meshes:
        if sizes := _sizes_for_both(ours, theirs):
            raise CutOtherwise(
                f"{name} runs on {_text(ours)}, and an argument of the program is on a "
                f"mesh of {_text(theirs)}: XLA cannot cut one program both ways. Put "
                f"the argument on a mesh with axes of sizes {sizes}, or call the map "
                "outside of your own jax.jit and jax.set_mesh."
            )


def _sizes_for_both(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The axes of a mesh that has the cuts of both; none if one of them has."""
    cuts, other_cuts = _cuts(a), _cuts(b)
    if max(cuts) != max(other_cuts) or cuts <= other_cuts or other_cuts <= cuts:
        return ()
    both = sorted(cuts | other_cuts)
    return tuple(b // a for a, b in itertools.pairwise(both))


def _cuts(sizes: Sequence[int]) -> set[int]:
    """Into how many groups the devices are cut by the first axis, first two, ..."""
    return {1, *itertools.accumulate(sizes, operator.mul)}


def _text(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) + " devices"
