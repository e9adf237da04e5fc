"""A run takes the tests that it can run, and the part of them that it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALONE = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take twice as long as the tests

CONFTEST = """
import pytest
from tests import selection

def pytest_pycollect_makemodule(module_path, parent):
    return selection.TestFile.from_parent(parent, path=module_path)

def pytest_addoption(parser):
    selection.add_options(parser)

def pytest_configure(config):
    selection.configure(config)
    for mark in ("dealt: each day", "few(n): of many", "gpu: of a GPU", "thorough: all"):
        config.addinivalue_line("markers", mark)

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    selection.thin(items, selection.day_of(config))
    items[:] = [item for item in items if item not in selection.deselected(config, items)]
"""


@pytest.fixture
def run(tmp_path: Path):
    """Write files, and run pytest on them in a process: its exit code and what it printed."""

    def run(files: dict[str, str], *options: str) -> tuple[int, str]:
        for name, text in {"conftest.py": CONFTEST, "pytest.ini": "[pytest]\n", **files}.items():
            (tmp_path / name).write_text(text)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-v", "--import-mode=importlib"]
        done = subprocess.run(
            [*command, *options],
            cwd=tmp_path, env={**os.environ, **ALONE}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_file_that_lacks_an_extra_is_skipped_in_words_and_so_are_those_that_import_from_it(run) -> None:
    code, printed = run({
        "test_a.py": "WORD = 1\nimport lm_eval.nothing_like_this\n\ndef test_it(): pass\n",
        "test_b.py": "import sys\nsys.path.append('.')\nfrom test_a import WORD, test_it\n",
        "test_c.py": "def test_it(): pass\n",
    })  # fmt: skip
    assert code == 0, printed
    assert "1 passed, 2 skipped" in printed
    assert "lm_eval is not installed" in printed


@pytest.mark.parametrize("line", ["import a_module_of_ours", "from ridgeline import nothing_like_this", "1 / 0"])
def test_a_file_with_another_error_fails(run, line: str) -> None:
    code, _ = run({"test_a.py": f"{line}\n"})
    assert code == 2


def test_parts_have_every_test_once_and_about_as_many(run) -> None:
    files = {f"test_{n}.py": "".join(f"def test_{i}(): pass\n" for i in range(n)) for n in (5, 1, 2, 3)}
    taken: list[str] = []
    for part in ("1/2", "2/2"):
        _, printed = run(files, "--part", part)
        lines = [line.split(" ")[0] for line in printed.splitlines() if " PASSED" in line]
        assert len(lines) in (5, 6)
        taken += lines
    assert len(taken) == len(set(taken)) == 11
    code, printed = run(files, "--part", "3/2")
    assert code == 4
    assert "--part 3/2" in printed


def test_a_run_goes_on_behind_what_passed(run, tmp_path: Path) -> None:
    files = {"test_a.py": "def test_1(): pass\n\ndef test_2(): assert False\n\ndef test_3(): pass\n"}
    code, printed = run(files, "--resume", "passed")
    assert (code, "2 passed" in printed) == (1, True)
    assert (tmp_path / "passed").read_text().split() == ["test_a.py::test_1", "test_a.py::test_3"]
    files["test_a.py"] = files["test_a.py"].replace("False", "True")
    code, printed = run(files, "--resume", "passed")
    assert (code, "1 passed" in printed) == (0, True)
    assert run(files, "--resume", "passed")[0] == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_case_for_a_gpu_on_a_cpu_is_left_out(run) -> None:
    """A mark that stands at another parameter's value selects it, and it would run on the wrong device."""
    text = """
import pytest
gpu = pytest.mark.gpu

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=gpu)])
def test_it(dtype, device): pass
"""
    _, printed = run({"test_a.py": text}, "-m", "gpu")
    assert "2 passed" in printed
    assert "bfloat16-cpu" not in printed


@pytest.mark.thorough
def test_all_tests_are_collected_without_any_extra() -> None:
    hide = """
import sys, pytest
from tests.selection import EXTRAS

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        needed = {"triton", "transformers", "hypothesis", "httpx", "yaml"}  # by most tests, or by transformers itself
        return None if name.split(".")[0] in EXTRAS - needed else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
plugins = ["-p", "no:xdist", "-p", "no:schemathesis"]
sys.exit(pytest.main(["--collect-only", "-m", "gpu or not gpu", *plugins, "tests"]))
"""
    done = subprocess.run([sys.executable, "-c", hide], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_few_cases_have_every_value_and_the_others_are_thorough(run) -> None:
    files = {
        "test_a.py": """
import pytest

@pytest.mark.few(3)
@pytest.mark.parametrize("a", [1, 2, 3, pytest.param(4, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("b", "c"), [(5, 6), (7, 8)])
def test_it(a, b, c): print(f"case {a} {b}", end="")

@pytest.mark.few(2)
def test_one(): pass
"""
    }
    code, printed = run(files, "-s", "-m", "not thorough and not gpu")
    assert code == 0, printed
    assert "4 passed, 5 deselected" in printed
    assert all(f"case {a} " in printed for a in (1, 2, 3))
    assert " 5PASSED" in printed
    assert " 7PASSED" in printed
    assert "3 passed" in run(files, "-m", "thorough")[1]
    assert "2 passed" in run(files, "-m", "gpu")[1]


DEALT = {
    "test_a.py": """
import pytest

@pytest.mark.dealt
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2, 3, pytest.param(4, marks=pytest.mark.gpu)])
def test_it(a, b): pass

@pytest.mark.dealt
def test_one(): pass

@pytest.mark.dealt
@pytest.mark.few(2)
@pytest.mark.parametrize("c", range(5))
def test_few(c): pass

def test_always(): pass
""",
    "test_b.py": """
import pytest
pytestmark = pytest.mark.dealt

def test_1(): pass

@pytest.mark.parametrize("a", range(5))
def test_2(a): pass
""",
}


def passed(printed: str) -> set[str]:
    return {line.split(" ")[0] for line in printed.splitlines() if " PASSED" in line}


def test_what_is_dealt_runs_once_in_three_days(run) -> None:
    days = [
        passed(run(DEALT, "-m", "not thorough and not gpu", "--day", f"{day}")[1]) for day in (20_001, 20_002, 20_003)
    ]
    always = "test_a.py::test_always"
    assert all(always in day for day in days)
    assert sum(map(len, days)) == 9 + 1 + 2 + 3 + 6, "each case on one day, and what is not dealt on each"
    assert set.union(*days) == passed(run(DEALT, "-m", "not thorough and not gpu")[1]), "without a day all"
    for day in days:
        of_it = [name.partition("[")[2] for name in day if "test_it" in name]
        assert all(len({name[at] for name in of_it}) > 1 for at in (0, 2)), "not those of one value"
        assert sum("test_b" in name for name in day) in (0, 6), "a file on one day"
    rest = passed(run(DEALT, "-m", "thorough", "--day", "20002")[1])
    assert rest | days[1] == passed(run(DEALT, "-m", "not gpu")[1])
    assert not rest & days[1]


def test_a_commit_has_its_day_and_a_run_that_names_files_takes_all(run, tmp_path: Path) -> None:
    files = {**DEALT, "pytest.ini": "[pytest]\ntestpaths = .\n"}
    without = passed(run(files, "-m", "not thorough and not gpu")[1])
    assert without == passed(run(files, "-m", "not thorough and not gpu", "--day", "0")[1]), "no history: the first"
    when = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    when |= {"GIT_COMMITTER_DATE": f"{86_400 * 20_002 + 7} +0000"}
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, env=os.environ | when, check=True)
    told = passed(run(files, "-m", "not thorough and not gpu")[1])
    assert told == passed(run(files, "-m", "not thorough and not gpu", "--day", "20002")[1])
    assert passed(run(files, "-m", "not thorough and not gpu", "test_a.py", "test_b.py")[1]) > told
