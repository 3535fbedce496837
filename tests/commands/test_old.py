"""`python -m shardmap old` runs a program as Python does, and tells what to edit."""

import re
import signal
import subprocess
import sys
import textwrap

import pytest

from shardmap.commands.old import main, report
from shardmap.compat.edits import PACKAGES, Use
from tests.command_line import ROOT, python, shardmap

TITLE = (
    "python -m shardmap old: old names that were used, and the edits that make them "
    "permanent\n"
)

# What docs/old.md shows is told of this program, by its lines.
SHOWN = {
    2: "import jax, numpy as np",
    3: "from jax import soft_pmap",
    6: "rows = soft_pmap(lambda x: 2 * x)(np.arange(8.0))",
    9: "jax.tree_map(np.shape, [rows])",
    12: "step = jax.pmap(lambda x: (x, {'loss': x}))",
    15: "def report():",
    16: "    params, metrics = step(rows)",
    20: "    print(metrics['loss'][0])",
    24: "    return jax.tree_map(lambda x: x[0], params)",
}


def test_the_page_shows_what_is_printed(folder):
    page = (ROOT / "docs/old.md").read_text()
    told, elements = re.findall(r"(?s)```text\n(.*?)```", page)
    source = "\n".join(SHOWN.get(k, "") for k in range(1, 25))
    write(folder, "train.py", source)
    assert shardmap("old", "train.py", cwd=folder).stderr == told
    listed = shardmap("old", "--check", "train.py", cwd=folder).stdout
    assert listed == told.partition("\n")[2].replace("  train", "train") + elements


# Prints all that a program may know of how it is run.
INTROSPECTIVE = """
import os, pickle, sys
import beside
class Thing: pass
assert sys.modules["__main__"].Thing is Thing
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
print(__name__, __file__, __package__, __spec__ and __spec__.name, __doc__)
print(sys.argv, sys.path[0], beside.value, type(__loader__).__name__)
print(sorted(n for n in globals() if n.startswith("__") and n != "__annotations__"))
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "beside.py").write_text("value = 3\n")
    return folder


def write(folder, name, source):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(textwrap.dedent(source))
    return name


@pytest.mark.deep
@pytest.mark.parametrize(
    "arguments", [("prog.py",), ("sub/prog.py", "--check", "-m", "x y")]
)
def test_a_script_knows_itself_as_python_runs_it(folder, arguments):
    write(folder, arguments[0], INTROSPECTIVE)
    write(folder, "sub/beside.py", "value = 4\n")
    as_python = python(*arguments, cwd=folder)
    result = shardmap("old", *arguments, cwd=folder)
    assert as_python.stderr == ""
    assert (result.returncode, result.stdout) == (0, as_python.stdout)
    assert result.stderr == ""


@pytest.mark.deep
def test_jaxlib_gets_threads_enough(folder):
    write(folder, "prog.py", "import os; print(os.environ['NPROC'])")
    assert int(shardmap("old", "prog.py", cwd=folder).stdout) >= 64


@pytest.mark.deep
def test_a_module_knows_itself_as_python_runs_it(folder):
    write(folder, "package/__init__.py", "")
    write(folder, "package/other.py", "number = 7\n")
    program = "from .other import number\nprint(number)\n" + INTROSPECTIVE
    write(folder, "package/prog.py", program)
    as_python = python("-m", "package.prog", "-x", cwd=folder)
    assert as_python.stderr == ""
    result = shardmap("old", "-m", "package.prog", "-x", cwd=folder)
    assert (result.returncode, result.stdout) == (0, as_python.stdout)


@pytest.mark.deep
def test_the_package_of_a_module_may_use_old_names(folder):
    write(folder, "package/__init__.py", "from jax import tree_map\n")
    write(folder, "package/prog.py", "import package; print(package.tree_map(abs, -1))")
    result = shardmap("old", "-m", "package.prog", cwd=folder)
    assert result.stdout == "1\n"
    assert "  package/__init__.py:1: from jax import tree_map -> " in result.stderr


def test_a_program_that_fails_is_told_what_nothing_stands_in_for(folder):
    write(folder, "prog.py", "import jax\nfrom flax import optim\n")
    result = shardmap("old", "prog.py", cwd=folder)
    assert result.returncode == 1
    assert result.stderr.endswith(
        "old: prog.py:2: flax.optim -> Flax removed it in 0.6; use optax\n"
    )


ENDS = {
    "sys.exit(3)": 3,
    "sys.exit('said')": 1,
    "1 / 0": 1,
    "sys.excepthook = lambda *a: print('own', a[0].__name__); 1 / 0": 1,
    "raise KeyboardInterrupt": 128 + signal.SIGINT,
    "import atexit; atexit.register(lambda: print(sys.modules['__main__'].sys))": 0,
}


@pytest.mark.deep
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(end, marks=[pytest.mark.deep] if k % 2 else [])
        for k, end in enumerate(ENDS)
    ],
)
def test_it_ends_as_under_python(folder, end):
    write(folder, "prog.py", f"import sys; print('begun')\n{end}\n")
    as_python = python("prog.py", cwd=folder)
    result = shardmap("old", "prog.py", cwd=folder)
    assert result.returncode == ENDS[end]
    assert as_python.returncode in (ENDS[end], -signal.SIGINT)
    assert result.stdout == as_python.stdout
    assert result.stderr == as_python.stderr


@pytest.mark.deep
def test_what_was_used_is_told_with_the_edits_also_when_it_fails(folder):
    write(
        folder,
        "prog.py",
        """
        import jax
        import jax.experimental.maps
        from jax import tree_multimap as tmap
        from jax.experimental import host_callback as hcb
        def total(x):
            hcb.id_tap(print, x)
            return jax.tree_map(sum, x)
        print(tmap(max, [1], [2]), jax.experimental.maps.SerialLoop)
        total()
        """,
    )
    result = shardmap("old", "prog.py", cwd=folder)
    assert result.returncode == 1
    trace, _, told = result.stderr.partition(TITLE)
    assert trace.endswith(" total() missing 1 required positional argument: 'x'\n")
    assert trace.startswith(
        f'Traceback (most recent call last):\n  File "{folder}/prog.py", line 10, in '
    )
    assert told.splitlines() == [
        "  prog.py:3: import jax.experimental.maps -> import shardmap.compat.maps",
        "  prog.py:4: from jax import tree_multimap as tmap -> "
        "from jax.tree import map as tmap",
        "  prog.py:5: from jax.experimental import host_callback as hcb -> "
        "from shardmap.compat import host_callback as hcb",
        "  prog.py:9: jax.experimental.maps.SerialLoop -> "
        "shardmap.compat.maps.SerialLoop",
    ]


@pytest.mark.deep
def test_the_edits_make_it_run_without(folder):
    """All that is told for a program, done to it."""
    source = (
        "import jax\n"
        "from jax import pmap, tree_multimap\n"
        "print(jax.tree_map(abs, -1), pmap(lambda x: 2 * x)(jax.numpy.arange(1)))\n"
        "print(tree_multimap(max, [1], [2]))\n"
    )
    write(folder, "prog.py", source.replace("pmap, ", "pmap\nfrom jax import "))
    result = shardmap("old", "prog.py", cwd=folder)
    assert result.stdout == "1 [0]\n[2]\n"
    edited = (folder / "prog.py").read_text()
    for line in result.stderr.removeprefix(TITLE).splitlines():
        before, after = line.partition(": ")[2].split(" -> ")
        assert before in edited
        edited = edited.replace(before, after)
    write(folder, "prog.py", "import jax.tree\n" + edited)
    assert shardmap("old", "--check", ".", cwd=folder).stdout == "no old names\n"
    assert python("prog.py", cwd=folder).stdout == "1 [0]\n[2]\n"


@pytest.mark.deep
def test_what_goes_through_a_pipe_is_in_order(folder):
    write(folder, "prog.py", "import jax\nprint('first', jax.tree_map(abs, -1))\n")
    process = subprocess.run(
        [sys.executable, "-m", "shardmap", "old", str(folder / "prog.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        check=True,
    )
    edit = "prog.py:2: jax.tree_map -> jax.tree.map"
    assert process.stdout == f"first 1\n{TITLE}  {folder}/{edit}\n"


def test_of_no_use_nothing_is_said():
    assert report([]) == []


def test_uses_of_installed_packages_are_told_by_package():
    uses = [
        Use(f"{PACKAGES[0]}/brax/a.py", 3, "jax.tree_map", "name"),
        Use(f"{PACKAGES[0]}/brax/b.py", 4, "jax.device_put_replicated", "name"),
        Use(f"{PACKAGES[0]}/single.py", 9, "jax.pmap", "from"),
        Use("<cell>", 1, "jax.tree_map", "name"),
    ]
    assert report(uses) == [
        TITLE.strip(),
        "  <cell>:1: jax.tree_map -> jax.tree.map",
        "python -m shardmap old: installed packages that use old names, which this "
        "command gives them",
        "  brax: jax.device_put_replicated, jax.tree_map",
        "  single: jax.pmap",
    ]


@pytest.mark.deep
def test_there_is_no_such_module():
    result = shardmap("old", "-m", "no.such.module")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "python -m shardmap old: there is no module no.such.module here\n"
    )


def test_only_the_script_is_required(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "arguments are required: SCRIPT\n" in capsys.readouterr().err
