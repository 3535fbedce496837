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
FEW = "@pytest.mark.few(2)\n@pytest.mark.one_in"
FEW = PRODUCT.format(n=2).replace("@pytest.mark.one_in", FEW)


@pytest.fixture
def run(pytester):
    """Runs pytest on one file with this repository's settings, and gives its output."""

    def run(text, *arguments):
        pytester.makefile(".toml", pyproject=(ROOT / "pyproject.toml").read_text())
        (pytester.path / "tests").mkdir(exist_ok=True)
        for name, content in (
            ("conftest.py", (ROOT / "tests" / "conftest.py").read_text()),
            ("test_it.py", text),
        ):
            (pytester.path / "tests" / name).write_text(content)
        return pytester.runpytest("-s", *arguments)

    return run


def test_one_combination_in_several_is_a_case(run):
    said = run(PRODUCT.format(n=3)).stdout.str()
    assert sorted(re.findall(r"ran (\w) (\d)", said)) == [
        *[("p", "0"), ("p", "3"), ("q", "2"), ("r", "1")],
    ]


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (["tests"], 2),
        (["-k", "test_it"], 6),
        (["tests/{}"], 6),
        (["tests/{}::test_it"], 6),
        (["tests/{}::test_it[1-6-q]"], 1),
        (["tests/{}::test_it[0-5-q]"], 1),
        (["tests/{}::test_it_too"], 1),
    ],
)
def test_all_cases_of_what_a_run_names_run(run, arguments, passed):
    deep = "\n@pytest.mark.deep\ndef test_it_too(): pass\n"
    arguments = [argument.format("test_it.py") for argument in arguments]
    run(FEW + deep, *arguments).assert_outcomes(passed=passed)


def test_no_value_may_be_left_out(run):
    result = run(PRODUCT.format(n=4))
    assert "test_it: one_in leaves out a value altogether" in result.stderr.str()
    result.assert_outcomes()


def test_a_few_cases_are_quick_and_spread(run):
    few = "@pytest.mark.few(5)\n@pytest.mark.parametrize"
    result = run(PRODUCT.format(n=1).replace("@pytest.mark.parametrize", few, 1))
    result.assert_outcomes(passed=5, deselected=7)
    cases = re.findall(r"ran (\w) (\d)", result.stdout.str())
    # Every second or third of twelve, where `a` changes fastest, from the second on.
    assert [3 * int(b) + "pqr".index(a) for a, b in cases] == [1, 3, 5, 8, 10]
