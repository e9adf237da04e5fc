"""The experiments that train small models give lines from which their tables and pictures follow."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ridgeline.cli.sizes import read_config, read_hardware, short
from ridgeline.perf.crossover import Curve, crossings
from ridgeline.perf.precision import precision
from ridgeline.perf.scaling_law import ScalingLaw
from ridgeline.training.linear import MAMBA2_ATTENTION, MAMBA2_CONFIG
from ridgeline_bench.scripts import mixer_quality, scaling_laws
from ridgeline_bench.scripts.small_models import sequences

CPU = torch.device("cpu")
TOKENS = np.random.default_rng(0).integers(1, 64, 3000)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "tokens.bin").write_bytes(TOKENS.astype(np.uint16).tobytes())
    return tmp_path / "tokens.bin"


def test_a_run_counts_the_parameters_and_tokens_that_it_trained(text: Path) -> None:
    line = scaling_laws.Setup(CPU, text, 32, 2, sequences(TOKENS, 32, 2)).run(64, 200)
    # attention of 64 by 64 four times, a feed-forward of 64 by 192 three times, in two layers; the output layer
    assert line["parameters"] == 2 * (4 * 64 * 64 + 3 * 64 * 192) + 4096 * 64
    assert line["tokens"] == 192
    assert 6 < line["loss"] < np.log(4096)  # of ids up to 64 it has learnt a little, in three steps


def test_the_law_is_fitted_to_the_smaller_models_alone() -> None:
    law = ScalingLaw(1.5, 60.0, 0.3, 900.0, 0.4)
    lines = [
        {"width": w, "parameters": n, "tokens": d, "loss": law.loss(n, d) + (w == 384)}
        for w, n in ((64, 3e5), (128, 1e6), (256, 5e6), (384, 1.5e7)) for d in (4e6, 8e6, 16e6)
    ]  # fmt: skip
    fitted, predicted = scaling_laws.divided(lines, 384)
    assert (len(fitted), len(predicted)) == (9, 3)
    table, said = scaling_laws.told(scaling_laws.fit(fitted), fitted, predicted)
    assert len(table.rows) == 12
    assert said[1].endswith("0.00%")
    worst = max(1 - law.loss(1.5e7, d) / (law.loss(1.5e7, d) + 1) for d in (4e6, 8e6, 16e6))
    assert said[2] == f"largest error of a prediction: {worst:.2%}"
    assert scaling_laws.drawing(lines, 384).count("<polyline") == 8


def test_mamba2_and_a_transformer_of_as_many_parameters_are_read_at_every_length(text: Path) -> None:
    small = {"vocab_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 32}
    setup = mixer_quality.Setup(CPU, text, (32, 64, 128), 2, 2, TOKENS[:500])
    lines = list(setup.lines(MAMBA2_CONFIG | small, MAMBA2_ATTENTION | small, Console(quiet=True)))
    lines = json.loads(json.dumps(lines))
    held: dict[tuple[str, str], list[float]] = {}
    for x in lines:
        if "held" in x:
            held.setdefault((x["model"], x["way"]), []).append(x["held"])
    # a state of 8 heads of 64 by 128 in float32, and three inputs of 768 channels in bfloat16
    assert held["Mamba-2", "plain"] == [4 * 8 * 64 * 128 + 2 * 3 * 768] * 3
    assert held["transformer", "plain"] == [2 * 2 * 2 * 64 * length for length in (32, 64, 128)]
    assert held["transformer", "in window"][2] <= held["transformer", "plain"][1]
    assert all(4 < x["nats"] < 4.5 for x in lines if "nats" in x)  # ln 64 = 4.16
    assert len(mixer_quality.rows_of(lines)) == 1 + 4 + 2
    assert mixer_quality.page_table(lines).count("\n") == 7
    assert mixer_quality.drawing(lines).count("<polyline") == 4 + 3


def test_both_models_have_as_many_parameters() -> None:
    sizes = []
    for config in (MAMBA2_CONFIG, MAMBA2_ATTENTION):
        made = mixer_quality.model_config(config)
        decoder = mixer_quality.training_decoder(made.spec, torch.float32, torch.device("meta"))
        sizes.append(sum(p.numel() for p in decoder.parameters()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_the_page_states_the_planners_figures() -> None:
    """The table of docs/sequence-mixers.md is what `ridgeline crossover` computes for the two configs."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "sequence-mixers.md").read_text()
    models = {
        name: read_config(str(root / "benchmarks" / "models" / name)).spec
        for name in ("transformer-2.7b", "mamba2-2.7b")
    }
    curves = [
        Curve(
            name=name, model=spec, hardware=read_hardware("H100", True), precision=precision("bfloat16"),
            kv_dtype="bfloat16", batch=8,
        )
        for name, spec in models.items()
    ]  # fmt: skip
    for context in (1, 4, 16, 64, 256):
        cells = [f"{context}k"]
        for curve in curves:
            point = curve.at(context << 10)
            cells += [f"{1e3 * point.step:.3g}", short(point.held, "B"), f"{point.requests}"]
        assert f"| {' | '.join(cells)} |" in page
    found = {what: at for _, _, what, at in crossings(curves)}
    assert found == {"held": 2074, "step": 4187}
    assert all(f"{at:,} tokens" in page.replace("\n", " ") for at in found.values())
    # 64 layers: 80 heads of 64 by 128 in float32, three inputs of 2 * 2560 + 2 * 128 channels in bfloat16
    assert curves[1].held(1 << 18) == curves[1].held(1 << 10) == 64 * (4 * 80 * 64 * 128 + 2 * 3 * 5376)


def test_the_page_states_the_measured_steps() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "sequence-mixers.md").read_text()
    stored = [json.loads(x) for x in (root / "benchmarks/results/h100-crossover.jsonl").read_text().splitlines()]
    steps = {
        (x["model"], x["batch"], x["context"]): f"{1e3 * x['measured']['step']:.3g}"
        for x in stored if x["model"].endswith("-2.7b") and "measured" in x
    }  # fmt: skip
    for kilo in (1, 4, 16, 64):
        cells = [
            float(steps[model, batch, kilo << 10])
            for batch in (1, 8) for model in ("transformer-2.7b", "mamba2-2.7b")
        ]  # fmt: skip
        [row] = [line for line in page.splitlines() if line.startswith(f"| {kilo}k |") and line.count("|") == 6]
        assert [float(cell) for cell in row.split("|")[2:6]] == cells
