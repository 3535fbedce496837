"""The old names in JAX's own places, for this process, when asked.

A module that still exists gets a ``__getattr__`` that gives the names it has lost; one
that does not gets a stand-in in `sys.modules`. Both note who asks for what, so that the
places to edit are known in the end.
"""

import dis
import functools
import importlib
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from jax import Array

from shardmap._jax.arrays import ArrayType
from shardmap.compat.edits import Form, Use, without_repetitions
from shardmap.compat.names import (
    ATTRIBUTES,
    GONE,
    MODULES,
    NAMES,
    REPLACED,
    new_name,
)
from shardmap.sharding.spec import spec_of

STANDARD = sysconfig.get_path("stdlib")
PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
OURS = str(Path(__file__).parent.parent)
# Instructions that ask a module for a name.
IMPORT_FROM = dis.opmap["IMPORT_FROM"]
IMPORT_STAR = dis.opmap.get("IMPORT_STAR"), dis.opmap.get("CALL_INTRINSIC_1")


_undo: list[Callable[[], None]] = []
_uses: dict[Use, None] = {}


def install() -> None:
    """Puts the old names that JAX has lost in their places, for this process.

    Call it before the imports that need them: a notebook's first cell, or the first
    lines of a program. `python -m shardmap old` does it for a program as it is.
    Installed twice is installed once.

    >>> import jax
    >>> install()
    >>> jax.tree_map(lambda x: 2 * x, [1, 2])
    [2, 4]
    >>> uninstall()
    >>> hasattr(jax, "tree_map")
    False
    """
    if _undo:
        return
    _uses.clear()
    names: dict[str, set[str]] = {}
    for old in (*NAMES, *GONE):
        module, _, name = old.rpartition(".")
        names.setdefault(module, set()).add(name)
    there = [importlib.import_module(name) for name in sorted(names.keys() - GONE)]
    try:
        for name in sorted(GONE):
            _stand_in(name)
        for existing in there:
            _amend(existing, names[existing.__name__])
        for name in ATTRIBUTES:
            _give_arrays(name)
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Takes back what `install` has put anywhere; JAX is then as it was before.

    What a program has imported under an old name it keeps.
    """
    while _undo:
        _undo.pop()()


def uses() -> list[Use]:
    """Where old names have been used since `install`, in the order of the files.

    >>> import jax
    >>> install()
    >>> twice = jax.tree_map(lambda x: 2 * x, [1, 2])
    >>> uninstall()
    >>> [use.name for use in uses()]
    ['jax.tree_map']
    """
    return without_repetitions(list(_uses))


@functools.cache
def _value(new: str) -> Any:
    """What a dotted name means.

    >>> _value("jax.config").__class__.__name__
    'Config'
    """
    first, *rest = new.split(".")
    path, found = first, importlib.import_module(first)
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def exists(new: str) -> bool:
    """Whether a dotted name means anything.

    >>> exists("jax.numpy.sin"), exists("jax.numpy.sine")
    (True, False)
    """
    try:
        _value(new)
    except (AttributeError, ImportError):
        return False
    return True


def _stand_in(name: str) -> None:
    """Puts a module in the place of one that is gone."""
    module = types.ModuleType(name, f"Stands in for {name}, which JAX has no more.")
    module.__spec__ = ModuleSpec(name, None)
    instead = MODULES.get(name)

    def names() -> list[str]:
        own = {old.rpartition(".")[2] for old in NAMES if old.startswith(f"{name}.")}
        there = vars(_value(instead)) if instead else {}
        return sorted(own | {each for each in there if not each.startswith("_")})

    def attribute(asked: str) -> Any:
        old = f"{name}.{asked}"
        if asked == "__all__":
            _note(name, is_import=True)
            return names()
        new = new_name(old)
        if asked.startswith("__") or new is None or not exists(new):
            raise AttributeError(f"module {name!r} has no attribute {asked!r}")
        _note(old)
        return _value(new)

    # Python looks there for what a module does not have.
    vars(module).update(__getattr__=attribute, __dir__=names)
    sys.modules[name] = module
    _undo.append(lambda: sys.modules.__delitem__(name))


def _amend(module: types.ModuleType, names: set[str]) -> None:
    """Gives a module the names that it has lost."""
    space = vars(module)
    before = space.get("__getattr__")
    instead = {
        name
        for name in names
        if f"{module.__name__}.{name}" in REPLACED or not _has(module, name)
    }

    def attribute(asked: str) -> Any:
        old = f"{module.__name__}.{asked}"
        if asked in instead:
            _note(old)
            return sys.modules[old] if old in GONE else _value(new_name(old) or "")
        if before is not None:
            return before(asked)
        raise AttributeError(f"module {module.__name__!r} has no attribute {asked!r}")

    for name in instead & space.keys():
        _undo.append(functools.partial(space.__setitem__, name, space.pop(name)))
    space["__getattr__"] = attribute
    _undo.append(
        functools.partial(space.pop, "__getattr__", None)
        if before is None
        else functools.partial(space.__setitem__, "__getattr__", before)
    )


def _has(module: types.ModuleType, name: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hasattr(module, name)


def _give_arrays(name: str) -> None:
    """Gives arrays an attribute that they have lost."""
    before = vars(ArrayType).get(name)

    def attribute(array: Array) -> Any:
        _note(f"jax.Array.{name}")
        if name == "sharding_spec":
            return spec_of(array)
        buffers = [shard.data for shard in array.addressable_shards]
        return buffers if name == "device_buffers" else buffers[0]

    setattr(ArrayType, name, property(attribute))
    _undo.append(
        functools.partial(delattr, ArrayType, name)
        if before is None
        else functools.partial(setattr, ArrayType, name, before)
    )


def _note(name: str, is_import: bool = False) -> None:
    """Notes that the caller's caller, or who asked it to, has used an old name."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return  # Looks whether it is there; who imports it asks once more.
        frame = frame.f_back
    instruction = frame.f_code.co_code[frame.f_lasti]
    if instruction in IMPORT_STAR and not is_import:
        return  # All names of a module are asked for, which has been noted.
    is_import |= instruction == IMPORT_FROM
    form: Form = "from" if is_import else "name"
    _uses[Use(frame.f_code.co_filename, frame.f_lineno, name, form)] = None


@functools.cache
def _is_machinery(file: str) -> bool:
    """Whether a file is Python's or ours, and asks for somebody else."""
    return file.startswith(("<frozen", OURS)) or (
        file.startswith(STANDARD) and not file.startswith(PACKAGES)
    )
