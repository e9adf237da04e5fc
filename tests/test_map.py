"""docs/map.md tells the truth: its folders are the tree's, its order is that of imports, and what it names is there."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ridgeline"
PACKAGES = (PACKAGE, ROOT / "ridgeline_bench")
MAP = (ROOT / "docs" / "map.md").read_text()
GENERATED = PACKAGE / "serving" / "grpc" / "proto"  # by protoc
AN_OP = "ridgeline/kernels/<family>/<op>/"  # one row for them all


def rows(heading: str) -> list[tuple[str, ...]]:
    """Return the cells of the table whose first column is called `heading`."""
    table = MAP.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table.splitlines()[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


FOLDERS = [(quoted(folder)[0], quoted(start)) for folder, _, start in rows("folder")]
DECISIONS = [(quoted(file)[0], name) for _, file, names in rows("question") for name in quoted(names)]


def test_every_folder_with_python_files_has_a_row_and_every_row_a_folder() -> None:
    inside = {
        file.parent for root in PACKAGES for file in root.rglob("*.py") if GENERATED not in (file.parent, *file.parents)
    }
    ops = {folder for folder in inside if (folder / "op.py").is_file() or folder.parent.name == "ranks"}
    ops = {folder for folder in ops if PACKAGE / "kernels" in folder.parents and folder.name not in ("base", "step")}
    wanted = {f"{folder.relative_to(ROOT)}/" for folder in inside - ops - {PACKAGE}}
    assert {name for name, _ in FOLDERS if name.endswith("/")} == wanted | {AN_OP}
    assert len(FOLDERS) == len({name for name, _ in FOLDERS}), "a folder has one row"
    modules = [name for name, _ in FOLDERS if name.endswith(".py")]
    assert [name for name in modules if not (ROOT / name).is_file()] == []


def test_the_files_to_start_with_are_there() -> None:
    for folder, files in FOLDERS:
        place = ROOT / folder.replace("<family>/<op>", "attention/paged")
        for file in files:
            assert ((place if place.is_dir() else place.parent) / file).is_file(), f"{folder} has no {file}"


def test_rows_come_in_the_order_of_the_import_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.split(r"\s*[|:]\s*", layer) for layer in contracts[0]["layers"]]
    depth: dict[str, float] = {f"ridgeline.{name}": at for at, names in enumerate(layers) for name in names}
    depth["ridgeline_bench"] = depth["ridgeline.cli"] + 0.5  # as a contract of its own says

    def depth_of(folder: str) -> float:
        """A folder without a layer of its own stands where its parent does, or else its own files."""
        module = folder.removesuffix("/").removesuffix(".py").replace("/", ".")
        parts = module.split(".")
        above = [depth[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in depth]
        files = [name for name in depth if (ROOT / f"{name.replace('.', '/')}.py").is_file()]
        own = [depth[name] for name in files if name.rpartition(".")[0] == module]
        return above[0] if above else min(own)

    found = [depth_of(folder) for folder, _ in FOLDERS]
    assert found == sorted(found)


@pytest.mark.parametrize(("file", "name"), DECISIONS)
def test_what_answers_a_question_is_in_that_file(file: str, name: str) -> None:
    path = PACKAGE / file if (PACKAGE / file).is_file() else ROOT / file
    text = path.read_text()
    assert name in (set(defined(ast.parse(text))) if path.suffix == ".py" else text)


def defined(tree: ast.AST) -> Iterator[str]:
    """Return names of functions, classes and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
