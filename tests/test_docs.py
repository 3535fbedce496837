"""Every example in docs/ and in a docstring gives the output it shows."""

import doctest
import importlib
import pathlib
import re
import runpy

import jax
import pytest

import shardmap

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Lists of names, of programs and of numbers, each checked elsewhere.
WITHOUT_CODE = {
    "api.md",
    "before_the_machine.md",
    "benchmarks.md",
    "examples.md",
    "index.md",
    "limits.md",
    "promised.md",
}
PAGES = [
    *(page for page in sorted(DOCS.glob("*.md")) if page.name not in WITHOUT_CODE),
    ROOT / "ARCHITECTURE.md",
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.FAIL_FAST
PACKAGE = pathlib.Path(shardmap.__file__).parent
MODULES = [path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text()]


def complaints(test):
    """Runs a doctest and returns what it printed about wrong examples."""
    printed = []
    with jax.numpy_rank_promotion("allow"):  # As users run them.
        runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
        runner.run(test, out=printed.append)
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


def test_every_python_line_of_a_page_is_an_example():
    """A line without a prompt is output; code that is never run would look like it."""
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
        assert blocks, page
        assert [block for block in blocks if not block.startswith(">>> ")] == []


def test_code_that_is_not_run_is_python():
    """Old code no longer runs, other code needs a cluster; neither shall rot."""
    blocks = [
        (page.name, block)
        for page in DOCS.glob("*.md")
        for block in re.findall(r"^```py\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    assert len([name for name, _ in blocks if name == "migrating.md"]) >= 5
    for name, block in blocks:
        compile(block, name, "exec")


# Who compares the output that is no example's.
COMPARED = {
    "before_the_machine.md": "compilers/test_page.py",
    "examples.md": "test_examples.py",
    "old.md": "commands/test_old.py",
    "processes.md": "process_programs/check_the_rest.py",
}


def test_all_output_is_compared():
    pages = [page for page in DOCS.rglob("*.md") if "```text" in page.read_text()]
    assert {page.name for page in pages} == set(COMPARED)
    for page, test in COMPARED.items():
        assert f"docs/{page}" in (ROOT / "tests" / test).read_text()


def test_a_page_without_examples_has_none():
    assert [name for name in WITHOUT_CODE if ">>>" in (DOCS / name).read_text()] == []


def test_every_public_name_is_on_the_page_of_names():
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    named = r"^\.\. (?:auto)?\w+:: shardmap\.(?:extend\.)?(\w+)$"
    directives = re.findall(named, text, re.M)
    public = {*shardmap.__all__, *shardmap.extend.__all__} - {"__version__"}
    assert sorted(directives) == sorted(public)
    old_names = re.findall(r"`compat\.(\w+)`", text)
    assert sorted(old_names) == sorted(shardmap.compat.__all__)


def test_the_table_of_names_has_every_public_one():
    table = (DOCS / "api.md").read_text()
    named = set(re.findall(r"`(?:extend\.)?(\w+)`", table))
    public = {*shardmap.__all__, *shardmap.extend.__all__} - {"__version__"}
    assert public <= named


def test_every_page_is_in_the_contents():
    start = (DOCS / "index.md").read_text()
    groups = re.findall(r"(?s)```{toctree}\n:hidden:\n.*?\n\n(.*?)\n```", start)
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    entries = "\n".join(groups).splitlines()
    named = [entry.rpartition("<")[2].rstrip(">") for entry in entries]
    assert sorted(named) == sorted(pages)
    of_names = re.findall(r"^api/(\w+)$", (DOCS / "api.md").read_text(), re.M)
    assert sorted(of_names) == sorted(page.stem for page in DOCS.glob("api/*.md"))


DIAGRAMS = runpy.run_path(str(DOCS / "diagrams.py"))["DIAGRAMS"]


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_shows_what_the_programs_do(name):
    """`python docs/diagrams.py` draws them again."""
    with jax.numpy_rank_promotion("allow"):  # As users run them.
        drawn = DIAGRAMS[name]()
    assert (DOCS / name).read_text() == drawn
    pages = [(ROOT / "README.md").read_text().replace("](docs/", "](")]
    pages += [page.read_text() for page in DOCS.glob("*.md")]
    assert f"]({name})" in "".join(pages)


def test_a_wrong_example_is_noticed():
    text = "```python\n>>> 1 + 1\n3\n```\n"
    assert "Expected:\n    3\nGot:\n    2\n" in complaints(as_doctest(text, "wrong"))


def test_blocks_of_other_languages_are_left_out():
    text = "```\n>>> 1 / 0\n```\n\n```python\n>>> 1\n1\n```\n\n>>> 1 / 0\n"
    assert [example.lineno for example in as_doctest(text, "mixed").examples] == [5]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_docstring_examples(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        assert complaints(test) == ""


def test_docstring_examples_are_found():
    module = importlib.import_module("shardmap.explaining.draw.text")
    examples = doctest.DocTestFinder(exclude_empty=True).find(module)
    assert "shardmap.explaining.draw.text.picture" in [test.name for test in examples]
