"""Tasks made of functions: which functions, their tests, and that trivial answers solve none. What runs here is the
text below, so no isolation is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from ridgeline.training.corpus import Document
from ridgeline.training.sandbox import SealedWorkers
from ridgeline_bench.scripts.code_tasks.arguments import found_tests
from ridgeline_bench.scripts.code_tasks.functions import lone_functions, shape_of
from ridgeline_bench.scripts.code_tasks.measure import interval
from ridgeline_bench.scripts.code_tasks.tasks import apart, share, tasks_of, within, worthwhile

TEXT = '''
import math
import os
from collections import Counter

VOWELS = "aeiou"
ENVIRONMENT = os.environ


def vowels(text):
    """Count the vowels of a text."""
    count = 0
    for letter in text:
        if letter in VOWELS:
            count += 1
    return count


def commonest(items):
    counts = Counter(items)
    return sorted(counts, key=lambda each: (-counts[each], str(each)))


def hypotenuse(a, b): return math.sqrt(a * a + b * b)


def same(value):
    return value


def listed(path):
    return os.listdir(path)


def shown(value):
    print(value)
    return value


def forever(number):
    while number != "never":
        pass
    return number


@staticmethod
def decorated(x):
    return x + 1


class Inside:
    def method(self, x):
        return x
'''
FILE = Document("made", "made/up.py", TEXT)


def functions() -> dict[str, object]:
    return {each.name: each for each in lone_functions([FILE])}


def test_functions_that_need_more_than_arguments_are_left_out() -> None:
    assert set(functions()) == {"vowels", "commonest", "same", "forever"}


@pytest.fixture
def workers() -> Iterator[SealedWorkers]:
    with SealedWorkers(1, isolated=False) as found:
        yield found


@pytest.mark.dealt
def test_tasks_are_solved_by_their_own_answers_and_by_no_trivial_one(workers: SealedWorkers) -> None:
    found = {}
    for function in lone_functions([FILE]):
        tests = found_tests(function, 0, workers)
        found[function.name] = worthwhile(tasks_of(function, tests), function.parameters, workers) if tests else []
    assert not found["same"]  # its argument is the answer
    assert not found["forever"]
    assert [task.grade for task in found["vowels"]] == [1, 2, 3]
    assert [task.grade for task in found["commonest"]] == [1, 3]
    for task in [*found["vowels"], *found["commonest"]]:
        assert (task.prompt + task.answer).endswith(("return count\n", "str(each)))\n"))
        assert not task.prompt.endswith("\n")
        assert share(task, task.answer, workers) == 1
        assert share(task, "\n    return 0\n", workers) < 1
        assert share(task, "\n    return (\n", workers) == 0
        json.dumps(task.record())
    assert found["vowels"][0].prompt.startswith('VOWELS = "aeiou"\ndef vowels')


def test_functions_alike_are_found_whatever_their_names() -> None:
    first = 'def f(a, b):\n    """Text."""\n    return a + b[0]\n'
    assert shape_of(first) == shape_of("def plus(left: int, right) -> int:\n\n    return left + right[0]\n")
    assert shape_of(first) != shape_of("def f(a, b):\n    return b + a[0]\n")
    known = list(lone_functions([FILE]))
    copied = Document("other", "x.py", TEXT.replace("vowels", "v").replace("letter", "c").replace("commonest", "most"))
    assert apart(lone_functions([copied]), known, []) == []
    assert [each.name for each in apart(known, [], [])] == ["vowels", "commonest", "same", "forever"]
    assert "vowels" not in {each.name for each in apart(known, [], [FILE])}


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("\n    return a\n\n\ndef g():\n    pass", "\n    return a\n\n"),
        (")\n    return a", ")\n    return a"),
        ("\n\n    x = 1\n# behind\n    return x", "\n\n    x = 1"),
        ("", ""),
    ],
)
def test_answers_end_where_the_function_ends(answer: str, kept: str) -> None:
    assert within(answer) == kept


def test_intervals_take_tasks_of_a_function_together() -> None:
    alone = interval(np.array([1.0, 0.0] * 50), np.arange(100).astype(str))
    together = interval(np.array([1.0] * 50 + [0.0] * 50), np.repeat(np.arange(10), 10).astype(str))
    assert alone[0] == pytest.approx(0.4, abs=0.02)  # 0.5 - 1.96 * 0.5 / sqrt(100)
    assert alone[1] == pytest.approx(0.6, abs=0.02)
    assert together[1] - together[0] > 2.5 * (alone[1] - alone[0])
