"""`compare_meshes`: every way to lay devices over the axes of a mesh."""

import dataclasses
import itertools
import math
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from shardmap._jax import api_boundary
from shardmap.explaining import elsewhere
from shardmap.explaining.api import explanation_for
from shardmap.explaining.chips import machine_of, part_of
from shardmap.explaining.draw import tables
from shardmap.explaining.draw.document import Document
from shardmap.explaining.draw.text import Printed
from shardmap.explaining.explanation import Explanation
from shardmap.explaining.interconnect import Interconnect, interconnect_of
from shardmap.sharding.mesh import make_mesh
from shardmap.units import duration, error_text, shown, size, size_of

IN_FULL = 3
"""How many of the best meshes are compiled with all optimizations."""
MOST_OF_ERROR = 240
"""The characters of an error that a row tells."""


@dataclasses.dataclass(frozen=True)
class MeshRow:
    """A program on one mesh.

    Attributes:
      mesh: the names and sizes of the axes.
      report: the explanation; None if there is no such program.
      error: why there is none, or None.
      is_quick: whether the report is of a program compiled with few optimizations:
        it sends the same bytes, and its peak of memory may be a tenth higher.
    """

    mesh: tuple[tuple[str, int], ...]
    report: Explanation | None
    error: str | None = None
    is_quick: bool = False

    @property
    def name(self) -> str:
        """Such as ``data 8, model 2``."""
        return ", ".join(f"{name} {size:,}" for name, size in self.mesh)

    @property
    def fits(self) -> bool:
        """Whether there is a program that fits into memory, as far as is known."""
        return self.report is not None and self.report.fits is not False


@dataclasses.dataclass(frozen=True, repr=False)
class MeshComparison(Printed):
    """A program on every mesh of a machine. Prints as a table, the best mesh first.

    Attributes:
      name: the name of the program.
      machine: the devices.
      rows: one for each mesh, the best first.
      reason: why the first is the best.
    """

    name: str
    machine: str
    rows: tuple[MeshRow, ...]
    reason: str

    @property
    def best(self) -> MeshRow:
        """The first row."""
        return self.rows[0]

    @property
    def fits(self) -> bool:
        """Whether the program fits on any of the meshes, as far as is known."""
        return self.best.fits

    def __repr__(self) -> str:
        return f"<MeshComparison of {self.name}: {len(self.rows):,} meshes>"

    def to_dict(self) -> dict[str, Any]:
        """The comparison as dicts, lists, strings and numbers, as JSON has them."""
        rows = [
            {
                "mesh": dict(row.mesh),
                "error": row.error,
                "is_quick": row.is_quick,
                "report": row.report and row.report.to_dict(),
            }
            for row in self.rows
        ]
        return dataclasses.asdict(dataclasses.replace(self, rows=())) | {"rows": rows}

    def _document(self) -> Document:
        rows = [
            (
                " x ".join(f"{size:,}" for _, size in row.mesh) + " *" * row.is_quick,
                row.report or row.error or "",
            )
            for row in self.rows
        ]
        quick = (
            "* compiled with few optimizations: it sends the same, and its peak may be "
            "a tenth lower."
        )
        says = [self.reason, *[quick] * any(row.is_quick for row in self.rows)]
        axes = " x ".join(name for name, _ in self.best.mesh)
        lead = f"{len(rows):,} meshes, {axes}, of {self.machine}; not run"
        return tables.of_reports(self.name, lead, "Mesh", rows, *says)


@api_boundary
def compare_meshes(
    program: Callable[[Mesh], Any],
    devices: str | Sequence[jax.Device] | None = None,
    axes: Sequence[str] = ("data", "model"),
    *,
    interconnect: str | Interconnect | None = None,
) -> MeshComparison:
    """Compares every way to lay devices over the axes of a mesh.

    Each mesh is tried with few optimizations of the compiler, and the best three again
    with all. What does not fit costs little. A line on stderr tells of each. The order
    is that of the least time of a step in which nothing overlaps: the longer of
    arithmetic and memory, and then the collectives.

    Args:
      program: a function of the mesh. It returns the function to explain and a tuple
        of its arguments, arrays or `jax.ShapeDtypeStruct` with shardings on this mesh.
      devices: a machine that need not be here, such as ``"v5e:4x4"`` (see `devices`),
        or a list of devices. Default: those of this process.
      axes: the names of the axes. Their sizes are tried in all ways that use all
        devices; on a slice of TPUs neighbours in the mesh are neighbours in the torus.
      interconnect: as of `explain`.

    Returns:
      A `MeshComparison`: print it, ``save("meshes.html")``, or read its ``rows``, whose
      ``report`` is that of `explain`.

    Raises:
      TypeError: `program` is not a function, or returns something else.
      ValueError: there is no such machine, or an axis is named twice; or `program`
        fails on every mesh, with the error of the first.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> def program(mesh):
      ...     def array(*spec):
      ...         layout = NamedSharding(mesh, P(*spec))
      ...         return jax.ShapeDtypeStruct((64, 64), np.float32, sharding=layout)
      ...     return lambda w, x: x @ w, (array(None, "model"), array("data"))
      >>> comparison = sm.compare_meshes(program)
      >>> sorted(row.name for row in comparison.rows)
      ['data 1, model 8', 'data 2, model 4', 'data 4, model 2', 'data 8, model 1']
    """
    if not callable(program):
        raise TypeError(
            f"compare_meshes takes a function of a mesh, got {shown(program)}"
        )
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names or len({*names}) < len(names):
        raise ValueError(
            f"compare_meshes axes must be different names, such as ('data', 'model'), "
            f"got {shown(axes)}"
        )
    given = interconnect_of(interconnect)
    there = list(elsewhere.devices_of(devices)) or jax.local_devices()
    start, failed = time.monotonic(), list[Exception]()
    factors = [n for n in range(len(there), 0, -1) if len(there) % n == 0]
    all_sizes = [
        sizes
        for sizes in itertools.product(factors, repeat=len(names))
        if math.prod(sizes) == len(there)
    ]

    def row_of(sizes: Sequence[int], is_quick: bool) -> MeshRow:
        mesh = tuple(zip(names, sizes, strict=True))
        row = MeshRow(mesh, None, is_quick=is_quick)
        what = f"{row.name}{'' if is_quick else ', in full'}"
        seconds = time.monotonic() - start
        print(f"compare_meshes: {what}, {seconds:.0f} s", file=sys.stderr, flush=True)
        try:
            step, *args = _program_on(program, _mesh(dict(mesh), there))
            report = explanation_for(step, given, there, args, {}, is_quick)
        except Exception as error:
            failed.append(error)
            first, *_ = error_text(error).splitlines()
            why = textwrap.shorten(first, MOST_OF_ERROR, placeholder=" ...")
            return dataclasses.replace(row, error=why, is_quick=False)
        return dataclasses.replace(row, report=report)

    rows = sorted((row_of(sizes, True) for sizes in all_sizes), key=_rank)
    if len(failed) == len(rows):
        raise failed[0]
    while quick := [row for row in rows[:IN_FULL] if row.is_quick and row.fits]:
        for row in quick:
            rows[rows.index(row)] = row_of([size for _, size in row.mesh], False)
        rows.sort(key=_rank)
    name = getattr(program, "__name__", type(program).__name__)
    return MeshComparison(name, machine_of(there), tuple(rows), _reason(rows))


def _mesh(sizes: dict[str, int], devices: list[jax.Device]) -> Mesh:
    if devices[0].platform != "tpu" or len({*map(part_of, devices)}) > 1:
        return make_mesh(sizes, devices)
    grid = mesh_utils.create_device_mesh(
        tuple(sizes.values()), devices, allow_split_physical_axes=True
    )
    return make_mesh(sizes, list(grid.flat))


def _program_on(program: Callable[[Mesh], Any], mesh: Mesh) -> Any:
    returned = program(mesh)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not callable(returned[0]) or not isinstance(returned[1], tuple):
        raise TypeError(
            "compare_meshes program must return a function and a tuple of its "
            f"arguments, such as (step, (state, batch)), got {shown(returned)}"
        )
    return returned[0], *returned[1]


def _rank(row: MeshRow) -> tuple[Any, ...]:
    """Programs that fit, by their time; then those that do not, by their memory."""
    report = row.report
    if report is None:
        return (2,)
    if not row.fits:
        return (1, report.peak_bytes or 0)
    return (0, report.in_turn or 0, report.sent_bytes, report.peak_bytes or 0)


def _reason(rows: Sequence[MeshRow]) -> str:
    """Why the first row is the best of those that fit."""
    fitting = [row.report for row in rows if row.report and row.fits]
    too_large = [row.report for row in rows if row.report and not row.fits]
    says = []
    if fitting:
        best = fitting[0]
        terms = [f"{duration(s)} of {what}" for what, s in best.least_times if s]
        sends = f"which sends {size(best.sent_bytes)}"
        says.append(", ".join([f"Best: {rows[0].name}", sends, *terms]))
    if len(fitting) > 1:
        second = fitting[1]
        text = f"{rows[1].name} sends {size(second.sent_bytes)}"
        if best.in_turn and second.in_turn:
            text += f" and takes {second.in_turn / best.in_turn:.2f} times as long"
        says.append(text)
    if too_large:
        nearest = too_large[0]
        needed = size_of(nearest.peak_bytes or 0, nearest.capacity or 1)
        text = f"Without room: {len(too_large)} of {len(rows)} meshes"
        says.append(f"{text}; {rows[len(fitting)].name} needs {needed}")
    return f"{'. '.join(says)}."
