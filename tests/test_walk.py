"""The way of a step may become shorter, and not longer unseen. docs/architecture.md follows a request's first one."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ridgeline_bench.scripts.walk import steady_walk, walk

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"

both = cache(walk)


def test_the_first_step_enters_no_more_files_and_functions_than_it_did() -> None:
    """Lower the numbers when the way has become shorter."""
    caller, worker = both()
    assert 0 < len(caller.files) <= 39
    assert 0 < len(caller.functions) <= 172
    assert 0 < caller.calls() <= 296
    assert 0 < len(worker.functions) <= 98
    assert caller.entered["engine/engine.py", "Engine.check"] == 1


def test_a_steady_step_enters_no_more_files_and_functions_than_it_did() -> None:
    """The numbers are for eight requests that decode, on a CPU, where the ops' plain references run too."""
    engine, text, worker = steady_walk()
    for found, files, functions in ((engine, 12, 32), (text, 10, 19), (worker, 36, 76)):
        assert 0 < len(found.files) <= files, found.files
        assert 0 < len(found.functions) <= functions, found.functions
    assert engine.entered["engine/engine.py", "Engine.step"] == 1
    assert engine.entered["worker/local.py", "LocalWorker.submit"] == 1
    assert worker.entered["worker/runner.py", "Runner.forward"] == 1
    assert text.entered["text/completion.py", "Completion.take_token"] == 8


def stations() -> list[tuple[str, str]]:
    """Return the file and the name of each function that the page says the first step enters, in its order."""
    table = ARCHITECTURE.read_text().split("| file | functions |", 1)[1].split("\n\n", 1)[0]
    rows = [re.findall(r"`([^`]+)`", " ".join(line.split("|")[1:3])) for line in table.splitlines()[2:]]
    return [(file, name) for file, *names in rows for name in names]


def test_the_page_on_architecture_follows_the_first_step() -> None:
    caller, worker = both()
    order = [*caller.entered, *worker.entered]
    found = stations()
    assert len(found) > 15
    assert [station for station in found if station not in order] == []
    places = [order.index(station) for station in found]
    assert places == sorted(places), "the table has the order in which the step enters them first"
