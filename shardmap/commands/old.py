"""`python -m shardmap old`: runs an old `jax.pmap` program unedited."""

import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

from shardmap.commands.cpu_threads import enough_threads
from shardmap.commands.parsing import Parser
from shardmap.commands.run_script import exit_code
from shardmap.compat.edits import PACKAGES, Use, told
from shardmap.compat.installing import install, uninstall, uses
from shardmap.compat.sources import unknown_in, uses_in
from shardmap.units import short_path

EXAMPLES = (
    "python -m shardmap old train.py --steps 100",
    "python -m shardmap old --check .",
)


def main(arguments: Sequence[str]) -> int:
    """Runs or checks the program, and returns the exit code."""
    parser = Parser(
        "old",
        "Run an old jax.pmap program unedited, with the names that JAX has removed.\n"
        "At the end, stderr lists the places that used them, each with the edit that\n"
        "replaces it.",
        EXAMPLES,
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only list old names in files and folders, by reading them; code 1 if "
        "there are any",
    )
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="SCRIPT is the name of a module, as for python -m",
    )
    parser.add_argument(
        "script", metavar="SCRIPT", help="the Python file, or what is to be checked"
    )
    # Argparse says that a rest of arguments is required, which may be empty.
    rest = parser.add_argument(
        "arguments", nargs="...", help="the script's own arguments"
    )
    rest.required = False
    options = parser.parse_args(arguments)
    if options.check:
        try:
            return check([options.script, *options.arguments])
        except ValueError as error:
            parser.error(str(error))
    if not options.module and not os.path.isfile(options.script):
        parser.error(f"there is no file {options.script}")
    os.environ.update(enough_threads(os.environ))
    install()
    # Looking for a module imports its package, which may need the old names.
    if options.module and not _is_module(options.script):
        uninstall()
        parser.error(f"there is no module {options.script} here")
    code = run(options.script, options.arguments, is_module=options.module)
    sys.stdout.flush()
    lines = report(uses())
    if code and not options.module:
        source = Path(options.script).read_bytes()
        lines += [
            f"python -m shardmap old: {options.script}:{line}: {name} -> {remedy}"
            for line, name, remedy in unknown_in(source)
        ]
    for line in lines:
        print(line, file=sys.stderr)
    return code


def check(paths: Sequence[str]) -> int:
    """Prints the old names in files and folders, and returns the exit code."""
    lines, unread = [], []
    for file in python_files(paths):
        try:
            source = file.read_bytes()
            used, others = uses_in(str(file), source), unknown_in(source)
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            unread.append(f"{file} cannot be read: {reason}")
            continue
        lines += [told(use, str(file)) for use in used]
        lines += [f"{file}:{line}: {name} -> {remedy}" for line, name, remedy in others]
    print("\n".join(lines or ["no old names"]))
    for text in unread:
        print(f"python -m shardmap old: {text}", file=sys.stderr)
    return 1 if lines or unread else 0


def python_files(paths: Iterable[str]) -> Iterator[Path]:
    """The Python files among files and in folders.

    Raises:
      ValueError: there is no such file or folder.
    """
    for text in paths:
        path = Path(text)
        if not path.exists():
            raise ValueError(f"there is no file or folder {text}")
        if path.is_file():
            yield path
            continue
        for file in sorted(path.rglob("*.py")):
            inside = file.relative_to(path).parts[:-1]
            if file.is_dir() or any(part.startswith(".") for part in inside):
                continue
            yield file


def run(script: str, arguments: Sequence[str], is_module: bool = False) -> int:
    """Runs a program as ``python SCRIPT`` does, and returns its exit code."""
    sys.argv = [script, *arguments]
    if is_module:
        sys.path[0] = os.getcwd()
        return exit_code(
            lambda: runpy.run_module(script, run_name="__main__", alter_sys=True)
        )
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    return exit_code(lambda: _run_file(os.path.abspath(script)))


def _is_module(name: str) -> bool:
    sys.path[0] = os.getcwd()
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _run_file(file: str) -> None:
    """Runs a file as the module ``__main__``, and keeps the module.

    Exit handlers and threads of the program may need it. `runpy.run_path` would remove
    it.
    """
    module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", file)
    module.__dict__.update(
        __file__=file, __cached__=None, __loader__=loader, __builtins__=__builtins__
    )
    sys.modules["__main__"] = module
    exec(loader.source_to_code(loader.get_data(file), file), module.__dict__)


def report(used: Sequence[Use]) -> list[str]:
    """Lines on the old names that a run has used; empty if there are none."""
    installed = [use for use in used if use.file.startswith(PACKAGES)]
    written = [use for use in used if use not in installed]
    lines: list[str] = []
    if written:
        lines.append(
            "python -m shardmap old: old names that were used, and the edits that make "
            "them permanent"
        )
        lines += [f"  {told(use, short_path(use.file))}" for use in written]
    if installed:
        lines.append(
            "python -m shardmap old: installed packages that use old names, which this "
            "command gives them"
        )
        packages: dict[str, set[str]] = {}
        for use in installed:
            folder = next(p for p in PACKAGES if use.file.startswith(p))
            name = Path(use.file).relative_to(folder).parts[0].removesuffix(".py")
            packages.setdefault(name, set()).add(use.name)
        lines += [f"  {name}: {', '.join(sorted(packages[name]))}" for name in packages]
    return lines
