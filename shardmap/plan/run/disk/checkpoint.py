"""A folder with the results of shards that are done."""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.disk.fingerprint import fingerprint, fingerprints
from shardmap.plan.run.disk.results import Folder, Part, Results, result_name
from shardmap.plan.run.folding import stored_as
from shardmap.plan.run.shards import Shard

MANIFEST = "plan.json"

MOMENT = 1.0
"""How many seconds a manifest may be empty, while another run writes it.

It is never seen so where file systems have hard links.
"""


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
        self.folder = Folder(folder, "checkpoint")
        self.plan = fingerprint(cut_program)
        self.results = Results(self.folder, self.plan)
        self.folder.make()
        self.folder.clear()
        arguments = fingerprints(leaves)
        is_new = self.folder.is_empty()
        theirs = self._manifest()
        if theirs is None:
            if not is_new:
                raise ValueError(
                    f"the folder {self.folder.path} is not empty and no checkpoint of "
                    "a plan: give an empty folder"
                )
            mine = {"plan": self.plan, "arguments": arguments}
            content = json.dumps({**mine, "sha256": _sum(mine)}).encode()
            self.folder.write(MANIFEST, content, anew=True)
            # Another run may have been faster.
            theirs = self._manifest() or mine
        if theirs["plan"] != self.plan:
            raise ValueError(
                f"the checkpoint folder {self.folder.path} belongs to another plan: "
                "give an empty folder, or the function, shapes, cuts and chunks of out "
                "that it was made with"
            )
        for name, now, before in zip(
            cut_program.names, arguments, theirs["arguments"], strict=True
        ):
            if now and before and now != before:
                raise ValueError(
                    f"the checkpoint folder {self.folder.path} was made with other "
                    f"values of {name}: give the same, or an empty folder"
                )

    def _manifest(self) -> dict[str, Any] | None:
        """What the folder says that it is for, None if it is new."""
        end = time.monotonic() + MOMENT
        while (content := self.folder.read(MANIFEST)) == b"" and time.monotonic() < end:
            time.sleep(0.01)
        if content is None:
            return None
        try:
            found = dict(json.loads(content))
            told = found.pop("sha256")
        except (ValueError, TypeError, KeyError):
            raise self._damaged() from None
        if told != _sum(found):
            raise self._damaged()
        return found

    def _damaged(self) -> ValueError:
        return ValueError(
            f"{self.folder.path / MANIFEST} is damaged, so that nothing says which "
            "plan the folder is for: give an empty folder"
        )

    def load(self, shard: Shard) -> list[np.ndarray] | None:
        """The result of a shard that is done, None of another."""
        return self.results.load(_name(shard), _parts(shard))

    def load_one(self, shard: Shard, place: int) -> np.ndarray | None:
        """As `load`, one of the arrays in a result."""
        found = self.results.load(_name(shard), _parts(shard), place)
        return None if found is None else found[0]

    def save(self, shard: Shard, result: Sequence[np.ndarray]) -> None:
        """Keeps a result; it is on disk when this returns."""
        self.results.save(_name(shard), result)


def _name(shard: Shard) -> str:
    return result_name(shard.stage, shard.number)


def _parts(shard: Shard) -> list[Part]:
    return [stored_as(value, box) for box, _, value in shard.writes()]


def _sum(manifest: Mapping[str, Any]) -> str:
    content = f"{MANIFEST} {json.dumps(manifest, sort_keys=True)}"
    return hashlib.sha256(content.encode()).hexdigest()
