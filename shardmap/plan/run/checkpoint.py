"""A folder with the results of shards that are done.

Each shard has a file, which appears whole or not at all, and which tells whether it is
whole and that shard's. A run that finds the file of a shard takes its result from
there, and gives the same bytes as if it had not stopped. Several runs of one plan may
share a folder: drafts have names of their own, and whoever comes last writes the same.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardmap.plan.engine.keys import data_aval
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.fingerprint import fingerprint, fingerprints
from shardmap.plan.run.shards import Shard

MANIFEST = "plan.json"
DRAFT = ".part"
FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class Checkpoint:
    """The folder of one plan.

    Args:
      folder: where it is, or will be.
      cut_program: the plan, or what is behind it.
      leaves: its arguments, of which those up to 1 MiB must be the same each time.

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
        self._folder = pathlib.Path(folder)
        self._plan = fingerprint(cut_program)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            path = self._folder
            file = next(each for each in (path, *path.parents) if each.exists())
            raise ValueError(
                f"checkpoint must be a folder, but {file} is a file: give another path"
            ) from None
        arguments = fingerprints(leaves)
        theirs = self._manifest()
        if theirs is None:
            if any(path.suffix != DRAFT for path in self._folder.iterdir()):
                raise ValueError(
                    f"the folder {self._folder} is not empty and no checkpoint of a "
                    "plan: give an empty folder"
                )
            mine = {"plan": self._plan, "arguments": arguments}
            self._write(MANIFEST, json.dumps(mine).encode(), anew=True)
            # Another run may have been faster.
            theirs = self._manifest() or mine
        if theirs["plan"] != self._plan:
            raise ValueError(
                f"the checkpoint folder {self._folder} belongs to another plan: "
                "give an empty folder, or the function, shapes and cuts that it "
                "was made with"
            )
        for name, now, before in zip(
            cut_program.names, arguments, theirs["arguments"], strict=True
        ):
            if now and before and now != before:
                raise ValueError(
                    f"the checkpoint folder {self._folder} was made with other "
                    f"values of {name}: give the same, or an empty folder"
                )

    def _manifest(self) -> dict[str, Any] | None:
        """What the folder says that it is for, None if it is new."""
        content = self._read(MANIFEST)
        if content is None:
            return None
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.keys() != {"plan", "arguments"}:
            raise ValueError(
                f"{self._folder / MANIFEST} is damaged, so that nothing says which "
                "plan the folder is for: give an empty folder"
            )
        return found

    def _read(self, name: str) -> bytes | None:
        """The content of a file, None of what is no file of ours."""
        path = self._folder / name
        try:
            with open(os.open(path, os.O_RDONLY | FLAGS), "rb") as file:
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return file.read()
        except FileNotFoundError:
            return None
        except OSError:
            if not (path.is_symlink() or path.is_dir()):
                raise
        raise ValueError(
            f"{path} is no plain file, and links are not followed: give an empty folder"
        )

    def _write(self, name: str, content: bytes, anew: bool = False) -> None:
        """Makes a file that is there in full, or not at all.

        Args:
          name: its name.
          content: what is in it.
          anew: whether a file that is there stays.
        """
        path = self._folder / name
        draft = self._folder / f"{name}.{secrets.token_hex(8)}{DRAFT}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS
            with open(os.open(draft, flags, 0o666), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # Both appear at once; linked, a file never replaces another one.
            if anew and hasattr(os, "link"):
                with contextlib.suppress(FileExistsError):
                    os.link(draft, path)
            else:
                draft.replace(path)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the checkpoint folder cannot take {len(content):,} bytes of {name} "
                f"({error.strerror}); the shards that are done stay there, and a run "
                "with the same folder goes on from them",
                str(self._folder),
            ) from error
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _sum(self, shard: Shard, content: bytes) -> bytes:
        """Tells a whole file of this shard and plan from any other."""
        whose = f"{self._plan} {_name(shard)} ".encode()
        return hashlib.sha256(whose + content).digest()

    def load(self, shard: Shard) -> list[np.ndarray] | None:
        """The result of a shard that is done, None of another."""
        content = self._read(_name(shard))
        if content is None:
            return None
        length = hashlib.sha256().digest_size
        told, content = content[:length], content[length:]
        if self._sum(shard, content) != told:
            return None
        found, position = [], 0
        for box, _, value in shard.writes():
            aval = data_aval(value.aval)
            shape = tuple(stop - start for start, stop in box)
            shape += aval.shape[len(shape) :]
            dtype = np.dtype(aval.dtype)
            size = int(np.prod(shape)) * dtype.itemsize
            part = content[position : position + size]
            found.append(np.frombuffer(part, dtype).reshape(shape))
            position += size
        return found

    def save(self, shard: Shard, result: Sequence[np.ndarray]) -> None:
        """Keeps a result; it is on disk when this returns."""
        content = b"".join(np.ascontiguousarray(part).tobytes() for part in result)
        self._write(_name(shard), self._sum(shard, content) + content)


def _name(shard: Shard) -> str:
    return f"{shard.stage}-{shard.number}.bin"
