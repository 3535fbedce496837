"""A folder with the results of shards that are done.

Each shard has a file, which appears whole or not at all. A run that finds the file of a
shard takes its result from there, and gives the same bytes as if it had not stopped.
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardmap.plan.engine.keys import data_aval, is_key
from shardmap.plan.engine.nodes import Node, Scalar
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.shards import Shard

MANIFEST = "plan.json"
COMPARED = 2**20
"""Up to how many bytes the values of an argument are compared."""


def fingerprint(cut_program: CutProgram) -> str:
    """The same for plans that have the same shards, and hardly for others."""
    stages = [
        [[loop.pieces for loop in stage.loops], [r.axes for r in stage.results]]
        for stage in cut_program.stages
    ]
    avals = [str(value.aval) for value in cut_program.program.inputs]
    nodes = [_text(node) for node in cut_program.program.nodes]
    digest = hashlib.sha256(json.dumps([nodes, stages, avals]).encode())
    for constant in cut_program.program.constants.values():
        if hasattr(constant, "tobytes"):
            digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()


def fingerprints(leaves: Sequence[Any]) -> list[str | None]:
    """One for each argument that is small enough to be compared."""
    found: list[str | None] = []
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and is_key(leaf.aval):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, bool | int | float | complex):
            leaf = np.asarray(leaf)
        small = isinstance(leaf, np.ndarray | np.generic | jax.Array)
        if not small or leaf.size * leaf.dtype.itemsize > COMPARED:
            found.append(None)
            continue
        digest = hashlib.sha256(np.ascontiguousarray(leaf).tobytes())
        found.append(digest.hexdigest())
    return found


def _text(node: Node) -> str:
    """An equation without what differs from process to process."""
    operands = [
        str(v.value) if isinstance(v, Scalar) else str(v.number) for v in node.ins
    ]
    # Functions among the parameters print their addresses, which differ per process.
    text = f"{node.name} {operands} {node.params}"
    return re.sub(r"0x[0-9a-f]+", "", text)


class Checkpoint:
    """The folder of one plan.

    Args:
      folder: where it is, or will be.
      cut_program: the plan, or what is behind it.
      leaves: its arguments, of which those up to 1 MiB must be the same each time.

    Raises:
      ValueError: it belongs to another plan or other arguments, or is no checkpoint.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        cut_program: CutProgram,
        leaves: Sequence[Any],
    ) -> None:
        self._folder = pathlib.Path(folder)
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(
                f"checkpoint= takes a folder, and {self._folder} is a file: give "
                "another name"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest = self._folder / MANIFEST
        mine = {"plan": fingerprint(cut_program), "arguments": fingerprints(leaves)}
        if manifest.exists():
            theirs = json.loads(manifest.read_text())
            if theirs.get("plan") != mine["plan"]:
                raise ValueError(
                    f"the checkpoint folder {self._folder} belongs to another plan: "
                    "give an empty folder, or the function, shapes and cuts that it "
                    "was made with"
                )
            for name, now, before in zip(
                cut_program.names, mine["arguments"], theirs["arguments"], strict=True
            ):
                if now and before and now != before:
                    raise ValueError(
                        f"the checkpoint folder {self._folder} was made with other "
                        f"values of {name}: give the same, or an empty folder"
                    )
        elif any(self._folder.iterdir()):
            raise ValueError(
                f"the folder {self._folder} is not empty and no checkpoint of a plan"
            )
        else:
            self._write(manifest, json.dumps(mine).encode())

    def _path(self, shard: Shard) -> pathlib.Path:
        return self._folder / f"{shard.stage}-{shard.number}.bin"

    def _write(self, path: pathlib.Path, content: bytes) -> None:
        # Renaming replaces a file at once: it is there in full, or not at all.
        draft = path.with_suffix(".part")
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    def load(self, shard: Shard) -> list[np.ndarray] | None:
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

    def save(self, shard: Shard, result: Sequence[np.ndarray]) -> None:
        """Keeps a result; it is on disk when this returns."""
        content = b"".join(np.ascontiguousarray(part).tobytes() for part in result)
        self._write(self._path(shard), content)
