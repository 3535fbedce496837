"""Every example in README.md, in docs/ and in a docstring gives the output it shows."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import shardmap

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.FAIL_FAST
MODULES = [
    "shardmap",
    *(info.name for info in pkgutil.walk_packages(shardmap.__path__, "shardmap.")),
]


def complaints(test):
    """Runs a doctest and returns what it printed about wrong examples."""
    printed = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=printed.append)
    return "".join(printed)


def python_blocks(text):
    """The text with all but the contents of its python blocks made blank.

    The line numbers stay, and all blocks together are one doctest.
    """
    kept, inside = [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        inside = line == "```python" if fence else inside
        kept.append(line if inside and not fence else "")
    return "\n".join(kept) + "\n"


def as_doctest(text, name):
    blocks = python_blocks(text)
    return doctest.DocTestParser().get_doctest(blocks, {}, name, name, 0)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page(page):
    test = as_doctest(page.read_text(), page.name)
    assert len(test.examples) >= 10
    assert complaints(test) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_line_of_a_page_is_an_example(page):
    """A line without a prompt is output; code that is never run would look like it."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert blocks
    assert [block for block in blocks if not block.startswith(">>> ")] == []


def test_old_code_is_python():
    """It no longer runs, but it shall not rot into something that never could."""
    page = ROOT / "docs" / "migrating.md"
    blocks = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.M | re.S)
    assert len(blocks) >= 5
    for block in blocks:
        compile(block, page.name, "exec")


def test_a_wrong_example_is_noticed():
    text = "```python\n>>> 1 + 1\n3\n```\n"
    assert "Expected:\n    3\nGot:\n    2\n" in complaints(as_doctest(text, "wrong"))


def test_blocks_of_other_languages_are_left_out():
    text = "```\n>>> 1 / 0\n```\n\n```python\n>>> 1\n1\n```\n\n>>> 1 / 0\n"
    assert [example.lineno for example in as_doctest(text, "mixed").examples] == [5]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        assert complaints(test) == ""


def test_docstring_examples_are_found():
    module = importlib.import_module("shardmap.explain.text")
    found = doctest.DocTestFinder(exclude_empty=True).find(module)
    assert "shardmap.explain.text.picture" in [test.name for test in found]
