"""A folder with the results of tasks that are done.

Checksums in a file show that it is complete, and that it is of this task and plan. The
same plan has the same digest in every process: that of its function's StableHLO, of its
cuts, and of the rules by which it was cut.
"""

import hashlib
import importlib.metadata
import itertools
import json
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np

from shardmap._jax.primitives import PURE_CALLBACK, callback_of
from shardmap._jax.walk import equations
from shardmap._version import __version__
from shardmap.planning.engine.nodes import is_key
from shardmap.planning.lax.per_piece import text_of
from shardmap.planning.run.cut_program import CutProgram, Spec
from shardmap.planning.run.disk.folder import Folder, folder_of
from shardmap.planning.run.tasks import Task
from shardmap.source import source_of

MANIFEST = "plan.json"

SUM = hashlib.sha256().digest_size
"""The length of a checksum, which stands before each result in a file."""

COMPARED = 2**20
"""The most bytes of an argument whose values are all compared."""

SAMPLES, SAMPLE = 16, 2**10
"""The number of parts of a larger one that are compared, and their elements at most."""


class Checkpoint:
    """The folder of one plan and its arguments."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        cut_program: CutProgram,
        leaves: Sequence[Any],
    ) -> None:
        self._names = cut_program.names
        self._manifest: dict[str, Any] = {
            "software": software(),
            "plan": fingerprint(cut_program),
            "arguments": fingerprints(leaves),
        }
        content = json.dumps(self._manifest, sort_keys=True).encode()
        self._key = hashlib.sha256(content).hexdigest()
        self.folder = folder_of("checkpoint", folder)
        if self.folder.read(MANIFEST) is None:
            names = self.folder.names()
            if names and MANIFEST not in names:
                raise ValueError(
                    f"the folder {self.folder.path} is not empty and no checkpoint of "
                    "a plan: give an empty folder"
                )
            self.folder.write(MANIFEST, content, new=True)
        self._refuse_other()

    def _refuse_other(self) -> None:
        """Raises an error if the folder is that of another plan or other arguments."""
        where, mine = f"the checkpoint folder {self.folder.path}", self._manifest
        try:
            theirs = json.loads(self.folder.read(MANIFEST) or b"")
            versions, plan = dict(theirs["software"]), theirs["plan"]
            arguments = list(theirs["arguments"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(
                f"{MANIFEST} of {where} is damaged, and nothing else says which plan "
                "it is for: give an empty folder"
            ) from None
        if theirs == mine:
            return
        for name, version in mine["software"].items():
            if versions.get(name) != version:
                raise ValueError(
                    f"{where} was made with {name} {versions.get(name)}, and this is "
                    f"{name} {version}, which may compute other bytes: give an empty "
                    "folder"
                )
        if plan != mine["plan"] or len(arguments) != len(self._names):
            raise ValueError(
                f"{where} belongs to another plan: give an empty folder, or the "
                "function, shapes and cuts that it was made with"
            )
        pairs = zip(self._names, arguments, mine["arguments"], strict=True)
        raise ValueError(
            f"{where} was made with other values of "
            f"{', '.join(name for name, then, now in pairs if then != now)}: give the "
            "same, or an empty folder"
        )

    def has(self, task: Task) -> bool:
        """Whether there is a file of a task, which may be damaged."""
        return self.folder.has(task.name)

    def file(self, task: Task) -> "TaskFile":
        """The file of a task, which a worker may read and write."""
        return TaskFile(self.folder, self._key, task.name, task.results)

    def load(
        self, task: Task, places: Sequence[int] | None = None
    ) -> list[np.ndarray] | None:
        """As `TaskFile.load`, if the folder is still that of this plan."""
        results = self.file(task).load(places)
        # Another run may have begun in the empty folder at the same time.
        if results is None and self.has(task):
            self._refuse_other()
        return results


class TaskFile(NamedTuple):
    """The file with the results of one task. It can be pickled."""

    folder: Folder
    key: str
    name: str
    results: Sequence[Spec]

    def load(self, places: Sequence[int] | None = None) -> list[np.ndarray] | None:
        """The results in these places; None if it is not done, or damaged."""
        lengths = [
            SUM + math.prod(shape) * np.dtype(dtype).itemsize
            for shape, dtype in self.results
        ]
        starts = [*itertools.accumulate(lengths, initial=0)]
        results = []
        for k in range(len(lengths)) if places is None else places:
            content = self.folder.read(self.name, starts[k], starts[k + 1])
            if content is None or self._sum_of(k, content[SUM:]) != content[:SUM]:
                return None
            shape, dtype = self.results[k]
            results.append(np.frombuffer(content[SUM:], dtype).reshape(shape))
        return results

    def save(self, results: Sequence[np.ndarray]) -> None:
        """Keeps the results; they are on disk when this returns."""
        contents = [np.ascontiguousarray(each).tobytes() for each in results]
        parts = ((self._sum_of(k, each), each) for k, each in enumerate(contents))
        self.folder.write(self.name, b"".join(itertools.chain(*parts)))

    def _sum_of(self, place: int, content: bytes) -> bytes:
        """The checksum of one result."""
        shape, dtype = self.results[place]
        told = f"{place} of {len(self.results)} {list(shape)} {np.dtype(dtype)}"
        head = f"{self.key} {self.name} {told} "
        return hashlib.sha256(head.encode() + content).digest()


def software() -> dict[str, str]:
    """What a plan is compiled with; others may compute other bytes."""
    return {
        "shardmap": __version__,
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "backend": jax.default_backend(),
    }


def fingerprint(cut_program: CutProgram) -> str:
    """A digest of the shards of a plan."""
    closed, stages = cut_program.closed, cut_program.stages
    texts = []
    for equation in equations(closed):
        if equation.primitive is PURE_CALLBACK:
            texts.append(text_of(callback_of(equation.params)))
            if texts[-1] is None:
                raise ValueError(
                    f"checkpoint: {equation.primitive} at {source_of(equation)} calls "
                    "the host, and nothing tells whether that code is the same when "
                    "the run goes on: call a function that closes over nothing by "
                    "per_piece, or compute what it returns before, and pass it as an "
                    "argument"
                )
    with cut_program.settings():
        lowered = jax.jit(jex_core.jaxpr_as_fun(closed)).lower(*closed.in_avals)
    told = [
        (cut_program.x64, cut_program.partitionable, str(cut_program.out_tree), texts),
        list(map(str, cut_program.analysis.rules.values())),
        [[loop.pieces for loop in stage.loops] for stage in stages],
        [[(r.value.number, r.axes) for r in stage.results] for stage in stages],
    ]
    return _sum(lowered.as_text().encode(), repr(told).encode())


def fingerprints(leaves: Sequence[Any]) -> list[str]:
    """The digest of each argument."""
    return list(map(_of_argument, leaves))


def _of_argument(leaf: Any) -> str:
    """That of its type and bytes; if it is large, of some parts, and when written."""
    if isinstance(leaf, jax.Array) and is_key(leaf.aval):
        leaf = jax.random.key_data(leaf)
    array: Any = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    shape, dtype = tuple(map(int, array.shape)), np.dtype(array.dtype)
    lengths, places = shape, [0.0]
    if math.prod(shape) * dtype.itemsize > COMPARED:
        # Along the diagonal, so that they are from everywhere.
        longest = int(SAMPLE ** (1 / len(shape)))
        lengths = tuple(min(n, longest) for n in shape)
        places = np.linspace(0, 1, SAMPLES).tolist()
    contents = [repr((shape, dtype.str, dtype.name)).encode()]
    for place in places:
        starts = [int(place * (n - m)) for n, m in zip(shape, lengths, strict=True)]
        index = tuple(slice(k, k + m) for k, m in zip(starts, lengths, strict=True))
        contents.append(np.asarray(array[index] if shape else array).tobytes())
    while isinstance(leaf, np.ndarray) and not isinstance(leaf, np.memmap):
        leaf = leaf.base
    if isinstance(leaf, np.memmap) and leaf.filename is not None:
        status = os.stat(leaf.filename)
        contents.append(f"{status.st_size} bytes of {status.st_mtime_ns}".encode())
    return _sum(*contents)


def _sum(*contents: bytes) -> str:
    return hashlib.sha256(b" ".join(contents)).hexdigest()
