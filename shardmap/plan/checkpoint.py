"""A folder with the results of shards that are done.

Each shard has a file, which appears whole or not at all. A run that finds the file of a
shard takes its result from there, and gives the same bytes as if it had not stopped.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmap.plan.keys import data_aval

if TYPE_CHECKING:
    from shardmap.plan.plan import ShardPlan
    from shardmap.plan.shards import Shard

MANIFEST = "plan.json"


def fingerprint(plan: "ShardPlan") -> str:
    """The same for plans that have the same shards, and hardly for others."""
    stages = [
        [[loop.pieces for loop in stage.loops], [r.axes for r in stage.results]]
        for stage in plan.stages
    ]
    avals = [str(value.aval) for value in plan.program.inputs]
    text = json.dumps([plan.text, stages, avals])
    digest = hashlib.sha256(text.encode())
    for constant in plan.program.constants.values():
        if hasattr(constant, "tobytes"):
            digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()


class Checkpoint:
    """The folder of one plan.

    Raises:
      ValueError: it belongs to another plan, or is no checkpoint at all.
    """

    def __init__(self, folder: Any, plan: "ShardPlan") -> None:
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest = self._folder / MANIFEST
        mine = fingerprint(plan)
        if manifest.exists():
            theirs = json.loads(manifest.read_text()).get("plan")
            if theirs != mine:
                raise ValueError(
                    f"the checkpoint folder {self._folder} belongs to another plan: "
                    "give an empty folder, or the function, shapes and cuts that it "
                    "was made with"
                )
        elif any(self._folder.iterdir()):
            raise ValueError(
                f"the folder {self._folder} is not empty and no checkpoint of a plan"
            )
        else:
            self._write(manifest, json.dumps({"plan": mine}).encode())

    def _path(self, shard: "Shard") -> pathlib.Path:
        return self._folder / f"{shard.stage}-{shard.number}.bin"

    def _write(self, path: pathlib.Path, content: bytes) -> None:
        draft = path.with_suffix(".part")
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    def load(self, shard: "Shard") -> list[np.ndarray] | None:
        """The result of a shard that is done, None of another."""
        try:
            content = self._path(shard).read_bytes()
        except FileNotFoundError:
            return None
        found, position = [], 0
        for box, _, value in shard.writes():
            aval = data_aval(value.aval)
            shape = tuple(stop - start for start, stop in box)
            shape += aval.shape[len(shape) :]
            dtype = np.dtype(aval.dtype)
            size = int(np.prod(shape)) * dtype.itemsize
            part = content[position : position + size]
            if len(part) != size:
                return None
            found.append(np.frombuffer(part, dtype).reshape(shape))
            position += size
        return found if position == len(content) else None

    def save(self, shard: "Shard", result: Sequence[np.ndarray]) -> None:
        """Keeps a result; it is on disk when this returns."""
        content = b"".join(np.ascontiguousarray(part).tobytes() for part in result)
        self._write(self._path(shard), content)
