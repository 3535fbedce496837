"""A folder of files that appear whole or not at all: on a disk or in an object store.

Several processes may write to it. On a disk each writes a draft of its own, and renames
it. An object store has no rename, but an object is there when all of it has arrived.
"""

import contextlib
import importlib
import os
import pathlib
import secrets
from typing import Any

from shardmap.units import shown

DRAFT = ".part"


def path_of(what: str, value: Any) -> str:
    """The path of a folder that was given, or its address in an object store."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"{what} must be the path of a folder, got {shown(value)} of type "
            f"{type(value).__name__}"
        )
    if not os.fspath(value):
        raise ValueError(f"{what} must be the path of a folder, got {shown(value)}")
    return os.fspath(value)


def make_folder(what: str, path: pathlib.Path) -> None:
    """Makes a folder on a disk."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(each for each in (path, *path.parents) if each.exists())
        raise ValueError(
            f"{what} must be a folder, but {file} is a file: give another path"
        ) from None


def folder_of(what: str, value: Any) -> "Folder":
    """The folder at a path, or at an address, which is made if it is not there."""
    path = path_of(what, value)
    if "://" in path:
        return ObjectStore(path)
    make_folder(what, pathlib.Path(path))
    return Folder(path)


class Folder:
    """A folder on a disk."""

    def __init__(self, path: str) -> None:
        self.path = path

    def names(self) -> list[str]:
        """The names of its files."""
        return [name for name in os.listdir(self.path) if not name.endswith(DRAFT)]

    def has(self, name: str) -> bool:
        return os.path.exists(self._at(name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """The bytes of a file from ``start`` to ``stop``, None if there is no file."""
        try:
            with open(self._at(name), "rb") as file:
                file.seek(start)
                return file.read(-1 if stop is None else stop - start)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes, new: bool = False) -> None:
        """Makes a file at once; leaves another's if ``new`` and the folder can tell."""
        try:
            self._write(name, content, new)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the checkpoint folder cannot take {len(content):,} bytes of {name} "
                f"({error.strerror or error}); the shards that are done stay there, "
                "and a run with the same folder goes on from them",
                self.path,
            ) from error

    def _write(self, name: str, content: bytes, new: bool) -> None:
        draft = self._at(f"{name}.{secrets.token_hex(8)}{DRAFT}")
        try:
            with open(draft, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._at(name))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(draft)

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)


class ObjectStore(Folder):
    """A folder in an object store, such as ``s3://bucket/job``, by fsspec."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            core: Any = importlib.import_module("fsspec.core")
        except ImportError as error:
            raise ImportError(
                f"checkpoint={path!r} needs fsspec, and its package for this kind of "
                "store: pip install fsspec s3fs"
            ) from error
        # A list of names that is kept would not have those of other processes.
        self._store, self._root = core.url_to_fs(path, use_listings_cache=False)

    def names(self) -> list[str]:
        paths = self._store.find(self._root)
        return [path.removeprefix(f"{self._root}/") for path in paths]

    def has(self, name: str) -> bool:
        return bool(self._store.exists(self._at(name)))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        try:
            return bytes(
                self._store.cat_file(self._at(name), start=start or None, end=stop)
            )
        except FileNotFoundError:
            return None

    def _write(self, name: str, content: bytes, new: bool) -> None:
        mode = "create" if new else "overwrite"
        with contextlib.suppress(FileExistsError):
            self._store.pipe_file(self._at(name), content, mode=mode)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"
