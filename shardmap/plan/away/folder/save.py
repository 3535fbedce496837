"""Writing a plan as a folder.

The folder has

- ``job.json``: what wrote it, the values and where they lie, the stages, and the
  checksums of everything else;
- ``functions/``: the functions of the shards, as `jax.export` writes them;
- ``tables/``: for each task and stage, what its shards read, run and write;
- ``inputs/``: arguments that lay in memory;
- ``out/`` and ``kept/``: results, and what later stages need;
- ``plan.json`` and ``*.bin``: the checkpoint;
- ``*.nodes``: partial results that a task has put together;
- ``claims/`` and ``done/``: who works on what, and what is done.
"""

import json
import os
import pathlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import sliceable
from shardmap.arrays.sources.registry import Away, away
from shardmap.arrays.trees import result_names
from shardmap.plan.away.folder.job import FORMAT, digest, sealed, version
from shardmap.plan.away.folder.stored import stored, stored_dtype
from shardmap.plan.away.tasks import Functions, Travels
from shardmap.plan.engine.keys import data_aval, is_key
from shardmap.plan.engine.nodes import Scalar, Value
from shardmap.plan.engine.slices import Box
from shardmap.plan.engine.stages import Stage
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.disk.checkpoint import Checkpoint
from shardmap.plan.run.disk.results import Folder, path_of
from shardmap.plan.run.out import outputs
from shardmap.plan.run.shards import Shard
from shardmap.units import integer_of

MOST_TASKS = 1000
SECRET = re.compile("key|secret|token|password|credential", re.IGNORECASE)


def save(
    cut_program: CutProgram,
    folder: str | os.PathLike[str],
    args: tuple[PyTree, ...],
    out: PyTree,
    tasks: int | None,
) -> None:
    """See `ShardPlan.save`."""
    leaves = list(map(sliceable, cut_program.leaves(args)))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError("plan.save writes arrays, and cannot run inside jax.jit")
    most = max((stage.num_shards for stage in cut_program.stages), default=1)
    if tasks is None:
        tasks = min(most, MOST_TASKS)
    tasks = integer_of("tasks", tasks, least=1)
    _Saving(cut_program, path_of("folder", folder), leaves, out).all(tasks)


class _Saving:
    def __init__(
        self,
        cut_program: CutProgram,
        path: pathlib.Path,
        leaves: Sequence[Any],
        out: PyTree,
    ) -> None:
        self.cut_program, self.path, self.leaves = cut_program, path, leaves
        self.graph = cut_program.graph
        places = outputs(cut_program, out, leaves)
        given = {value: array for value, array in places if value}
        self.out = self._sinks(places, given)
        self.travels = Travels.of(cut_program, leaves, given)
        # Whoever makes the folder first has it; the results in it are the checkpoint's.
        if (path / "job.json").exists():
            raise ValueError(f"{path} is a job already: give an empty folder")
        self.plan = Checkpoint(path, cut_program, leaves).plan
        for name in ("functions", "tables", "inputs", "out", "kept", "claims", "done"):
            (path / name).mkdir(exist_ok=True)
        self.functions = Functions()
        self.blobs: dict[bytes, int] = {}
        self.sums: dict[str, str] = {}
        self.seen: Counter[tuple[Value, Box]] = Counter()

    def _sinks(
        self, places: Sequence[tuple[Value | None, Any]], given: Mapping[Value, Any]
    ) -> list[Away | None]:
        """Where the user wants the outputs.

        Raises:
          ValueError: a place that no other process can write to.
        """
        read = {source.place for leaf in self.leaves if (source := away(leaf))}
        names = result_names(self.cut_program.out_tree)
        found: list[Away | None] = []
        for name, (value, array) in zip(names, places, strict=True):
            sink = None if array is None else away(array)
            if array is not None and (sink is None or sink.grain is None):
                raise ValueError(
                    f"plan.save cannot give {name} to other processes: its out is a "
                    f"{type(array).__name__} that they cannot write to; give a "
                    "numpy.memmap or an array of zarr, or no out and take "
                    "out/*.npy of the folder"
                )
            if sink is not None and (sink.place in read or value is None):
                raise ValueError(
                    f"plan.save cannot write {name} over what is read, or twice: a "
                    "task that was stopped could not be tried again; give another out"
                )
            found.append(sink)
        return found

    def all(self, tasks: int) -> None:
        values: dict[str, dict[str, Any]] = {}
        for value, about in self._values():
            values.setdefault(str(value.number), {}).update(about)
        stages = []
        for stage in self.cut_program.stages:
            self.seen.clear()
            units = min(tasks, max(stage.num_shards, 1))
            bounds = [k * stage.num_shards // units for k in range(units + 1)]
            for unit in range(units):
                self._table(stage, unit, range(bounds[unit], bounds[unit + 1]))
            makes = {
                str(value.number): [combiner, self.cut_program.parts[value]]
                for value, _, _, combiner in stage.results
            }
            stages.append({"bounds": bounds, "makes": makes})
        names = result_names(self.cut_program.out_tree)
        made = [
            self._output(k, name, value)
            for k, (name, value) in enumerate(
                zip(names, self.graph.outputs, strict=True)
            )
        ]
        body = {
            "format": FORMAT,
            "versions": {name: version(name) for name in ("shardmap", "jax")},
            "plan": self.plan,
            "tasks": tasks,
            "platforms": [jax.default_backend()],
            "calling_convention": export.maximum_supported_calling_convention_version,
            "values": values,
            "outputs": made,
            "stages": stages,
            "sums": self.sums,
        }
        # What has no job.json is no job yet.
        Folder(self.path, "job").write("job.json", sealed(body))

    def _values(self) -> Iterator[tuple[Value, dict[str, Any]]]:
        """What shards read and write, and where it is."""
        for name, value, leaf in zip(
            self.cut_program.names, self.graph.inputs, self.leaves, strict=True
        ):
            source = self.travels.sources.get(value)
            if source is not None and not is_key(value.aval):
                yield value, {**_aval(value), "source": self._where(source, name)}
            else:
                file = self._kept_input(value, leaf)
                yield value, {**_aval(value), "source": {"file": file}}
        for value, constant in self.graph.constants.items():
            file = self._kept_input(value, constant)
            yield value, {**_aval(value), "source": {"file": file}}
        outputs = reversed([*enumerate(self.graph.outputs)])
        places = {v: k for k, v in outputs if isinstance(v, Value)}
        for stage in self.cut_program.stages:
            for result in stage.results:
                value = result.value
                k = places.get(value)
                sink = None if k is None else self.out[k]
                if sink is not None:
                    where = self._where(sink, f"output {k}")
                elif k is not None:
                    where = {"file": f"out/{k}.npy"}
                else:
                    where = {"file": f"kept/{value.number}.npy"}
                if sink is None and result.combiner == "insert":
                    aval = data_aval(value.aval)
                    file = self.path / where["file"]
                    dtype = stored_dtype(aval.dtype)
                    np.lib.format.open_memmap(file, "w+", dtype, aval.shape)
                yield value, {**_aval(value), "sink": where}
                # What is returned as it is is read in another place.
                if value.producer is not None:
                    yield value, {"source": where}

    def _where(self, source: Away, name: str) -> dict[str, Any]:
        secret = [k for k in source.about.get("options", ()) if SECRET.search(k)]
        if secret:
            raise ValueError(
                f"{name} is opened with {', '.join(secret)}, which plan.save does not "
                "write down: give it to the tasks in their environment"
            )
        return {
            "kind": source.kind,
            "about": dict(source.about),
            "grain": None if source.grain is None else list(source.grain),
        }

    def _kept_input(self, value: Value, leaf: Any) -> str:
        if is_key(value.aval) and hasattr(leaf, "dtype"):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
        name = f"inputs/{value.number}.npy"
        whole = leaf[...] if hasattr(leaf, "__getitem__") else leaf
        array = np.asarray(whole, data_aval(value.aval).dtype)
        np.save(self.path / name, stored(array))
        self.sums[name] = digest(self.path / name)
        return name

    def _output(self, k: int, name: str, value: Any) -> dict[str, Any]:
        about = {"name": name, "dtype": data_aval(value.aval).dtype.name}
        if isinstance(value, Scalar):
            file = f"out/{k}.npy"
            array = np.asarray(value.value, value.aval.dtype)
            np.save(self.path / file, stored(array))
            return {**about, "file": file}
        return {**about, "value": value.number}

    def _table(self, stage: Stage, unit: int, numbers: range) -> None:
        """What the shards of one task do in one stage, a line for each."""
        name = f"tables/{stage.number}-{unit}.jsonl"
        with open(self.path / name, "w") as file:
            for number in numbers:
                shard = Shard(self.cut_program, stage, number)
                row = {
                    "number": number,
                    "function": self._function(shard),
                    "reads": [[v.number, box] for v, box in shard.recipe.reads],
                    "starts": [int(start) for start in shard.recipe.starts],
                    "writes": [self._write(*write) for write in shard.writes()],
                }
                file.write(json.dumps(row) + "\n")
        self.sums[name] = digest(self.path / name)

    def _write(self, box: Box, combiner: str, value: Value) -> list[Any]:
        place = None
        if combiner != "insert":
            place = self.seen[value, box]
            self.seen[value, box] += 1
        return [value.number, box, combiner, place]

    def _function(self, shard: Shard) -> int:
        blob = self.functions.of(shard)
        if blob not in self.blobs:
            number = len(self.blobs)
            self.blobs[blob] = number
            name = f"functions/{number}.bin"
            Folder(self.path, "job").write(name, blob)
            self.sums[name] = digest(self.path / name)
        return self.blobs[blob]


def _aval(value: Value) -> dict[str, Any]:
    aval = data_aval(value.aval)
    return {
        "shape": list(aval.shape),
        "dtype": aval.dtype.name,
        "key": is_key(value.aval),
    }
