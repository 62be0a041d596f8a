"""The layout of the code: how long each file may be, and which module may import which."""

import ast
import re
from graphlib import TopologicalSorter

import pytest
from conftest import FILES, ROOT

from experiments.lines import code_lines

# Code lines of each file: the budget of the design, and the bar that holds until the file is within
# 1.15 of its budget. A bar may be lowered, and deleted when it is reached.
BUDGETS = {
    "train.py": (280,), "trajectory.py": (120, 193), "agent.py": (330, 469),
    "rollout.py": (330, 401), "envs.py": (260, 315), "algos.py": (180,), "update.py": (310,),
    "sft.py": (210, 256), "rl.py": (230, 294), "schedule.py": (60,), "engine.py": (300,),
    "config.py": (180, 265), "checkpoint.py": (100, 116), "parallel.py": (180,),
    "metrics.py": (170,), "eval.py": (270,), "view.py": (100,), "models": (420, 519),
}
TOTALS = {"core": (4050, 4739), "without tests": (19_000,), "tests": (12_000,)}

# Modules that read none of ours, so that everything may read them.
LEAVES = ["trajectory", "algos", "schedule"]
# Modules that load others by their names: the tables' loader, and two that run a command.
LOADERS = {"envs", "benches.__main__"}
LOAD = {"import_module", "__import__", "run_module", "run_path", "spec_from_file_location"}


FOLDERS = {"models", "worlds", "websites", "page", "benches", "ideas", "experiments"}
TOP = [path for path in FILES if path.parent == ROOT]
PARTS = {path: path.relative_to(ROOT).with_suffix("").parts for path in FILES}
# Module name -> its file, tests left out.
MODULES = {".".join(parts).removesuffix(".__init__"): path for path, parts in PARTS.items()
           if (path in TOP or parts[0] in FOLDERS) and "tests" not in parts}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


# ---- sizes ----


def lines_of(paths):
    return sum(code_lines(path.read_text()) for path in paths)


def test_lines_are_counted_without_blank_lines_comments_and_docstrings():
    assert code_lines('"""Head.\n\nMore."""\n\n# why\nx = [1,\n     2]  # two\n\n\n'
                      'def f():\n    "What."\n    return """a\n\nb"""\n') == 6


@pytest.mark.parametrize("name", BUDGETS)
def test_a_file_keeps_to_its_budget(name):
    budget, *bar = BUDGETS[name]
    lines = lines_of([ROOT / name] if name.endswith(".py") else (ROOT / name).glob("*.py"))
    assert 0 < lines <= max([int(1.15 * budget), *bar])


def test_the_code_keeps_to_its_budget():
    core = [*TOP, *(path for path in FILES if path.parent == ROOT / "models")]
    tests = [path for path in FILES if "tests" in PARTS[path]]
    found = {"core": lines_of(core), "tests": lines_of(tests)}
    found["without tests"] = lines_of(FILES) - found["tests"]
    assert {name: lines for name, lines in found.items() if lines > max(TOTALS[name])} == {}
    assert {path.name for path in TOP} == BUDGETS.keys() - {"models"}


def test_every_line_has_at_most_100_columns():
    assert len(FILES) > 100
    assert [f"{path}:{number}" for path in FILES
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if len(line) > 100] == []


def test_the_encoding_of_a_text_does_not_depend_on_the_locale():
    sources = {name: path.read_text("utf-8") for name, path in MODULES.items()
               if not name.startswith(("benches", "experiments", "websites"))}
    assert [name for name, text in sources.items() if "read_text()" in text] == []


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    prose = [line for line in re.sub("```.*?```", "", text, flags=re.S).splitlines()
             if not line.startswith("|")]
    assert 200 < len(" ".join(prose).split()) <= 700 and len(text.split()) <= 1500
    stated = re.findall(r"\[(\w+\.py)\]\(\1\), (\d+) \|", text)  # lines, within a tenth
    lines = {name: len((ROOT / name).read_text().splitlines()) for name, _ in stated}
    assert len(stated) > 15 and all(abs(int(n) - lines[name]) < lines[name] / 10
                                    for name, n in stated)


# ---- imports ----


def imports_of(tree, modules):
    """The modules among `modules` that a file imports, wherever: under TYPE_CHECKING and inside
    functions, too. `from worlds import almanac` imports worlds.almanac."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            wholes = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= wholes & modules or {node.module}
    return found & modules


IMPORTS = {name: imports_of(tree, MODULES.keys()) - {name} for name, tree in TREES.items()}


def test_imports_form_no_circle():
    assert sum(map(len, IMPORTS.values())) > 150
    TopologicalSorter(IMPORTS).prepare()  # raises CycleError, which names the circle


def test_the_leaves_import_nothing_and_nothing_imports_an_idea_or_a_web_site():
    assert [name for name in LEAVES if IMPORTS[name]] == []
    readers = {"ideas": ("ideas",), "websites": ("websites", "experiments", "worlds.webarena")}
    for name, imported in IMPORTS.items():
        for other in imported:
            folder = other.partition(".")[0]
            assert name.startswith(readers.get(folder, "")), f"{name} imports {other}"
            assert folder == "websites" or not name.startswith("websites"), name


def test_only_the_tables_loader_and_the_commands_load_modules_by_name():
    found = {name for name, tree in TREES.items() for node in ast.walk(tree)
             if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOAD}
    assert found == LOADERS


# ---- installation ----


def listed(key):
    """The names in a list of pyproject.toml's section on setuptools."""
    text = (ROOT / "pyproject.toml").read_text()
    (names,) = re.findall(rf"^{key} = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    return set(re.findall(r'"([^"]+)"', names))


def test_every_module_and_package_is_installed():
    assert listed("py-modules") == {path.stem for path in TOP}
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert listed("packages") == {name for name in packages if not name.startswith("experiments")}
