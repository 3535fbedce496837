"""What is imported when it is first used: public names, and what notebooks show."""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def html_of(value: Any) -> str:
    """What a notebook shows of a value of ours.

    It is drawn in a room above that of the value, imported when a notebook asks.
    """
    shown = importlib.import_module("shardmap.explain.draw.shown")
    text: str = shown.html_of(value)
    return text


def attach(
    package: str,
    modules: Mapping[str, Sequence[str]],
    public: Sequence[str],
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes a package's ``__getattr__`` and ``__dir__``, to be called while it loads.

    A subpackage that is called like one of the names would hide it: Python makes it an
    attribute of the package when it is first imported, and then never again. So it is
    imported here, which is to cost nothing, and the attribute taken away. What is in
    it is there by ``from package.name import module``; ``import package.name.module as
    x`` looks for it in what hides the subpackage, and fails.

    Args:
      package: its name.
      modules: the names that each module brings.
      public: all public names of the package, which ``dir`` shows.
      elsewhere: names that are looked for here, and what to use for them.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    attributes = vars(sys.modules[package])
    for name in module_of:
        if any(module.startswith(f"{package}.{name}.") for module in modules):
            importlib.import_module(f"{package}.{name}")
            del attributes[name]

    def get(name: str) -> Any:
        if name not in module_of:
            text = f"module {package!r} has no attribute {name!r}"
            if instead := (elsewhere or {}).get(name):
                text += f". Use {instead}."
            elif close := difflib.get_close_matches(name, public, 1):
                text += f". Did you mean {close[0]!r}?"
            raise AttributeError(text)
        value = getattr(importlib.import_module(module_of[name]), name)
        attributes[name] = value
        return value

    return get, lambda: sorted(public)
