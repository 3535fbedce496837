"""Old names are found by reading files, in every form, and nothing of theirs is run."""

import errno
import os
import textwrap

import jax
import pytest

from shardmap.commands import old
from shardmap.compat.sources import unknown_in, uses_in
from tests.command_line import call, refusal


def old_and_unknown(source):
    uses = uses_in("f.py", textwrap.dedent(source))
    return [use[1:4] for use in uses], unknown_in(source)


FORMS = {
    "from jax import pmap": [(1, "jax.pmap", "from")],
    "import jax as j; j.pmap": [(1, "jax.pmap", "name")],
    "from jax import tree_map as t": [(1, "jax.tree_map", "from")],
    "import jax.api": [(1, "jax.api", "import")],
    "import jax.api as a; a.jit": [(1, "jax.api", "import")],
    "import jax.api; jax.api.jit(f)": [
        (1, "jax.api", "import"),
        (1, "jax.api.jit", "name"),
    ],
    "from jax.api import *": [(1, "jax.api", "from")],
    "from jax.api import tree_map": [(1, "jax.api.tree_map", "from")],
    "from jax.lib import xla_bridge as b\nb.devices()": [
        (1, "jax.lib.xla_bridge", "from"),
        (2, "jax.lib.xla_bridge.devices", "name"),
    ],
    "import jax.numpy as np; x: np.DeviceArray": [(1, "jax.numpy.DeviceArray", "name")],
    "import jax; jax.sharding.PmapSharding.default(s)": [
        (1, "jax.sharding.PmapSharding", "name")
    ],
    "from jax.interpreters import pxla\nf(pxla.Chunked([2]).x)": [
        (2, "jax.interpreters.pxla.Chunked", "name")
    ],
    "f(x).device_buffers[0].shape": [(1, "jax.Array.device_buffers", "name")],
    "y.sharding_spec": [(1, "jax.Array.sharding_spec", "name")],
    "slice(3).indices(2), b.to_py()": [(1, "jax.Array.to_py", "name")],
    "import jax; jax.pmap(f)(x).device_buffer": [
        (1, "jax.Array.device_buffer", "name"),
        (1, "jax.pmap", "name"),
    ],
}


@pytest.mark.parametrize("source", FORMS)
def test_forms(source):
    assert old_and_unknown(source) == (FORMS[source], [])


@pytest.mark.parametrize(
    "source",
    [
        "import jax; jax.jit(jax.numpy.sin)",
        "from jax import numpy as jnp, lax; jnp.sin; lax.psum",
        "from jax.experimental.shard_map import shard_map",
        "import jaxopt; jaxopt.tree_map",
        "from .jax import pmap",
        "from mine import tree_map; tree_map()",
        "mine.jax.tree_map()",
        "from jax.sharding import Mesh; Mesh.nothing",
        "'jax.tree_map'  # jax.tree_map",
        "x.device()",
        "import jax; jax.numpy.where(c, a, b), x.device, torch.device(0)",
    ],
)
def test_what_is_no_old_name(source):
    assert old_and_unknown(source) == ([], [])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import jax; jax.mask(f)", "jax.mask"),
        ("from jax.experimental import gmap", "jax.experimental.gmap"),
        ("from jax.experimental.maps import gmap", "jax.experimental.maps.gmap"),
        ("import jax.interpreters.masking", "jax.interpreters.masking"),
    ],
)
def test_a_name_that_nothing_is_known_of(source, name):
    remedy = "not in this JAX, and shardmap knows no other"
    assert old_and_unknown(source) == ([], [(1, name, remedy)])


@pytest.mark.parametrize(
    ("source", "name", "remedy"),
    [
        ("from flax import linen, optim", "flax.optim", "use optax"),
        ("import flax\nflax.optim.Adam()", "flax.optim", "use optax"),
        (
            "from jax.experimental.callback import rewrite",
            "jax.experimental.callback",
            "an interpreter of jaxprs",
        ),
    ],
)
def test_a_name_without_a_stand_in_is_told_with_what_to_do(source, name, remedy):
    uses, [(_, unknown, said)] = old_and_unknown(source)
    assert (uses, unknown) == ([], name)
    assert remedy in said


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a.py").write_text("from jax import pmap\nraise SystemExit('run')\n")
    (tmp_path / "sub" / "b.py").write_text("import jax\njax.mask(jax.tree_leaves(1))\n")
    (tmp_path / ".hidden" / "c.py").write_text("from jax import pmap\n")
    (tmp_path / "d.txt").write_text("from jax import pmap\n")
    return tmp_path


EDITS = {
    "import jax.linear_util as lu": (
        "import jax.linear_util as lu -> import jax.extend.linear_util as lu"
    ),
    "from jax import tree_map as t": (
        "from jax import tree_map as t -> from jax.tree import map as t"
    ),
    "import jax.api as a": "import jax.api as a -> import jax as a",
    "from jax.interpreters import pxla\npxla.mesh_sharding_specs": (
        "jax.interpreters.pxla.mesh_sharding_specs -> shardmap.mesh_sharding_spec"
    ),
    "from jax.config import config\nconfig.enable_omnistaging()": (
        "from jax.config import config -> from jax import config\n"
        "{file}:2: jax.config.config.enable_omnistaging -> leave it out"
    ),
    "from jax.config import config\nconfig.FLAGS.jax_xla_backend = 'tpu_driver'": (
        "from jax.config import config -> from jax import config\n"
        "{file}:2: jax.config.config.FLAGS.option = value -> jax.config.update("
        "'option', value), or leave it out where JAX has no such option"
    ),
    "from jax.config import config\nconfig.update('jax_array', True)": (
        "from jax.config import config -> from jax import config\n"
        "{file}:2: jax.config.update('jax_array', ...) -> leave it out"
    ),
    "import jax\njax.config.update('jax_xla_backend', 'tpu_driver')": (
        "jax.config.update('jax_xla_backend', ...) -> leave it out"
    ),
    "import jax.tools.colab_tpu as c\nc.setup_tpu()": (
        "import jax.tools.colab_tpu as c -> leave it out, with the new names in their "
        "places\n{file}:2: jax.tools.colab_tpu.setup_tpu -> leave it out"
    ),
    "import jax\nys = jax.api.pmap(f)(x)\njax.tree_map(lambda y: y[0], ys)": (
        "jax.api.pmap -> shardmap.compat.pmap, with `import shardmap.compat`; in new "
        "code shardmap.spmap\n{file}:3: jax.tree_map(lambda y: y[0], ys) -> "
        "shardmap.unreplicate(ys)"
    ),
    "import jax\njax.config.enable_omnistaging()": (
        "jax.config.enable_omnistaging -> leave it out"
    ),
    "import jax.numpy as jnp\njnp.where(c, x=1, y=2)": (
        "jax.numpy.where(c, x=a, y=b) -> jax.numpy.where(c, a, b)"
    ),
    "import jax\nx = f(y).device()": "f(y).device() -> f(y).device",
    "from jax.experimental import disable_x64\ndisable_x64()": (
        "from jax.experimental import disable_x64 -> "
        "from shardmap.compat.ops import disable_x64"
    ),
    "from jax.interpreters import xla\nxla.translations[p] = rule": (
        "jax.interpreters.xla.translations -> leave it out; "
        "jax.interpreters.mlir.register_lowering takes the rules of primitives"
    ),
    "x.copy_to_device(d)": "x.copy_to_device(device) -> jax.device_put(x, device)",
} | {
    f"from jax.interpreters.pxla import {name}": (
        f"from jax.interpreters.pxla import {name} -> {new}"
    )
    for name, new in {
        "shard_arg_handlers": "from shardmap.compat.pxla import shard_arg_handlers",
        "soft_pmap": "from shardmap.compat.pxla import soft_pmap",
        "soft_pmap_p": "from shardmap import spmap_p as soft_pmap_p",
        "xla_pmap": "from shardmap.compat.pxla import xla_pmap",
        "ShardedDeviceArray": "from shardmap.compat.pxla import ShardedDeviceArray",
    }.items()
}


@pytest.mark.parametrize("source", EDITS)
def test_the_line_and_its_edit(tmp_path, source):
    file = tmp_path / "program.py"
    file.write_text(source)
    code, out, _ = call(old.main, "--check", str(file))
    assert code == 1
    assert out.partition(": ")[2] == EDITS[source].format(file=file) + "\n"


def test_a_folder_is_listed_and_not_run(folder):
    assert call(old.main, "--check", str(folder)) == (
        1,
        f"{folder}/a.py:1: from jax import pmap -> from shardmap.compat import pmap\n"
        f"{folder}/sub/b.py:2: jax.tree_leaves -> jax.tree.leaves\n"
        f"{folder}/sub/b.py:2: jax.mask -> not in this JAX, and shardmap knows no "
        "other\n",
        "",
    )
    assert not hasattr(jax, "tree_map")


def test_files_and_folders(folder):
    files = list(old.python_files([str(folder / "sub"), str(folder / "d.txt")]))
    assert files == [folder / "sub" / "b.py", folder / "d.txt"]


def test_nothing_to_edit_is_code_0(tmp_path):
    (tmp_path / "new.py").write_text("import jax\njax.jit\n")
    assert call(old.main, "--check", str(tmp_path)) == (0, "no old names\n", "")


def test_a_file_that_is_not_python_is_said_and_the_rest_read(folder):
    (folder / "aa.py").write_text("print 'python 2'\n")
    code, out, err = call(old.main, "--check", str(folder))
    assert code == 1
    assert len(out.splitlines()) == 3
    assert err.startswith(
        f"python -m shardmap old: {folder}/aa.py cannot be read: Missing parentheses"
    )
    assert len(err.splitlines()) == 1


def test_what_cannot_be_opened_is_said_and_the_rest_read(folder):
    (folder / ".#a.py").symlink_to("me@host.1234:5678")  # As an editor locks a file.
    (folder / "loop.py").symlink_to("loop.py")
    (folder / "package.py").mkdir()
    (folder / "package.py" / "c.py").write_text("from jax import pmap\n")
    code, out, err = call(old.main, "--check", str(folder))
    assert code == 1
    assert len(out.splitlines()) == 4
    assert f"{folder}/package.py/c.py:1: from jax import pmap" in out
    assert err.splitlines() == [
        f"python -m shardmap old: {folder}/{name} cannot be read: {os.strerror(number)}"
        for name, number in [(".#a.py", errno.ENOENT), ("loop.py", errno.ELOOP)]
    ]


def test_a_refusal_leaves_jax_as_it_was():
    pmap = jax.pmap
    assert (
        refusal(old.main, "--check", "nothere") == "there is no file or folder nothere"
    )
    assert refusal(old.main, "-m", "no.such") == "there is no module no.such here"
    assert refusal(old.main, "nothere.py") == "there is no file nothere.py"
    assert jax.pmap is pmap
