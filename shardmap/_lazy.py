"""Lazy imports of public names."""

import ast
import difflib
import importlib
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attach(
    package: str, elsewhere: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes a package's ``__getattr__``, ``__dir__`` and ``__all__``.

    The stub file of the package, ``__init__.pyi``, says which module has each name.
    ``__all__`` and ``dir`` leave out the names of the submodule ``extend``.

    Args:
      package: the name of the package, which is being imported.
      elsewhere: names of other libraries, and their replacements. Those that the
        submodule ``compat`` has are known.
    """
    attributes = vars(sys.modules[package])
    stub = pathlib.Path(attributes["__file__"]).with_suffix(".pyi").read_text()
    module_of = {
        alias.name: statement.module or ""
        for statement in ast.parse(stub).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    submodules = [name for name, module in module_of.items() if module == package]
    shown = [n for n, module in module_of.items() if module != f"{package}.extend"]

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            text = f"module {package!r} has no attribute {name!r}"
            if instead := elsewhere.get(name):
                text += f". Use {instead}."
            elif not name.startswith("_") and hasattr(get("compat"), name):
                text += f". Use {package}.compat.{name}, for old programs."
            elif close := difflib.get_close_matches(name, module_of, 2, 0.75):
                meant = " or ".join(map(repr, sorted(close, key=len)))
                text += f". Did you mean {meant}?"
            raise AttributeError(text)
        value = getattr(importlib.import_module(module_of[name]), name)
        attributes[name] = value
        return value

    public = sorted(["__version__", *shown])
    return get, lambda: public, [name for name in public if name not in submodules]
