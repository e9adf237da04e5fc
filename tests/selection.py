"""Which tests a run takes: a part of them, those not yet passed, and none that lack a package.

Of a test with the mark `few(n)` n cases run, and the others have the mark `thorough`. `--part 1/2` takes the first of
two parts, made of whole files and of about as many tests. `--resume FILE` leaves out what FILE lists as passed, and
adds what passes, so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

# Modules of optional packages (pyproject.toml). A test file that imports one is skipped where the package is missing.
EXTRAS = {
    "compressed_tensors", "fastapi", "gguf", "google", "grpc", "grpc_health", "grpc_reflection", "grpc_tools",
    "httptools", "httpx", "hypothesis", "jsonschema", "kubernetes_validate", "llguidance", "lm_eval", "matplotlib",
    "msgspec", "openai", "opentelemetry", "playwright", "prometheus_client", "pynvml", "schemathesis", "sentencepiece",
    "tiktoken", "transformers", "triton", "uvicorn", "uvloop", "yaml", "zmq",
}  # fmt: skip


class TestFile(pytest.Module):
    """A file of tests that is skipped, in words, if it imports an optional package that is not installed."""

    __test__ = False

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except (self.CollectError, pytest.skip.Exception) as error:
            for name in [
                name for name, module in sys.modules.items() if getattr(module, "__file__", "") == str(self.path)
            ]:
                del sys.modules[name]  # pytest leaves it there half executed, and other files would import from it
            cause = error.__cause__
            missing = (cause.name or "").split(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
            if missing not in EXTRAS:
                raise
            pytest.skip(f"{missing} is not installed", allow_module_level=True)


def of_another_device(item: pytest.Item) -> bool:
    """Whether a test is marked for a GPU by one parameter and set on a CPU by another: no run can mean it."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return parameters.get("device") == "cpu" and item.get_closest_marker("gpu") is not None


def values_of(item: pytest.Item) -> set[tuple[str, Any]]:
    """The parameters of a case with their values, of which all but words and numbers are known by their identity."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return {
        (name, value if isinstance(value, str | int | float | None) else id(value))
        for name, value in parameters.items()
    }


def thin(items: Iterable[pytest.Item]) -> None:
    """Mark as thorough all cases but n of each test with the mark `few(n)`: always the next that has most values of
    parameters that none has yet, so that n cases have every value if that many can. Cases that other marks leave out
    are not counted. Cases that are added later change few of the choices."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("few") and not any(map(item.get_closest_marker, ("gpu", "timing", "thorough"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    for left in cases.values():
        [mark] = left[0].iter_markers("few")
        left.sort(key=lambda item: crc32(item.name.encode()))
        seen = set[tuple[str, Any]]()
        for _ in range(min(mark.args[0], len(left))):
            seen |= values_of(left.pop(max(range(len(left)), key=lambda at: len(values_of(left[at]) - seen))))
        for item in left:
            item.add_marker("thorough")


def part_of(items: list[pytest.Item], part: str) -> set[Path]:
    """The files of part `number/count`. Each goes to the part with fewest tests so far, the longest file first."""
    number, count = map(int, part.split("/"))
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--part {part}: must be like 1/2, the first number no larger than the second")
    tests: dict[Path, int] = {}
    for item in items:
        tests[item.path] = tests.get(item.path, 0) + 1
    files: list[set[Path]] = [set() for _ in range(count)]
    loads = [0] * count
    for path in sorted(tests, key=lambda path: (-tests[path], path)):
        least = loads.index(min(loads))
        files[least].add(path)
        loads[least] += tests[path]
    return files[number - 1]


class Resumed:
    """Leaves out the tests that a file lists as passed, and lists those that pass."""

    def __init__(self, file: Path, *, writes: bool) -> None:
        self.file, self.writes = file, writes  # of several processes the one that leads writes for all
        self.passed = set(file.read_text().splitlines()) if file.exists() else set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.writes and report.when == "call" and report.passed:
            with self.file.open("a") as file:
                file.write(report.nodeid + "\n")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run part K of N parts, made of whole files")
    parser.addoption("--resume", metavar="FILE", type=Path, help="leave out tests that FILE lists, add those that pass")


def configure(config: pytest.Config) -> None:
    if (file := config.getoption("--resume")) is not None:
        config.pluginmanager.register(Resumed(file, writes=not hasattr(config, "workerinput")), "resumed")


def deselected(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests among `items` that this run leaves out by the options above."""
    passed: set[str] = getattr(config.pluginmanager.get_plugin("resumed"), "passed", set())
    files = part_of(items, part) if (part := config.getoption("--part")) else None
    return [
        item
        for item in items
        if of_another_device(item) or item.nodeid in passed or (files is not None and item.path not in files)
    ]
