"""The benchmarks' own arithmetic, with a clock that only moves when told to."""

import json

import pytest

from benchmarks import __main__ as command_line
from benchmarks import harness, rows
from benchmarks.harness import OURS, Benchmark, Contender, Result


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


def test_the_first_run_is_not_counted():
    clock = Clock()
    times = iter([50, 1, 2])
    contender = Contender(lambda: clock.pass_(next(times)))
    assert harness.interleave({OURS: contender}, 2, clock) == {OURS: [1, 2]}


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


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5e-6, "1.5 us"), (0.0205, "20.5 ms"), (2, "2.00 s")]
)
def test_durations(seconds, text):
    assert harness.duration(seconds) == text


def test_json_holds_what_the_table_shows():
    written = harness.as_json([a_result({"fast": 1.05})], {"jax": "1"})
    assert json.loads(json.dumps(written)) == written
    (race,) = written["benchmarks"]
    assert written["versions"] == {"jax": "1"}
    assert race["contenders"]["fast"] == {
        "median": 1,
        "quartiles": [1, 1, 1],
        "runs": 3,
        "ratio": 2,
        "limit": 1.05,
        "verdict": "MISS",
    }


def test_all_rows_of_the_plan_are_there():
    limits = {b.name: dict(b.limits) for b in rows.BENCHMARKS}
    for count in (1, 100):
        for devices in (2, 8):
            assert limits[f"dispatch, {count} arg, {devices} dev"] == {
                rows.SHARD_MAP: 1.05,
                rows.PMAP: 1.0,
            }
    assert limits["NumPy input, 2 MB, 8 dev"] == {rows.DEVICE_PUT: 1.1}
    assert limits["first call, demo's step, 8 dev"] == {rows.SHARD_MAP: 1.2}


@pytest.mark.parametrize("benchmark", rows.BENCHMARKS, ids=lambda b: b.name)
def test_every_row_runs(benchmark):
    result = harness.measure(benchmark, repeats=2)
    assert OURS in result.samples
    assert all(len(times) == 2 for times in result.samples.values())


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["--only", "nothing"])
    assert "no benchmark has 'nothing' in its name" in capsys.readouterr().err


def test_repeats_must_be_positive(capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["--repeats", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err
