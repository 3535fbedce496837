"""Parsing of arguments, and errors about them."""

import argparse
import ast
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

# Modules whose names may stand in front of a name.
PREFIXES = ("sm.", "shardmap.", "jax.sharding.", "jax.")


class Parser(argparse.ArgumentParser):
    """Parses the arguments of one command.

    A wrong argument ends the program with code 2 and one line on stderr, such as
    ``python -m shardmap show: --shape needs whole numbers, got 'x'``.

    Args:
      name: the command's.
      description: what it does.
      examples: command lines that work as they stand.
    """

    def __init__(self, name: str, description: str, examples: Sequence[str]) -> None:
        super().__init__(
            prog=f"python -m shardmap {name}",
            description=description,
            epilog="\n  ".join(["examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As `parse_args`, but does not take a value such as ``-5,-1`` for an option.

        The option that it belongs to reports the wrong value.
        """
        options = self._option_string_actions
        joined: list[str] = []
        for text in arguments:
            if joined and joined[-1] in options and re.match(r"-[\d.]+,", text):
                joined[-1] += f"={text}"
            else:
                joined.append(text)
        return self.parse_args(joined)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)}\n")


def one_line(message: str) -> str:
    """The first paragraph of a message, on one line.

    >>> one_line("two lines\\nof bad news\\n\\nand much advice")
    'two lines of bad news'
    """
    paragraphs = "\n".join(line.strip() for line in message.splitlines()).strip()
    return " ".join(paragraphs.split("\n\n")[0].split())


def evaluate(text: str, what: str, lookup: Callable[[str], Any]) -> Any:
    """Evaluates a small Python expression with the functions of `lookup`.

    Args:
      text: constants, tuples, lists, dicts, and calls and subscripts of names.
      what: what the text is, for errors.
      lookup: the value of a name; `LookupError` if it is not known.

    Raises:
      ValueError: the text is anything else.
      Exception: what a call or a subscript raises.

    >>> evaluate("{'a': add((1, 2))}", "the sum", {"add": sum}.__getitem__)
    {'a': 3}
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd numbers and strings.
            node = ast.parse(text.strip(), mode="eval").body
            return _Evaluation(what, lookup).value(node)
    except (SyntaxError, RecursionError, MemoryError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else "it is too deep"
        raise ValueError(f"{what} {_short(text)} cannot be read: {problem}") from None


def _short(text: str) -> str:
    return repr(text) if len(text) < 80 else f"{text[:80]!r}..."


class _Evaluation:
    def __init__(self, what: str, lookup: Callable[[str], Any]) -> None:
        self.what, self.lookup = what, lookup

    def value(self, node: ast.AST | None) -> Any:
        """Evaluates a node; None is the key of ``**`` in a dict."""
        match node:
            case ast.Constant(
                value=None | bool() | int() | float() | str() as constant
            ):
                return constant
            case ast.UnaryOp(
                op=ast.USub(), operand=ast.Constant(value=int() | float())
            ):
                return -self.value(node.operand)
            case ast.Tuple(elts=parts):
                return tuple(map(self.value, parts))
            case ast.List(elts=parts):
                return list(map(self.value, parts))
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {self.value(key): self.value(value) for key, value in pairs}
            case ast.Name() | ast.Attribute():
                return self.named(node)
            case ast.Subscript(value=ast.Name() as name):
                return self.named(name)[self.value(node.slice)]
            case ast.Call(func=ast.Name() | ast.Attribute(), args=args, keywords=named):
                options = {
                    keyword.arg: self.value(keyword.value)
                    for keyword in named
                    if keyword.arg is not None
                }
                if len(options) == len(named):
                    return self.named(node.func)(*map(self.value, args), **options)
        wrong = "**" if node is None else _short(ast.unparse(node))
        raise ValueError(f"{self.what} cannot have {wrong} in it")

    def named(self, node: ast.AST) -> Any:
        name = ast.unparse(node)
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        try:
            return self.lookup(name)
        except LookupError:
            raise ValueError(
                f"{self.what} has an unknown name {_short(name)}"
            ) from None
