"""What is said of the maps in docs/ and examples/ agrees with their compiled text."""

import ast
import doctest

import jax
import pytest

from tests.command_line import python
from tests.explain.caught import catching, looked_at
from tests.test_docs import FLAGS, PAGES, as_doctest
from tests.test_examples import SMALL

QUICK = {"nesting.md"}
# What they run is told elsewhere: other processes, or no maps.
EXAMPLES = ["heat", "population", "data_parallel"]


def check(found):
    assert found.lies == []
    assert found["programs"] > 0
    assert found["user, located"] == found["user"]
    assert found["compiler, located"] >= 0.95 * found["compiler"]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.name in QUICK else pytest.mark.deep)
        for page in PAGES
    ],
    ids=lambda page: page.name,
)
def test_of_the_maps_of_a_page(page):
    test = as_doctest(page.read_text(), page.name)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    with catching() as caught, jax.numpy_rank_promotion("allow"):  # As users run them.
        # Its names stay: the maps are traced once more.
        runner.run(test, out=lambda text: None, clear_globs=False)
    if page.name in QUICK:
        assert len(caught) >= 5
    if caught:
        with jax.numpy_rank_promotion("allow"):
            check(looked_at(caught))


@pytest.mark.deep
@pytest.mark.parametrize("name", EXAMPLES)
def test_of_the_maps_of_an_example(name):
    result = python("-m", "tests.explain.caught", name, *SMALL[name])
    assert result.returncode == 0, result.stderr[-2000:]
    *_, counts, lies = result.stdout.splitlines()
    assert lies == "lies: []"
    counts = ast.literal_eval(counts)
    assert counts["programs"] > 0
    for made in ("user", "compiler"):
        some = counts.get(made, 0)
        assert (
            counts.get(f"{made}, located", 0) >= (1 if made == "user" else 0.95) * some
        )
