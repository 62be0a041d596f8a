"""The examples in docstrings are true."""

import doctest
import importlib
import inspect
import subprocess
import sys

import pytest
from conftest import ROOT

MODULES = sorted(p.stem for p in ROOT.glob("*.py") if p.stem not in ("notebook", "conftest")) + [f"worlds.{p.stem}" for p in (ROOT / "worlds").glob("[a-z]*.py")] + [
    f"worlds.webarena.{p.stem}" for p in (ROOT / "worlds/webarena").glob("[a-z]*.py")] + [
    f"websites.{p.stem}" for p in (ROOT / "websites").glob("[a-z]*.py")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_some():
    finder = doctest.DocTestFinder()
    found = sum(bool(test.examples) for name in ("algos", "schedule", "agent", "envs", "config", "eval") for test in finder.find(importlib.import_module(name)))
    assert found >= 15


def test_public_functions_say_what_they_take_and_give():
    for name in (name for name in MODULES if not name.startswith("websites.")):
        module = importlib.import_module(name)
        for key, thing in vars(module).items():
            if key.startswith("_") or getattr(thing, "__module__", "") != name:
                continue
            assert not inspect.isfunction(thing) or thing.__doc__, f"{name}.{key} has no docstring"
            methods = [v for k, v in vars(thing).items() if k in ("__init__", "__call__") or not k.startswith("_")] if inspect.isclass(thing) else [thing]
            for function in filter(inspect.isfunction, methods):
                signature = inspect.signature(function)
                untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"]
                assert not untyped and (signature.return_annotation is not inspect.Signature.empty or function.__name__ == "__init__"), (name, function, untyped)


def test_the_notebook_runs():
    done = subprocess.run([sys.executable, "notebook.py"], cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env={"PATH": "/usr/bin:/bin", "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout and "better than their group +" in done.stdout
