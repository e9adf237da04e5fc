"""Arguments for functions whose types nobody wrote down: many are tried, in isolation, and those are kept on which the
function returns something."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from ridgeline.training.sandbox import CodeEnded, Limits, SealedWorkers
from ridgeline_bench.scripts.code_tasks.functions import LoneFunction

TRIED, CALLS, FEWEST = 240, 8, 4  # argument lists that are tried; tests that are kept; different results among them
LIMITS = Limits(seconds=20.0, cpu_seconds=10)

_WORDS = (
    "a",
    "ab",
    "hello",
    "Hello World",
    "snake_case_name",
    "camelCaseName",
    "a,b,c",
    "  padded ",
    "",
    "12",
    "-3.5",
    ("racecar"),
    "x=1;y=2",
    "path/to/file.txt",
    "#ff8800",
    "2024-02-29",
    "one two three two",
    "AbC-dEf",
    "(a(b)c)",
    "MCMXCIV",
)
_WHOLE = 0, 1, 2, 3, 5, 7, 10, 12, 17, 25, 100, -1, -4
_FRACTIONS = 0.0, 0.5, 1.5, 2.25, -1.25, 10.0, 3.75
_LISTS: tuple[Any, ...] = (
    [], [1], [3, 1, 2], [1, 2, 3, 4, 5], [5, 3, 8, 3, 1], [2, 4, 6, 8], [-2, 0, 7], [1, 1, 2, 2, 3], [0.5, 1.5, 2.5],
    ["a", "b", "c"], ["pear", "fig", "apple"], ["x", "x", "y"], [[1, 2], [3, 4]], [[1, 0, 2], [0, 3, 4], [5, 6, 0]],
    [["a", 1], ["b", 2]], [True, False, True], ["1", "2", "10"],
)  # fmt: skip
_TABLES: tuple[Any, ...] = (
    {}, {"a": 1}, {"a": 1, "b": 2}, {"x": [1, 2], "y": [3]}, {"name": "n", "size": 3}, {"a": {"b": 1}},
    {"a": ["b"], "b": ["c"], "c": []},
)  # fmt: skip
_POOLS: tuple[tuple[Any, ...], ...] = (_WORDS, _WHOLE, _LISTS, _FRACTIONS, _TABLES, (True, False), (None,))
_WEIGHTS = 30, 30, 24, 6, 6, 2, 2

# A call of a function for at most a twentieth of a second: what it returned, as JSON.
CALLED = """

def _called(function, arguments):
    import json, signal

    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        return json.dumps(function(*json.loads(json.dumps(arguments))), allow_nan=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
"""

# Calls the function with each list of arguments, twice. An answer has either what it returned, or nothing.
_SEARCH = """
def _found(name, tries):
    results = []
    for arguments in tries:
        try:
            first, again = (_called(globals()[name], arguments) for _ in range(2))
            results.append([first] if first == again and len(first) <= 400 else [])
        except BaseException:
            results.append([])
    return results
"""


class CodeTest(NamedTuple):
    """Arguments, and what the function returns for them, as JSON has both."""

    arguments: list[Any]
    expected: Any


def found_tests(function: LoneFunction, seed: int, workers: SealedWorkers) -> list[CodeTest]:
    """Return tests of a function, or none where too few arguments gave different results."""
    draw = Random(f"{seed} {function.package} {function.path} {function.name}")
    tries = [_drawn(draw, len(function.parameters)) for _ in range(TRIED)]
    try:
        found = workers.returned(function.whole + CALLED + _SEARCH, "_found", [function.name, tries], LIMITS)
    except CodeEnded:
        return []
    if not isinstance(found, list) or len(found) != len(tries):
        return []
    return _chosen([CodeTest(a, json.loads(r[0])) for a, r in zip(tries, found, strict=True) if r])


def _drawn(draw: Random, count: int) -> list[Any]:
    """Return arguments. Those of a call are often of one kind."""
    pools = draw.choices(_POOLS, _WEIGHTS, k=count)
    if count > 1 and draw.random() < 0.5:
        pools = [pools[0]] * count
    return [draw.choice(pool) for pool in pools]


def _chosen(tests: Sequence[CodeTest]) -> list[CodeTest]:
    """Return tests with different results first, of which no single value and no argument is right for all."""
    by_result: dict[str, list[CodeTest]] = {}
    for test in tests:
        if test not in by_result.setdefault(json.dumps(test.expected), []):
            by_result[json.dumps(test.expected)].append(test)
    if len(by_result) < FEWEST:
        return []
    ahead, found = [list(each) for each in by_result.values()], list[CodeTest]()
    while len(found) < CALLS and any(ahead):
        found += [each.pop(0) for each in ahead if each][: CALLS - len(found)]
    for place in range(len(found[0].arguments)):
        if all(test.arguments[place] == test.expected for test in found):
            return []
    return found
