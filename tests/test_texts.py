"""What the texts say of this house is so: no file and no name in them is a ghost."""

import functools
import importlib
import pathlib
import re
import runpy

import setuptools

from tests.test_layers import ROOMS

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "shardmap"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
TEXTS = [
    *PAGES,
    *(ROOT / name for name in ("Makefile", "setup.py", "pyproject.toml")),
    *sorted(path for path in ROOT.glob(".ci/*") if path.is_file()),
    *sorted(ROOT.glob(".github/**/*.yml")),
    *(
        path
        for folder in ("shardmap", "tests", "benchmarks", "examples")
        for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
        if path != pathlib.Path(__file__)
    ),
]
# A path in a text begins at one of these.
STARTS = (ROOT, PACKAGE, ROOT / "tests", ROOT / "docs")
FOLDERS = {
    path.name
    for start in (ROOT, PACKAGE)
    for path in start.iterdir()
    if path.is_dir() and path.name not in ("build", "dist") and path.name[:5] != ".venv"
}
PATH = re.compile(r"(?<![\w./-])(?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|yml|json|svg))?")
MADE_LATER = {"benchmarks/results.json"}
FILE = re.compile(r"(?<![\w./{}-])\w+\.py\b")
FILES_OF_USERS = {"cluster.py", "train.py", "script.py", "program.py", "f.py"}
NAME = re.compile(r"(?<![\w./-])shardmap(?:\.[A-Za-z_]\w*)+(?![\w/])")


def ghosts(text):
    """Paths in a text that lead nowhere."""
    paths = {
        path
        for path in PATH.findall(text)
        if path.split("/")[0] in FOLDERS and path not in MADE_LATER
    }
    return {path for path in paths if not any((s / path).exists() for s in STARTS)}


def ghostly_names(text):
    return {name for name in NAME.findall(text) if not leads_somewhere(name)}


@functools.cache
def leads_somewhere(name):
    """Whether a name is a module's, or reached from one."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        if not module or not leads_somewhere(module):
            return False
        try:
            return hasattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError:
            return True  # What a class has is its own matter.
    return True


def test_what_the_texts_name_is_there():
    found = {}
    for path in TEXTS:
        text, name = path.read_text(), str(path.relative_to(ROOT))
        # Tests make up names for what they try.
        names = set() if name.startswith("tests/") else ghostly_names(text)
        found[name] = ghosts(text) | names
    assert len(found) > 200
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_a_ghost_is_found():
    text = "see `shardmap/map/rules.py`, docs/old.md and map/primitive.py in shardmap/"
    assert ghosts(text) == {"shardmap/map/rules.py", "map/primitive.py"}
    text = "`shardmap.map.api`, `shardmap.spmap`, `shardmap.ShardingSpec.indices`"
    assert ghostly_names(text) == {"shardmap.map.api"}
    assert ghosts("x/y, ../map/primitive.py, https://a.org/docs/no.md") == set()


def test_files_named_without_their_folder_are_there():
    there = {path.name for path in ROOT.glob("[a-z]*/**/*.py")} | {"setup.py"}
    sources = [*PAGES, *PACKAGE.rglob("*.py")]
    named = {name for path in sources for name in FILE.findall(path.read_text())}
    assert named - there - FILES_OF_USERS == set()


def tree(text):
    """The folders of a tree whose lines are `name/   what it is`, 2 spaces a level."""
    found, inside = [], []
    for indent, name in re.findall(r"(?m)^( *)(\w+)/  ", text):
        inside = [*inside[: len(indent) // 2], name]
        found.append(".".join(inside))
    return found


def test_the_house_in_contributing_is_the_house():
    (block,) = re.findall(
        r"(?m)^    shardmap/\n((?:      .*\n)+)", (ROOT / "CONTRIBUTING.md").read_text()
    )
    shown = tree(re.sub(r"(?m)^ {6}", "", block))
    folders = {path.parent for path in PACKAGE.glob("**/*.py")} - {PACKAGE}
    names = {".".join(path.relative_to(PACKAGE).parts) for path in folders}
    assert set(shown) == {name for name in names if name.count(".") < 2}
    assert upstairs(shown) == upstairs(ROOMS)


def upstairs(names):
    """The outermost folders among these, in their order."""
    first = [name.split(".")[0] for name in names]
    return list(dict.fromkeys(name for name in first if (PACKAGE / name).is_dir()))


def test_every_folder_of_the_package_is_in_the_wheel(monkeypatch):
    """What setup.py finds; `make dist` looks into the wheel itself."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {path.parent for path in PACKAGE.glob("**/*.py")}
    assert set(given["packages"]) == {
        ".".join(folder.relative_to(ROOT).parts) for folder in folders
    }
    assert given["package_data"] == {"shardmap": ["py.typed", "__init__.pyi"]}
