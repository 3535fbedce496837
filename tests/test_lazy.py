"""Public names that are imported when they are first used."""

import operator
import sys
import types

import pytest

import shardmap as sm
from shardmap import _lazy


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a function ``plan`` in a subpackage of that name."""
    folder = tmp_path / "later_example"
    (folder / "plan").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "plan" / "__init__.py").write_text("")
    (folder / "plan" / "plan.py").write_text("def plan(): return 'planned'\nRULES = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("later_example")
    for name in [name for name in sys.modules if name.startswith("later_example")]:
        del sys.modules[name]


def attached(package):
    modules = {"later_example.plan.plan": ["plan", "RULES"]}
    package.__getattr__, package.__dir__ = _lazy.attach(
        "later_example", modules, ["plan", "RULES", "other"]
    )
    return package


def test_a_name_is_imported_when_it_is_used_and_kept(package):
    attached(package)
    assert "later_example.plan.plan" not in sys.modules
    assert package.RULES == 1
    assert "later_example.plan.plan" in sys.modules
    assert vars(package)["RULES"] == 1


def test_a_subpackage_does_not_hide_a_name(package):
    attached(package)
    __import__("later_example.plan.plan")
    assert not isinstance(package.plan, types.ModuleType)
    assert package.plan() == "planned"


def test_a_module_is_imported_when_something_of_it_is_used(package):
    module = _lazy._Module("later_example.plan.plan")
    assert "later_example.plan.plan" not in sys.modules
    assert module.plan() == "planned"
    assert module.RULES == 1
    with pytest.raises(AttributeError, match=r"'later_example.plan.plan' has no"):
        operator.attrgetter("other")(module)


def test_dir_is_what_is_public(package):
    assert dir(attached(package)) == ["RULES", "other", "plan"]


def test_another_name_is_not_there(package):
    with pytest.raises(AttributeError, match=r"'later_example' has no attribute 'x'"):
        operator.attrgetter("x")(attached(package))


def test_what_is_called_otherwise_is_named():
    with pytest.raises(AttributeError, match=r"'pmap'. Use shardmap.spmap, which has"):
        operator.attrgetter("pmap")(sm)
    with pytest.raises(AttributeError, match=r"'spmapp'. Did you mean 'spmap' or"):
        operator.attrgetter("spmapp")(sm)
    with pytest.raises(AttributeError, match=r"Did you mean 'make_mesh'\?$"):
        operator.attrgetter("makemesh")(sm)
    for name, instead in {
        "replicate": "shardmap.device_put_replicated",
        "PartitionSpec": "jax.sharding.PartitionSpec",
        "P": "jax.sharding.PartitionSpec",
        "NamedSharding": "jax.sharding.NamedSharding",
    }.items():
        with pytest.raises(AttributeError, match=rf"'{name}'. Use {instead}\.$"):
            operator.attrgetter(name)(sm)
    assert not hasattr(sm, "xmap")
