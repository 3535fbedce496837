"""Files that appear whole or not at all, and results of shards in such files.

Checksums in a file say whether it is complete and which shard it is of. Several
processes may write to one folder: each writes a draft of its own, and renames it.
"""

import contextlib
import hashlib
import itertools
import math
import os
import pathlib
import stat
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from shardmap.plan.run.disk.owned import is_left, own_name

DRAFT = ".part"
FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)

SUM = hashlib.sha256().digest_size
"""The length of a checksum. A file has those of its parts first."""

Part: TypeAlias = tuple[Sequence[int], Any]
"""The shape and dtype of an array in a file of results."""


def path_of(what: str, value: Any) -> pathlib.Path:
    """The path of a folder that was given.

    Raises:
      TypeError: it is no path.
      ValueError: it is empty.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"{what} must be the path of a folder, got {value!r} of type "
            f"{type(value).__name__}"
        )
    if not os.fspath(value):
        raise ValueError(f"{what} must be the path of a folder, got {value!r}")
    return pathlib.Path(value)


class Folder:
    """A folder of files that are whole.

    Args:
      path: where it is.
      what: what messages call it.
    """

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        self.path, self.what = path_of(what, path), what

    def make(self) -> None:
        """Makes the folder.

        Raises:
          ValueError: there is a file of its name.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            paths = (self.path, *self.path.parents)
            file = next(each for each in paths if each.exists())
            raise ValueError(
                f"{self.what} must be a folder, but {file} is a file: give another path"
            ) from None

    def clear(self) -> None:
        """Removes the drafts of processes that were killed."""
        for path in self.path.glob(f"*{DRAFT}"):
            if is_left(path.name):
                path.unlink(missing_ok=True)

    def is_empty(self) -> bool:
        """Whether nothing but drafts is in it."""
        return all(path.suffix == DRAFT for path in self.path.iterdir())

    def read(self, name: str, *spans: tuple[int, int]) -> bytes | None:
        """The content of a file, None if there is none.

        Args:
          name: its name.
          *spans: (offset, length) of what is read of it; default: all.
        """
        path = self.path / name
        try:
            with open(os.open(path, os.O_RDONLY | FLAGS), "rb") as file:
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    found = []
                    for offset, length in spans or [(0, -1)]:
                        file.seek(offset)
                        found.append(file.read(length))
                    return b"".join(found)
        except FileNotFoundError:
            return None
        except OSError:
            if not (path.is_symlink() or path.is_dir()):
                raise
        raise ValueError(
            f"{path} is no plain file, and links are not followed: give an empty folder"
        )

    def write(self, name: str, content: bytes, anew: bool = False) -> bool:
        """Makes a file that is there in full, or not at all.

        Args:
          name: its name.
          content: what is in it.
          anew: whether a file that is there stays.

        Returns:
          Whether the file is this one.
        """
        path = self.path / name
        draft = self.path / f"{name}.{own_name()}{DRAFT}"
        try:
            _write(draft, content)
            if not anew:
                draft.replace(path)
            elif not _link(draft, path):
                _write(path, content)
        except FileExistsError:
            return False
        except OSError as error:
            raise OSError(
                error.errno,
                f"the {self.what} folder cannot take {len(content):,} bytes of {name} "
                f"({error.strerror}); the shards that are done stay there, and a run "
                "with the same folder goes on from them",
                str(self.path),
            ) from error
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        return True


def _write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file that is not there yet, onto the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS
    with open(os.open(path, flags, 0o666), "wb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink()
            raise


def _link(draft: pathlib.Path, path: pathlib.Path) -> bool:
    """Gives a file a second name, if its file system can.

    FAT cannot, nor can SMB and some of FUSE.

    Raises:
      FileExistsError: the name is taken.
    """
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except (OSError, AttributeError):
        return False
    return True


class Results:
    """Results of the shards of one plan.

    Args:
      folder: where they are.
      plan: the fingerprint of the plan.
    """

    def __init__(self, folder: Folder, plan: str) -> None:
        self._folder, self._plan = folder, plan

    def _sum(
        self, name: str, place: int, parts: Sequence[Part], content: bytes
    ) -> bytes:
        """The checksum of one part of one file of this plan."""
        shape, dtype = parts[place]
        told = f"{place} of {len(parts)} {list(shape)} {np.dtype(dtype)}"
        head = f"{self._plan} {name} {told} "
        return hashlib.sha256(head.encode() + content).digest()

    def load(
        self, name: str, parts: Sequence[Part], place: int | None = None
    ) -> list[np.ndarray] | None:
        """The parts of a result; None if it is not done, or is damaged.

        Args:
          name: the file.
          parts: the shapes and dtypes of all its parts.
          place: which one to read; default: all.
        """
        lengths = [
            math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in parts
        ]
        offsets = [*itertools.accumulate(lengths, initial=SUM * len(parts))]
        found = []
        for k in range(len(parts)) if place is None else [place]:
            spans = (SUM * k, SUM), (offsets[k], lengths[k])
            content = self._folder.read(name, *spans)
            if content is None:
                return None
            if self._sum(name, k, parts, content[SUM:]) != content[:SUM]:
                return None
            shape, dtype = parts[k]
            found.append(np.frombuffer(content[SUM:], dtype).reshape(shape))
        return found

    def save(self, name: str, result: Sequence[np.ndarray]) -> None:
        """Keeps a result; it is on disk when this returns."""
        parts = [(part.shape, part.dtype) for part in result]
        contents = [np.ascontiguousarray(part).tobytes() for part in result]
        sums = [self._sum(name, k, parts, each) for k, each in enumerate(contents)]
        self._folder.write(name, b"".join([*sums, *contents]))


def result_name(stage: int, number: int) -> str:
    return f"{stage}-{number}.bin"
