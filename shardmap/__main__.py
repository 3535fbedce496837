"""The command line: `python -m shardmap COMMAND`."""

import difflib
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from shardmap import __version__


class Command(NamedTuple):
    """One command: a module with `main(arguments) -> exit code`, imported when run."""

    module: str
    summary: str
    # Modules that the command needs beyond the core dependencies, and their extras.
    needs: dict[str, str]


COMMANDS = {
    "demo": Command(
        module="shardmap.demo",
        summary="train a digit classifier over 8 virtual devices",
        needs={"sklearn": "demo"},
    ),
    "picture": Command(
        module="shardmap.commands.picture",
        summary="draw a sharding, and write its proto, HLO and Shardy text",
        needs={},
    ),
    "explain": Command(
        module="shardmap.commands.explain",
        summary="tell what a function runs in parallel, what moves, what it costs",
        needs={},
    ),
    "run": Command(
        module="shardmap.commands.run",
        summary="start several processes on this machine",
        needs={},
    ),
    "old": Command(
        module="shardmap.commands.old",
        summary="run an old jax.pmap program unedited",
        needs={},
    ),
    "doctor": Command(
        module="shardmap.commands.doctor",
        summary="check what is installed, and say what is known not to work here",
        needs={},
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command that `arguments` name and returns its exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    name, *rest = arguments
    if name in ("-V", "--version", "version"):
        print(f"shardmap {__version__}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        known = ", ".join(COMMANDS)
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        return refuse(f"unknown command {name!r}{meant}; the commands are: {known}")
    asks_for_help = not {"-h", "--help"}.isdisjoint(rest)
    for module, extra in () if asks_for_help else command.needs.items():
        if importlib.util.find_spec(module) is None:
            return refuse(
                f"{name} needs {module}, which is not installed; "
                f"in a clone of shardmap, run: pip install '.[{extra}]'"
            )
    try:
        imported = importlib.import_module(command.module)
    except Exception as error:  # For example, JAX refuses a setting in the environment.
        reason = " ".join(str(error).split())
        return refuse(f"{name} cannot start: {type(error).__name__}: {reason}")
    return imported.main(rest)


def help_text() -> str:
    """The text of ``--help``.

    >>> print(help_text().splitlines()[0])
    usage: python -m shardmap COMMAND [options]
    """
    width = max(map(len, COMMANDS))
    rows = (f"  {name:<{width}}  {c.summary}" for name, c in COMMANDS.items())
    return "\n".join(
        [
            "usage: python -m shardmap COMMAND [options]",
            "",
            "commands:",
            *rows,
            "",
            "'python -m shardmap COMMAND --help' shows the options of a command, and",
            "'--version' the version. An installed package has the command 'shardmap'.",
            "The exit code is 0 if all went well, 1 if a check failed, and 2 if the",
            "command could not run; stderr says why.",
        ]
    )


def refuse(reason: str) -> int:
    print(f"python -m shardmap: {reason}", file=sys.stderr)
    return 2


def run(arguments: Sequence[str]) -> int:
    """Runs `main`; ends quietly after Ctrl-C, or if the reader of its output exits."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130  # The code of shells for SIGINT; below, for SIGPIPE.
    except BrokenPipeError:
        # Python flushes its output at exit, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def console() -> None:
    """The script `shardmap`, which installing the package makes."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    console()
