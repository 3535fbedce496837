"""Finds old names in Python source, without running it."""

import ast
import types
import warnings

from shardmap.compat.edits import Form, Use, without_repetitions
from shardmap.compat.names import (
    ATTRIBUTES,
    EDITS,
    GONE,
    KEYWORDS,
    WITHOUT_STAND_IN,
    exists,
    is_dropped,
    new_name,
    value_of,
)
from shardmap.compat.rows import elements_in

# The libraries whose names are looked up.
LIBRARIES = {name.partition(".")[0] for name in ("jax", *WITHOUT_STAND_IN)}


def uses_in(file: str, source: str | bytes) -> list[Use]:
    """The uses of old names.

    Raises:
      SyntaxError: the source is not Python's.

    >>> [use] = uses_in("train.py", "import jax\\njax.tree_map(f, x)\\njax.mask(f)")
    >>> use.line, use.name, use.form
    (2, 'jax.tree_map', 'name')
    """
    return without_repetitions(_Finder(file, source).uses)


def unknown_in(source: str | bytes) -> list[tuple[int, str, str]]:
    """The lines, the names that nothing stands in for, and what to do about each.

    >>> unknown_in("import jax\\njax.tree_map(f, x)\\njax.mask(f)")
    [(3, 'jax.mask', 'not in this JAX, and shardmap knows no other')]
    """
    unknown = set()
    for line, name in _Finder("", source).others:
        gone = next((g for g in WITHOUT_STAND_IN if f"{name}.".startswith(f"{g}.")), "")
        if gone:
            unknown.add((line, gone, WITHOUT_STAND_IN[gone]))
        elif name.startswith("jax.") and not _is_in_jax(name):
            remedy = "not in this JAX, and shardmap knows no other"
            unknown.add((line, name, remedy))
    return sorted(unknown)


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str | bytes) -> None:
        self.file = file
        self.uses: list[Use] = []
        self.others: set[tuple[int, str]] = set()
        # The names of the file, as dotted names in JAX.
        self.meanings: dict[str, str] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd strings.
            tree = ast.parse(source)
            self.visit(tree)
        for line, method, edit in elements_in(tree, self.resolve):
            name = f"jax.Array.{method}"
            self.uses.append(Use(file, line, name, "name", edit=edit))

    def resolve(self, node: ast.expr) -> str | None:
        """The dotted name of an expression, in JAX if it is from there."""
        if not isinstance(_root(node), ast.Name):
            return None
        first, *rest = ast.unparse(node).split(".")
        return ".".join([self.meanings.get(first, first), *rest])

    def look(self, node: ast.alias | ast.Attribute, name: str, form: Form) -> bool:
        """Records the longest old name that ``name`` begins with."""
        parts = name.split(".")
        for k in range(len(parts), 1, -1):
            if k < len(parts) and ".".join(parts[:k]) in GONE:
                break
            if self.note(node, ".".join(parts[:k]), form):
                return True
        self.others.add((node.lineno, name))
        return False

    def note(self, node: ast.alias | ast.Attribute, name: str, form: Form) -> bool:
        new = new_name(name)
        known = name in GONE if new is None else exists(new)
        if known:
            asname = node.asname if isinstance(node, ast.alias) else None
            self.uses.append(Use(self.file, node.lineno, name, form, asname))
        return known

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            if root not in LIBRARIES:
                continue
            if alias.asname is None:
                self.meanings[root] = root
            else:
                self.meanings[alias.asname] = alias.name
            self.look(alias, alias.name, "import")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or module.partition(".")[0] not in LIBRARIES:
            return
        for alias in node.names:
            if alias.name == "*":
                self.look(alias, module, "from")
                continue
            name = f"{module}.{alias.name}"
            self.meanings[alias.asname or alias.name] = name
            self.look(alias, name, "from")

    def visit_Call(self, node: ast.Call) -> None:
        function = self.resolve(node.func) or ""
        old = KEYWORDS.get(function, {}).keys() & {each.arg for each in node.keywords}
        if old:
            self.uses.append(
                Use(self.file, node.lineno, function, "name", edit=EDITS[function])
            )
        is_device = isinstance(node.func, ast.Attribute) and node.func.attr == "device"
        if is_device and self.meanings and not (node.args or node.keywords):
            of = ast.unparse(node.func)
            self.uses.append(
                Use(
                    self.file,
                    node.lineno,
                    "jax.Array.device",
                    "name",
                    edit=f"{of}() -> {of}",
                )
            )
        if function.replace("config.config", "config") == "jax.config.update":
            given = [getattr(arg, "value", None) for arg in node.args]
            option, value, *_ = *given, None, None
            if is_dropped(option, value):
                name = f"jax.config.update({option!r})"
                self.uses.append(Use(self.file, node.lineno, name, "name"))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        first, *rest = ast.unparse(node).split(".")
        known = isinstance(_root(node), ast.Name) and first in self.meanings
        if known and self.look(node, ".".join([self.meanings[first], *rest]), "name"):
            return
        # Slices have `indices` too: only a run can tell them from arrays.
        if node.attr in ATTRIBUTES and not hasattr(slice, node.attr):
            name = f"jax.Array.{node.attr}"
            self.uses.append(Use(self.file, node.lineno, name, "name"))
        if not known:
            self.generic_visit(node)


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _is_in_jax(name: str) -> bool:
    """Whether JAX has a dotted name; only the part in modules is checked.

    >>> _is_in_jax("jax.numpy.sin.anything"), _is_in_jax("jax.mask")
    (True, False)
    """
    parts = name.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some names are deprecated.
        for k in range(1, len(parts) + 1):
            path = ".".join(parts[:k])
            if not exists(path):
                return False
            if not isinstance(value_of(path), types.ModuleType):
                return True
    return True
