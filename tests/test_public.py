"""What is public: names, when they are imported, and what documents say of them."""

import inspect
import operator
import pathlib
import re
import types

import numpy as np
import pytest

import shardmap
from tests.command_line import python

ROOT = pathlib.Path(__file__).parent.parent


def test_the_package_shows_exactly_its_public_names():
    assert dir(shardmap) == sorted([*shardmap.__all__, "compat", "extend"])
    assert not [
        name
        for name in {*shardmap.__all__} - {"__version__"}
        if isinstance(getattr(shardmap, name), types.ModuleType)
    ]


def test_no_other_name_is_bound_where_public_names_are():
    """And what explains or plans is imported when it is used."""
    program = """
import sys, types, shardmap as sm
def others():
    names = sorted(name for name in {*vars(sm)} - {*dir(sm)} if name[0] != "_")
    return [name for name in names if not isinstance(vars(sm)[name], types.ModuleType)]
print(others())
sm.compat, sm.spmap(abs)
late = "shardmap.explaining.", "shardmap.planning.", "shardmap.commands"
print([name for name in sys.modules if name.startswith(late)])
sm.extend
print(others())
for name in dir(sm): getattr(sm, name)
print(others())

# Each of these has been hidden by a function of its package's name.
import shardmap.sharding.spec as spec
import shardmap.explaining.api as api
import shardmap.planning.cutting as cutting
from shardmap import *
assert spec.ShardingSpec and cutting
assert explain is api.explain and callable(plan) and callable(spmap)
"""
    result = python("-c", program)
    assert result.stdout.splitlines() == ["[]"] * 4, result.stderr[-2000:]
    assert result.returncode == 0, result.stderr[-2000:]


def test_decorators_and_stages_say_what_they_are():
    def double(x):
        return 2 * x

    mapped = shardmap.spmap(double)
    assert repr(mapped) == "<spmap of double>"
    for decorator, said in (
        (shardmap.spmap(axis_name="i"), "<decorator spmap(axis_name='i')>"),
        (shardmap.mesh_map(in_axes=({},)), "<decorator mesh_map(in_axes=({},))>"),
        (shardmap.sharded_jit(in_parts=2, out_parts=None), "<decorator sharded_jit("),
        (shardmap.chunked(memory="1 kB"), "<decorator chunked(memory='1 kB')>"),
    ):
        assert repr(decorator).startswith(said)
    lowered = mapped.lower(np.ones(8))
    assert re.match(r"<Lowered spmap of double: in_specs=\(Shardin", repr(lowered))


def test_what_extends_the_package_is_reached_from_it_but_not_listed():
    assert not {*shardmap.extend.__all__} & {*dir(shardmap), *shardmap.__all__}
    for name in shardmap.extend.__all__:
        assert getattr(shardmap.extend, name) is getattr(shardmap, name)


def test_every_public_name_has_a_docstring_with_an_example():
    for name in {*shardmap.__all__, *shardmap.extend.__all__} - {"__version__"}:
        assert ">>> " in (inspect.getdoc(getattr(shardmap, name)) or ""), name


def test_a_name_that_is_not_there_is_said():
    with pytest.raises(
        AttributeError, match=r"^module 'shardmap' has no attribute 'x'$"
    ):
        operator.attrgetter("x")(shardmap)


DOCUMENTS = sorted([*(ROOT / "docs").glob("**/*.md"), ROOT / "README.md"])


def test_documents_import_from_the_package_alone():
    for page in DOCUMENTS:
        modules = re.findall(r"(?:from|import) (shardmap[.\w]*)", page.read_text())
        assert {*modules} <= {"shardmap", "shardmap.compat", "shardmap.extend"}, page


def unreachable(text):
    """What a text names, but a user does not get from the package as he writes it."""

    def leads_nowhere(path):
        try:
            operator.attrgetter(path)(shardmap)
        except AttributeError:
            return True
        return False

    # The site shows classes that have no public name without the module they are in.
    text = re.sub(r"(?m)^\.\. autoclass:: .*$", "", text)
    named = re.findall(r"(?<![\w./-])(?:sm|shardmap)\.(\w+(?:\.\w+)*)(?![\w/])", text)
    return sorted({path for path in named if leads_nowhere(path)})


def test_what_documents_name_is_reached_from_the_package():
    by_page = {page.name: unreachable(page.read_text()) for page in DOCUMENTS}
    assert {page: names for page, names in by_page.items() if names} == {}


def test_a_name_that_is_not_reached_is_found():
    text = "`sm.spmap`, `sm.explaining.api.Axis`, shardmap/map, `shardmap.compat.pjit`"
    assert unreachable(text) == ["explaining.api.Axis"]
