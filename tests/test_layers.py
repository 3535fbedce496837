"""The house rules: who imports whom, what is public, how long a file may be."""

import ast
import inspect
import operator
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import shardmap
import shardmap.compat
from tests.command_line import python

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "shardmap"
# From the bottom up: a module imports from its own room and from those before it. The
# room of a module is the longest of these names that its own begins with.
ROOMS = [
    "later",
    "_jax",
    "units",
    "sharding",
    "arrays.sources",
    "arrays",
    "map.primitives",
    "map.collectives",
    "map",
    "map.rules",
    "map.lowering",
    "plan.engine",
    "plan.lax.control",
    "plan.lax.indexed",
    "plan.lax",
    "plan.run",
    "plan.away",
    "plan.away.folder",
    "plan.in_slices",
    "plan.inside",
    "plan",
    "explain.counts",
    "explain.interconnect",
    "explain.report",
    "explain.read",
    "explain.draw",
    "explain",
    "api.calls",
    "api.elements",
    "api.blocks",
    "api.partitions",
    "api",
    "compat",
    "__init__",
    "commands",
]
ROOM_OF_PROGRAMS = "commands"
PROGRAMS = {"__main__", "demo"}
LONGEST_FILE = 400
MOST_FILES = 11


def module_name(path):
    """`shardmap/api/spmap.py` is `api.spmap`, `shardmap/map/__init__.py` is `map`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def room(module):
    if module.partition(".")[0] in PROGRAMS:
        return ROOM_OF_PROGRAMS
    return max((r for r in ROOMS if f"{module}.".startswith(f"{r}.")), key=len)


def imports(source):
    """The modules of this package that a file imports, `__init__` for its root.

    A string that is the name of one stands for its import: something imports it later.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
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


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_imports_only_from_rooms_below_it(module):
    assert upward_imports(module, SOURCES[module]) == []


def test_an_upward_import_is_found():
    assert upward_imports("sharding.spec", "from shardmap.api.spmap import spmap") == [
        "api.spmap"
    ]
    assert upward_imports(
        "api.spmap", "def f():\n    import shardmap.commands.show"
    ) == ["commands.show"]
    assert upward_imports("map.tracing", "from shardmap.map.rules import remat") == [
        "map.rules.remat"
    ]
    assert upward_imports("explain.draw.text", "import shardmap") == ["__init__"]
    later = 'importlib.import_module("shardmap.explain.draw.shown")'
    assert upward_imports("later", later) == ["explain.draw.shown"]
    assert upward_imports("map.rules.remat", "from shardmap.map import tracing") == []
    assert upward_imports("__main__", "import shardmap.demo, jax") == []


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: imports(source) for module, source in SOURCES.items()}
    assert circles(graph) == []


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


def test_no_folder_has_too_many_files():
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    counts = {
        str(folder.relative_to(ROOT)): len(files)
        for folder in folders
        if (files := [f for f in folder.glob("*.py") if f.stem != "__init__"])
    }
    assert {folder: n for folder, n in counts.items() if n > MOST_FILES} == {}


# What leans on how JAX is made: its private modules, and public objects whose insides
# nobody has promised.
TOUCHES = {
    r"jax\._src|jaxlib\._": "import jax._src.core",
    r"module_context|host_callbacks|axis_context": "ctx.module_context.axis_context",
    r"\btokens_(?:in|out)\b|TokenSet": "ctx.replace(tokens_out=None)",
    r"jaxprs_in_params|custom_typechecks": "jex_core.jaxprs_in_params(params)",
    r"jex_core\.find_top_trace|core\.find_top_trace": "jex_core.find_top_trace(())",
    r"type\((?:\w+\.)*_?(?:ctx|context|\w*effect\w*)\)": "type(equation.ctx)()",
    r"jax\.stages\.\w+\.__slots__": "for slot in jax.stages.Lowered.__slots__:",
    r"fancy_primitive_batchers": "batching.fancy_primitive_batchers[p] = rule",
    r"dce_rules|dce_jaxpr": "partial_eval.dce_rules[spmap_p] = rule",
    r"partial_eval_jaxpr_": "partial_eval.partial_eval_jaxpr_custom_rules[p] = rule",
    r"newly_manual_axes": 'equation.params["newly_manual_axes"]',
    r"getattr\(\w+, \"(?:jaxpr|consts)\"": 'getattr(jaxpr, "jaxpr", jaxpr)',
    r"(?:repr|str)\((?:\w+\.)*ctx\)": "repr(equation.ctx)",
    r"axis_data\.": "axis_data.spmd_name",
    r"\.eqns\[[^\]]*\]\.(?:primitive|params)|eqns\[-1\]$": "jaxpr.eqns[-1].primitive",
    r"num_consts|ft_in": 'params["num_consts"]',
    r"effect\w*, \"(?:name|input)\"": 'hasattr(effect, "name")',
    r"jax\.__version__|version_info": "if jax.__version_info__ < (0, 12):",
    r"\bgloo\b": 'if "gloo" in str(error):',
}


def touches(source):
    return [name for name in TOUCHES if re.search(name, source, re.M)]


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_how_jax_is_made_matters_in_one_room(module):
    assert room(module) == "_jax" or touches(SOURCES[module]) == []


@pytest.mark.parametrize(("name", "planted"), TOUCHES.items())
def test_a_touch_of_what_is_inside_jax_is_found(name, planted):
    assert touches(f"def f(x):\n    return x\n{planted}\n") == [name]


@pytest.mark.parametrize("folder", ["shardmap", "tests", "benchmarks", "examples"])
def test_no_file_is_too_long(folder):
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert lengths
    assert {path: n for path, n in lengths.items() if n > LONGEST_FILE} == {}


def test_the_package_shows_exactly_its_public_names():
    assert dir(shardmap) == sorted(shardmap.__all__)
    assert not [
        name
        for name in {*shardmap.__all__} - {"__version__"}
        if isinstance(getattr(shardmap, name), types.ModuleType)
    ]


@pytest.mark.parametrize(
    ("program", "others"),
    [
        ("import shardmap as sm", []),
        ("import shardmap as sm\nfor name in sm.__all__: getattr(sm, name)", []),
        ("import shardmap.explain.draw.shown, shardmap as sm", []),
        ("import shardmap.compat, shardmap as sm", ["compat"]),
    ],
)
def test_no_other_name_is_bound_where_public_names_are(program, others):
    """Neither what the package itself imports nor the folders that it is made of."""
    bound = "sorted(name for name in {*vars(sm)} - {*sm.__all__} if name[0] != '_')"
    result = python("-c", f"{program}\nprint({bound})")
    assert result.stdout == f"{others}\n", result.stderr[-2000:]


def test_the_package_only_re_exports():
    docstring, *others = ast.parse(SOURCES["__init__"]).body
    assert isinstance(docstring, ast.Expr)
    *statements, later, deleted = others
    assigned = []
    for statement in statements:
        assert isinstance(statement, ast.ImportFrom | ast.Assign)
        if isinstance(statement, ast.Assign):
            assigned += [target.id for target in statement.targets]
    assert assigned == ["__version__", "__all__"]
    assert isinstance(later, ast.If)
    assert ast.unparse(later.test) == "TYPE_CHECKING"
    assert all(isinstance(each, ast.ImportFrom) for each in later.body)
    attached, drawn = later.orelse
    assert ast.unparse(drawn) == "later.draw_in('shardmap.explain.draw.shown')"
    assert ast.unparse(deleted) == "del TYPE_CHECKING, later"
    assert ast.unparse(attached.targets[0]) == "(__getattr__, __dir__)"
    # What type checkers are told is what is imported.
    told = {each.module: [a.name for a in each.names] for each in later.body}
    assert ast.literal_eval(attached.value.args[1]) == told


@pytest.mark.parametrize("name", sorted(set(shardmap.__all__) - {"__version__"}))
def test_every_public_name_has_a_docstring_with_an_example(name):
    assert ">>> " in (inspect.getdoc(getattr(shardmap, name)) or "")


def test_importing_starts_no_backend():
    """A program may set devices, or start several processes, after the import."""
    program = (
        "import jax, shardmap; jax.config.update('jax_num_cpu_devices', 5); "
        "print(jax.local_device_count())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert result.stdout == "5\n", result.stderr[-2000:]


LATE = ("shardmap.explain.", "shardmap.plan.", "shardmap.commands")


def loaded(program):
    """The modules of this package that a program has imported at its end."""
    text = f"import sys\n{program}\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return [name for name in result.stdout.split() if name.startswith("shardmap")]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "program",
    [
        "import shardmap",
        "import shardmap.compat",
        "import shardmap as sm; sm.spmap(abs)",
    ],
)
def test_what_explains_and_plans_is_imported_when_it_is_used(program):
    assert [name for name in loaded(program) if name.startswith(LATE)] == []


@pytest.mark.deep
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["explain", "plan"])
@pytest.mark.parametrize(
    "before",
    [
        "import shardmap",
        "import shardmap.{0}",
        "import shardmap.explain.api, shardmap.plan.plan",
        "from shardmap.plan.engine import slices",
        "import shardmap; shardmap.plan, shardmap.explain",
    ],
)
def test_a_package_does_not_hide_the_function_that_is_called_like_it(name, before):
    program = (
        f"{before.format(name)}\nfrom shardmap import {name}\nassert {name}.__call__"
    )
    assert f"shardmap.{name}" in loaded(
        f"{program}\nassert {name}.__name__ == {name!r}"
    )


@pytest.mark.deep
def test_modules_are_imported_by_their_names():
    for program in (
        "import shardmap.sharding.spec as spec; assert spec.ShardingSpec",
        "from shardmap.explain import api; assert api.explain.__name__ == 'explain'",
        "from shardmap import *; assert callable(plan) and callable(spmap)",
    ):
        assert "shardmap" in loaded(program)


def test_a_name_that_is_not_there_is_said():
    with pytest.raises(
        AttributeError, match=r"^module 'shardmap' has no attribute 'x'$"
    ):
        shardmap.x  # noqa: B018


DOCUMENTS = sorted([*(ROOT / "docs").glob("**/*.md"), ROOT / "README.md"])


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_documents_import_from_the_package_alone(page):
    found = re.findall(r"(?:from|import) (shardmap[.\w]*)", page.read_text())
    assert {*found} <= {"shardmap", "shardmap.compat"}


def unreachable(text):
    """What a text names, but a user does not get from the package as he writes it."""

    def leads_nowhere(path):
        try:
            operator.attrgetter(path)(shardmap)
        except AttributeError:
            return True
        return False

    # The site shows classes that have no public name without the module they are in.
    text = re.sub(r"(?m)^\.\. autoclass:: .*$", "", text)
    named = re.findall(r"(?<![\w./-])(?:sm|shardmap)\.(\w+(?:\.\w+)*)(?![\w/])", text)
    return sorted({path for path in named if leads_nowhere(path)})


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_what_documents_name_is_reached_from_the_package(page):
    assert unreachable(page.read_text()) == []


def test_a_name_that_is_not_reached_is_found():
    text = "`sm.spmap`, `sm.explain.report.Axis`, shardmap/map, `shardmap.compat.pjit`"
    assert unreachable(text) == ["explain.report.Axis"]


TYPED = ("_jax", "sharding", "arrays", "map")


def parameters(source):
    """The annotations of all parameters in a file, as they are written."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            args = node.args
            stars = [each for each in (args.vararg, args.kwarg) if each is not None]
            every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *stars]
            found += [
                "" if each.annotation is None else ast.unparse(each.annotation)
                for each in every
                if each.arg not in ("self", "cls")
            ]
    return found


@pytest.mark.parametrize("folder", TYPED)
def test_few_parameters_may_be_anything(folder):
    """mypy holds that all have a type; this, that most of them say something."""
    sources = [s for m, s in SOURCES.items() if m.partition(".")[0] == folder]
    found = [each for source in sources for each in parameters(source)]
    assert len(found) > 50
    assert sum(each in ("Any", "Any | None") for each in found) < len(found) / 10


def test_parameters_of_any_type_are_counted():
    source = "def f(self, a: Any, *b: int, c=1, **d: Any | None): pass"
    assert parameters(source) == ["Any", "", "int", "Any | None"]
