"""Which tests a run takes: a part of them, those not yet passed, and none that lack a package.

Of a test with the mark `few(n)` n cases run, and the others have the mark `thorough`. A run of the whole suite takes a
third of the cases of a test that is `dealt`: each day another third, and the others have the mark `thorough` that day.
A dealt test of one case runs every third day, and so do all tests of a file whose `pytestmark` is `dealt`. The day is
the newest commit's, so that a commit has the same tests whenever they run, and `--day N` takes another one's. A run
that names files or folders takes all.

`--part 1/2` takes the first of two parts, made of whole files and of about as many tests. `--resume FILE` leaves out
what FILE lists as passed, and adds what passes, so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

import subprocess
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


HANDS = 3  # days after which every case of a test that is dealt has run
MANY = 2  # cases from which on a test of these is dealt without a mark
# Folders and files whose tests are dealt. Their cases are families, formats, shapes and divisions, each of which many
# tests have, so that each day has some cases of every one.
DEALT = {
    "compiler", "compression", "hearing", "kernels", "models", "parallel", "quantization", "ranks", "vision", "worker",
    "test_beam_search.py", "test_draft_heads.py", "test_draft_model.py", "test_draft_trees.py",
    "test_expert_offload.py", "test_guidance.py", "test_kv_disk.py", "test_layer_skip.py", "test_layers_below.py",
    "test_lookahead_decoding.py", "test_lora.py", "test_masked_drafts.py", "test_oracle.py", "test_pooling.py",
    "test_quantization.py", "test_score.py", "test_speculation.py", "test_speculation_recurrent.py",
    "test_triton_engine.py",
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


def chosen(left: list[pytest.Item], counts: list[int]) -> list[list[pytest.Item]]:
    """Take hands of so many cases out of `left`. Each in turn takes the next that has most values of parameters that it
    has not yet, so that it has every value if so many cases can."""
    hands, seen = [list[pytest.Item]() for _ in counts], [set[tuple[str, Any]]() for _ in counts]
    values = {id(item): values_of(item) for item in left}
    for turn in range(max(counts)):
        for hand, known, count in zip(hands, seen, counts, strict=True):
            if turn < count and left:
                best = max(range(len(left)), key=lambda at: len(values[id(left[at])] - known))
                hand.append(left.pop(best))
                known |= values[id(hand[-1])]
    return hands


def of_today(cases: list[pytest.Item], day: int) -> list[pytest.Item]:
    """Return the cases of a test that a day takes: all, unless the test is dealt."""
    nodes = [node for node, _ in cases[0].iter_markers_with_node("dealt")]
    if any(isinstance(node, pytest.Module) for node in nodes):
        return cases if (day + crc32(cases[0].nodeid.partition("::")[0].encode())) % HANDS == 0 else []
    if not nodes and (len(cases) < MANY or DEALT.isdisjoint(cases[0].nodeid.partition("::")[0].split("/")[1:2])):
        return cases
    hands = chosen(cases[:], [-(-(len(cases) - number) // HANDS) for number in range(HANDS)])
    return hands[(day + crc32(cases[0].nodeid.partition("[")[0].encode())) % HANDS]  # of one case not all on one day


def thin(items: Iterable[pytest.Item], day: int | None = None) -> None:
    """Mark as thorough all cases but n of each test with the mark `few(n)`, and of what is left of tests that are dealt
    the cases of other days. Without a day every day's run. Cases that other marks leave out are not counted. Cases that
    are added later change few of the choices of `few`."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not any(map(item.get_closest_marker, ("gpu", "timing", "thorough"))):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        few = next(cases[0].iter_markers("few"), None)
        taken = sorted(cases, key=lambda item: crc32(item.name.encode()))
        if few is not None:
            [taken] = chosen(taken, [few.args[0]])
        if day is not None:
            taken = of_today(taken, day)
        kept = set(map(id, taken))
        for item in cases:
            if id(item) not in kept:
                item.add_marker("thorough")


def day_of(config: pytest.Config) -> int | None:
    """Return the day whose cases a run takes, in days since 1970, or None if it takes all."""
    if (given := config.getoption("--day")) is not None:
        return int(given)
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return None
    command = ["git", "-C", str(config.rootpath), "log", "-1", "--format=%ct"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        return 0
    return int(told) // 86_400


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
    parser.addoption("--day", metavar="N", type=int, help="of tests that are dealt, take the cases of day N")
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
