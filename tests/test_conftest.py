"""Which tests a run leaves out, and what it says of them."""

import pathlib
import re

import pytest

pytest_plugins = ["pytester"]

ROOT = pathlib.Path(__file__).parent.parent
PRODUCT = """
import pytest

@pytest.mark.one_in({n})
@pytest.mark.parametrize("a", ["p", "q", "r"])
@pytest.mark.parametrize("b, c", [(0, 5), (1, 6), (2, 7), (3, 8)])
def test_it(a, b, c):
    print("ran", a, b)
"""


@pytest.fixture
def run(pytester):
    """Runs pytest on one file with this repository's settings, and gives its output."""

    def run(text, *arguments, names=("it",)):
        pytester.makefile(".toml", pyproject=(ROOT / "pyproject.toml").read_text())
        (pytester.path / "tests").mkdir(exist_ok=True)
        for name, content in (
            ("conftest.py", (ROOT / "tests" / "conftest.py").read_text()),
            *((f"test_{name}.py", text) for name in names),
        ):
            (pytester.path / "tests" / name).write_text(content)
        return pytester.runpytest("-s", *arguments)

    return run


def test_one_case_in_several_is_quick(run):
    said = run(PRODUCT.format(n=3)).stdout.str()
    assert sorted(re.findall(r"ran (\w) (\d)", said)) == [
        *[("p", "0"), ("p", "3"), ("q", "2"), ("r", "1")],
    ]
    assert "8 deep tests left to `make test-deep`" in said


def test_the_others_are_deep(run):
    result = run(PRODUCT.format(n=3), "-m", "deep")
    result.assert_outcomes(passed=8, deselected=4)
    assert "left to" not in result.stdout.str()


@pytest.mark.deep
def test_workers_tell_how_many_they_leave_out(run):
    result = run(PRODUCT.format(n=2), "-n", "1")
    result.assert_outcomes(passed=6)
    assert "6 deep tests left to `make test-deep`" in result.stdout.str()


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (["tests"], 4),
        (["-k", "test_it"], 12),
        (["tests/{}"], 12),
        (["tests/{}::test_it"], 12),
        (["tests/{}::test_it[0-5-r]"], 1),
    ],
)
def test_all_cases_of_what_a_run_names_run(run, arguments, passed):
    deep = "\n@pytest.mark.deep\ndef test_it_too(): pass\n"
    few = "@pytest.mark.few(9)\n@pytest.mark.parametrize"
    text = PRODUCT.format(n=3).replace("@pytest.mark.parametrize", few, 1)
    arguments = [argument.format("test_it.py") for argument in arguments]
    run(text + deep, *arguments).assert_outcomes(passed=passed)


def test_no_value_may_be_left_out(run):
    result = run(PRODUCT.format(n=4))
    assert "test_it: one_in leaves out a value altogether" in result.stderr.str()
    result.assert_outcomes()


def test_a_bound_skips_what_is_left(run, monkeypatch):
    monkeypatch.setenv("DEEP_SECONDS", "0")
    result = run("def test_it(): pass", "-rs")
    result.assert_outcomes(skipped=1)
    assert "NOT RUN: the 0 s of DEEP_SECONDS are over" in result.stdout.str()


def test_files_stand_in_another_order_with_each_number(run, monkeypatch):
    names = [f"it_{k}" for k in range(9)]
    found = []
    for number in ("1", "1", "2"):
        monkeypatch.setenv("DEEP_ORDER", number)
        result = run("def test_it(): pass", "-v", names=names)
        result.assert_outcomes(passed=9)
        found.append(re.findall(r"test_(it_\d).py::", result.stdout.str()))
    assert sorted(found[0]) == names
    assert found[0] == found[1] != found[2]


def test_a_few_cases_are_quick_and_spread(run):
    few = "@pytest.mark.few(5)\n@pytest.mark.parametrize"
    result = run(PRODUCT.format(n=1).replace("@pytest.mark.parametrize", few, 1))
    result.assert_outcomes(passed=5, deselected=7)
    found = re.findall(r"ran (\w) (\d)", result.stdout.str())
    # Every second or third of twelve, where `a` changes fastest, from the second on.
    assert [3 * int(b) + "pqr".index(a) for a, b in found] == [1, 3, 5, 8, 10]


def test_few_counts_what_one_in_leaves(run):
    few = "@pytest.mark.few(1)\n@pytest.mark.parametrize"
    result = run(PRODUCT.format(n=3).replace("@pytest.mark.parametrize", few, 1))
    result.assert_outcomes(passed=1, deselected=11)
