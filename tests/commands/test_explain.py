"""`python -m shardmap explain`: finding the function, reading arguments, refusing."""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmap as sm
from shardmap.commands import example
from shardmap.commands.explain import (
    find_function,
    load,
    main,
    read_argument,
)
from tests.command_line import call, refusal, shardmap

PREDICT = "shardmap.commands.example:predict"
ARRAYS = ("--arg", "f32[64,32]", "--arg", "f32[256,64]")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes a file of the user's into an empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    modules = sys.modules.copy()

    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    yield write
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


# What it prints.


@pytest.fixture
def expected(program):
    """The explanation of a file of the user's that has the function of the example."""
    program(pathlib.Path(example.__file__).read_text(), "predict.py")
    predict, _ = find_function("predict.py:predict")
    arrays = array(jnp.float32, 64, 32), array(jnp.float32, 256, 64)
    return lambda **options: sm.explain(predict, **options)(*arrays)


def test_it_prints_the_explanation(expected):
    result = call(main, "predict.py:predict", *ARRAYS)
    assert result == (0, f"{expected()}\n", "")
    assert "axis 'batch' of 256 = 8 devices x 32 vectorised x 1 step" in result.stdout


def test_times_are_for_the_interconnect_that_is_named(expected):
    nvlink = ("--interconnect", "nvlink4")
    result = call(main, "predict.py:predict", *ARRAYS, *nvlink)
    assert result.stdout == f"{expected(interconnect='nvlink4')}\n"
    assert ", on nvlink4: 450 GB/s from a device" in result.stdout


def test_the_page_is_written(tmp_path, expected):
    html = ("--html", str(tmp_path / "out.html"))
    assert call(main, "predict.py:predict", *ARRAYS, *html).returncode == 0
    expected().save(tmp_path / "expected.html")
    pages = [(tmp_path / f"{name}.html").read_text() for name in ("out", "expected")]
    assert pages[0] == pages[1]


def test_virtual_devices_are_made_before_jax_starts(program):
    """Also where the environment asks for others."""
    file = program("import shardmap as sm\nf = sm.spmap(lambda x: x + 1, 'i')")
    result = shardmap(
        *("explain", f"{file}:f", "--arg", "f32[12]", "--devices", "6"),
        XLA_FLAGS="--xla_force_host_platform_device_count=3",
    )
    assert result.stderr == ""
    assert "axis 'i' of 12 = 6 devices x 2 vectorised x 1 step" in result.stdout


# Arguments.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("f32[8,128]", array(jnp.float32, 8, 128)),
        (" f32[ 8 , 128 ] ", array(jnp.float32, 8, 128)),
        ("bf16[4]", array(jnp.bfloat16, 4)),
        ("i32[]", array(jnp.int32)),
        ("u8[0]", array(jnp.uint8, 0)),
        ("c64[1]", array(jnp.complex64, 1)),
        ("bool[2]", array(jnp.bool_, 2)),
        ("f8_e4m3fn[2]", array(jnp.float8_e4m3fn, 2)),
        ("float16[2]", array(jnp.float16, 2)),
        ("key[3]", array(jax.eval_shape(jax.random.key, 0).dtype, 3)),
        ("3", 3),
        ("-0.5", -0.5),
        ("None", None),
        ("'i32[]'", "i32[]"),
        ("[]", []),
        (
            '{"w": f32[3], "b": [i32[], (2, True)]}',
            {"w": array(jnp.float32, 3), "b": [array(jnp.int32), (2, True)]},
        ),
    ],
)
def test_arguments(text, value):
    assert read_argument(text) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f32", r"'f32' is not defined. Write arrays as .*, or f32\[\] for one num"),
        ("(f32, 1)", "'f32' is not defined. Write arrays as"),
        ("f32(3)", "'f32' is not defined. Write arrays as"),
        ("f32[-1]", r"needs a shape of whole numbers, got \(-1,\)"),
        ("f32[2.0]", "needs a shape of whole numbers"),
        ("f32[True]", "needs a shape of whole numbers"),
        ("f33[1]", "unknown dtype 'f33': known are f32, bf16"),
        ("object[1]", "unknown dtype 'object'"),
        ("ndarray[1]", "unknown dtype 'ndarray'"),
        ("f64[1]", "f64, which JAX makes float32 unless JAX_ENABLE_X64=1 is set"),
        ("f32[1", "--arg 'f32.1' cannot be read: '.' was never closed"),
        ("f32[2][3]", "--arg 'f32.2..3.' cannot be read"),
        ("{[]: 1}", "unhashable type"),
        ("{'a': f32[1], 2: f32[1]}", "sort"),
        ("", "--arg '' cannot be read"),
    ],
)
def test_wrong_arguments(text, reason):
    assert re.search(reason, refusal(main, PREDICT, "--arg", text))


# The function.


def test_functions_are_found_as_python_finds_them(program):
    program("def f(x): return x\nclass C:\n    g = staticmethod(f)", "mine.py")
    function, name = find_function("mine:C.g")
    assert (function(3), name) == (3, "C.g")
    program("import beside\nf = beside.f", "main.py")
    program("def f(x): return x + 1", "beside.py")
    assert find_function("main.py:f")[0](3) == 4


def test_a_file_is_found_from_any_folder(program, tmp_path, monkeypatch):
    file = program(
        "import dataclasses\n"
        "@dataclasses.dataclass\nclass Scale:\n    by: 'float' = 2.0\n"
        "def f(x): return x * Scale().by"
    )
    monkeypatch.chdir("/")
    assert find_function(f"{file}:f")[0](3) == 6.0


def test_a_file_does_not_hide_a_module(program):
    file = program("f = abs", "numpy.py")
    assert load(str(file)).f is abs
    assert sys.modules["numpy"] is np


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("mine", "expected MODULE:FUNCTION, such as train.py:step .* got 'mine'"),
        ("mine:", "expected MODULE:FUNCTION"),
        (":f", "expected MODULE:FUNCTION"),
        ("other:f", "there is no module other here"),
        ("other.inner:f", "there is no module other.inner here"),
        ("mine.inner:f", "there is no module mine.inner here"),
        ("other.py:f", "there is no file other.py"),
        ("..other:f", "importing ..other failed: TypeError: the 'package' argument"),
        ("mine:g", "mine has no g$"),
        ("mine:ff", r"mine has no ff; did you mean f\?$"),
        ("mine:f.g", "mine has no f.g$"),
        ("json:lod", r"json has no lod; did you mean load or loads\?$"),
        ("mine:three", "three of mine is of type int, no function"),
    ],
)
def test_functions_that_are_not_there(function, reason, program):
    program("def f(x): return x\nthree = 3")
    assert re.search(reason, refusal(main, function))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\n1 / 0", "importing mine.py failed: ZeroDivisionError: division by zero "),
        ("\nimport sys; sys.exit(3)", "importing mine.py failed: SystemExit: 3 "),
        ("\nimport no_such_module", "ModuleNotFoundError: No module named 'no_such_m"),
        ("\nraise ValueError('a\\nb\\n\\nc')", "failed: ValueError: a b (mine.py:2)"),
        ("\nassert 0", "importing mine.py failed: AssertionError (mine.py:2)"),
    ],
)
def test_a_module_that_fails_is_told_in_a_line(text, reason, program):
    program(text)
    said = refusal(main, "mine.py:f")
    assert reason in said
    assert said.endswith(" (mine.py:2)")
    assert refusal(main, "mine:f") == said.replace(
        "importing mine.py", "importing mine"
    )


def test_a_module_that_cannot_be_read_is_told_in_a_line(program):
    program("x = = 1")
    said = refusal(main, "mine.py:f")
    assert said.startswith("importing mine.py failed: SyntaxError: invalid syntax")


def test_a_function_that_fails_is_told_in_a_line(program):
    program("import jax.numpy as jnp\ndef f(x):\n    return jnp.reshape(x, 7)")
    said = refusal(main, "mine.py:f", "--arg", "f32[3]")
    assert said.startswith("f cannot be explained: TypeError: ")
    assert said.endswith(" (mine.py:3)")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--devices", "0"], "--devices must be from 1 to 4,096, got 0"),
        (["--devices", "99999999999"], "--devices must be from 1 to 4,096"),
        (["--devices", "x"], "argument --devices: invalid int value: 'x'"),
        (["--interconnect", "wire"], "--interconnect: invalid choice: 'wire'"),
        (
            ["--html", f"{__file__}/x.html"],
            "--html: .*x.html cannot be written: .* cannot be made, File exists. Give",
        ),
        (
            ["--html", "/"],
            "--html: / cannot be written: it is a folder. Give a file in",
        ),
        (["--hmtl", "x.html"], "unrecognized arguments: --hmtl"),
    ],
)
def test_wrong_options(options, reason):
    assert re.search(reason, refusal(main, PREDICT, *ARRAYS, *options))


# No product: Python would compute it.
WORDS = [
    *("f32", "i32", "key", "bool", "[", "]", "(", ")", "{", "}", ",", ":", "'a'", "1"),
    *("-", "8", "None", ".", "=", "lambda", "\0", "\udcff", " ", "\n", "1e999"),
]


@pytest.mark.deep
@given(st.one_of(st.text(max_size=12), st.lists(st.sampled_from(WORDS)).map("".join)))
def test_no_argument_gives_a_traceback(text):
    result = call(main, PREDICT, f"--arg={text}")
    assert result.returncode == 2  # It takes two.
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@given(st.text("ab.:/_\0\udcff -0é\\", max_size=8))
def test_no_function_gives_a_traceback(text):
    result = call(main, text)
    assert result.returncode in (0, 2)
    assert result.stderr.count("\n") == (result.returncode == 2)


FILE = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from typing import NamedTuple

class State(NamedTuple):
    w: object
    step: object

def step(state, x):
    return State(state.w - 0.1 * x.T @ (x @ state.w), state.step + 1)

def one(state):
    return state.w * 2

def arguments():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((64, 4), "float32", sharding=rows)
    return jax.eval_shape(lambda: State(jnp.ones((4, 4)), 0)), x

def state():
    return arguments()[0]

def program(mesh):
    rows = NamedSharding(mesh, P("data", "model"))
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=rows)
    return lambda x: x.sum(), (x,)
"""


def test_arguments_are_what_a_function_returns(program):
    program(FILE)
    result = call(main, "mine.py:step", "--args", "mine.py:arguments", "--json")
    (report,) = json.loads(result.stdout)
    paths = [each["path"] for each in report["arrays"] if each["role"] == "input"]
    assert paths == ["state.w", "state.step", "x"]
    assert (report["mesh"], report["fits"]) == ([["data", 8]], None)
    result = call(main, "mine.py:one", "--args", "mine.py:state")
    assert "      state.w: float32[4,4], 64 B\n" in result.stdout


def test_meshes_are_compared(program, tmp_path):
    program(FILE)
    meshes = "mine.py:program", "--meshes", "data,model"
    result = call(main, *meshes, "--html", str(tmp_path / "meshes.html"))
    assert result.stdout.startswith(
        "program: 4 meshes, data x model, of cpu, 1 host of 8;"
    )
    assert result.stderr.startswith("compare_meshes: data 8, model 1, 0 s\n")
    assert "<summary>8 x 1</summary>" in (tmp_path / "meshes.html").read_text()
    (comparison,) = json.loads(call(main, *meshes, "--json").stdout)
    assert [row["error"] for row in comparison["rows"]] == [None] * 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--args", "mine.py:none"], "mine.py has no none"),
        (
            ["--args", "mine.py:state", "--arg", "f32[3]"],
            "--arg is for a function with",
        ),
        (
            ["--meshes", "data", "--arg", "f32[3]"],
            "--arg is for a function without --a",
        ),
        (
            ["--meshes", "a", "--on", "v5e:2x2", "--on", "h100:8"],
            "--meshes are those of ",
        ),
        (["--arg", "(8,4)"], r"--arg (8,4) is a shape without a type: write f32[8,4]"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(program, options, reason):
    program(FILE)
    assert reason in refusal(main, "mine.py:one", *options)


def test_machines_that_are_not_known_or_not_one_page_are_refused(tmp_path):
    reason = refusal(main, PREDICT, "--on", "v5e")
    assert reason.startswith("devices knows no 'v5e'. Did you mean 'v5e:")
    page = "--html", str(tmp_path / "page.html")
    reason = refusal(main, PREDICT, "--on", "v5e:2x2", "--on", "h100:8", *page)
    assert reason == "--html is a page of one machine: give --on once"
