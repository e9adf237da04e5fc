"""Scripts outside the package, some of which need what is seldom installed, import what the package has."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ridgeline", "ridgeline_bench")
SCRIPTS = sorted(file for folder in ("ridgeline_bench/scripts", "deploy") for file in (ROOT / folder).rglob("*.py"))


def imports(script: Path) -> Iterator[tuple[str, str, str]]:
    """Return (module, name, name in the script) of every import from the package, at the top or within a function."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            yield from ((node.module, alias.name, alias.asname or alias.name) for alias in node.names)


def names(module: str) -> set[str]:
    """Return the names that can be imported from a module: those that it defines or imports, and modules within."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = {each.stem for each in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_what_a_script_imports_from_the_package_is_there(script: Path) -> None:
    assert [(module, name) for module, name, _ in imports(script) if name not in names(module)] == []


def calls(script: Path) -> Iterator[tuple[str, str, ast.Call]]:
    """Return (module, name, call) of every call of a name that is imported from the package."""
    origin = {own: (module, name) for module, name, own in imports(script)}
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in origin:
            yield *origin[node.func.id], node


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_what_a_script_calls_takes_these_arguments(script: Path) -> None:
    for module, name, call in calls(script):
        try:
            found = getattr(import_module(module), name)
            taken = inspect.signature(found)
        except (ImportError, ValueError):  # a package that is seldom installed; a type without a signature
            continue
        starred = any(isinstance(each, ast.Starred) for each in call.args)
        named = {each.arg: None for each in call.keywords if each.arg}
        partial = starred or any(each.arg is None for each in call.keywords)
        try:
            (taken.bind_partial if partial else taken.bind)(*([] if starred else call.args), **named)
        except TypeError as error:
            pytest.fail(f"line {call.lineno} calls {module}.{name}{taken}: {error}")


def options(script: Path) -> Iterator[tuple[set[str], ast.FunctionDef, str]]:
    """Return, for every function that calls `asked`, the options' names, the function, and its name for them."""
    for function in ast.walk(ast.parse(script.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            called, target = node.value.func, node.targets[0]
            if isinstance(called, ast.Name) and called.id == "asked" and isinstance(target, ast.Name):
                if any(each.arg is None for each in node.value.keywords):
                    continue  # some options come from a table
                places = [each.value for each in node.value.args[1:] if isinstance(each, ast.Constant)]
                named = {str(place).removesuffix("...").partition("=")[0] for place in places}
                yield named | {each.arg for each in node.value.keywords if each.arg}, function, target.id


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_reads_options_that_it_has(script: Path) -> None:
    for named, function, name in options(script):
        read = {
            node.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        }
        assert read - named == set()
