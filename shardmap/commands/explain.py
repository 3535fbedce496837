"""`python -m shardmap explain`: explains a function without running it."""

import argparse
import difflib
import importlib
import importlib.util
import json
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from shardmap.commands.parsing import Parser, evaluate, one_line
from shardmap.explaining.api import explain
from shardmap.explaining.draw.tables import of_reports
from shardmap.explaining.draw.text import as_text
from shardmap.explaining.interconnect import Interconnect
from shardmap.explaining.machines import devices
from shardmap.explaining.meshes import compare_meshes
from shardmap.source import user_line
from shardmap.units import shown

EXAMPLE = (
    "python -m shardmap explain shardmap.commands.example:predict "
    "--arg f32[64,32] --arg f32[256,64] --devices 8"
)
# More virtual devices take a long time to start.
MOST_DEVICES = 4096
# The short names of dtypes in jaxprs.
KINDS = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex"}


class Failure(RuntimeError):
    """An error of the user's program, with its place."""


def main(arguments: Sequence[str]) -> int:
    """Explains the function and returns the exit code."""
    options, parser = _parsed(arguments)
    try:
        reports = reports_of(options)
        if options.html is not None:
            reports[0].save(options.html)
    except (TypeError, ValueError, OSError, RuntimeError, ImportError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps([each.to_dict() for each in reports], indent=2))
    elif len(reports) > 1:
        rows = [*zip(options.on, reports, strict=True)]
        lead = "on one device of each machine; not run"
        print(as_text(of_reports(reports[0].name, lead, "Machine", rows)))
    else:
        print(reports[0])
    return int(any(each.fits is False for each in reports))


def _parsed(arguments: Sequence[str]) -> tuple[Any, Parser]:
    parser = Parser(
        "explain",
        "Tell what a function runs in parallel, where its arrays are, what moves "
        "between\ndevices and what it costs. The function is compiled, but not run. "
        "Its module\nor .py file is imported, which runs its top level.",
        (
            EXAMPLE,
            f"{EXAMPLE} --interconnect nvlink4",
            f"{EXAMPLE.partition(' --devices')[0]} --on v5e:4x4 --on h100:8",
            "python -m shardmap explain train.py:step --args train.py:arguments "
            "--on v5e:4x4",
            "python -m shardmap explain train.py:program --meshes data,model "
            "--on v5e:4x4",
        ),
    )
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="a module, or a .py file, and a function in it",
    )
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        dest="each_arg",
        metavar="ARRAY",
        help="one for each argument: an array such as f32[8,128], bf16[4], i32[] or "
        "key[]; a tuple, list or dict of them, such as '{\"w\": f32[3]}'; or a number",
    )
    parser.add_argument(
        "--args",
        metavar="MODULE:FUNCTION",
        help="a function that returns the arguments, as a tuple, or the only one: "
        "arrays or shapes, such as those of jax.eval_shape, also with shardings",
    )
    parser.add_argument(
        "--meshes",
        metavar="AXES",
        help="the names of axes, such as data,model: the function takes a mesh and "
        "returns a function and a tuple of its arguments, and every mesh is compared",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="virtual devices of the CPU; by default the devices that JAX finds",
    )
    parser.add_argument(
        "--on",
        action="append",
        default=[],
        metavar="MACHINE",
        help="a machine to compile for, which need not be here, such as v5e:16x16 or "
        "h100:32x8; given several times, the answer is a table. The exit code is 1 if "
        "the program does not fit into memory",
    )
    names = tuple(Interconnect.KNOWN)
    parser.add_argument(
        "--interconnect",
        choices=names,
        metavar="NAME",
        help=f"what joins the devices or, if several, hosts: {', '.join(names)}",
    )
    parser.add_argument(
        "--html",
        type=_page,
        metavar="FILE",
        help="write a page with pictures to this file",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a list of reports, one a machine",
    )
    options = parser.parse_args(arguments)
    for given, why in (
        (options.html and len(options.on) > 1, "--html is a page of one machine"),
        (options.meshes and len(options.on) > 1, "--meshes are those of one machine"),
    ):
        if given:
            parser.error(f"{why}: give --on once")
    if options.each_arg and (options.args or options.meshes):
        parser.error("--arg is for a function without --args and --meshes")
    return options, parser


def _page(text: str) -> str:
    """The file of a page, whose folder is made if there is none."""
    path = pathlib.Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        why = "it is a folder" if path.is_dir() else ""
    except OSError as error:
        why = f"{path.parent} cannot be made, {error.strerror}"
    if why:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: {why}. Give a file in a folder of yours, such "
            "as ./report.html"
        )
    return text


def reports_of(options: Any) -> list[Any]:
    """The explanations for the parsed options, one per machine; or a comparison."""
    machines: Sequence[Any] = [devices(name) for name in options.on] or [None]
    count = options.devices
    if options.on:
        jax.config.update("jax_platforms", "cpu")
        # Meshes that the module makes of all devices are moved to the machine.
        counts = {len(machine) for machine in machines if machine is not None}
        if count is None and len(counts) == 1 and max(counts) <= MOST_DEVICES:
            count = counts.pop()
    if count is not None:
        if not 1 <= count <= MOST_DEVICES:
            raise ValueError(
                f"--devices must be from 1 to {MOST_DEVICES:,}, got {count:,}"
            )
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    args = [read_argument(text) for text in options.each_arg]
    function, name = find_function(options.function)
    wires = options.interconnect
    try:
        if options.meshes:
            axes = options.meshes.split(",")
            return [compare_meshes(function, machines[0], axes, interconnect=wires)]
        if options.args:
            returned = find_function(options.args)[0]()
            args = list(returned) if type(returned) in (tuple, list) else [returned]
        return [
            explain(function, interconnect=wires, devices=machine)(*args)
            for machine in machines
        ]
    except Exception as error:
        raise Failure(f"{name} cannot be explained: {_what(error)}") from None


def read_argument(text: str) -> Any:
    """Parses an ``--arg``: arrays as `jax.ShapeDtypeStruct`, or constants.

    >>> read_argument("{'w': f32[3], 'scale': 2}")
    {'w': ShapeDtypeStruct(shape=(3,), dtype=float32), 'scale': 2}
    >>> read_argument("i32[]")
    ShapeDtypeStruct(shape=(), dtype=int32)
    """
    # Outside of strings, `f32[8]` is a call of `array`.
    written = re.sub(
        r"""("[^"]*"|'[^']*')|(\w+)\[([^][]*)\]""",
        lambda match: match[1] or f"array({match[2]!r}, {match[3]})",
        text,
    )
    try:
        value = evaluate(written, f"--arg {shown(text)}", {"array": _array})
    except ValueError as error:
        raise ValueError(
            f"{error}. Write arrays as f32[8,128], or f32[] for one number"
        ) from None
    is_flat = isinstance(value, tuple | list) and value
    if is_flat and all(type(each) is int for each in value):
        raise ValueError(
            f"--arg {text} is a shape without a type: write "
            f"f32[{','.join(map(str, value))}]"
        )
    return value


def _array(name: str, *shape: Any) -> jax.ShapeDtypeStruct:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name} needs a shape of whole numbers, got {shape!r}")
    return jax.ShapeDtypeStruct(shape, _dtype(name))


def _dtype(name: str) -> Any:
    if name == "key":
        return jax.eval_shape(jax.random.key, 0).dtype
    short = re.fullmatch(r"(bf|f|i|u|c)(\d\w*)", name)
    long = KINDS[short[1]] + short[2] if short else name
    known = re.fullmatch(r"(b?float|u?int|complex)\d\w*|bool", long)
    scalar = getattr(jnp, long, None) if known else None
    if scalar is None:
        raise ValueError(
            f"unknown dtype {name!r}: known are f32, bf16, i32, u8, c64, bool, key ..."
        )
    dtype, used = jnp.dtype(scalar), jax.dtypes.canonicalize_dtype(scalar)
    if used != dtype:
        raise ValueError(
            f"64-bit dtype {name}, which JAX makes {used} unless JAX_ENABLE_X64=1 is "
            "set"
        )
    return dtype


def find_function(text: str) -> tuple[Callable[..., Any], str]:
    """The function of a text such as ``train.py:step``, and its name."""
    module_text, _, path = text.rpartition(":")
    if not (module_text and path):
        raise ValueError(
            "expected MODULE:FUNCTION, such as train.py:step or package.train:step, "
            f"got {text!r}"
        )
    value: Any = load(module_text)
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            near = difflib.get_close_matches(part, vars(value), n=2)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"{module_text} has no {path}{meant}") from None
    if not callable(value):
        raise ValueError(
            f"{path} of {module_text} is of type {type(value).__name__}, no function"
        )
    return value, path


def load(text: str) -> ModuleType:
    """Imports a module by name, or from a .py file."""
    file = pathlib.Path(text)
    is_file = file.suffix == ".py"
    if is_file and not file.is_file():
        raise ValueError(f"there is no file {text}")
    folder = str(file.resolve().parent if is_file else pathlib.Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _load_file(file) if is_file else importlib.import_module(text)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if not is_file and missing and f"{text}.".startswith(f"{missing}."):
            raise ValueError(f"there is no module {text} here") from None
        raise Failure(f"importing {text} failed: {_what(error)}") from None


def _load_file(file: pathlib.Path) -> ModuleType:
    # Dataclasses look up their module. No other module has this name.
    spec = importlib.util.spec_from_file_location(f"<{file.stem}>", file)
    assert spec is not None  # Python knows what to do with a .py file.
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _what(error: BaseException) -> str:
    """The type and message of an error, and the last line of the user's code."""
    text = f"{type(error).__name__}: {one_line(str(error))}".rstrip(": ")
    frames = reversed(traceback.extract_tb(error.__traceback__))
    line = user_line((each.filename, each.lineno or 0, each.name) for each in frames)
    if isinstance(error, SyntaxError) or line is None:  # It has its line.
        return text
    return f"{text} ({line.rpartition(' (')[0]})"
