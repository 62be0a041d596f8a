"""The examples in docstrings are true, and public functions are documented."""

import doctest
import importlib
import inspect

import pytest
from conftest import FILES, ROOT


ALL_PARTS = [path.relative_to(ROOT).with_suffix("").parts for path in FILES]
MODULES = sorted(".".join(parts) for parts in ALL_PARTS
                 if (len(parts) == 1 or parts[0] in ("models", "worlds", "websites", "ideas"))
                 and parts[-1] != "__init__" and "tests" not in parts)


@pytest.mark.parametrize("name", [*MODULES, "worlds", "page.run", "page.live"])
def test_the_examples_in_docstrings_are_true(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


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


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("websites.")])
def test_public_functions_say_what_they_do_and_take_and_give(name):
    """Of `ideas/`, whose interface is given, only what they do."""
    for function in public_functions(importlib.import_module(name)):
        at, signature = (name, function.__qualname__), inspect.signature(function)
        assert "." in function.__qualname__ or function.__doc__, at
        untyped = [p.name for p in signature.parameters.values()
                   if p.annotation is p.empty and p.name != "self"]
        has_result_type = signature.return_annotation is not inspect.Signature.empty
        has_types = not untyped and (has_result_type or function.__name__ == "__init__")
        assert has_types or name.startswith("ideas."), (at, untyped)
