"""A folder with the results of shards that are done."""

import json
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardmap.plan.engine.keys import data_aval
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.disk.fingerprint import fingerprint, fingerprints
from shardmap.plan.run.disk.results import Folder, Results, result_name
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
        theirs = self._manifest()
        if theirs is None:
            if not self.folder.is_empty():
                raise ValueError(
                    f"the folder {self.folder.path} is not empty and no checkpoint of "
                    "a plan: give an empty folder"
                )
            mine = {"plan": self.plan, "arguments": arguments}
            self.folder.write(MANIFEST, json.dumps(mine).encode(), anew=True)
            # Another run may have been faster.
            theirs = self._manifest() or mine
        if theirs["plan"] != self.plan:
            raise ValueError(
                f"the checkpoint folder {self.folder.path} belongs to another plan: "
                "give an empty folder, or the function, shapes, cuts and chunks of out "
                "that it was made with"
            )
        if len(theirs["arguments"]) != len(arguments):
            raise self._damaged()
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
            found = json.loads(content)
        except ValueError:
            found = None
        if (
            not isinstance(found, dict)
            or found.keys() != {"plan", "arguments"}
            or not isinstance(found["arguments"], list)
        ):
            raise self._damaged()
        return found

    def _damaged(self) -> ValueError:
        return ValueError(
            f"{self.folder.path / MANIFEST} is damaged, so that nothing says which "
            "plan the folder is for: give an empty folder"
        )

    def load(self, shard: Shard) -> list[np.ndarray] | None:
        """The result of a shard that is done, None of another."""
        parts = []
        for box, _, value in shard.writes():
            aval = data_aval(value.aval)
            shape = tuple(stop - start for start, stop in box)
            parts.append((shape + aval.shape[len(shape) :], aval.dtype))
        return self.results.load(result_name(shard.stage, shard.number), parts)

    def save(self, shard: Shard, result: Sequence[np.ndarray]) -> None:
        """Keeps a result; it is on disk when this returns."""
        self.results.save(result_name(shard.stage, shard.number), result)
