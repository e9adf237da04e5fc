"""What a capacity would have dropped, against transformers' own routers and experts that fill up token by token."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from ridgeline import LLM
from ridgeline.cli import app
from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.quality.capacity import measure_capacity
from ridgeline_bench.quality.documents import TextFile
from tests import tiny_models
from tests.api.conftest import write_tokenizer
from tests.bench.quality.conftest import TEXT

EXPERTS, USED, BATCH = 8, 2, 64


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("mixture"))
    write_tokenizer(made)
    return made


def routes(folder: Path, ids: list[int]) -> list[list[list[int]]]:
    """The experts of each token, in each layer, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return [layer.topk(USED).indices.tolist() for layer in logits]


def lost(tokens: list[list[int]], factor: float) -> int:
    """Experts take one token after the other until they are full."""
    room, taken, beyond = math.ceil(factor * len(tokens) * USED / EXPERTS), [0] * EXPERTS, 0
    for expert in (expert for chosen in tokens for expert in chosen):
        beyond += taken[expert] >= room
        taken[expert] += 1
    return beyond


def test_shares_are_those_of_experts_that_fill_up(mixture: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ["eval", "capacity", str(text), "--model", str(mixture), "--batch", str(BATCH), "--dtype", "float32"]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--device", "cpu", "--window", "250", "--json"]).stdout)
    with LLM(mixture, device="cpu", skip_tokenizer_init=False) as llm:
        ids = llm.get_tokenizer().encode(TEXT, add_special_tokens=False)
    assert BATCH < len(ids) < 250
    bounds = [*range(0, len(ids), BATCH), len(ids)]
    assert (found["tokens"], found["batches"]) == (len(ids), len(bounds) - 1)
    assert list(found["dropped"]) == ["1.0", "1.25", "1.5", "2.0"]
    every = routes(mixture, ids)
    for layer, tokens in zip(found["layers"], every, strict=True):
        counts = np.bincount(np.ravel(tokens), minlength=EXPERTS)
        assert layer["imbalance"] == pytest.approx(counts.max() / counts.mean())
        for factor, share in layer["dropped"].items():
            batches = [tokens[start:end] for start, end in pairwise(bounds)]
            assert share == pytest.approx(sum(lost(batch, float(factor)) for batch in batches) / (USED * len(ids)))
    assert found["layers"][0]["dropped"]["1.0"] > found["layers"][0]["dropped"]["2.0"]
    for factor, share in found["dropped"].items():
        assert share == pytest.approx(np.mean([layer["dropped"][factor] for layer in found["layers"]]))


def test_the_table_has_a_row_for_each_layer(mixture: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ["eval", "capacity", str(text), "--model", str(mixture), "--device", "cpu", "--factor", "1.1"]
    lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.strip()][-3:] == ["0", "1", "together"]
    assert any("1.1" in line for line in lines)


def test_mistakes_are_one_sentence(llm: LLM, mixture: Path) -> None:
    file = TextFile(Path("a.txt"), (TEXT,))
    with pytest.raises(InvalidConfig, match="the model has no experts"):
        measure_capacity(llm, [file])
    with LLM(mixture, device="cpu") as own:
        with pytest.raises(InvalidConfig, match="a capacity factor is -1"):
            measure_capacity(own, [file], factors=[-1.0])
        with pytest.raises(InvalidConfig, match="finds no tokens"):
            measure_capacity(own, [TextFile(Path("a.txt"), ("",))])
