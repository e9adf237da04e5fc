"""Tasks: the beginning of a function as a prompt, and tests for what a model writes behind it.

A task's grade says how much is missing: 1, the last statement; 2, the later half; 3, the whole body. A task that a
trivial answer solves (one value, one argument) is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ridgeline.training.corpus import Document, shingles
from ridgeline.training.sandbox import CodeCall, CodeEnded, Limits, SealedWorkers
from ridgeline_bench.scripts.code_tasks.arguments import CALLED, CodeTest
from ridgeline_bench.scripts.code_tasks.functions import LoneFunction, shape_of

GRADES = {1: "the last statement", 2: "the later half", 3: "the whole body"}


class CodeTask(NamedTuple):
    """prompt: imports and constants, and the function up to the line where a model goes on. answer: its own text."""

    package: str
    name: str
    grade: int
    prompt: str
    answer: str
    tests: Sequence[CodeTest]

    def record(self) -> dict[str, Any]:
        """Return a line for `ridgeline train`: `completion` for sft, `prefix`, `entry` and `tests` for rewards."""
        return {
            "prompt": self.prompt, "completion": self.answer, "prefix": self.prompt, "entry": self.name,
            "tests": [list(each) for each in self.tests], "grade": self.grade, "package": self.package,
        }  # fmt: skip


def tasks_of(function: LoneFunction, tests: Sequence[CodeTest]) -> list[CodeTask]:
    """Return the tasks of a function, at most one of each grade."""
    lines, count = function.source.split("\n"), len(function.starts)
    cuts = {3: 0} if count == 1 else {3: 0, 1: count - 1} if count == 2 else {3: 0, 2: count // 2, 1: count - 1}
    found = []
    for grade, statement in sorted(cuts.items()):
        line = function.starts[statement]
        # A prompt ends before the line's end: tokenizers join that with the indentation behind it
        before, behind = function.prelude + "\n".join(lines[:line]), "\n" + "\n".join(lines[line:])
        found.append(CodeTask(function.package, function.name, grade, before, behind, tests))
    return found


# Runs each source and says how many of the tests its function passes, from the first on. Nothing here wants to deceive:
# the sources are the package's own text and trivial answers.
_TRIED = """
def tried(sources, entry, tests):
    import json

    found = []
    for source in sources:
        names, right = {"__name__": "solution"}, 0
        try:
            exec(compile(source, "solution", "exec"), names)
            for arguments, expected in tests:
                if _called(names[entry], arguments) != json.dumps(expected):
                    break
                right += 1
        except BaseException:
            pass
        found.append(right)
    return found
"""


def worthwhile(tasks: Sequence[CodeTask], parameters: Sequence[str], workers: SealedWorkers) -> list[CodeTask]:
    """Return the tasks of a function whose own answer passes all tests, and for which no trivial one does."""
    trivial = [*parameters, "None", "True", "False"]
    sources = [task.prompt + each for task in tasks for each in (task.answer, *_returning(task, trivial))]
    asked = [sources, tasks[0].name, [list(each) for each in tasks[0].tests]]
    try:
        found = workers.returned(CALLED + _TRIED, "tried", asked, Limits(seconds=20.0, cpu_seconds=15))
    except CodeEnded:
        return []
    count, kept = len(tasks[0].tests), list[CodeTask]()
    for index, task in enumerate(tasks):
        own, *others = found[index * (1 + len(trivial)) : (index + 1) * (1 + len(trivial))]
        if own == count and max(others) < count:
            kept.append(task)
    return kept


def _returning(task: CodeTask, values: Sequence[str]) -> list[str]:
    code = task.answer.lstrip("\n")
    indent = code[: len(code) - len(code.lstrip())]
    return [f"\n{indent}return {each}\n" for each in values]


def share(task: CodeTask, answer: str, workers: SealedWorkers) -> float:
    """Return the share of tests that a model's answer passes, from the first on."""
    calls = [CodeCall(*each) for each in task.tests]
    return workers.passed(task.prompt + answer, task.name, calls) / len(calls)


def within(answer: str) -> str:
    """Return an answer up to the first line that is no part of the function any more."""
    first, *lines = answer.split("\n")
    kept = [first]
    for line in lines:
        if line.strip() and not line[0].isspace():
            break
        kept.append(line)
    return "\n".join(kept)


def apart(
    functions: Iterable[LoneFunction], known: Sequence[LoneFunction], documents: Sequence[Document]
) -> list[LoneFunction]:
    """Return the functions that resemble none of those known, no other of themselves, and no file of the documents: by
    the shape of their text, and by runs of four lines."""
    shapes = {shape_of(each.source) for each in known}
    seen = {int(each) for document in documents for each in shingles(document.text)}
    found = []
    for function in functions:
        shape = shape_of(function.source)
        own = set(shingles(function.source).tolist())
        if shape not in shapes and not own & seen:
            shapes.add(shape)
            found.append(function)
    return found
