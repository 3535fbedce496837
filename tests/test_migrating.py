"""Every example in docs/migrating.md gives the output it shows."""

import pathlib
import re

from tests.test_docs import as_doctest, complaints

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "migrating.md"


def test_examples():
    test = as_doctest(PAGE.read_text(), PAGE.name)
    assert len(test.examples) >= 50
    assert complaints(test) == ""


def test_every_python_line_is_an_example():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert [block for block in blocks if not block.startswith(">>> ")] == []


def test_old_code_is_python():
    """It no longer runs, but it shall not rot into something that never could."""
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) >= 5
    for block in blocks:
        compile(block, PAGE.name, "exec")
