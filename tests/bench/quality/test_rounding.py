"""What fewer bits cost: likelihoods and divergences are those of transformers' logits, bits are counted, caches round
as they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.compression.calibration import sequences
from ridgeline.compression.predictions import TokenCosts, logprobs
from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.quality import cache
from ridgeline_bench.quality.dense import DenseModel
from ridgeline_bench.quality.documents import TextFile, held_out_files
from ridgeline_bench.quality.quantized import Choice, Speeds, measure, quantized
from ridgeline_bench.quality.rounding_results import draw
from ridgeline_bench.results import read
from tests.bench.quality.conftest import TEXT
from tests.command import run_here

CPU = torch.device("cpu")
GROUP = 16


@pytest.fixture(scope="module")
def dense(folder: Path) -> DenseModel:
    return DenseModel.of(folder, CPU)


@pytest.fixture(scope="module")
def windows(dense: DenseModel) -> Tensor:
    return dense.windows([TextFile(Path("a.txt"), (TEXT, TEXT))], 48, 3)


@pytest.fixture(scope="module")
def calibration(dense: DenseModel) -> Tensor:
    return sequences([TEXT], dense.tokenizer, count=4, length=32, bos=1)


@torch.no_grad()
def their_logprobs(theirs: transformers.PreTrainedModel, tokens: Tensor) -> Tensor:
    return theirs(tokens[None, :-1]).logits[0].float().log_softmax(-1)


# ---- the dense model ---------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_transformers(
    dense: DenseModel, windows: Tensor, theirs: transformers.PreTrainedModel
) -> None:
    decoder = dense.decoder()
    for tokens in windows:
        torch.testing.assert_close(logprobs(decoder, tokens), their_logprobs(theirs, tokens), rtol=1e-4, atol=1e-4)


def test_windows_follow_each_other_behind_the_prefix_token(dense: DenseModel, windows: Tensor) -> None:
    ids = dense.tokenizer.encode(TEXT, add_special_tokens=False)
    joined = [1, *ids, 1, *ids]
    assert windows.shape == (3, 49)
    assert windows[:, :-1].flatten().tolist() == joined[: 3 * 48]
    assert windows[:, 1:].flatten().tolist() == joined[1 : 3 * 48 + 1]
    with pytest.raises(InvalidConfig, match="a window takes 201; name more"):
        dense.windows([TextFile(Path("a.txt"), ("word",))], 200, 1)
    with pytest.raises(InvalidConfig, match="this model's allows 2 to 256"):
        dense.windows([TextFile(Path("a.txt"), (TEXT,))], 257, 1)


def test_costs_are_the_divergence_over_the_whole_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(20, 50, generator=generator).log_softmax(1) for _ in range(2))
    tokens = torch.randint(50, (21,), generator=generator)
    costs = TokenCosts.between(p, q, tokens)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p.double()), torch.distributions.Categorical(logits=q.double())
    )
    torch.testing.assert_close(costs.kl_T.double(), exact, rtol=1e-4, atol=1e-5)
    nats = torch.nn.functional.nll_loss(q.double(), tokens[1:])
    assert costs.perplexity == pytest.approx(float(nats.exp()), rel=1e-6)
    assert costs.equal_greedy == float((p.argmax(1) == q.argmax(1)).double().mean())
    certain = torch.full((1, 3), -torch.inf)
    certain[0, 0] = 0.0
    assert TokenCosts.between(certain, certain, torch.tensor([0, 0])).kl_mean == 0


# ---- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("w4a16", 4 + 16 / GROUP),
        ("w4a16:gptq", 4 + 16 / GROUP),
        ("w2a16", 2 + (16 + 8) / GROUP),  # groups of so few bits have zeros
        ("nvfp4", 4 + 8 / 16),
    ],
)
def test_bits_of_a_weight_count_scales_and_zeros(
    dense: DenseModel, calibration: Tensor, name: str, bits: float
) -> None:
    decoder = dense.decoder()
    total = sum(p.numel() for p in decoder.parameters())
    matrices = sum(p.numel() for n, p in decoder.named_parameters() if n.startswith("layers.") and p.ndim == 2)
    found, num_bytes = quantized(decoder, dense, Choice.of(name), calibration, GROUP)
    # NVFP4's one scale of a whole matrix counts too: 32 bits for each of the 7 projections of a layer
    whole = 32 * 7 * len(dense.config.spec.layers) / matrices if name == "nvfp4" else 0.0
    assert found == pytest.approx(bits + whole, rel=1e-6)
    assert num_bytes == pytest.approx(matrices * found / 8 + 2 * (total - matrices), rel=1e-9)


@pytest.mark.parametrize("name", ["quip", "aqlm"])
def test_references_take_the_place_of_every_matrix_of_the_layers(
    dense: DenseModel, calibration: Tensor, name: str
) -> None:
    decoder, before = dense.decoder(), dict(dense.decoder().named_parameters())
    bits, _ = quantized(decoder, dense, Choice.of(name), calibration, GROUP)
    changed = {n for n, p in decoder.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if n.startswith("layers.") and before[n].ndim == 2}
    assert bits > 2
    for n in changed:
        assert float((decoder.get_parameter(n) - before[n]).norm() / before[n].norm()) < 0.6


@pytest.mark.dealt
def test_rows_compare_with_the_plain_model(
    dense: DenseModel, windows: Tensor, calibration: Tensor, theirs: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    choices = [Choice.of(name) for name in ("w8a8", "w4a16", "w2a16")]
    heard: list[str] = []
    plain, *rows = measure(
        dense,
        choices,
        windows,
        calibration,
        group=GROUP,
        speeds=Speeds({"model": dense.folder, "device": "cpu", "block_size": 4}, (2,)),
        progress=lambda what, fraction: heard.append(what),
    )
    nats = torch.cat([-their_logprobs(theirs, t).gather(1, t[1:, None])[:, 0] for t in windows]).mean()
    assert plain.costs.perplexity == pytest.approx(float(nats.exp()), rel=1e-4)
    assert plain.costs.kl_mean == pytest.approx(0, abs=1e-6)
    assert [row.scheme for row in rows] == ["w8a8", "w4a16", "w2a16"]
    kl = [row.costs.kl_mean for row in rows]
    assert 0 < kl[0] < kl[1] < kl[2]
    assert plain.speed[2] > 0
    assert rows[2].speed == {}  # no kernel multiplies with two bits
    assert "w2a16 rtn" in heard
    draw([plain, *rows], "a title", tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_unknown_schemes_and_methods_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"unknown scheme 'w5a16'.*quip"):
        Choice.of("w5a16")
    with pytest.raises(InvalidConfig, match="is not made by smoothquant"):
        Choice.of("w4a16:smoothquant")


# ---- the cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cache.FORMATS)
def test_a_cache_rounds_each_row_to_its_own_levels(name: str) -> None:
    x = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None, None]
    rounded = cache.rounding(name)(x)
    if name == "bfloat16":
        assert torch.equal(rounded, x.bfloat16().float())
        return
    for before, after in zip(x.flatten(0, 1), rounded.flatten(0, 1), strict=True):
        alone = cache.rounding(name)(before[None, None])[0, 0]
        assert torch.equal(after, alone)
        step = float(before.abs().max()) / (2.0 ** (int(name[3:]) - 1) - 1) if name.startswith("int") else None
        # half a step, and what the bfloat16 of a scale adds to the largest number
        error = (after - before).abs()
        if step is not None:
            assert float(error.max()) <= 0.5 * step + 2**-8 * float(before.abs().max())
            assert len(after.unique()) <= 2 ** int(name[3:]) - 1
        else:
            relative = 2.0 ** -(4 if name == "fp8_e4m3" else 3)
            assert bool((error <= relative * before.abs() + 2**-8 * before.abs().max()).all())
    assert torch.equal(cache.rounding(name)(torch.zeros(1, 1, 64)), torch.zeros(1, 1, 64))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_simulated_format_predicts_as_the_engine_does(
    dense: DenseModel, windows: Tensor, folder: Path, name: str
) -> None:
    """Far nearer than the plain cache predicts; a sum in another order can make a level the next one."""
    tokens, decoder = windows[0], dense.decoder()
    simulated = logprobs(decoder, tokens, cache._cache(name, "both")).gather(1, tokens[1:, None])[:, 0]
    plain = logprobs(decoder, tokens).gather(1, tokens[1:, None])[:, 0]
    with LLM(folder, device="cpu", block_size=4, kv_cache_dtype=name) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        [result] = llm.generate([{"prompt_token_ids": tokens.tolist()}], params, use_tqdm=False)
    pairs = zip(tokens[1:].tolist(), result.prompt_logprobs[1:], strict=True)
    found = torch.tensor([entry[token].logprob for token, entry in pairs])
    assert float((found - simulated).norm()) < 0.1 * float((found - plain).norm())


def test_only_the_side_that_is_named_is_rounded() -> None:
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    keys, values, both = (cache._cache("int4", side).cached(k, v) for side in ("keys", "values", "both"))
    assert torch.equal(keys[1], v)
    assert torch.equal(values[0], k)
    assert not torch.equal(keys[0], k)
    assert not torch.equal(values[1], v)
    assert torch.equal(both[0], keys[0])
    assert torch.equal(both[1], values[1])


def test_costs_of_a_cache_fall_with_its_bits_and_are_given_by_position(
    dense: DenseModel, windows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MIN_EDGE", 16)
    seen: list[int] = []
    found = cache.measure(dense.decoder(), windows, ("int8", "int4"), seen.append)
    assert found.edges == [16, 32, 48]
    assert sum(seen) == 3 * 48 * (1 + 2 * 3)
    by_name = {(cost.format, cost.side): sum(cost.kl) for cost in found.costs}
    assert 0 < by_name["int8", "both"] < by_name["int4", "both"]
    assert by_name["int4", "keys"] > 0
    assert by_name["int4", "values"] > 0
    assert {cost.bits for cost in found.costs} == {8 + 16 / 16, 4 + 16 / 16}  # heads are 16 wide
    exact = dense.decoder()
    nats = torch.stack([-logprobs(exact, t).gather(1, t[1:, None])[:, 0] for t in windows]).double().mean(0)
    assert found.baseline == pytest.approx([float(nats[s : s + 16].mean()) for s in (0, 16, 32)], rel=1e-5)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"unknown cache format 'fp4'; use bfloat16, .*int4"):
        cache.rounding("fp4")


# ---- the commands ------------------------------------------------------------------------------------------------


def test_texts_are_there_where_none_is_given() -> None:
    assert {file.path.parent.name for file in held_out_files()} == {"json", "logging", "http", "email"}


def test_the_commands_write_result_files(folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.jsonl"
    text.write_text(TEXT)
    common = [str(text), "--model", str(folder), "--context", "40", "--windows", "1", "--out", str(out), "--json"]
    options = ["--schemes", "w4a16,quip", "--group", "16", "--batches", "none", "--calibration", str(text)]
    made = run_here("eval", "quantization", *common, *options, "--length", "32", "--device", "cpu")
    assert made.returncode == 0, made.stderr
    rows = json.loads(made.stdout)
    assert [(row["scheme"], row["method"]) for row in rows] == [("plain", ""), ("w4a16", "rtn"), ("2 bits", "quip")]
    made = run_here("eval", "cache", *common, "--formats", "int4", "--device", "cpu")
    assert made.returncode == 0, made.stderr
    assert {cost["side"] for cost in json.loads(made.stdout)["costs"]} == {"both", "keys", "values"}
    records = read([out])
    assert {record.workload for record in records} >= {"quantization:w4a16:rtn", "cache:int4:keys:40"}
    assert all(record.machine.torch and record.date and record.model for record in records)
    wrong = run_here("eval", "quantization", "--batches", "1,x")
    assert wrong.returncode == 2
    assert "whole numbers separated by commas" in wrong.stderr
