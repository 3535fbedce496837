"""Installs the old names in the modules of JAX, for this process.

A module that still exists gets a ``__getattr__`` for its removed names. A removed
module gets a stand-in in `sys.modules`. Both record the places that use a name, for
the list of edits.
"""

import functools
import importlib
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import jax
from jax.sharding import Mesh

from shardmap._jax.context import ArrayType
from shardmap.compat.edits import Use, caller, without_repetitions
from shardmap.compat.mapped_rows import row_of
from shardmap.compat.names import (
    ATTRIBUTES,
    GONE,
    KEYWORDS,
    MODULES,
    NAMES,
    REPLACED,
    exists,
    is_dropped,
    new_name,
    value_of,
)
from shardmap.compat.sources import uses_in
from shardmap.sharding.mesh import submesh

_undo: list[Callable[[], None]] = []
# The lines and names of each file that has used old names.
_noted: dict[str, set[tuple[int, str]]] = {}


def install() -> None:
    """Installs the old names that JAX has removed, for this process.

    Call it before the imports that need them: in the first cell of a notebook, or the
    first lines of a program. `python -m shardmap old` does so for an unedited program.
    A second call has no effect.

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
    _noted.clear()
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
        for name, (_, value) in ATTRIBUTES.items():
            _give_arrays(name, value)
        _index_rows()
        _set(Mesh, "__getitem__", _part_of_mesh)
        for name, positions in KEYWORDS.items():
            _take_keywords(name, positions)
        _set(jax.Device, "__call__", _of_array)
        for name in ("FLAGS", "enable_omnistaging", "omnistaging_enabled"):
            _give_config(name)
        _drop_options()
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Removes everything that `install` has installed.

    Names that a program has already imported still work.
    """
    while _undo:
        _undo.pop()()


def uses() -> list[Use]:
    """Lists the places where files have used old names since `install`, in order.

    If a file has used a name, all places of the name in that file are listed; or the
    line that used it, if the source cannot be read or does not contain the name.

    >>> import jax
    >>> install()
    >>> twice = jax.tree_map(lambda x: 2 * x, [1, 2])
    >>> uninstall()
    >>> [use.name for use in uses()]
    ['jax.tree_map']
    """
    used: list[Use] = []
    for file, noted in list(_noted.items()):
        written = [
            use
            for use in _written_in(file)
            # Only the run knows which are elements of mapped results.
            if use.edit is None or (use.line, use.name) in noted
        ]
        told = {(use.line, use.name) for use in written if use.edit}
        known = {use.name for use in written if not use.edit}
        stars = {(use.line, use.name) for use in written if use.form == "from"}
        names = {name for _, name in noted}
        used += [use for use in written if use.name in names or use.form == "import"]
        used += [
            Use(file, line, name, "name")
            for line, name in noted
            # `from module import *` gets all names of the module.
            if not (name in known or (line, name) in told)
            and (line, name.rpartition(".")[0]) not in stars
        ]
    return without_repetitions(used)


def _written_in(file: str) -> list[Use]:
    try:
        return uses_in(file, "".join(linecache.getlines(file)))
    except SyntaxError:
        return []


def _stand_in(name: str) -> None:
    """Installs a module in place of a removed one."""
    module = types.ModuleType(name, f"Stands in for {name}, which JAX has no more.")
    module.__spec__ = ModuleSpec(name, None)
    instead = MODULES.get(name)

    def names() -> list[str]:
        names_here = {
            old.rpartition(".")[2] for old in NAMES if old.startswith(f"{name}.")
        }
        there = vars(value_of(instead)) if instead else {}
        return sorted(names_here | {each for each in there if not each.startswith("_")})

    def attribute(asked: str) -> Any:
        old = f"{name}.{asked}"
        if asked == "__all__":
            _note(name)
            return names()
        new = new_name(old)
        if asked.startswith("__") or new is None or not exists(new):
            raise AttributeError(f"module {name!r} has no attribute {asked!r}")
        _note(old)
        return value_of(new)

    # Python calls these for names that a module does not have.
    vars(module).update(__getattr__=attribute, __dir__=names)
    sys.modules[name] = module
    _undo.append(lambda: sys.modules.__delitem__(name))


def _amend(module: types.ModuleType, names: set[str]) -> None:
    """Gives a module its removed names."""
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
            return sys.modules[old] if old in GONE else value_of(new_name(old) or "")
        if before is not None:
            return before(asked)
        raise AttributeError(f"module {module.__name__!r} has no attribute {asked!r}")

    for name in instead & space.keys():
        _undo.append(functools.partial(space.__setitem__, name, space.pop(name)))
    _set(module, "__getattr__", attribute)


def _has(module: types.ModuleType, name: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hasattr(module, name)


def _give_arrays(name: str, value: Callable[[jax.Array], Any]) -> None:
    """Gives arrays a removed attribute."""

    def attribute(array: jax.Array) -> Any:
        _note(f"jax.Array.{name}")
        return value(array)

    _set(ArrayType, name, property(attribute))


def _index_rows() -> None:
    """Makes an element of a mapped result the buffer of its device, as it was.

    JAX runs a program on all devices, which takes a hundred times as long.
    """
    of_jax = vars(ArrayType)["__getitem__"], vars(ArrayType)["__iter__"]
    noted: set[tuple[types.CodeType, int]] = set()

    def note(frame: types.FrameType, name: str) -> None:
        place = frame.f_code, frame.f_lasti
        if place not in noted:
            noted.add(place)
            _note(f"jax.Array.{name}")

    def getitem(array: jax.Array, index: Any, /) -> Any:
        row = row_of(array, index)
        if row is None:
            return of_jax[0](array, index)
        note(sys._getframe(1), "__getitem__")
        return row

    def iterate(array: jax.Array) -> Iterator[Any]:
        if not (array.ndim and len(array)) or row_of(array, 0) is None:
            return of_jax[1](array)
        note(sys._getframe(1), "__iter__")
        return (row_of(array, i) for i in range(len(array)))

    _set(ArrayType, "__getitem__", getitem)
    _set(ArrayType, "__iter__", iterate)


def _part_of_mesh(mesh: Mesh, axis_names: Sequence[str]) -> Mesh:
    """What ``mesh[("y",)]`` gives."""
    _note("jax.sharding.Mesh.__getitem__")
    return submesh(mesh, axis_names)


def _take_keywords(name: str, positions: Mapping[str, int]) -> None:
    """Has a function take its old keyword arguments."""
    module, _, function = name.rpartition(".")
    of_jax = value_of(name)

    @functools.wraps(of_jax)
    def taking(*args: Any, **kwargs: Any) -> Any:
        for old in sorted(positions.keys() & kwargs.keys(), key=positions.__getitem__):
            missing = positions[old] - len(args)
            if missing < 0:
                break  # It is given twice, which JAX refuses.
            _note(name)
            args = (*args, *[None] * missing, kwargs.pop(old))
        return of_jax(*args, **kwargs)

    _set(sys.modules[module], function, taking)


def _of_array(device: jax.Device) -> jax.Device:
    """What ``x.device()`` gives."""
    _note("jax.Array.device")
    return device


def _give_config(name: str) -> None:
    """Gives `jax.config` a removed attribute."""

    def attribute(_: object) -> Any:
        _note(f"jax.config.{name}")
        return value_of(NAMES[f"jax.config.{name}"])

    _set(type(jax.config), name, property(attribute))


def _drop_options() -> None:
    """Has `jax.config.update` take options that JAX has dropped, without effect."""
    of_jax = type(jax.config).update

    @functools.wraps(of_jax)
    def update(config: Any, name: str, value: object) -> None:
        if is_dropped(name, value):
            _note(f"jax.config.update({name!r})")
        else:
            of_jax(config, name, value)

    _set(type(jax.config), "update", update)


def _set(owner: Any, name: str, value: object) -> None:
    """Sets an attribute, until `uninstall`."""
    _undo.append(
        functools.partial(setattr, owner, name, vars(owner)[name])
        if name in vars(owner)
        else functools.partial(delattr, owner, name)
    )
    setattr(owner, name, value)


def _note(name: str) -> None:
    """Records that the program has used an old name."""
    file, line = caller()
    _noted.setdefault(file, set()).add((line, name))
