"""The benchmarks' own arithmetic, with a clock that only moves when told to."""

import gc
import importlib.util
import json
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command_line
from benchmarks import (
    chunked_rows,
    harness,
    idiom_rows,
    planning,
    plot,
    rows,
    worker_rows,
)
from benchmarks.field import __main__ as board
from benchmarks.field import analyses
from benchmarks.field import tasks as field_tasks
from benchmarks.harness import OURS, Benchmark, Contender, Result
from benchmarks.plan_rows import BLOCK, cols, create, opened, weights


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """Collecting what all tests before have made takes seconds."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


class Clock:
    """A clock that work moves forward."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


def test_contenders_take_turns():
    ran = []
    contenders = {name: Contender(lambda name=name: ran.append(name)) for name in "abc"}
    samples = harness.interleave(contenders, repeats=20)
    turns = [tuple(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 1
    assert len(turns) == 21  # The first is not counted.
    assert {name: len(times) for name, times in samples.items()} == dict.fromkeys(
        "abc", 20
    )


def test_only_the_work_is_timed():
    clock = Clock()

    def prepare():
        clock.pass_(100)
        return (3,)

    finished = []
    contender = Contender(
        run=lambda seconds: clock.pass_(seconds) or "result",
        prepare=prepare,
        finish=lambda result: finished.append(result) or clock.pass_(100),
    )
    assert harness.interleave({OURS: contender}, 2, clock) == {OURS: [3, 3]}
    assert finished == ["result"] * 3


def a_result(limits):
    samples = {OURS: [2.0, 1.0, 99.0], "fast": [1.0] * 3, "slow": [4.0] * 3}
    return Result(Benchmark("race", "running", dict, limits), samples)


def test_ratios_are_of_medians_and_verdicts_of_ratios():
    result = a_result({"fast": 1.05, "slow": 0.5})
    assert result.median(OURS) == 2
    assert (result.ratio("fast"), result.verdict("fast")) == (2, "MISS")
    assert (result.ratio("slow"), result.verdict("slow")) == (0.5, "ok")
    assert a_result({}).verdict("fast") == ""


def test_the_table():
    assert harness.table([a_result({"fast": 1.05})]).splitlines() == [
        "benchmark  contender  median  ours / its  must be",
        "race       shardmap   2.00 s",
        "           fast       1.00 s        2.00  <= 1.05  MISS",
        "           slow       4.00 s        0.50",
    ]


def stored(limits):
    return harness.as_json([a_result(limits)], {"jax": "1"})


def texts(svg):
    tree = ElementTree.fromstring(svg)
    return [text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")]


def test_the_table_of_the_docs():
    assert plot.markdown(stored({"fast": 1.05})).splitlines() == [
        "Measured with jax 1.",
        "",
        "| benchmark | against | shardmap | it | ratio | limit | | runs |",
        "|---|---|---:|---:|---:|---:|---|---:|",
        "| race | fast | 2.00&nbsp;s | 1.00&nbsp;s | 2.00 | 1.05 | MISS | 3 |",
        "|  | slow | 2.00&nbsp;s | 4.00&nbsp;s | 0.50 |  |  | 3 |",
    ]


def test_docs_are_written_from_what_is_stored(tmp_path):
    pytest.importorskip("matplotlib", reason="what draws the picture")
    results, page = tmp_path / "results.json", tmp_path / "benchmarks.md"
    results.write_text(json.dumps(stored({})))
    page.write_text("before\n<!-- table -->\n\nold\n\n<!-- end of table -->\nafter\n")
    assert command_line.main(["--json", str(results), "--docs", str(tmp_path)]) == 0
    before, table, after = page.read_text().split("table -->")
    assert before == "before\n<!-- "
    assert table == f"\n\n{plot.markdown(stored({}))}\n\n<!-- end of "
    assert after == "\nafter\n"
    assert json.loads((tmp_path / "benchmarks.json").read_text()) == stored({})
    assert "race" in (tmp_path / "benchmarks.svg").read_text()


def test_page_picture_and_numbers_of_the_docs_agree():
    data = json.loads((command_line.DOCS / "benchmarks.json").read_text())
    page = (command_line.DOCS / "benchmarks.md").read_text()
    assert plot.TABLE.findall(page) == [plot.markdown(data)]
    shown = texts((command_line.DOCS / "benchmarks.svg").read_text())
    wanted = [plot.versions_line(data)]
    for row in plot.ratios(data):
        wanted += [row.peer, f"{row.ratio:.2f}"]
    assert [text for text in wanted if text not in shown] == []
    names = [benchmark["name"] for benchmark in data["benchmarks"]]
    assert [name for name in names if name not in shown] == []
    assert names == [benchmark.name for benchmark in rows.BENCHMARKS]


def test_all_rows_of_the_plan_are_there():
    limits = {b.name: dict(b.limits) for b in rows.BENCHMARKS}
    for count in (1, 100):
        for devices in (2, 8):
            assert limits[f"dispatch, {count} arg, {devices} dev"] == {
                rows.SHARD_MAP: 1.03,
                rows.PMAP: 1.0,
            }
    assert limits["NumPy input, 2 MB, 8 dev"] == {rows.DEVICE_PUT: 1.1}
    assert limits["first call, demo's step, 8 dev"] == {rows.SHARD_MAP: 1.2}


@pytest.mark.few(1)
@pytest.mark.parametrize("benchmark", rows.BENCHMARKS[::4], ids=lambda row: row.name)
@jax.numpy_rank_promotion("allow")  # They broadcast, as users do.
def test_every_row_runs(benchmark):
    result = harness.measure(benchmark, repeats=1)
    assert OURS in result.samples
    assert all(len(times) == 1 for times in result.samples.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("row", idiom_rows.BENCHMARKS, ids=lambda row: row.name)
@jax.numpy_rank_promotion("allow")  # They broadcast, as users do.
def test_contenders_of_idioms_agree(row, monkeypatch):
    sizes = {"SIDE": 70, "SAMPLES": 640, "KEYS": 640, "ROWS": 640}
    for name, size in sizes.items():
        monkeypatch.setattr(idiom_rows, name, size)
    results = [np.asarray(each.run()) for each in row.contenders().values()]
    assert len(results) == 3
    for other in results[1:]:
        np.testing.assert_allclose(results[0], other, rtol=2e-4, atol=2e-5)


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["--only", "nothing"])
    assert "no benchmark has 'nothing' in its name" in capsys.readouterr().err


def test_planning_is_timed_beside_lowering():
    x = planning.floats(64, 256)
    program = planning.Program(lambda x: (x @ x.T).sum(0), (x,), {0: 2}, "12 kB")
    seconds = planning.measured(program)
    assert set(seconds) == {"lower", "plan", "shards", "memory", "chunked"}
    assert planning.told({"plan": 3.0}, "plan", 1.0, limit=4).split() == [
        *("3.00", "3.0", "ok")
    ]


@pytest.mark.deep
@jax.numpy_dtype_promotion("standard")  # What optax needs.
def test_a_function_in_pieces_beside_the_whole_and_other_forms():
    pytest.importorskip("optax", reason="one of the other forms")
    programs = chunked_rows.PROGRAMS
    small = programs["ODE step"]._replace(shapes=((256, 16), (16, 16)))
    row = chunked_rows.measured(small, repeats=1)
    assert row.temporaries < 1
    assert set(row.seconds) == {
        *(harness.OURS, chunked_rows.WHOLE, chunked_rows.LAX_MAP)
    }
    assert row.wrong == set()
    row = chunked_rows.measured(programs["lagged product"], repeats=1)
    assert row.wrong == {chunked_rows.OPTAX}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", board.TASKS)
def test_contenders_of_the_field_agree(name, tmp_path, monkeypatch):
    if "zarr" in name or name == "rechunk, transposed":
        pytest.importorskip("zarr", reason="has the arrays")
    if name in analyses.JOBS and analyses.JOBS[name].labelled:
        pytest.importorskip("xarray", reason="has the labels")
    monkeypatch.setattr(field_tasks, "BLOCK", 2**16)
    folder, task, norms = tmp_path / "arrays", board.TASKS[name], {}
    folder.mkdir()
    task.create(folder, 4e-4)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for contender, run in task.contenders.items():
            if importlib.util.find_spec(board.IMPORTS[contender][0].split(".")[0]):
                out = tmp_path / f"out-{contender}"
                norms[contender] = board.norm(run(folder, out).run())
    want = norms[board.NUMPY]
    assert want > 0
    assert all(abs(norm - want) < 1e-3 * want for norm in norms.values()), norms


def test_verdicts_of_the_field():
    def row(contender, cpu, wall, norm=1.0, planning=None):
        return {
            "contender": contender,
            "cpu": cpu,
            "wall": wall,
            "again": wall / 2,
            "planning": planning,
            "megabytes": 10 * cpu,
            "told": 5,
            "norm": norm,
        }

    rows = [
        row(board.OURS, 1.0, 1.2, planning=0.2),
        row(board.HAND, 1.0, 2.0, norm=1.1),
        row(board.DASK, 3.0, 0.6),
    ]
    assert board.verdict(rows).startswith(
        "first call 0.60 x by hand: ok; first call 2.00 x best other: MISS; "
        "second call 0.60 x by hand: ok; second call 2.00 x best other: MISS; "
        "planning 0.20 s: MISS; RESULTS"
    )
    assert board.markdown([{"job": "a", **each} for each in rows]).splitlines()[2:] == [
        "| a | 1.00 | 1.00 |  |  | 3.00 | 5 | 10 | 10 |  |  | 30 | 0.60 | 2.00 |"
    ]


def test_workers_are_compared_with_one():
    runs = [worker_rows.Run(1, 4.0, cpu, 1.0) for cpu in (2.0, 9.0, 2.0)]
    runs += [worker_rows.Run(2, 2.0, 2.5, 2.0)]
    assert worker_rows.table(runs).splitlines() == [
        " workers  wall s   CPU s  to one   start",
        "       1    4.00    2.00    1.00    1.00  ok",
        "       2    2.00    2.50    1.25    2.00  MISS",
    ]


@pytest.mark.deep  # It starts processes.
def test_the_seconds_of_workers_are_theirs(tmp_path):
    for rows_ in (worker_rows.SMALL, 2 * BLOCK):
        create(tmp_path, rows_, ["npy"])
    x = opened(tmp_path, 2 * BLOCK, "npy")
    with jax.numpy_rank_promotion("allow"):
        made, result = worker_rows.measure(tmp_path, 2 * BLOCK, 2)
        assert worker_rows.near(cols(x, weights()), result)
    assert made.workers == 2
    assert made.start > 0
