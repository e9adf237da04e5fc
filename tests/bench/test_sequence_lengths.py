"""The benchmark of mixers over sequence lengths runs on a CPU, checks before it times, and writes result lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from ridgeline_bench.results import read
from ridgeline_bench.scripts import sequence_lengths, sequence_mixers
from ridgeline_bench.scripts.sequence_lengths import Kept, bench

CPU = torch.device("cpu")
QUIET = Console(quiet=True)


def test_every_mixer_is_measured_at_every_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_lengths, "CHECKED", (20, 20))
    monkeypatch.setattr(sequence_lengths, "SAMPLES", 1)
    file = tmp_path / "lines.jsonl"
    records = bench(64, [16, 32], 64, CPU, QUIET, Kept(output=file))
    forms = sequence_mixers.forms(CPU)
    assert [record.model for record in records] == [form.mixer for form in forms for _ in range(2)]
    assert {record.model for record in records} == {"GLA", "attention", "Mamba", "Mamba-2"}
    assert all(record.value > 0 and record.options["error"] < 1e-5 for record in records)
    assert [record.what for record in read([file])] == [record.what for record in records]


def test_no_time_is_reported_for_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_lengths, "CHECKED", (8, 8))
    monkeypatch.setattr(sequence_lengths, "error_of", lambda form, setting: float("nan"))
    assert bench(32, [16], 64, CPU, QUIET, Kept()) == []


def test_a_batch_has_the_same_work_at_every_length_but_for_attention() -> None:
    def flops(form: sequence_mixers.Form, length: int) -> float:
        rows = (length,) * (16_384 // length)
        return form.work(sequence_mixers.Setting(rows, 2048, torch.bfloat16, CPU)).least.flops

    for form in sequence_mixers.forms(CPU):
        ratio = flops(form, 16_384) / max(flops(form, 1024), 1)
        assert ratio == pytest.approx(16, rel=0.01) if form.mixer == "attention" else ratio <= 1.01


def test_kernels_move_and_compute_no_less_than_the_least() -> None:
    setting = sequence_mixers.Setting((2048,) * 8, 2048, torch.bfloat16, CPU)
    for form in sequence_mixers.forms(CPU):
        work = form.work(setting)
        moved, flops = (sum(part[which] for part in work.parts) for which in (0, 1))
        assert moved >= work.least.bytes
        assert flops >= 0.99 * work.least.flops


def test_the_page_shows_the_stored_lines() -> None:
    records = read([Path("benchmarks/results/h100-sequence-lengths.jsonl")])
    assert sequence_lengths.PICTURE.read_text() == sequence_lengths.drawing(records)
    page = (sequence_lengths.PICTURE.parents[1] / "sequence-mixers.md").read_text()
    assert sequence_lengths.page_table(records) in page, "run sequence_lengths --draw"


def test_the_largest_batch_and_the_latest_line_of_a_length_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    for tokens in (32, 64, 64):
        bench(tokens, [16], 64, CPU, QUIET, Kept(output=file, only="Mamba-2"))
    [mamba2] = sequence_lengths.served(read([file])).values()
    assert mamba2[16] == read([file])[-1]
    assert sequence_lengths.page_table(read([file])).count("\n") == 2
