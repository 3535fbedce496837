"""Finds elements that are taken from mapped results, in Python source.

``y[0]`` of a result was the buffer of device 0. Now it is a program on all devices.
"""

import ast
from collections.abc import Callable, Iterator

_PMAPS = {
    f"{module}.{name}"
    for module in ("jax", "jax.api", "jax.experimental.maps")
    for name in ("pmap", "soft_pmap")
}
_TREE_MAPS = {"jax.tree.map", "jax.tree_map", "jax.tree_multimap", "jax.api.tree_map"}
_TREE_MAPS |= {"jax.tree_util.tree_map", "jax.tree_util.tree_multimap"}

Resolve = Callable[[ast.expr], str | None]
"""Gives the dotted name that an expression has in its module, such as ``jax.pmap``."""


def elements_in(tree: ast.Module, resolve: Resolve) -> Iterator[tuple[int, str, str]]:
    """Yields the line, the method of arrays and the edit of each place.

    Only assignments in the file tell what is a result: ``y = jax.pmap(f)(x)``, or the
    same with a name for ``jax.pmap(f)``.
    """
    nodes = list(ast.walk(tree))

    def is_pmap(node: ast.expr) -> bool:
        """Whether this is `jax.pmap`, perhaps with options."""
        if isinstance(node, ast.Call) and node.args:
            is_partial = resolve(node.func) in ("partial", "functools.partial")
            return is_partial and is_pmap(node.args[0])
        return resolve(node) in _PMAPS

    mapped = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and any(map(is_pmap, node.decorator_list))
    }

    def is_mapped(node: ast.expr) -> bool:
        """Whether this is a function that `jax.pmap` has made."""
        is_new = isinstance(node, ast.Call) and is_pmap(node.func)
        return is_new or ast.unparse(node) in mapped

    def targets_of(is_kind: Callable[[ast.expr], bool]) -> set[str]:
        return {
            ast.unparse(part)
            for node in nodes
            if isinstance(node, ast.Assign) and is_kind(node.value)
            for target in node.targets
            for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        }

    mapped |= targets_of(is_mapped)
    results = targets_of(
        lambda node: isinstance(node, ast.Call) and is_mapped(node.func)
    )

    def is_result(node: ast.expr) -> bool:
        """Whether this is a result, or an array in it."""
        if isinstance(node, ast.Call):
            return is_mapped(node.func)
        if ast.unparse(node) in results:
            return True
        if isinstance(node, ast.Attribute):
            return is_result(node.value)
        if isinstance(node, ast.Subscript) and _index(node.slice) is None:
            return is_result(node.value)
        return False

    # The second index of each `y[2][0]`.
    second = {
        node.value: index
        for node in nodes
        if isinstance(node, ast.Subscript) and (index := _index(node.slice)) is not None
    }
    has_maps = any(isinstance(node, ast.expr) and is_pmap(node) for node in nodes)
    for node in nodes:
        if isinstance(node, ast.Subscript):
            index = _index(node.slice)
            if index is not None and is_result(node.value):
                of = ast.unparse(node.value)
                edit = f"{of}[{index}] -> shardmap.shard_of({of}, {index})"
                if (then := second.get(node)) is not None:
                    edit = (
                        f"{of}[{index}][{then}] -> shardmap.shard_of({of}, {index})"
                        f"[{then}]; if {of} is a tuple, shardmap.shard_of"
                        f"({of}[{index}], {then})"
                    )
                yield node.lineno, "__getitem__", edit
        elif isinstance(node, ast.For | ast.comprehension) and is_result(node.iter):
            of = ast.unparse(node.iter)
            edit = f"in {of} -> in shardmap.unstack({of})"
            yield node.iter.lineno, "__iter__", edit
        elif has_maps and isinstance(node, ast.Call) and len(node.args) == 2:
            index = _index_of_leaves(node.args[0])
            if index is not None and resolve(node.func) in _TREE_MAPS:
                of = ast.unparse(node.args[1])
                new = f"shard_of({of}, {index})" if index else f"unreplicate({of})"
                edit = f"{ast.unparse(node)} -> shardmap.{new}"
                yield node.args[0].lineno, "__getitem__", edit


def _index(node: ast.expr) -> int | None:
    """An int that is written as such."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None


def _index_of_leaves(node: ast.expr) -> int | None:
    """The index of ``lambda x: x[0]``."""
    if not (isinstance(node, ast.Lambda) and isinstance(node.body, ast.Subscript)):
        return None
    of = node.body.value
    is_leaf = isinstance(of, ast.Name) and [of.id] == [a.arg for a in node.args.args]
    return _index(node.body.slice) if is_leaf else None
