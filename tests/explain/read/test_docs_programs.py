"""What is said of the programs in docs/, examples/ and of other tests agrees with their
compiled text.
"""

import doctest

import jax
import pytest

from tests.command_line import python
from tests.explain.caught import catching, looked_at
from tests.test_docs import FLAGS, PAGES, as_doctest
from tests.test_examples import SMALL

# `make explained` looks at those of all tests.
TESTS = ["tests/map/collectives/test_rewrites.py", "tests/api/test_mesh_map.py"]


@pytest.mark.deep
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_of_the_maps_of_a_page(page):
    test = as_doctest(page.read_text(), page.name)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    with catching() as caught, jax.numpy_rank_promotion("allow"):  # As users run them.
        # Its names stay: the maps are traced once more.
        runner.run(test, out=lambda text: None, clear_globs=False)
    if page.name == "tutorial_mesh.md":
        assert len(caught) >= 5
    if caught:
        with jax.numpy_rank_promotion("allow"):
            summary = looked_at(caught)
        assert summary.is_true, list(summary.lines())


@pytest.mark.deep
def test_of_the_maps_of_an_example():
    result = python("-m", "tests.explain.caught", "heat", *SMALL["heat"])
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert result.stdout.splitlines()[-1].startswith("true (")


@pytest.mark.deep
def test_of_the_programs_of_other_tests():
    arguments = ["-q", "-n", "0", "-p", "tests.explain.caught", *TESTS]
    result = python("-m", "pytest", *arguments, JAX_PLATFORMS="cpu")
    assert result.returncode == 0, result.stdout[-2000:]
    assert "\ntrue (" in result.stdout
