"""The table of old names: none is in JAX, each new one is, and stays when asked for."""

import importlib
import warnings

import jax
import pytest

from shardmap.compat import names


def is_in_jax(name):
    module, _, attribute = name.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return hasattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError:
            return False


@pytest.mark.parametrize("old", sorted({*names.NAMES, *names.MODULES}))
def test_an_old_name_has_a_new_one(old):
    new = names.new_name(old)
    assert names.value_of(new) is not None
    assert new not in names.NAMES
    if new.startswith("jax."):
        assert is_in_jax(new)


# There on JAX 0.10.2, gone on 0.12.
GOING = {"jax.core.unsafe_get_axis_names_DO_NOT_USE"}


@pytest.mark.parametrize(
    "old", sorted({*names.NAMES, *names.GONE} - {*names.REPLACED} - GOING)
)
def test_an_old_name_is_gone(old):
    if old == "jax.config":
        assert type(jax.config).__name__ == "Config"  # No module, which it was.
    else:
        assert not is_in_jax(old)


@pytest.mark.parametrize("old", sorted(names.REPLACED))
def test_a_replaced_name_is_there_and_is_another_thing(old):
    assert is_in_jax(old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert names.value_of(old) is not names.value_of(names.REPLACED[old])


def test_each_gone_module_is_in_the_list():
    modules = {old.rpartition(".")[0] for old in names.NAMES}
    gone = set()
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            gone.add(module)
    assert gone | {*names.MODULES} == names.GONE


def test_what_is_no_old_name_has_no_new_one():
    assert names.new_name("jax.numpy.sin") is None
    assert names.new_name("jax.mask") is None
    assert names.new_name("jax.config") is None
