"""A plan that was saved: what its shards read, run and write, checked before use."""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export

from shardmap.arrays.sources.registry import Away, kind_named
from shardmap.plan.away.tasks import is_whole
from shardmap.plan.engine.slices import shape_of, slices
from shardmap.plan.run.disk.results import Folder, Results, result_name
from shardmap.plan.run.remote import run_exported

FORMAT = 3
SUM = np.dtype([("sha256", f"V{hashlib.sha256().digest_size}")])
"""The dtype of a checksum, which no result has."""


class JobError(ValueError):
    """A folder that is no job, is damaged, or cannot be run here."""


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from its source"


def digest(path: pathlib.Path) -> str:
    """The checksum of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(body: Mapping[str, Any]) -> bytes:
    """A manifest with its checksum."""
    text = json.dumps(body, sort_keys=True)
    told = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"sha256": told, "body": body}).encode()


class Row(NamedTuple):
    """What one shard does: a line of a table.

    Attributes:
      number: which of its stage.
      function: the number of its function.
      reads: the numbers of values, and the boxes of them.
      starts: where in the whole they begin.
      writes: for each result the number of its value, the box, how it is combined, and
        if it is a partial result, which of those of the box.
    """

    number: int
    function: int
    reads: list[tuple[int, Any]]
    starts: list[int]
    writes: list[tuple[int, Any, str, int | None]]


class Job:
    """A saved plan.

    Args:
      path: the folder.

    Raises:
      JobError: it is no job, is damaged, or cannot be run by what is installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self.folder = Folder(path, "job")
        self.body = self._manifest()
        self.results = Results(self.folder, self.body["plan"])
        self.stages: list[dict[str, Any]] = self.body["stages"]
        self.tasks: int = self.body["tasks"]
        self._checked: set[str] = set()
        self.function = functools.lru_cache(maxsize=256)(self._function)

    def _manifest(self) -> dict[str, Any]:
        content = self.folder.read("job.json") if self.path.is_dir() else None
        if content is None:
            raise JobError(
                f"{self.path} is no job: made.save({str(self.path)!r}) makes one"
            )
        try:
            found = json.loads(content)
            body = found["body"]
            whole = json.loads(sealed(body))["sha256"] == found["sha256"]
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise JobError(f"{self.path / 'job.json'} is damaged: save the plan again")
        return dict(body)

    def refuse_other_versions(self) -> None:
        """Says so if this JAX cannot run the functions.

        Raises:
          JobError: it cannot.
        """
        wrote = ", ".join(f"{k} {v}" for k, v in self.body["versions"].items())
        if self.body["format"] != FORMAT:
            raise JobError(
                f"{self.path} was written by {wrote} in format {self.body['format']}, "
                f"this shardmap reads {FORMAT}: run it by the one that wrote it"
            )
        least = export.minimum_supported_calling_convention_version
        most = export.maximum_supported_calling_convention_version
        convention = self.body["calling_convention"]
        if not least <= convention <= most:
            raise JobError(
                f"{self.path} was written by {wrote}, whose functions have calling "
                f"convention {convention}; JAX {version('jax')} runs {least} to "
                f"{most}: run it by a JAX nearer to the one that wrote it"
            )
        if jax.default_backend() not in self.body["platforms"]:
            raise JobError(
                f"{self.path} was written for {self.body['platforms']}, but this "
                f"process has {jax.default_backend()}: set JAX_PLATFORMS, or save the "
                "plan where it is to run"
            )

    def intact(self, name: str) -> pathlib.Path:
        """A file of the folder that is as it was written.

        Raises:
          JobError: it is not.
        """
        path = self.path / name
        if name not in self._checked:
            told = self.body["sums"].get(name)
            if path.is_symlink() or not path.is_file() or digest(path) != told:
                raise JobError(
                    f"{path} is missing or damaged: save the plan again, in an empty "
                    "folder"
                )
            self._checked.add(name)
        return path

    def units(self, stage: int) -> int:
        return len(self.stages[stage]["bounds"]) - 1

    def rows(self, stage: int, unit: int) -> Iterator[Row]:
        with open(self.intact(f"tables/{stage}-{unit}.jsonl")) as file:
            for line in file:
                yield Row(**json.loads(line))

    def _function(self, number: int) -> bytes:
        return self.intact(f"functions/{number}.bin").read_bytes()

    def value(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.body["values"][str(number)]
        return found

    def part(self, number: int, box: Any) -> tuple[tuple[int, ...], np.dtype]:
        """The shape and dtype of a box of a value."""
        about = self.value(number)
        shape = shape_of(box) + tuple(about["shape"][len(box) :])
        return shape, np.dtype(about["dtype"])

    def open(self, number: int, role: str, writable: bool = False) -> Any:
        """A value, to be read or written.

        Args:
          number: the value's.
          role: "source" or "sink".
          writable: whether it is to be written.
        """
        about = self.value(number)
        where = about[role]
        if "file" not in where:
            return self._away(where).open(writable)
        name = where["file"]
        if name in self.body["sums"]:
            self.intact(name)
        mode: Any = "r+" if writable else "r"
        dtype = np.dtype(about["dtype"])
        if 0 in about["shape"] or not about["shape"]:
            # Those cannot be mapped, or not be written by parts.
            return np.load(self.path / name).view(dtype)
        return np.load(self.path / name, mmap_mode=mode).view(dtype)

    def _away(self, where: Mapping[str, Any]) -> Away:
        kind = kind_named(where["kind"])
        if kind is None:
            raise JobError(
                f"nothing is registered for {where['kind']}: import the module that "
                "registers it, python -m shardmap work FOLDER --import MODULE"
            )
        grain = where["grain"]
        return Away(
            where["kind"],
            where["about"],
            kind.reopen,
            None if grain is None else tuple(grain),
        )

    def goes(self, write: tuple[int, Any, str, int | None]) -> bool:
        """Whether a shard writes a result itself, rather than keep it for later."""
        number, box, combiner, _ = write
        about = self.value(number)
        sink = about["sink"]
        if combiner != "insert":
            return False
        if "file" in sink:
            return 0 not in about["shape"] and bool(about["shape"])
        if about["key"] or sink["grain"] is None:
            return False
        return is_whole(box, sink["grain"], about["shape"])

    def load(self, stage: int, row: Row) -> list[np.ndarray] | None:
        """What a shard kept, or the checksum of what it wrote, for each result."""
        parts = [
            ((1,), SUM) if self.goes(write) else self.part(*write[:2])
            for write in row.writes
        ]
        return self.results.load(result_name(stage, row.number), parts)

    def run(self, stage: int, row: Row) -> list[np.ndarray]:
        """Runs a shard, and gives what `load` gives of it from then on."""
        args = [self._read(number, box) for number, box in row.reads]
        wide = any(abs(start) >= 2**31 for start in row.starts)
        args.append(np.asarray(row.starts, np.int64 if wide else np.int32))
        kept = []
        made = run_exported(self.function(row.function), args)
        for write, part in zip(row.writes, made, strict=True):
            if self.goes(write):
                self.put(write[0], write[1], part)
                part = part_sum(part)
            kept.append(part)
        self.results.save(result_name(stage, row.number), kept)
        return kept

    def put(self, number: int, box: Any, part: np.ndarray) -> None:
        array = self.open(number, "sink", writable=True)
        index: Any = slices(box)
        array[index] = part
        if hasattr(array, "flush"):
            array.flush()

    def _read(self, number: int, box: Any) -> np.ndarray:
        shape, dtype = self.part(number, box)
        index: Any = slices(box)
        found = np.asarray(self.open(number, "source")[index], dtype)
        if found.shape != shape:
            raise JobError(
                f"asked for {index} of value {number}, which has the shape {shape}, "
                f"got {found.shape}"
            )
        return found

    def is_as_written(self, row: Row, kept: list[np.ndarray]) -> bool:
        """Whether what a shard wrote is still there."""
        for write, told in zip(row.writes, kept, strict=True):
            if self.goes(write):
                shape, dtype = self.part(*write[:2])
                index: Any = slices(write[1])
                found = np.asarray(self.open(write[0], "sink")[index], dtype)
                if found.shape != shape or (part_sum(found) != told).any():
                    return False
        return True


def part_sum(part: np.ndarray) -> np.ndarray:
    content = np.ascontiguousarray(part).tobytes()
    return np.frombuffer(hashlib.sha256(content).digest(), SUM)
