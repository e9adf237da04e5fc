"""A tiny GGUF file over two processes: what each holds is what is predicted of it, and so are the limits."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from ridgeline.perf.hardware import find
from ridgeline.perf.host_layers import Places
from ridgeline.perf.links import assumed
from ridgeline_bench.scripts import experiments_page, host_layers
from ridgeline_bench.scripts.random_gguf import write

STORED = {"model": "m", "form": "F32", "gpu": "G", "date": "2026-11-27T01:02:03"}
CPU = find("CPU")  # a guess, whose figures are as good as others here


@pytest.mark.usefixtures("forked_ranks")
def test_each_process_holds_what_is_predicted_and_whole_models_give_the_scale(folder: Path, tmp_path: Path) -> None:
    file = write(folder, tmp_path / "model.gguf", "F32")
    where = host_layers.place(file, "float32", torch.device("cpu"), CPU)
    asked = Namespace(devices="cpu,cpu", layers=[0, 1, 2], input=8, tokens=6, dtype="float32")
    lines = list(host_layers.study(file, Places(where, where, assumed(CPU)), asked))
    for line in lines:
        predicted = [size for size in (line["host_bytes"], line["device_bytes"]) if size]
        assert line["held"] == pytest.approx(predicted, rel=0.1)  # tables of angles are held too
        assert line["limit"] == pytest.approx(1 / (line["host"] + line["device"] + line["handed"]))
        assert line["measured"] > 0
    device, both, host = lines
    assert both["handed"] == pytest.approx(300e-6, rel=0.1)  # two messages of gloo
    assert both["host"] + both["device"] == pytest.approx(host["host"], rel=0.01)
    scale = host_layers.scaled(lines)
    assert [scale[0], scale[2]] == pytest.approx([device["measured"], host["measured"]])
    slower = [line["limit"] / line["measured"] for line in (host, device)]
    assert scale[1] == pytest.approx(1 / (slower[0] * both["host"] + slower[1] * both["device"] + both["handed"]))
    assert host_layers.scaled(lines[:2]) == [None, None]
    row = list(host_layers.rows(lines))[1]
    assert [row[0], row[2], row[4], row[-1]] == ["1", "1", f"{both['measured']:.1f}", f"{scale[1]:.1f}"]
    shown = experiments_page.divided([{**line, **STORED} for line in lines])
    assert shown[0] == "m in F32 on cpu,cpu of G, 2026-11-27:"
    assert f"| {' | '.join(row)} |" in shown


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (0, {"device": "cuda"}),
        (4, {"device": "cpu"}),
        (1, {"pipeline_parallel_size": 2, "pipeline_devices": "cpu,cuda", "pipeline_layer_partition": "1,3"}),
    ],
)
def test_whole_models_run_on_one_device(first: int, expected: dict[str, Any]) -> None:
    assert host_layers.options_of(first, 4, ["cpu", "cuda"]) == expected
