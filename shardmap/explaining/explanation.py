"""`Explanation`: a report that prints, shows and saves itself, and measures calls."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardmap.explaining.draw import sections, tables
from shardmap.explaining.draw.document import Document
from shardmap.explaining.draw.text import Printed
from shardmap.explaining.report import Report
from shardmap.units import duration, printable, size


@dataclasses.dataclass(frozen=True, repr=False)
class Measurement:
    """The time and memory of some calls. Prints beside the predictions.

    Attributes:
      name: the name of the function.
      seconds: the time of each call. The first call compiles and is left out.
      peak_bytes: the most memory in use so far on any device; None on devices that do
        not count it, such as CPUs.
      predicted_bytes: the peak memory of a device that the compiler predicts.
    """

    name: str
    seconds: tuple[float, ...]
    peak_bytes: int | None
    predicted_bytes: int | None

    def __repr__(self) -> str:
        peak = "not counted here"
        if self.peak_bytes is not None:
            peak = f"{size(self.peak_bytes)} since the process began"
        predicted = self.predicted_bytes
        return (
            f"{self.name}, {len(self.seconds)} calls\n"
            f"  time of a call: {duration(statistics.median(self.seconds))}\n"
            f"  peak memory of a device: {peak}; predicted: "
            + ("unknown" if predicted is None else size(predicted))
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Printed, Report):
    """What runs in parallel, where arrays are, what moves, and what it costs.

    Printed, it is a page of text; a notebook shows it as a page.

    Attributes:
      name: the name of the function.
      mesh: the names and sizes of the mesh axes; () on one device, or without a mesh.
      num_devices: how many devices the program runs on.
      device_kind: the kind of device, such as "cpu"; None for a plan.
      axes: the axes in program order, each before those inside it.
      arrays: the inputs, then the outputs, in the order of the pytrees.
      collectives: the collectives in the order in which the program runs them.
      cost: the cost per device; None for a plan.
      remarks: what to change, the most important first.
      notes: limits of the numbers; for example, XLA counts the steps of a loop once.
      largest: the largest values, except arguments, at the peak of memory.
      busiest: for TPUs, the lines that take most cycles by the compiler's own estimate,
        each with its share of all. It is rough: products are near, reductions 4 to 6
        times too high, and collectives and gathers of rows are not in it.
      available: how many devices of that kind this process has; None for a plan, or
        devices that only compile.
      pieces: for a function in pieces, lines on each cut and each stage.
      stages: for a function in pieces, what each stage makes, reads and keeps.
      title: for a plan, its shards and bytes in one line; None for a function. The
        explanation of a plan has ``pieces`` and ``stages``, and nothing on devices.
      interconnect: the links of the devices, for the least times; None if unknown.
      network: what joins the slices of TPUs, or the hosts with GPUs, if several.
      machine: the machine that was compiled for, such as "TPU v5 lite, 16 x 16", if it
        is not here and cannot run the program; else None.
      capacity: the bytes of memory of a device; None if unknown.
      least_times: the least seconds of a call for "arithmetic", "memory" and
        "interconnect", each by itself, at the vendor's figures. In loops, memory counts
        one step.
      mesh_devices: the ids of the devices in the order of the mesh; () if they are 0,
        1, 2 and so on, or unknown.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> report = sm.explain(jax.vmap(lambda x: x.sum()))(np.ones((4, 3)))
      >>> print(report.axes[0])
      an axis of 4 = 1 device x 4 vectorised x 1 step
      >>> [(array.path, array.shape, array.layout) for array in report.outputs]
      [('result', (4,), 'on one device')]
      >>> report.collectives
      ()
    """

    call: tuple[Callable[..., Any], bool] | None = dataclasses.field(
        default=None, repr=False, compare=False, metadata={"plain": False}
    )
    """The function, and whether a call donates arguments."""

    def __str__(self) -> str:
        if self.title is not None:
            return printable("\n  ".join([self.title, *self.pieces]))
        return super().__str__()

    def __repr__(self) -> str:
        what = self.title or f"{self.name}: {self.summary}"
        return printable(f"<Explanation of {what}>")

    def __getstate__(self) -> dict[str, Any]:
        # Most functions cannot be pickled, and a report is useful without.
        return {**vars(self), "call": None}

    def _document(self) -> Document:
        if self.title is None:
            return sections.of_report(self)
        return sections.of_plan(self.title, self.pieces)

    def compare(self, other: "Explanation") -> "Comparison":
        """What differs from another version of the program, or another machine.

        Args:
          other: the explanation of the other version.

        Returns:
          A `Comparison`, which prints the figures, arrays and collectives that differ.

        Example:
          >>> import jax.numpy as jnp, shardmap as sm
          >>> x = jnp.ones((4, 4))
          >>> print(sm.explain(lambda x: x @ x)(x).compare(sm.explain(lambda x: x)(x)))
          <lambda>: compared with <lambda>
          <BLANKLINE>
          Figures
            ...
        """
        return Comparison(self, other)

    def measure(self, *args: Any, repeats: int = 5, **kwargs: Any) -> Measurement:
        """Runs the function a few times, and measures its time and memory.

        Args:
          *args: the arguments of the function: arrays of the explained shapes. They
            stay valid even if the function donates them.
          repeats: the number of measured calls, after one that is not measured.
          **kwargs: keyword arguments of the function.

        Returns:
          A `Measurement`, which prints as a table.

        Raises:
          TypeError: an argument is only a shape.
          ValueError: an argument has another shape than the explained one; or the
            explanation is of a plan or devices that compile only, or was pickled.

        Example:
          >>> import jax.numpy as jnp, numpy as np, shardmap as sm
          >>> x = jnp.ones((64, 64))
          >>> measured = sm.explain(lambda x: x @ x)(x).measure(x)
          >>> len(measured.seconds), measured.predicted_bytes
          (5, 32768)
        """
        if self.call is None or self.cost is None or self.machine is not None:
            raise ValueError(
                f"the explanation of {self.name} cannot run it: it is of a plan or of "
                "devices that compile only, or was pickled. Explain the function again"
            )
        leaves = jax.tree.leaves((args, kwargs))
        # Other numbers of leaves have static arguments, or are the function's to tell.
        pairs = zip(self.inputs, leaves, strict=False)
        for array, leaf in pairs if len(leaves) == len(self.inputs) else ():
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"measure runs {self.name}, but {array.path} is only a shape, "
                    f"{leaf}: give arrays"
                )
            if np.shape(leaf) != array.shape:
                raise ValueError(
                    f"measure of {self.name} got {array.path} of shape "
                    f"{np.shape(leaf)}, which is explained for {array.shape}: explain "
                    "it for these arguments"
                )
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        fun, donates = self.call
        run = fun if hasattr(fun, "lower") else jax.jit(fun)
        seconds = []
        for _ in range(repeats + 1):
            given = jax.tree.map(_copy, (args, kwargs)) if donates else (args, kwargs)
            jax.block_until_ready(given)
            start = time.perf_counter()
            result = jax.block_until_ready(run(*given[0], **given[1]))
            seconds.append(time.perf_counter() - start)
        arrays = [a for a in jax.tree.leaves(result) if isinstance(a, jax.Array)]
        devices = {device for array in arrays for device in array.devices()}
        counted = [(device.memory_stats() or {}) for device in devices]
        peaks = [each.get("peak_bytes_in_use", 0) for each in counted]
        peak = max(peaks, default=0) or None
        return Measurement(self.name, tuple(seconds[1:]), peak, self.cost.peak_bytes)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """What differs between two explanations. Prints as tables.

    Attributes:
      before, after: the explanations.
    """

    before: Explanation
    after: Explanation

    def _document(self) -> Document:
        return tables.of_changes(self.before, self.after)


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
