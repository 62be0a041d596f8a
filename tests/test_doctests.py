"""The examples in docstrings are true, and public functions are documented."""

import doctest
import importlib
import inspect

import pytest
from conftest import ROOT


def module_names():
    """The project's modules."""
    files = [*ROOT.glob("*.py")]
    for folder in ("worlds", "websites", "ideas"):
        files += ROOT.glob(f"{folder}/**/*.py")
    all_parts = [path.relative_to(ROOT).with_suffix("").parts for path in files]
    return sorted(".".join(parts) for parts in all_parts
                  if parts[-1] != "__init__" and "tests" not in parts)


MODULES = module_names()
SITES = ("websites.",)  # web pages: their functions are handlers of requests
DOCUMENTED = [name for name in MODULES if not name.startswith(SITES)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    with_examples = 0
    for name in ("algos", "schedule", "agent", "envs", "config", "eval"):
        found = finder.find(importlib.import_module(name))
        with_examples += sum(bool(test.examples) for test in found)
    assert with_examples >= 15


def public_functions(module):
    """The functions of a module, and the constructors and public methods of its classes."""
    for name, member in vars(module).items():
        if name.startswith("_") or getattr(member, "__module__", "") != module.__name__:
            continue
        if inspect.isfunction(member):
            yield member
        elif inspect.isclass(member):
            for key, method in vars(member).items():
                is_public = key in ("__init__", "__call__") or not key.startswith("_")
                if is_public and inspect.isfunction(method):
                    yield method


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_functions_have_a_docstring(name):
    module = importlib.import_module(name)
    for function in public_functions(module):
        is_method = "." in function.__qualname__
        assert is_method or function.__doc__, f"{name}.{function.__qualname__} has no docstring"


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if "ideas." not in name])
def test_public_functions_say_what_they_take_and_give(name):
    for function in public_functions(importlib.import_module(name)):
        signature = inspect.signature(function)
        untyped = [p.name for p in signature.parameters.values()
                   if p.annotation is p.empty and p.name != "self"]
        assert not untyped, (name, function.__qualname__, untyped)
        has_result_type = signature.return_annotation is not inspect.Signature.empty
        assert has_result_type or function.__name__ == "__init__", (name, function.__qualname__)


def test_the_checks_of_public_functions_see_functions():
    names = {f.__qualname__ for f in public_functions(importlib.import_module("rollout"))}
    assert {"rollout", "Episode.add_token", "Episode.__init__"} <= names
    assert "Episode._pass_on" not in names
    assert "split_item" not in names  # imported from another module
