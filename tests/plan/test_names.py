"""One name for each thing: no class of the plan has the name of another class."""

import ast
import pathlib
from collections import defaultdict

import shardmap

PACKAGE = pathlib.Path(shardmap.__file__).parent
# Its name stands in the fingerprints of checkpoints.
KEPT = {"Options"}


def classes(sources):
    """The classes at the top of files, and in which of them each is."""
    found = defaultdict(list)
    for name, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return found


def twice(sources):
    return {
        name: files
        for name, files in classes(sources).items()
        if len(files) > 1 and any(file.startswith("plan/") for file in files)
    }


def test_no_class_of_the_plan_has_the_name_of_another():
    paths = {p.relative_to(PACKAGE).as_posix(): p for p in PACKAGE.rglob("*.py")}
    found = twice({name: path.read_text() for name, path in paths.items()})
    assert found.keys() - KEPT == set()


def test_a_class_that_stands_twice_is_found():
    sources = {"plan/a": "class A: pass", "map/b": "class A: pass\nclass B: pass"}
    assert twice(sources) == {"A": ["plan/a", "map/b"]}
    assert twice({"api/a": "class A: pass", "map/b": "class A: pass"}) == {}
