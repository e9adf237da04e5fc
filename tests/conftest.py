"""Fixtures every test folder shares."""

from __future__ import annotations

import atexit
import gc
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Of this process and of those that tests start: models are tiny, and threads that spin for one another double the cost.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each HTTP client that is made reads the authorities it trusts: all of the system's are 30 ms, one is 2 ms.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "authority.pem")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile 400 modules anew, for half a second
if os.environ.get("RIDGELINE_TEST_NO_BF16"):  # here and in every process that a test starts, before torch is imported
    masked = str(Path(__file__).parent / "no_bf16")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (masked, os.environ.get("PYTHONPATH"))))
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_VNNI"
    runpy.run_path(f"{masked}/sitecustomize.py")

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before any is imported

from ridgeline.engine import pressure
from tests import forks, selection, tiny_models

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    from tests import interpreter

    interpreter.patch_once()

collect_ignore: list[str] = []
# Without the packages of the server and of its clients the engine is tested alone.
if any(find_spec(name) is None for name in ("msgspec", "zmq", "fastapi", "httpx", "openai", "httpx2")):
    collect_ignore += ["serving", "deploy", "bench/serving/test_load.py"]
if find_spec("matplotlib") is None:  # training plots its loss
    collect_ignore += ["training"]


sys.dont_write_bytecode = False  # nor need this process compile tests anew that are as they were

# The same examples every time, on a machine however slow: no run may fail by chance. RIDGELINE_EXAMPLES draws others.
settings.register_profile(
    "fixed",
    derandomize="RIDGELINE_EXAMPLES" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fixed")


def start_numbers() -> None:
    number = int(os.environ.get("RIDGELINE_TEST_SEED", "0"))
    for start in (torch.manual_seed, np.random.seed, random.seed):
        start(number)


# Folders with files that take long, and folders whose files take a moment. Workers take whole files: a long one at the
# end would be waited for by all.
FIRST = ("serving", "ranks", "kernels", "parallel", "bench", "worker")
LAST = ("deploy", "perf", "text")


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    selection.configure(config)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    module: pytest.Module = selection.TestFile.from_parent(parent, path=module_path)
    return module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores: tests of servers and of ranks wait for a sixth of their time."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave out what options say. Begin with what takes long, and end with what takes a moment, for workers too with
    `--no-loadscope-reorder`."""
    selection.thin(items, selection.day_of(config))
    yield  # marks choose, so that parts are parts of what runs
    if left_out := selection.deselected(config, items):
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]

    def place(item: pytest.Item) -> int:
        folder = item.nodeid.split("/")[1]
        return FIRST.index(folder) if folder in FIRST else len(FIRST) + (folder in LAST)

    items.sort(key=place)


gc.set_threshold(50_000)  # and once after each file: tests of engines take 4 to 8% less than with 700
gc.disable()  # until tests are found: what is imported stays


def pytest_collection_finish() -> None:
    """Let garbage be looked for among what tests make alone, and not among a million objects of modules each time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # once the file's fixtures are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # what is left stays, so the next file's collection need not walk it again: some 90 s of CPU a run


# Libraries complain at the end about what was never freed. Before that, pytest collects garbage five times over.
atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Make the fixtures of modules and of the session of the same random numbers, whichever test comes first."""
    start_numbers()


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every request start that fits at first, as where outputs become longer than forecast, so that some are
    preempted later."""
    monkeypatch.setattr(pressure, "OVERBOOKED", 1e6)
    monkeypatch.setattr(pressure, "LEFT", -1e6)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Begin every test with the same random numbers, in whatever order tests run. RIDGELINE_TEST_SEED gives others."""
    start_numbers()


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Let ranks begin as forks of a process that has imported torch (`tests/forks.py`)."""
    with forks.forking():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model(family)`: the folder of that family's tiny model (see tests/tiny_models.py). Do not write to it."""

    @cache
    def folder(family: str) -> Path:
        return tiny_models.save(family, tmp_path_factory.mktemp(family))

    return folder
