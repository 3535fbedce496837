"""The house rules: who imports whom, what is public, how long a file may be."""

import ast
import inspect
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import shardmap

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "shardmap"
# From the bottom up: a module imports from its own room and from those before it.
ROOMS = [
    "_jax",
    "sharding",
    "map",
    "plan",
    "explain",
    "compat",
    "__init__",
    "commands",
]
ROOM_OF_PROGRAMS = "commands"
PROGRAMS = {"__main__", "demo"}
# A mapped function explains itself.
UPWARD = {"map.api": ["explain.api"]}
LONGEST_FILE = 500


def module_name(path):
    """`shardmap/map/api.py` is `map.api`, `shardmap/map/__init__.py` is `map`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def room(module):
    first = module.partition(".")[0]
    return ROOM_OF_PROGRAMS if first in PROGRAMS else first


def imports(source):
    """The modules of this package that a file imports, `__init__` for its root."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports from the package's root"
            names = [node.module]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "shardmap":
                found.add(rest or "__init__")
    return found


def upward_imports(module, source):
    return sorted(
        imported
        for imported in imports(source)
        if ROOMS.index(room(imported)) > ROOMS.index(room(module))
    )


SOURCES = {module_name(path): path.read_text() for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_imports_only_from_rooms_above_it(module):
    assert upward_imports(module, SOURCES[module]) == UPWARD.get(module, [])


def test_an_upward_import_is_found():
    assert upward_imports("sharding.spec", "from shardmap.map.api import spmap") == [
        "map.api"
    ]
    assert upward_imports("map.api", "def f():\n    import shardmap.explain.text") == [
        "explain.text"
    ]
    assert upward_imports("explain.text", "import shardmap") == ["__init__"]
    assert upward_imports("map.api", "from shardmap.map import rules") == []
    assert upward_imports("__main__", "import shardmap.demo, jax") == []


PRIVATE = re.compile(r"jax\._src|jaxlib\._")


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_private_parts_of_jax_are_left_alone_but_in_one_room(module):
    found = PRIVATE.findall(SOURCES[module])
    assert found == [] or room(module) == "_jax"


@pytest.mark.parametrize("folder", ["shardmap", "tests", "benchmarks", "examples"])
def test_no_file_is_too_long(folder):
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert lengths
    assert {path: n for path, n in lengths.items() if n > LONGEST_FILE} == {}


def test_the_package_exports_exactly_its_public_names():
    exported = {
        name
        for name, value in vars(shardmap).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert exported | {"__version__"} == set(shardmap.__all__)


def test_the_package_only_re_exports():
    statements = ast.parse(SOURCES["__init__"]).body
    docstring, *others = statements
    assert isinstance(docstring, ast.Expr)
    assigned = []
    for statement in others:
        assert isinstance(statement, ast.ImportFrom | ast.Assign)
        if isinstance(statement, ast.Assign):
            assigned += [target.id for target in statement.targets]
    assert assigned == ["__version__", "__all__"]


@pytest.mark.parametrize("name", sorted(set(shardmap.__all__) - {"__version__"}))
def test_every_public_name_has_a_docstring_with_an_example(name):
    assert ">>> " in (inspect.getdoc(getattr(shardmap, name)) or "")


def test_importing_starts_no_backend():
    """A program may set devices, or start several processes, after the import."""
    program = (
        "import jax, shardmap; jax.config.update('jax_num_cpu_devices', 5); "
        "print(jax.local_device_count())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert result.stdout == "5\n", result.stderr[-2000:]
