"""What is imported when it is first used: public names, drawings, the log."""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class _Module:
    """A module that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


logging = _Module("absl.logging")
"""Nothing is logged before the first call of a map."""

_providers: dict[str, str] = {}


def provide(**modules: str) -> None:
    """Says which module has each function that modules below it ask for."""
    _providers.update(modules)


def ask(name: str) -> Any:
    """A function of a module above, which is imported when it is first asked for."""
    return getattr(importlib.import_module(_providers[name]), name)


def attach(
    package: str,
    modules: Mapping[str, Sequence[str]],
    public: Sequence[str],
    subpackages: Sequence[str] = (),
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes a package's ``__getattr__`` and ``__dir__``; call it while it loads.

    Some subpackages have the name of a public function, such as `plan`. Python makes a
    subpackage an attribute of its package when it is first imported, which would hide
    the function. So the subpackages are imported here, and the attributes deleted.
    ``from package.plan import module`` works; ``import package.plan.module as x`` looks
    for the module in the function, and fails.

    Args:
      package: its name.
      modules: the names that each module brings.
      public: all public names of the package. ``dir`` shows them and the subpackages.
      subpackages: public modules of the package.
      elsewhere: names that are looked for here, and what to use for them.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    attributes = vars(sys.modules[package])
    inside = {module.removeprefix(f"{package}.").split(".")[0] for module in modules}
    for name in sorted(inside):
        importlib.import_module(f"{package}.{name}")
        del attributes[name]

    def get(name: str) -> Any:
        if name in subpackages:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            text = f"module {package!r} has no attribute {name!r}"
            if instead := (elsewhere or {}).get(name):
                text += f". Use {instead}."
            elif close := difflib.get_close_matches(name, public, 2, 0.75):
                meant = " or ".join(map(repr, sorted(close, key=len)))
                text += f". Did you mean {meant}?"
            raise AttributeError(text)
        value = getattr(importlib.import_module(module_of[name]), name)
        attributes[name] = value
        return value

    return get, lambda: sorted([*public, *subpackages])
