"""A model whose weights are read again, from another folder, in this process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ridgeline.assembly import assemble
from ridgeline.core.config import LLMConfig
from ridgeline.serving.processes.loaded import Loaded
from ridgeline.serving.processes.turn import Turn
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.driving import Rig, ask
from tests.test_speculation import Always, prompt


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_what_drafts_stays_where_other_weights_take_the_models_place(method: str, tmp_path: Path) -> None:
    copy = shutil.copytree(EMBEDDED_MODEL, tmp_path / "copy")
    config = LLMConfig(
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        speculative_config={"method": method, "num_speculative_tokens": 2},
    )
    loaded = Loaded(assemble(config), config, "embedded", 0, Turn(), lambda request, stats: None)
    try:
        loaded.reload(str(copy))
        assert loaded.facts.folder == str(copy)
        loaded.engine.resume()
        own = Rig(loaded.engine)
        own.engine.scheduler.running.drafting = Always()  # type: ignore[assignment]
        assert len(own.run(ask("a", prompt(20, 1), max_tokens=20))["a"].tokens) == 20
        counts = own.engine.scheduler.figures().drafts
        assert counts is not None
        assert counts["draft_tokens"] > 0
    finally:
        loaded.shutdown()
