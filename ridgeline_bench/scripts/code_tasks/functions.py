"""Functions of packages that can be tested alone: they need nothing but their arguments, builtins, a few modules of the
standard library, and constants that stand beside them."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ridgeline.training.corpus import Document

MODULES = frozenset({"math", "re", "itertools", "functools", "collections", "string", "operator", "bisect", "heapq"})
_FORBIDDEN = frozenset(
    {"open", "eval", "exec", "input", "print", "compile", "globals", "locals", "vars", "setattr", "delattr", "exit"}
    | {"quit", "breakpoint", "help", "memoryview", "super", "object", "type", "id", "hash", "dir", "__import__"}
)
BUILTINS = frozenset(dir(builtins)) - _FORBIDDEN
MOST_CHARACTERS, MOST_LINES, MOST_PARAMETERS = 1200, 30, 4
_BARRED = (
    ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.AsyncFor, ast.AsyncWith, ast.AsyncFunctionDef,
    ast.ClassDef, ast.Import, ast.ImportFrom, ast.With,
)  # fmt: skip


class LoneFunction(NamedTuple):
    """A function that can run alone.

    prelude: imports and constants that it needs. source: its text, from `def` on.
    parameters: names of those that must be given. starts: the line of `source` with which each statement of the body
        begins, the docstring left out.
    """

    package: str
    path: str
    name: str
    prelude: str
    source: str
    parameters: tuple[str, ...]
    starts: tuple[int, ...]

    @property
    def whole(self) -> str:
        return self.prelude + self.source


def lone_functions(documents: Sequence[Document]) -> Iterator[LoneFunction]:
    """Yield the functions at the top of files that can be tested alone."""
    for document in documents:
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        lines = document.text.split("\n")
        modules, constants = _modules(tree), _constants(tree, lines)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (found := _lone(node, lines, modules, constants)):
                yield LoneFunction(document.package, document.path, node.name, *found)


Found = tuple[str, str, tuple[str, ...], tuple[int, ...]]


def _lone(node: ast.FunctionDef, lines: list[str], modules: dict[str, str], constants: dict[str, str]) -> Found | None:
    arguments = node.args
    required = arguments.posonlyargs + arguments.args
    required = required[: len(required) - len(arguments.defaults)]
    if not 1 <= len(required) <= MOST_PARAMETERS or any(each is None for each in arguments.kw_defaults):
        return None
    if node.decorator_list or any(isinstance(each, _BARRED) for each in ast.walk(node)):
        return None
    if not any(isinstance(each, ast.Return) and each.value is not None for each in ast.walk(node)):
        return None
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    text = lines[node.lineno - 1 : node.end_lineno]
    source = "\n".join(text) + "\n"
    if not body or len(source) > MOST_CHARACTERS or len(text) > MOST_LINES or not source.isascii():
        return None
    if any(len(line) - len(line.lstrip()) < 1 for line in text[body[0].lineno - node.lineno :] if line.strip()):
        return None  # a text in several lines that begins at the left: it cannot be cut by its lines
    free = _free(node) - BUILTINS
    if any(name not in modules and name not in constants for name in free):
        return None
    prelude = "".join(sorted({modules[name] for name in free if name in modules}))
    prelude += "".join(sorted({constants[name] for name in free if name not in modules}))
    starts = tuple(statement.lineno - node.lineno for statement in body)
    if len(set(starts)) < len(starts) or starts[0] == 0:
        return None  # several statements in a line
    return prelude, source, tuple(each.arg for each in required), starts


def _free(node: ast.FunctionDef) -> set[str]:
    """Return the names that a function reads and does not bind. Annotations count, since they are evaluated."""
    bound = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)} | {node.name}
    bound |= {
        each.name for each in ast.walk(node) if isinstance(each, ast.ExceptHandler | ast.FunctionDef) and each.name
    }
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    bound |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
    read = {each.id for each in names if isinstance(each.ctx, ast.Load)}
    return read - bound


def _modules(tree: ast.Module) -> dict[str, str]:
    """Return the import of each name that an allowed module gives."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name in MODULES:
                    found[each.asname or each.name] = f"import {each.name}{_as(each)}\n"
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES and not node.level:
            for each in node.names:
                found[each.asname or each.name] = f"from {node.module} import {each.name}{_as(each)}\n"
    return found


def _as(alias: ast.alias) -> str:
    return f" as {alias.asname}" if alias.asname else ""


def _constants(tree: ast.Module, lines: list[str]) -> dict[str, str]:
    """Return the text of each assignment of a literal, or of a compiled expression, at the top of a file."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n"
            if len(text) <= 400 and text.isascii() and _is_literal(node.value):
                found[node.targets[0].id] = text
    return found


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def shape_of(source: str) -> str:
    """Return a text that two functions share if they differ in names, docstrings, annotations and layout alone."""
    tree = ast.parse(source)
    known: dict[str, str] = {}

    def numbered(name: str) -> str:
        return known.setdefault(name, str(len(known)))

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = node.body[1:] or [ast.Pass()] if ast.get_docstring(node) is not None else node.body
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.name = numbered(node.name)
        elif isinstance(node, ast.arg):
            node.arg = numbered(node.arg)
        elif isinstance(node, ast.Name):
            node.id = numbered(node.id)
    return ast.dump(tree)
