"""Tasks put partial results together, and the bytes are those of a run here."""

import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.away.folder import partial_results
from shardmap.plan.away.folder.job import Job, Row
from shardmap.plan.away.folder.work import Worker, results
from shardmap.plan.plan import plan
from tests.plan.plan_programs import reals

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")
PIECES = 600
X = reals(PIECES, 6)


def moments(x):
    return x.sum(0), (x * x).max(), jnp.tanh(x), x.T @ x


@pytest.fixture(scope="module")
def made():
    return plan(moments, X, in_slices={0: PIECES})


@pytest.fixture
def path(made, tmp_path):
    made.save(tmp_path / "job", X, tasks=3)
    return tmp_path / "job"


def read_in_the_end(path, monkeypatch):
    """How many shards' own files whoever ends the stage reads."""
    for task in range(3):
        Worker(Job(path)).run(task)
    read = []
    load = Job.load

    def counted(job, stage, row):
        read.append(row.number)
        return load(job, stage, row)

    monkeypatch.setattr(Job, "load", counted)
    monkeypatch.setattr(Job, "run", None)
    Worker(Job(path)).run()
    monkeypatch.undo()
    return len(read)


def assert_bytes(path, want):
    found = results(Job(path)).values()
    for result, value in zip(found, want, strict=True):
        got = np.load(path / result.where)
        assert got.tobytes() == np.asarray(value).tobytes()


@pytest.mark.deep
def test_one_process_reads_few_partial_results(made, path, monkeypatch):
    # Of 200 to 400, say, 208 to 256 are three sixteens and 256 to 400 nine: eight
    # stand alone.
    assert read_in_the_end(path, monkeypatch) == 8 + 8 + 8
    assert len(list(path.glob("*.nodes"))) == 3
    assert_bytes(path, made.run(X))


@pytest.mark.few(1)
@pytest.mark.parametrize("harm", ["damaged", "missing", "of another task"])
def test_what_is_not_there_is_put_together_again(harm, made, path):
    for task in range(3):
        Worker(Job(path)).run(task)
    file = path / "0-1.nodes"
    content = file.read_bytes()
    file.unlink()
    if harm == "damaged":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "of another task":
        file.write_bytes((path / "0-2.nodes").read_bytes())
    Worker(Job(path)).run()
    assert_bytes(path, made.run(X))


@pytest.mark.deep
def test_a_damaged_shard_takes_its_node_along(path):
    for task in range(3):
        Worker(Job(path)).run(task)
    (path / "0-250.bin").write_bytes(b"")
    assert Worker(Job(path)).check() == 1
    assert sorted(file.name for file in path.glob("*.nodes")) == [
        "0-0.nodes",
        "0-2.nodes",
    ]


def rows(*places):
    box = [(0, 1)]
    return [
        Row(k, 0, [], [], [(7, box, "add", place), (8, [(k, k + 1)], "insert", None)])
        for k, place in enumerate(places)
    ]


def test_a_node_has_all_its_parts_in_the_unit():
    found = partial_results.parts_of(rows(*range(10, 300)))
    whole = [own[0].level for own in found if own[0].is_last]
    # 10 to 15 alone, sixteens from 16 to 256, two from 256 to 288, and 12 alone.
    assert whole == [0] * 6 + [1] * 15 + [1] * 2 + [0] * 12
    assert [own[1] for own in found] == [None] * 290
    [one] = [own[0] for own in partial_results.parts_of(rows(*range(512)))[255:256]]
    assert one == partial_results.PartialResult((7, ((0, 1),)), 2, True)
