"""Working on a saved plan: one task of an array job, or all that is left."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from shardmap.arrays.combining import identity
from shardmap.plan.away.folder.claims import LEASE, Claims, pause
from shardmap.plan.away.folder.job import Job, Row
from shardmap.plan.away.folder.partial_results import PartialResults, file_name
from shardmap.plan.away.folder.stored import stored, stored_dtype
from shardmap.plan.run import buffers
from shardmap.plan.run.disk.results import Folder, result_name

POLL = 0.2
"""How many seconds pass before a worker that waits for others looks again."""

Tell = Callable[[str], Any]
Kept = Callable[[Row], list[np.ndarray]]


class Progress(NamedTuple):
    """How far a stage is, in units of work."""

    stage: int
    shards: int
    units: int
    done: int
    claimed: int
    over: bool


class Worker:
    """One process that works on a job.

    Args:
      job: the saved plan.
      lease: for how many seconds a claim stands that nobody renews.
      tell: what is called with a line for each piece of work that is done.
    """

    def __init__(
        self, job: Job, lease: float = LEASE, tell: Tell = lambda line: None
    ) -> None:
        self.job, self.tell, self.shards_run = job, tell, 0
        self.claims = Claims(Folder(job.path / "claims", "claims"), lease)
        self.marks = Folder(job.path / "done", "done")

    def run(self, task: int | None = None, of: int | None = None) -> None:
        """Runs one task, or all that is left.

        A task runs its share of each stage. A stage begins when the one before it is
        done, and so a task first does what others have left of that.

        Args:
          task: its number, None for all of them.
          of: how many tasks there are; by default as many as the plan was saved for.
        """
        self.job.refuse_other_versions()
        last = len(self.job.stages) - 1
        for stage in range(last + 1):
            units = range(self.job.units(stage))
            count = of or self.job.tasks
            own = [u for u in units if task is None or u % count == task]
            self._units(stage, own, wait=task is None)
            if stage < last or task is None:
                self._units(stage, units, wait=True)
                self._finish_stage(stage)

    def _units(self, stage: int, units: Iterable[int], wait: bool) -> None:
        """Runs what nobody runs, and waits for what others do."""
        left = list(units)
        while left:
            left = [unit for unit in left if not self._is_done(f"{stage}-{unit}")]
            before = len(left)
            left = [unit for unit in left if not self._unit(stage, unit)]
            if not wait:
                return
            if left and len(left) == before:
                pause(POLL)

    def _is_done(self, name: str) -> bool:
        return (self.marks.path / name).exists()

    def _unit(self, stage: int, unit: int) -> bool:
        """Runs the shards of one unit, if nobody else does."""
        name = f"{stage}-{unit}"
        with self.claims.claimed(name) as mine:
            if not mine:
                return False
            if self._is_done(name):
                return True
            before = self.shards_run
            PartialResults(self.job, stage, unit, self._kept(stage)).run()
            count = self.shards_run - before
            self.marks.write(name, b"")
            self.tell(f"stage {stage}, part {unit}: {count} shards done")
        return True

    def _finish_stage(self, stage: int) -> None:
        """Puts together what shards could not write themselves."""
        name = f"{stage}"
        while not self._is_done(name):
            with self.claims.claimed(name) as mine:
                if mine and not self._is_done(name):
                    self._assemble(stage)
                    self.marks.write(name, b"")
                    self.tell(f"stage {stage}: done")
            if not mine:
                pause(POLL)

    def _assemble(self, stage: int) -> None:
        sums: dict[int, np.ndarray] = {}
        makes = self.job.stages[stage]["makes"]
        folds = buffers.Folds()
        for text, (combiner, _) in makes.items():
            about = self.job.value(int(text))
            shape, dtype = tuple(about["shape"]), np.dtype(about["dtype"])
            if combiner != "insert":
                start: Any = identity(combiner, dtype)
                sums[int(text)] = np.full(shape, start, dtype)
            elif "file" in about["sink"] and not (shape and 0 not in shape):
                sums[int(text)] = np.zeros(shape, dtype)
        kept = self._kept(stage)
        for unit in range(self.job.units(stage)):
            parts = PartialResults(self.job, stage, unit, kept)
            for part, node in parts.load():
                number, box = part.key
                combiner, count = makes[str(number)]
                covers = buffers.FOLDED**part.level
                made = folds.add(part.key, combiner, count, node, part.level, covers)
                if made is not None:
                    buffers.put(sums[number], box, combiner, made)
            for row in parts.rows:
                self._put_shared(row, sums, kept)
        for number, array in sums.items():
            self._publish(number, array)

    def _kept(self, stage: int) -> Kept:
        """What gives what a shard has kept, and runs it if that is nothing."""

        def kept(row: Row) -> list[np.ndarray]:
            found = self.job.load(stage, row)
            if found is None:
                found = self.job.run(stage, row)
                self.shards_run += 1
            return found

        return kept

    def _put_shared(
        self,
        row: Row,
        whole: Mapping[int, np.ndarray],
        kept: Kept,
    ) -> None:
        """Writes what a shard could not, as others write to the same place."""
        left = [
            (k, number, box)
            for k, (number, box, combiner, _) in enumerate(row.writes)
            if combiner == "insert" and not self.job.goes(row.writes[k])
        ]
        parts = kept(row) if left else []
        for k, number, box in left:
            if number in whole:
                buffers.put(whole[number], box, "insert", parts[k])
            else:
                self.job.put(number, box, parts[k])

    def _publish(self, number: int, array: np.ndarray) -> None:
        sink = self.job.value(number)["sink"]
        if "file" not in sink:
            self.job.put(number, [(0, size) for size in array.shape], array)
            return
        path = self.job.path / sink["file"]
        # Not ``np.save(path)``: others may look meanwhile.
        draft = path.with_name(f"{path.name}.{self.claims.token}.part")
        with open(draft, "wb") as file:
            np.save(file, stored(array))
        draft.replace(path)

    def rows(self, stage: int) -> Iterator[tuple[int, Any, list[np.ndarray] | None]]:
        for unit in range(self.job.units(stage)):
            for row in self.job.rows(stage, unit):
                yield unit, row, self.job.load(stage, row)

    def status(self) -> list[Progress]:
        """How far each stage is."""
        found = []
        for stage, about in enumerate(self.job.stages):
            units = range(self.job.units(stage))
            done = [unit for unit in units if self._is_done(f"{stage}-{unit}")]
            live = [
                unit
                for unit in units
                if unit not in done and self.claims.live(f"{stage}-{unit}")
            ]
            over = self._is_done(str(stage))
            shards = about["bounds"][-1]
            found.append(
                Progress(stage, shards, len(units), len(done), len(live), over)
            )
        return found

    def check(self) -> int:
        """Reads all that was made, and forgets what is not as it was written.

        Returns:
          How many shards are to be run again.
        """
        bad = 0
        for stage in range(len(self.job.stages)):
            for unit, row, kept in self.rows(stage):
                if not self._is_done(f"{stage}-{unit}"):
                    continue
                if kept is not None and self.job.is_as_written(row, kept):
                    continue
                bad += 1
                for name in (result_name(stage, row.number), file_name(stage, unit)):
                    (self.job.path / name).unlink(missing_ok=True)
                for mark in (f"{stage}-{unit}", str(stage)):
                    (self.marks.path / mark).unlink(missing_ok=True)
        return bad


class Output(NamedTuple):
    """Where an output is.

    Attributes:
      where: a file in the folder, or the place that ``out`` named.
      dtype: its numbers, which ``.npy`` files have as unsigned integers of their bits
        if NumPy itself does not know them.
    """

    where: Any
    dtype: np.dtype

    def __str__(self) -> str:
        if isinstance(self.where, str) and stored_dtype(self.dtype) != self.dtype:
            return f"{self.where}, as bits: np.load(...).view({self.dtype.name!r})"
        return str(self.where)


def results(job: Job) -> dict[str, Output]:
    """Where the outputs are, by their names."""
    found = {}
    for output in job.body["outputs"]:
        where = output.get("file")
        if where is None:
            sink = job.value(output["value"])["sink"]
            where = sink.get("file", sink.get("about", {}).get("place"))
        found[output["name"]] = Output(where, np.dtype(output["dtype"]))
    return found
