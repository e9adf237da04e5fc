"""Commands as pages show them, read by the programs' own parsers of arguments."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import runpy
import shlex
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import typer.main

ROOT = Path(__file__).parents[3]
OUR_OWN = ("ridgeline_bench", "ridgeline", "tests", "deploy")  # packages whose modules run with `python -m`
ENDS = {"|", ">", ">>", "2>", "<", "&", "&&", ";", "||"}
BEGINS = re.compile(
    r"\s*(?:\w+=\S+ +)*(?:nice +)?(?:\S*/)?(?:(ridgeline)(?= |$)|python3? +(?:-W +\w+ +)?-m +([\w.]+)) *(.*)"
)
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*")
LEFT_OUT = ("...", "…")
LACKING = re.compile(r"[Mm]issing|requires an argument|are required|expected (?:one|at least one) argument")
LACKING_OR_WRONG = re.compile(rf"{LACKING.pattern}|[Ii]nvalid")


class Command(NamedTuple):
    """A command that a page shows. module: "ridgeline" or what `python -m` runs."""

    module: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        start = "ridgeline" if self.module == "ridgeline" else f"python -m {self.module}"
        return " ".join([start, *self.words])


class Parser(Exception):
    """The parser that a script made, raised where it would have read the command line."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of ours in one line of a shell."""
    for part in re.split(r"\s(?:&&|\|\||;)\s", re.sub(r"(?:^|\s)#.*", "", text)):
        if found := BEGINS.fullmatch(part.rstrip("\\").strip().removeprefix("$ ")):
            module = found[1] or found[2]
            if module.split(".")[0] in OUR_OWN:
                yield Command("ridgeline" if module == "ridgeline" else module, tuple(_words(found[3])))


def _words(text: str) -> list[str]:
    """Return the arguments of a command, up to a pipe or a redirection, without the brackets of optional ones."""
    words = []
    for word in shlex.split(re.sub(r"\[(?=[-A-Z])", "", text)):
        if word in ENDS:
            break
        words.append(word.rstrip("]") if "[" not in word else word)
    return words


def problem(command: Command, *, whole: bool) -> str | None:
    """Return the complaint of the command's own parser, or None.

    A command that is not `whole` is one that a sentence names: arguments and values of options may be missing.
    """
    left_out = any(word in LEFT_OUT for word in command.words)
    words = ["1" if PLACEHOLDER.fullmatch(word) else word for word in command.words if word not in LEFT_OUT]
    words = [re.sub(r"(?<==)[A-Z][A-Z0-9_]*$", "1", word) for word in words]
    told = _of_ridgeline(words) if command.module == "ridgeline" else _of_script(command.module, words)
    partly = LACKING if whole and left_out else None if whole else LACKING_OR_WRONG
    return None if told and partly and partly.search(told) else told


def _of_ridgeline(words: list[str]) -> str | None:
    command = ridgeline()
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return f"there is no `ridgeline … {words[0]}`"
        command, words = command.commands[words[0]], words[1:]
    if hasattr(command, "commands") or "--help" in words:
        return None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command.make_context(command.name, words)
    except Exception as error:  # click's usage errors and ours, which are told in the same way
        told = error.format_message() if hasattr(error, "format_message") else str(error)
        return told or "arguments are missing"
    return None


def in_docstring(text: str) -> Iterator[Command]:
    """Yield the commands that a module's text shows with a margin. Their options may go on in the next line."""
    lines = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    for line in re.sub(r"(?:\\\n *|\n {6,}(?=[-\[/]|[A-Z]+(?:\n|$)))", " ", lines).splitlines():
        yield from commands(re.split(r" {2,}(?=[a-z(])", line.strip())[0])


@cache
def ridgeline() -> Any:
    from ridgeline.cli import app

    return typer.main.get_command(app)


def _of_script(module: str, words: list[str]) -> str | None:
    path = file_of(module)
    if not path.is_file():
        return f"there is no module {module}"
    if not reads_arguments(path):
        return f"{module} takes no arguments" if words and "sys.argv" not in path.read_text() else None
    if "--help" in words:
        return None
    parser, told = parser_of(module), io.StringIO()
    passed_on = "parse_known_args" in path.read_text()  # to a program that it starts
    try:
        with contextlib.redirect_stderr(told):
            (parser.parse_known_args if passed_on else parser.parse_args)(words)
    except SystemExit:
        return told.getvalue().strip().rpartition("error: ")[2] or "the arguments are not taken"
    return None


def file_of(module: str) -> Path:
    """Return the file that `python -m` runs, whether or not it is there."""
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def reads_arguments(path: Path) -> bool:
    """Return True if a script calls `asked`, `parse_args` or `parse_known_args`, or takes its `main` from one."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    if any(name == "asked" or name.endswith((".parse_args", ".parse_known_args")) for name in calls):
        return True
    mains = [node for node in nodes if isinstance(node, ast.ImportFrom) and "main" in [a.name for a in node.names]]
    return any(reads_arguments(file_of(node.module or "")) for node in mains)


@cache
def parser_of(module: str) -> argparse.ArgumentParser:
    """Return the parser that a script makes first when it runs. What it would do afterwards does not happen."""

    def made(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Parser(parser)

    with patch.object(argparse.ArgumentParser, "parse_known_args", made), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module may have been imported before
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except Parser as found:
            return _lenient(found.parser)
    raise AssertionError(f"{module} did not read its arguments")


def _lenient(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let a placeholder, which is "1" here, stand for one of several words too."""
    for action in parser._actions:
        if isinstance(action.choices, (list, tuple)):
            action.choices = [*action.choices, "1"]
    return parser
