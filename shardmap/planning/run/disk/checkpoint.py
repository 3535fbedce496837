"""A folder with the results of tasks that are done.

Checksums in a file show that it is complete, and that it is of this task and plan.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardmap.planning.run.cut_program import CutProgram, Spec
from shardmap.planning.run.disk.fingerprint import fingerprint, fingerprints, software
from shardmap.planning.run.disk.folder import Folder
from shardmap.planning.run.tasks import Task

MANIFEST = "plan.json"

SUM = hashlib.sha256().digest_size
"""The length of a checksum. A file begins with the checksums of its results."""


class Checkpoint:
    """The folder of one plan.

    Args:
      folder: where it is, or will be.
      cut_program: the plan's program.
      leaves: its arguments, which must be the same each time; of those above 1 MiB,
        samples are compared.

    Raises:
      ValueError: it belongs to another plan or other arguments, or is no checkpoint.
      OSError: it cannot be written to.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        cut_program: CutProgram,
        leaves: Sequence[Any],
    ) -> None:
        self.folder = Folder(folder, "checkpoint")
        self._names = cut_program.names
        self._plan, self._arguments = fingerprint(cut_program), fingerprints(leaves)
        self.folder.make()
        self.folder.clear()
        is_new = self.folder.is_empty()
        theirs = self._manifest()
        if theirs is None:
            if not is_new:
                raise ValueError(
                    f"the folder {self.folder.path} is not empty and no checkpoint of "
                    "a plan: give an empty folder"
                )
            theirs = {
                "software": software(),
                "plan": self._plan,
                "arguments": self._arguments,
            }
            content = json.dumps({**theirs, "sha256": _sum(theirs)}).encode()
            self.folder.write(MANIFEST, content)
        self._refuse_other(theirs)
        self._key = _sum(theirs)

    def _refuse_other(self, theirs: Mapping[str, Any]) -> None:
        """Raises an error if a manifest is that of another plan or other arguments."""
        made_with: Any = theirs.get("software")
        told = software().items() if isinstance(made_with, dict) else ()
        for name, version in told:
            if (other := made_with.get(name)) != version:
                raise ValueError(
                    f"the checkpoint folder {self.folder.path} was made with {name} "
                    f"{other}, and this is {name} {version}, which may compute other "
                    "bytes: give an empty folder"
                )
        before: Any = theirs.get("arguments")
        is_listed = isinstance(before, list) and len(before) == len(self._arguments)
        if theirs.get("plan") != self._plan or not told or not is_listed:
            raise ValueError(
                f"the checkpoint folder {self.folder.path} belongs to another plan: "
                "give an empty folder, or the function, shapes and cuts that it was "
                "made with"
            )
        for name, now, then in zip(self._names, self._arguments, before, strict=True):
            if any(a and b and a != b for a, b in zip(now, then, strict=True)):
                raise ValueError(
                    f"the checkpoint folder {self.folder.path} was made with other "
                    f"values of {name}: give the same, or an empty folder"
                )

    def _manifest(self) -> dict[str, Any] | None:
        """The manifest of the folder, None if it is new."""
        content = self.folder.read(MANIFEST)
        if content is None:
            return None
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            manifest = dict(json.loads(content))
            if manifest.pop("sha256") == _sum(manifest):
                return manifest
        raise ValueError(
            f"{self.folder.path / MANIFEST} is damaged, so that nothing says which "
            "plan the folder is for: give an empty folder"
        )

    def has(self, task: Task) -> bool:
        """Whether there is a file of a task, which may be damaged."""
        return (self.folder.path / task.name).exists()

    def file(self, task: Task) -> "TaskFile":
        """The file of a task, which a worker may read and write."""
        return TaskFile(self.folder, self._key, task.name, task.results)

    def load(
        self, task: Task, places: Sequence[int] | None = None
    ) -> list[np.ndarray] | None:
        """As `TaskFile.load`, if the folder is still that of this plan."""
        results = self.file(task).load(places)
        # Another run may have begun in the empty folder at the same time.
        if results is None and self.has(task) and (theirs := self._manifest()):
            self._refuse_other(theirs)
        return results

    def save(self, task: Task, results: Sequence[np.ndarray]) -> None:
        """As `TaskFile.save`."""
        self.file(task).save(results)


class TaskFile(NamedTuple):
    """The file with the results of one task. It can be pickled.

    Attributes:
      folder: the folder of the plan.
      key: of the plan.
      name: of the task.
      results: their shapes and dtypes.
    """

    folder: Folder
    key: str
    name: str
    results: Sequence[Spec]

    def load(self, places: Sequence[int] | None = None) -> list[np.ndarray] | None:
        """The results; None if the task is not done, or the file is damaged.

        Args:
          places: which of the results. Default: all.
        """
        specs = self.results
        lengths = [
            math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in specs
        ]
        offsets = [*itertools.accumulate(lengths, initial=SUM * len(specs))]
        results = []
        for k in range(len(specs)) if places is None else places:
            spans = (SUM * k, SUM), (offsets[k], lengths[k])
            content = self.folder.read(self.name, *spans)
            if content is None or self._sum_of(k, content[SUM:]) != content[:SUM]:
                return None
            shape, dtype = specs[k]
            results.append(np.frombuffer(content[SUM:], dtype).reshape(shape))
        return results

    def save(self, results: Sequence[np.ndarray]) -> None:
        """Keeps the results; they are on disk when this returns."""
        contents = [np.ascontiguousarray(each).tobytes() for each in results]
        sums = [self._sum_of(k, each) for k, each in enumerate(contents)]
        self.folder.write(self.name, b"".join([*sums, *contents]))

    def _sum_of(self, place: int, content: bytes) -> bytes:
        """The checksum of one result."""
        shape, dtype = self.results[place]
        told = f"{place} of {len(self.results)} {list(shape)} {np.dtype(dtype)}"
        head = f"{self.key} {self.name} {told} "
        return hashlib.sha256(head.encode() + content).digest()


def _sum(manifest: Mapping[str, Any]) -> str:
    content = f"{MANIFEST} {json.dumps(manifest, sort_keys=True)}"
    return hashlib.sha256(content.encode()).hexdigest()
