"""The engine gets a table of rules; it names no primitive itself, in any folder."""

import ast
import pathlib
import re

from shardmap.planning.engine import rules

FOLDER = pathlib.Path(rules.__file__).parent
PRIMITIVE = re.compile(r"[a-z]\w*_p$")


def primitives_named(source):
    """What looks like a primitive, by its name or where it is imported from."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found += [n for n in names if PRIMITIVE.search(n) or "primitives" in n]
        # Primitives told by their names are no better.
        if isinstance(node, ast.Compare) and ".name" in ast.unparse(node):
            found.append(ast.unparse(node))
    return found


def test_the_engine_names_no_primitive():
    found = {p.name: primitives_named(p.read_text()) for p in FOLDER.rglob("*.py")}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_named_primitive_is_found():
    for source in (
        "from jax.extend.core import primitives as p",
        "from shardmap.planning.lax.primitives import SPLIT",
        "import jax\nx = jax.lax.add_p",
        "def f(node):\n    return node.primitive.name == 'add'",
    ):
        assert primitives_named(source) != []
