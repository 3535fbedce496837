"""Who imports whom, and that what leans on how JAX is made is in one folder."""

import ast
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "shardmap"
# From the bottom up: a module imports from its own room and from those before it. The
# room of a module is the longest of these names that its own begins with.
ROOMS = [
    "_version",
    "_lazy",
    "_jax",
    "units",
    "source",
    "sharding",
    "arrays",
    "map.primitives",
    "map.collectives",
    "map",
    "map.rules",
    "map.lowering",
    "api",
    "planning.sources",
    "planning.engine",
    "planning.lax.primitives",
    "planning.lax.staged.barrier",
    "planning.lax.indexed",
    "planning.lax.pointwise",
    "planning.lax.on_cpu",
    "planning.lax.control",
    "planning.lax",
    "planning.arguments",
    "planning.run",
    "planning.in_slices",
    "planning.memory",
    "planning.inside",
    "planning",
    "explaining.interconnect",
    "explaining.chips",
    "explaining.machines",
    "explaining.report",
    "explaining.read",
    "explaining.draw",
    "explaining",
    "compat",
    "extend",
    "__init__",
    "commands",
]
# What a function of a lower room may import when it is called, and nothing else: a map
# that is explained, and a spec or plan that is drawn.
DOORS = {
    "shardmap.explaining.api",
    "shardmap.explaining.draw.html",
    "shardmap.explaining.explanation",
}
ROOM_OF_PROGRAMS = "commands"
PROGRAMS = {"__main__", "demo"}


def module_name(path):
    """`shardmap/api/spmap.py` is `api.spmap`, `shardmap/map/__init__.py` is `map`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def room(module):
    if module.partition(".")[0] in PROGRAMS:
        return ROOM_OF_PROGRAMS
    return max((r for r in ROOMS if f"{module}.".startswith(f"{r}.")), key=len)


class _WhenImported(ast.NodeTransformer):
    def visit_FunctionDef(self, node):
        """Without the doors that are opened in it."""
        node.body = [
            each
            for each in node.body
            if not isinstance(each, ast.ImportFrom) or each.module not in DOORS
        ]
        return self.generic_visit(node)

    def visit_If(self, node):
        """What only types need may be behind a door too, as what `explain` returns."""
        is_of_types = ast.unparse(node.test) == "TYPE_CHECKING"
        return self.visit_FunctionDef(node) if is_of_types else node


@functools.cache
def imports(source):
    """The modules of this package that a file imports, `__init__` for its root.

    A string that is the name of one stands for its import: something imports it _lazy.
    """
    found = set()
    for node in ast.walk(_WhenImported().visit(ast.parse(source))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports from the package's root"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inner]
        elif isinstance(node, ast.Constant) and node.value in MODULES:
            names = [node.value]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "shardmap":
                found.add(rest or "__init__")
    return found


def upward_imports(module, source):
    return sorted(
        imported
        for imported in imports(source)
        if ROOMS.index(room(imported)) > ROOMS.index(room(module))
    )


def circles(graph):
    """The modules that import themselves, by way of others, in a graph of imports."""

    def reached(module):
        found, waiting = set(), [module]
        while waiting:
            new = graph.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    return sorted(module for module in graph if module in reached(module))


SOURCES = {module_name(path): path.read_text() for path in PACKAGE.rglob("*.py")}
MODULES = {f"shardmap.{module}" for module in SOURCES}


def test_a_module_imports_only_from_rooms_below_it():
    upward = {m: those for m in SOURCES if (those := upward_imports(m, SOURCES[m]))}
    assert upward == {}


def test_an_upward_import_is_found():
    assert upward_imports("sharding.spec", "from shardmap.api.spmap import spmap") == [
        "api.spmap"
    ]
    assert upward_imports(
        "api.spmap", "def f():\n    import shardmap.commands.picture"
    ) == ["commands.picture"]
    assert upward_imports("map.tracing", "from shardmap.map.rules import remat") == [
        "map.rules.remat"
    ]
    assert upward_imports("explaining.draw.text", "import shardmap") == ["__init__"]
    later = 'importlib.import_module("shardmap.explaining.draw.html")'
    assert upward_imports("_lazy", later) == ["explaining.draw.html"]
    assert upward_imports("map.rules.remat", "from shardmap.map import tracing") == []
    assert upward_imports("__main__", "import shardmap.demo, jax") == []
    door = "from shardmap.explaining.api import explain"
    assert upward_imports("api.function", door) == ["explaining.api"]
    assert upward_imports("api.function", f"def f():\n    {door}") == []
    assert upward_imports("api.function", f"if TYPE_CHECKING:\n    {door}") == []
    types = "if TYPE_CHECKING:\n    from shardmap.planning.plan import ShardPlan"
    assert upward_imports("api.function", types) == ["planning.plan"]


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: imports(source) for module, source in SOURCES.items()}
    assert circles(graph) == []


def test_a_report_is_read_and_drawn_by_rooms_that_do_not_know_each_other():
    known = {
        (module.split(".")[1], imported.split(".")[1])
        for module in SOURCES
        for imported in imports(SOURCES[module])
        if module.startswith("explaining.") and imported.startswith("explaining.")
    }
    for apart in [("draw", "read"), ("read", "draw"), ("report", "draw")]:
        assert apart not in known
    assert {("draw", "report"), ("read", "report")} <= known


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


# What leans on how JAX is made: its private modules, and public objects whose insides
# nobody has promised.
TOUCHES = {
    r"jax\._src|jaxlib\.(?:_|xla_client)": "from jaxlib.xla_client import OpSharding",
    r"module_context|host_callbacks|axis_context": "ctx.module_context.axis_context",
    r"\btokens_(?:in|out)\b|TokenSet": "ctx.replace(tokens_out=None)",
    r"jaxprs_in_params|custom_typechecks": "jex_core.jaxprs_in_params(params)",
    r"jex_core\.find_top_trace|core\.find_top_trace": "jex_core.find_top_trace(())",
    r"type\((?:\w+\.)*_?(?:ctx|context|\w*effect\w*)\)": "type(equation.ctx)()",
    r"jax\.stages\.\w+\.__slots__": "for slot in jax.stages.Lowered.__slots__:",
    r"fancy_primitive_batchers": "batching.fancy_primitive_batchers[p] = rule",
    r"dce_rules|dce_jaxpr": "partial_eval.dce_rules[spmap_p] = rule",
    r"partial_eval_jaxpr_": "partial_eval.partial_eval_jaxpr_custom_rules[p] = rule",
    r"\bname_stack|traceback\.frames": "str(equation.source_info.name_stack)",
    r"newly_manual_axes": 'equation.params["newly_manual_axes"]',
    r"getattr\(\w+, \"(?:jaxpr|consts)\"": 'getattr(jaxpr, "jaxpr", jaxpr)',
    r"(?:repr|str)\((?:\w+\.)*ctx\)": "repr(equation.ctx)",
    r"axis_data\.": "axis_data.spmd_name",
    r"\.eqns\[[^\]]*\]\.(?:primitive|params)|eqns\[-1\]$": "jaxpr.eqns[-1].primitive",
    r"num_consts|ft_in": 'params["num_consts"]',
    r"effect\w*, \"(?:name|input)\"": 'hasattr(effect, "name")',
    r"jax\.__version__|\b(?:__)?version_info": "if jax.__version_info__ < (0, 12):",
    r"\bgloo\b": 'if "gloo" in str(error):',
}


def touches(source):
    return [name for name in TOUCHES if re.search(name, source, re.M)]


def test_how_jax_is_made_matters_in_one_room():
    touching = {m: lines for m in SOURCES if (lines := touches(SOURCES[m]))}
    assert {m: lines for m, lines in touching.items() if room(m) != "_jax"} == {}


def test_a_touch_of_what_is_inside_jax_is_found():
    for name, planted in TOUCHES.items():
        assert touches(f"def f(x):\n    return x\n{planted}\n") == [name]
