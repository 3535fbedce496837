"""Parsing of arguments, and errors about them."""

import argparse
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Parses the arguments of one command.

    A wrong argument ends the program with code 2 and one line on stderr, such as
    ``python -m shardmap picture: --shape needs whole numbers, got 'x'``.

    Args:
      name: the name of the command.
      description: its description.
      examples: command lines that work as written.
    """

    def __init__(self, name: str, description: str, examples: Sequence[str]) -> None:
        super().__init__(
            prog=f"python -m shardmap {name}",
            description=description,
            epilog="\n  ".join(["examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)}\n")


def one_line(message: str) -> str:
    """The first paragraph of a message, on one line.

    >>> one_line("two lines\\nof bad news\\n\\nand much advice")
    'two lines of bad news'
    """
    paragraphs = "\n".join(line.strip() for line in message.splitlines()).strip()
    return " ".join(paragraphs.split("\n\n")[0].split())


def evaluate(text: str, what: str, names: Mapping[str, Any]) -> Any:
    """Evaluates a Python expression of the command line.

    Args:
      text: the expression, written by the user of the command.
      what: what the user gave, for errors.
      names: the names that it may use.

    Raises:
      ValueError: it cannot be evaluated.

    >>> evaluate("{'a': add((1, 2))}", "--sum", {"add": sum})
    {'a': 3}
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd numbers and strings.
            return eval(text.strip(), {"__builtins__": {}}, names)
    except Exception as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"{what} cannot be read: {reason}") from None
