"""`install` puts old names in place and notes who uses them; `uninstall` undoes it."""

import linecache
import sys
import textwrap
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardmap as sm
from shardmap import compat
from shardmap._jax.context import ArrayType
from shardmap.compat import core
from shardmap.compat.edits import Use, told
from tests.command_line import python

# Each imports, and makes `found`.
FORMS = {
    "from jax import pmap as found": compat.pmap,
    "import jax; found = jax.pmap": compat.pmap,
    "from jax.api import jit as found": jax.jit,
    "from jax.config import config as found": jax.config,
    "import jax.experimental.maps as m; found = m.xmap": compat.xmap,
    "import jax.experimental.maps; found = jax.experimental.maps.xmap": compat.xmap,
    "from jax.experimental import maps; found = maps.Mesh": jax.sharding.Mesh,
    "from jax.experimental.maps import *; found = xmap": compat.xmap,
    "from jax.experimental import host_callback as h; found = h.call": compat.call,
    "from jax.interpreters import pxla; found = pxla.Chunked": sm.Chunked,
    "from jax.interpreters.pxla import xla_pmap_p as found": sm.spmap_p,
    "from jax.interpreters import sharded_jit as s; found = s.sharded_jit": (
        compat.sharded_jit
    ),
    "from jax.lib import xla_bridge; found = xla_bridge.devices": jax.devices,
    "from jax import linear_util as lu; found = lu.wrap_init": (
        jax.extend.linear_util.wrap_init
    ),
    "import jax.linear_util as lu; found = lu.wrap_init": (
        jax.extend.linear_util.wrap_init
    ),
    "import jax; found = jax.xla.Device": jax.Device,
    "from jax import pxla; found = pxla.Chunked": sm.Chunked,
    "from jax.interpreters import xla; found = xla._CppDeviceArray": jax.Array,
    "import jax; found = jax.numpy.product": jnp.prod,
    "import jax.numpy; found = jax.numpy.sometrue": jnp.any,
    "from jax.config import config; found = config.enable_omnistaging": (
        core.enable_omnistaging
    ),
}


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


def run(program):
    """What a program's global names are in the end."""
    space = {"__name__": "program"}
    # As notebooks do with their cells.
    lines = program.splitlines(keepends=True)
    linecache.cache["program.py"] = len(program), None, lines, "program.py"
    exec(compile(program, "program.py", "exec"), space)
    return space


def state():
    """All that `install` could touch."""
    modules = {
        name: dict(vars(module))
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "jax" and module is not None
    }
    types = ArrayType, jax.Device, type(jax.config)
    return modules, *(dict(vars(each)) for each in types)


def test_every_form_of_an_import_finds_the_new_thing():
    for form, expected in FORMS.items():
        compat.install()
        try:
            assert run(form)["found"] is expected, form
            assert {use.file for use in compat.uses()} == {"program.py"}, form
        finally:
            compat.uninstall()


def test_without_it_they_find_nothing_or_another_thing():
    for form in FORMS:
        try:
            found = run(form)["found"]
        except (ImportError, AttributeError):
            continue
        assert found is jax.pmap, form


def test_uninstall_leaves_everything_as_it_was():
    compat.install()
    compat.uninstall()
    before = state()
    compat.install()
    assert state()[0].keys() - before[0].keys() >= {"jax.api", "jax.config"}
    compat.uninstall()
    for old, new in zip(before, state(), strict=True):
        assert old == new


@pytest.mark.usefixtures("installed")
def test_twice_is_once():
    pmap = jax.pmap
    compat.install()
    assert jax.pmap is pmap
    compat.uninstall()
    assert not hasattr(jax, "tree_map")
    assert jax.pmap is not pmap
    compat.uninstall()
    compat.install()
    assert jax.pmap is pmap


def test_a_module_that_was_what_is_an_object_now_can_be_imported(installed):
    assert run("import jax.config; found = jax.config")["found"] is jax.config


def test_all_names_of_a_module_are_one_use(installed):
    run("from jax.experimental.maps import *")
    assert compat.uses() == [Use("program.py", 1, "jax.experimental.maps", "from")]


def test_a_part_of_a_mesh_is_a_submesh_and_told(installed):
    made = "import shardmap as sm; mesh = sm.make_mesh(x=4, y=2)"
    space = run(f"{made}\npart = mesh['y',]")
    assert space["part"] == sm.submesh(space["mesh"], ("y",))
    (use,) = compat.uses()
    edited = "program.py:2: mesh['y',] -> shardmap.submesh(mesh, ('y',))"
    assert told(use, "program.py") == edited


def test_an_exception_in_the_program_changes_nothing(installed):
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        run("from jax import tree_map\n1 / 0")
    assert jax.tree_map([1].__class__, ()) == ()
    compat.uninstall()
    assert not hasattr(jax, "tree_map")


def test_what_neither_has_is_an_error_as_before(installed):
    with pytest.raises(AttributeError, match="module 'jax' has no attribute 'mask'"):
        _ = jax.mask
    with pytest.raises(ImportError, match="cannot import name 'gmap'"):
        run("from jax.experimental.maps import gmap")
    with pytest.raises(AttributeError, match=r"jax\.lib\.xla_bridge"):
        run("from jax.lib import xla_bridge\nxla_bridge.nothing")


def test_what_jax_says_of_its_own_names_it_still_says(installed):
    with pytest.raises(AttributeError, match=r"removed in JAX v0\.10\.0|no attribute"):
        _ = jax.lax.pvary


def test_uses_are_told_by_file_line_name_and_form(installed):
    run(
        "import jax\n"
        "from jax import (\n"
        "    pmap,\n"
        "    tree_multimap as tmap)\n"
        "from jax.experimental import maps\n"
        "def f():\n"
        "    return jax.tree_map(tmap, maps.xmap)\n"
        "for _ in range(3):\n"
        "    try: f()\n"
        "    except TypeError: pass\n"
    )
    lines = {use.name: use.line for use in compat.uses()}
    assert lines.pop("jax.pmap") in (2, 3)  # Python tells where a statement begins.
    assert lines.pop("jax.tree_multimap") in (2, 4)
    assert lines == {"jax.experimental.maps": 5, "jax.tree_map": 7}
    forms = {use.name: use.form for use in compat.uses()}
    assert forms.pop("jax.tree_map") == "name"
    assert set(forms.values()) == {"from"}


def test_uses_start_anew(installed):
    run("from jax import tree_map")
    compat.uninstall()
    assert compat.uses() == [Use("program.py", 1, "jax.tree_map", "from")]
    compat.install()
    assert compat.uses() == []


def test_a_use_in_a_thread_is_noted(installed):
    thread = threading.Thread(target=run, args=("import jax; jax.tree_leaves(1)",))
    thread.start()
    thread.join()
    assert [use.name for use in compat.uses()] == ["jax.tree_leaves"]


def test_mock_replaces_an_old_name_and_puts_it_back(installed):
    """As chex does with `jax.pmap`."""
    with mock.patch("jax.pmap") as fake:
        assert jax.pmap is fake
    assert jax.pmap is compat.pmap


def test_arrays_have_what_they_had(installed):
    x = sm.spmap(lambda x: x * 2)(np.arange(16.0).reshape(8, 2))
    assert x.sharding_spec == sm.spec_of(x)
    assert [buffer.shape for buffer in x.device_buffers] == [(1, 2)] * 8
    assert x.device_buffers[3].devices() == {jax.devices()[3]}
    np.testing.assert_array_equal(jnp.ones(3).device_buffer, np.ones(3))
    assert x.indices == sm.spec_to_indices(x.shape, sm.spec_of(x))
    moved = x.device_buffers[3].copy_to_device(jax.devices()[5])
    assert moved.devices() == {jax.devices()[5]}
    assert type(moved.to_py()) is np.ndarray
    np.testing.assert_array_equal(moved.to_py(), [[12, 14]])
    pairs = NamedSharding(sm.make_mesh(row=4, copy=2), PartitionSpec("row"))
    copies = jax.device_put(np.ones((4, 4)), pairs)
    assert copies.one_replica_buffer_indices == [0, 2, 4, 6]
    compat.uninstall()
    assert not hasattr(x, "sharding_spec")
    with pytest.raises(AttributeError, match="has been deprecated"):
        _ = x.device_buffers


@pytest.mark.filterwarnings("ignore:jax.core.pytype_aval_mappings is deprecated")
def test_a_library_that_fills_the_tables_of_jax_is_imported(installed):
    """As rlax 0.0.4 does for its collectives."""
    program = """
        import numpy as np
        from jax.extend.core import Primitive
        from jax.interpreters import pxla, xla
        mine_p = Primitive("mine")
        pxla.multi_host_supported_collectives.add(mine_p)
        xla.translations[mine_p] = xla.backend_specific_translations["cpu"][mine_p] = 1
        xla.register_translation(mine_p, 1, platform="cpu")
        aval = xla.pytype_aval_mappings[np.ndarray](np.ones(3))
    """
    assert run(textwrap.dedent(program))["aval"].shape == (3,)
    names = {use.name for use in compat.uses()}
    assert "jax.interpreters.pxla.multi_host_supported_collectives" in names


def test_axis_frame_tells_whether_a_name_is_bound(installed):
    with pytest.raises(NameError, match="i"):
        jax.core.axis_frame("i")
    seen = []
    outer = jax.vmap(lambda x: seen.append(jax.core.axis_frame("i").size) or x)
    jax.pmap(outer, axis_name="i")(np.ones((2, 3)))
    jax.jit(jax.pmap(jax.grad(lambda x: outer(x).sum()), "i"))(np.ones((4, 3)))
    assert seen == [2, 4]


def test_keyword_arguments_of_old_functions(installed):
    x = jnp.arange(4)
    np.testing.assert_array_equal(jnp.where(x > 1, x=x, y=-1), [-1, -1, 2, 3])
    np.testing.assert_array_equal(jnp.where(condition=x > 1, x=x, y=0), [0, 0, 2, 3])
    np.testing.assert_array_equal(jnp.clip(x, a_min=1, a_max=2), [1, 1, 2, 2])
    np.testing.assert_array_equal(jnp.clip(a=x, a_max=2), [0, 1, 2, 2])
    assert {use.name for use in compat.uses()} == {"jax.numpy.clip", "jax.numpy.where"}
    np.testing.assert_array_equal(jnp.where(x > 2)[0], [3])
    with pytest.raises(TypeError, match="keyword"):
        jnp.where(x > 1, x, x=x, y=0)
    compat.uninstall()
    with pytest.raises(TypeError, match="keyword"):
        jnp.clip(x, a_min=1)


def test_the_device_of_an_array_may_be_called(installed):
    x = jax.device_put(1, jax.devices()[3])
    assert x.device() == x.device == jax.devices()[3]
    compat.uninstall()
    with pytest.raises(TypeError, match="not callable"):
        x.device()


def test_wide_types_are_turned_off(installed):
    with jax.experimental.enable_x64(), jax.experimental.disable_x64():
        assert jnp.arange(2.0).dtype == np.float32


def test_installing_starts_no_backend_and_importing_touches_nothing():
    program = """
        import jax, sys
        before, modules = dict(vars(jax)), set(sys.modules)
        import shardmap.compat
        for name, value in before.items():
            assert getattr(jax, name) is value, name
        assert not hasattr(jax, "tree_map")
        shardmap.compat.install()
        jax.config.update("jax_num_cpu_devices", 5)
        print(jax.local_device_count(), jax.tree_map(str, [1]))
    """
    result = python("-c", textwrap.dedent(program), JAX_PLATFORMS="cpu")
    assert result.stdout == "5 ['1']\n", result.stderr


def test_a_failure_half_way_is_undone(monkeypatch):
    compat.install()
    compat.uninstall()
    before = state()

    def fail(name, value):
        raise OSError(name)

    monkeypatch.setattr("shardmap.compat.installing._give_arrays", fail)
    with pytest.raises(OSError, match="copy_to_device"):
        compat.install()
    assert state() == before
