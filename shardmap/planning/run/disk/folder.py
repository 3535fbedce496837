"""A folder of files that appear whole or not at all.

Several processes may write to it: each writes a draft of its own, and renames it.
"""

import contextlib
import functools
import os
import pathlib
import re
import secrets
import socket
import stat
from typing import Any

from shardmap.units import shown

DRAFT = ".part"
# Without O_NONBLOCK, opening a pipe waits for a process that writes to it.
FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)


def path_of(what: str, value: Any) -> pathlib.Path:
    """The path of a folder that was given.

    Raises:
      TypeError: it is no path.
      ValueError: it is empty, or no path of a file system.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"{what} must be the path of a folder, got {shown(value)} of type "
            f"{type(value).__name__}"
        )
    if not os.fspath(value):
        raise ValueError(f"{what} must be the path of a folder, got {shown(value)}")
    if "://" in os.fspath(value):
        raise ValueError(
            f"{what} must be a folder of a file system, got {shown(value)}: object "
            "stores hold arguments and out, as zarr arrays"
        )
    return pathlib.Path(value)


class Folder:
    """A folder of files that are whole.

    Args:
      path: where it is.
      what: its name in messages.
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
          *spans: (offset, length) of each part to read; default: all.
        """
        path = self.path / name
        try:
            with open(os.open(path, FLAGS), "rb") as file:
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    parts = []
                    for offset, length in spans or [(0, -1)]:
                        file.seek(offset)
                        parts.append(file.read(length))
                    return b"".join(parts)
        except FileNotFoundError:
            return None
        except OSError:
            if stat.S_ISREG(path.lstat().st_mode):
                raise
        raise ValueError(
            f"{path} is no plain file, and links are not followed: give an empty folder"
        )

    def write(self, name: str, content: bytes) -> None:
        """Makes a file, or replaces it, at once."""
        path = self.path / name
        draft = self.path / f"{name}.{own_name()}{DRAFT}"
        try:
            with open(draft, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
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


def own_name() -> str:
    """A name for a temporary file, with the machine and the process that make it."""
    return f"{_machine()}.{os.getpid()}.{secrets.token_hex(8)}"


def is_left(name: str) -> bool:
    """Whether the process that made a name with `own_name` in it has ended.

    Returns False for a name from another machine, as nothing is known of it.
    """
    owner = _owner(name)
    return owner is not None and not _is_alive(owner)


def is_own(name: str) -> bool:
    """Whether this process made a name with `own_name` in it."""
    return _owner(name) == os.getpid()


def _owner(name: str) -> int | None:
    """The process of this machine that made a name; None for another machine's."""
    owner = re.search(rf"{re.escape(_machine())}\.(\d+)\.[0-9a-f]{{16}}", name)
    return int(owner[1]) if owner else None


def _is_alive(process: int) -> bool:
    """Whether a process of this machine runs. On Windows the answer is always yes."""
    if os.name == "nt":  # Where signal 0 is not a question but Ctrl-C.
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@functools.cache
def _machine() -> str:
    """This machine, or this container if it numbers its processes by itself.

    Several machines may have one host name. Those that share a folder differ in this.
    """
    parts = [socket.gethostname()]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError):
            if identity := pathlib.Path(path).read_text().strip():
                parts.append(identity.replace("-", "")[:12])
                break
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return "-".join(parts)
