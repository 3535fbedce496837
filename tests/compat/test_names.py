"""The table of old names: none is in JAX, each new one is, and stays when asked for."""

import importlib
import warnings

import jax
import pytest

from shardmap import compat
from shardmap.compat import names


def is_in_jax(name):
    module, _, attribute = name.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return hasattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError:
            return False


@pytest.mark.filterwarnings("ignore:jax.core.pytype_aval_mappings is deprecated")
def test_each_old_name_has_a_new_one():
    for old in {*names.NAMES, *names.MODULES}:
        new = names.new_name(old)
        assert names.value_of(new) is not None, old
        assert new not in names.NAMES, old
        assert not new.startswith("jax.") or is_in_jax(new), old


# There on JAX 0.10.2, gone on 0.12.
GOING = {
    f"jax.core.{name}"
    for name in (
        *("CallPrimitive", "DebugInfo", "DropVar", "Effect", "Effects"),
        *("InconclusiveDimensionOperation", "JaxprTypeError", "check_jaxpr"),
        *("concrete_or_error", "find_top_trace", "gensym", "get_opaque_trace_state"),
        *("new_jaxpr_eqn", "no_effects", "valid_jaxtype"),
        *("nonempty_axis_env_DO_NOT_USE", "primal_dtype_to_tangent_dtype"),
        "unsafe_am_i_under_a_jit_DO_NOT_USE",
        "unsafe_am_i_under_a_vmap_DO_NOT_USE",
        "unsafe_get_axis_names_DO_NOT_USE",
    )
} | {
    f"jax.interpreters.pxla.{name}"
    for name in (
        *("ArrayMapping", "Index", "MeshAxisName", "array_mapping_to_axis_resources"),
    )
}


def test_the_old_names_are_gone():
    old_names = {*names.NAMES, *names.GONE} - {*names.REPLACED} - GOING
    # No module, which it was.
    assert type(jax.config).__name__ == "Config"
    assert {old for old in old_names if is_in_jax(old)} == {"jax.config"}


def test_names_that_only_one_end_of_jax_has_are_on_both():
    compat.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for old in GOING:
                module, _, name = old.rpartition(".")
                assert getattr(importlib.import_module(module), name) is not None, old
    finally:
        compat.uninstall()


def test_replaced_names_are_there_and_are_other_things():
    for old, new in names.REPLACED.items():
        assert is_in_jax(old), old
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert names.value_of(old) is not names.value_of(new), old


def test_each_gone_module_is_in_the_list():
    modules = {old.rpartition(".")[0] for old in names.NAMES}
    gone = set()
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            gone.add(module)
    assert gone | {*names.MODULES} == names.GONE


def test_dropped_options_are_not_in_jax():
    still_there = names.DROPPED_OPTIONS & jax.config.values.keys()
    assert still_there <= {"jax_backend_target"}
    assert not any(is_in_jax(name) for name in names.WITHOUT_STAND_IN if "jax" in name)


def test_what_is_no_old_name_has_no_new_one():
    assert names.new_name("jax.numpy.sin") is None
    assert names.new_name("jax.mask") is None
    assert names.new_name("jax.config") is None
