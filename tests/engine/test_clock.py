"""An engine reads the clock that it is given, and no other."""

from __future__ import annotations

import ast
from itertools import count
from pathlib import Path

import pytest

import ridgeline.engine
from ridgeline.core.plan.request import RequestStats
from ridgeline.core.settings.config import EngineConfig
from ridgeline.engine.engine import Engine
from tests.engine.desk import make_request
from tests.engine.ideal_worker import VOCAB, IdealWorker
from tests.engine.layouts import layout_of

FOLDER = Path(ridgeline.engine.__file__).parent


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: str(file.relative_to(FOLDER)))
def test_no_module_of_the_engine_imports_a_clock(file: Path) -> None:
    tree = ast.walk(ast.parse(file.read_text()))
    imported = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
    assert not imported & {"time", "datetime"}


def test_all_times_of_a_request_are_those_of_the_engines_clock() -> None:
    layout, ticks, ended = layout_of(((None, 1),), 4, 33), count(1000), list[RequestStats]()
    config = EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    engine = Engine(config, layout, IdealWorker(layout), vocab_size=VOCAB, clock=lambda: float(next(ticks)))
    engine.on_finish(lambda request, stats: ended.append(stats))
    engine.add(make_request("a", [1, 2, 3]))
    while engine.has_work:
        engine.step()
    [stats] = ended
    assert stats.first_scheduled is not None
    assert stats.first_token is not None
    assert 1000 <= stats.first_scheduled < stats.first_token < stats.finished < next(ticks)
