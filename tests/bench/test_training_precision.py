"""The experiment with types of products trains each from the same start, and says what of the gradients was lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ridgeline_bench.scripts.small_models import sequences
from ridgeline_bench.scripts.training_precision import (
    PICTURE,
    RESULTS,
    SHAPES,
    Setup,
    compared,
    drawing,
    measure,
    page_tables,
    rows_of,
)


def test_a_gradient_is_lost_where_float32_has_one() -> None:
    exact = torch.tensor([0.0, 3.0, 4.0, 0.0])
    assert compared(torch.tensor([0.0, 0.0, 4.0, 1.0]), exact) == {
        "lost": 0.25, "error": pytest.approx(10**0.5 / 5), "overflown": 0.0,
    }  # fmt: skip
    broken = compared(torch.tensor([0.0, torch.inf, 4.0, torch.nan]), exact)
    assert (broken["error"], broken["overflown"]) == (None, 0.5)


def test_every_type_trains_and_a_factor_too_large_destroys_the_weights(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 64, 2000)
    (tmp_path / "tokens.bin").write_bytes(tokens.astype(np.uint16).tobytes())
    config = {**SHAPES["tiny"], "vocab_size": 64}
    setup = Setup(config, torch.device("cpu"), tmp_path / "tokens.bin", 32, 2, 3, 1e-2, sequences(tokens, 32, 2))
    lines = json.loads(json.dumps(list(measure(setup, Console(quiet=True)))))
    runs = {x["run"]: x for x in lines if "run" in x}
    first = {x["losses"][0] for name, x in runs.items() if name.startswith("float")}
    assert max(first) - min(first) < 1e-3  # the same weights and batch
    assert runs["float16, fixed at 2^28"]["held_out"] is None
    for name in ("bfloat16", "float16, adapting"):
        assert runs[name]["held_out"] == pytest.approx(runs["float32"]["held_out"], rel=1e-2)
    probes = {(x["probe"], x["factor"]): x for x in lines if "probe" in x}
    assert probes["bfloat16", 1.0]["overflown"] == probes["float16", 1.0]["overflown"] == 0
    assert probes["float16", 2.0**32]["overflown"] == 1
    assert probes["float16", 2.0**-12]["lost"] > 0.1 > probes["float16", 2.0**16]["lost"]
    assert probes["float16", 2.0**16]["error"] < probes["bfloat16", 1.0]["error"]  # three more bits of mantissa
    assert [len(rows) for rows in rows_of(lines)] == [7, 14]
    assert drawing(lines).count("<polyline") >= 6


def test_the_page_shows_the_stored_lines() -> None:
    lines = [json.loads(line) for line in (PICTURE.parents[2] / RESULTS).read_text().splitlines()]
    page = (PICTURE.parents[1] / "training.md").read_text()
    assert all(table in page for table in page_tables(lines)), "run training_precision --draw"
    assert PICTURE.read_text() == drawing(lines)
    runs, probes = ({x[key]: x for x in lines if key in x} for key in ("run", "probe"))
    assert runs["float16, fixed at 2^28"]["held_out"] is None
    best = runs["float32"]["held_out"]
    assert abs(runs["bfloat16"]["held_out"] - best) < 0.001 > abs(runs["float16, adapting"]["held_out"] - best)
    assert runs["float16, fixed at 2^-9"]["held_out"] > best
    assert set(probes) == {"bfloat16", "float16"}
