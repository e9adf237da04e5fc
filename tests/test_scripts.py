"""Scripts outside the package, some of which need what is seldom installed, import what the package has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(file for folder in ("ridgeline_bench/scripts", "deploy") for file in (ROOT / folder).rglob("*.py"))


def imports(script: Path) -> Iterator[tuple[str, str]]:
    """Return (module, name) of every import from the package, at the top or within a function."""
    for node in ast.walk(ast.parse(script.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in ("ridgeline", "ridgeline_bench")
        ):
            yield from ((node.module, alias.name) for alias in node.names)


def names(module: str) -> set[str]:
    """Return what can be imported from a module: what it defines or imports, and modules within."""
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
    assert [(module, name) for module, name in imports(script) if name not in names(module)] == []
