"""Methods of longer contexts do to each rotated pair what their papers say, and the engine computes the same losses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ridgeline import LLM, SamplingParams
from ridgeline.training.embedded import llama_config
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.formats.json_file import read_json
from ridgeline_bench.scripts import long_context
from ridgeline_bench.scripts.long_context import Experiment, Model, search
from ridgeline_bench.scripts.small_models import held_out_tokens, losses, sequences

CPU, QUIET = torch.device("cpu"), Console(quiet=True)
CONFIG = read_json(EMBEDDED_MODEL / "config.json", required=True)
EMBEDDED = Model(CONFIG, EMBEDDED_MODEL, CPU)
TINY = Model(
    llama_config(hidden=64, intermediate=64, layers=1, heads=1, kv_heads=1) | {"max_position_embeddings": 64}, None, CPU
)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return held_out_tokens()


@pytest.fixture(scope="module")
def stream(tokens: np.ndarray) -> torch.Tensor:
    return sequences(tokens, 3072, 1)


@pytest.mark.parametrize("factor", [2, 8])
def test_each_method_slows_the_pairs_that_its_paper_names(factor: int) -> None:
    slowed = {method: EMBEDDED.slowed(method, 2048 * factor) for method in ("plain", "PI", "NTK", "YaRN")}
    assert slowed["plain"] == (1.0,) * 32
    assert slowed["PI"] == pytest.approx([factor] * 32)
    assert slowed["NTK"] == pytest.approx([factor ** (pair / 31) for pair in range(32)], rel=1e-4)
    # pair i turns 2048 / (2 pi 10000^(i / 32)) times in training: 32 times at i = 8.06, once at i = 20.1
    assert slowed["YaRN"][:9] == pytest.approx([1] * 9)
    assert slowed["YaRN"][21:] == pytest.approx([factor] * 11)
    assert all(1 < each < factor for each in slowed["YaRN"][9:21])


def test_longrope_uses_the_factors_that_it_is_given() -> None:
    factors = tuple(1 + n / 4 for n in range(32))
    mixer = long_context.model_config(EMBEDDED.lengthened("LongRoPE", 4096, factors)).spec.layers[0].mixer
    ours = long_context.inverse_frequencies(mixer.rope, 4096)[0].tolist()  # type: ignore[union-attr,arg-type]
    assert ours == pytest.approx([10_000 ** (-n / 32) / factors[n] for n in range(32)], rel=1e-5)


@pytest.mark.dealt
def test_the_engine_has_the_same_losses(stream: torch.Tensor) -> None:
    short = Model(CONFIG | {"max_position_embeddings": 128}, EMBEDDED_MODEL, CPU)
    text = stream[:, :257]
    config = short.lengthened("YaRN", 256)
    ours = losses(short.decoder(config), text)[0]
    changed = {name: config[name] for name in ("max_position_embeddings", "rope_scaling")}
    with LLM(hf_overrides=changed, dtype="float32", max_model_len=256, enable_prefix_caching=False) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        [output] = llm.generate({"prompt_token_ids": text[0, :255].tolist()}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    theirs = [
        -entry[token].logprob
        for token, entry in zip(text[0, 1:255].tolist(), output.prompt_logprobs[1:], strict=True)
        if entry
    ]
    torch.testing.assert_close(ours[:254], torch.tensor(theirs), rtol=1e-3, atol=1e-3)


@pytest.mark.thorough
def test_beyond_training_distances_fail_and_positions_do_not(stream: torch.Tensor) -> None:
    """The loss behind 2,048 tokens is high where a token sees further than in training, at the same positions not
    where it sees 2,048 tokens, and in between where all pairs turn slower."""
    late = {
        method: float(losses(EMBEDDED.decoder(EMBEDDED.lengthened(method, 3072)), stream)[0, 2560:].mean())
        for method in ("plain", "in window", "YaRN")
    }
    assert late["plain"] > late["in window"] + 1
    assert late["YaRN"] < (late["plain"] + late["in window"]) / 2


def test_every_length_reads_the_same_tokens(tokens: np.ndarray) -> None:
    held = sequences(tokens, 256, 2)
    made = Experiment(TINY, (64, 128, 256), held[:1], held, 0, 0, 1, 1.0, QUIET)
    for length in made.lengths:
        cut = made.cut(held, length)
        assert cut.shape == (512 // length, length + 1)
        assert torch.equal(cut[:, 1:].flatten(), held[:, 1:].flatten())


def test_the_search_never_ends_with_more_loss_than_it_begins_with(tokens: np.ndarray) -> None:
    text = sequences(tokens, 256, 1)

    def loss(factors: tuple[float, ...]) -> float:
        return float(losses(TINY.decoder(TINY.lengthened("LongRoPE", 256, factors)), text).double().mean())

    starts = [loss(TINY.slowed(method, 256)) for method in ("PI", "NTK", "YaRN")]
    best = search(TINY, 256, text, rounds=2)
    assert loss(best) <= min(starts)
    assert list(best) == sorted(best)
    assert 1 <= best[0] <= best[-1] <= 1.25 * 4


def test_training_further_gives_figures_of_every_method_at_every_length(tmp_path: Path, tokens: np.ndarray) -> None:
    held, file = sequences(tokens, 128, 2), tmp_path / "tokens.bin"
    file.write_bytes(tokens[:600].astype("uint16").tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_context, "training_text", lambda folder, megabytes: file)
        lines = list(Experiment(TINY, (64, 128), held[:1], held[1:], 0, 1, 1, 1.0, QUIET).lines())
    figures = [(x["method"], x["length"], x["steps"]) for x in lines if "nats" in x]
    assert len(figures) == len(set(figures)) == 6 * 2 + 5 * 2
    assert all(math.isfinite(x["nats"]) for x in lines if "nats" in x)
    assert len(long_context.rows_of(lines)) == 1 + 6 + 5
    drawn = long_context.drawing([json.loads(json.dumps(line)) for line in lines])
    assert drawn.count("<polyline") == 2 + 6 + 5


def test_the_page_shows_the_stored_lines_and_says_what_they_say() -> None:
    root = long_context.PICTURE.parents[2]
    lines = [json.loads(line) for line in (root / "benchmarks/results/long-context.jsonl").read_text().splitlines()]
    page = (root / "docs" / "long-context.md").read_text()
    assert long_context.page_table(lines) in page, "run long_context --draw"
    assert long_context.PICTURE.read_text() == long_context.drawing(lines)
    figures = {(x["method"], x["length"]): math.exp(x["nats"]) for x in lines if x.get("steps") == 0}
    for length in (4096, 8192, 16_384):
        order = [figures[method, length] for method in ("in window", "LongRoPE", "YaRN", "NTK", "PI", "plain")]
        assert order == sorted(order)
    window = [figures["in window", length] for length in (2048, 4096, 8192, 16_384)]
    assert window == sorted(window, reverse=True)
    assert f"from {window[0]:.2f} to {window[-1]:.2f}" in page
    [plain] = [x["positions"] for x in lines if x.get("method") == "plain" and "positions" in x]
    assert max(plain[:4]) < 2
    assert min(plain[5:]) > 5
