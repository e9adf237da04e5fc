"""`ridgeline quantize`: what goes together, what is refused, what it costs the embedded models."""

from __future__ import annotations

import errno
import inspect
import json
import json.decoder
import json.encoder
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.compression import folder as folders
from ridgeline.compression.calibration import default_documents, sequences
from ridgeline.compression.folding import folds
from ridgeline.compression.predictions import TokenCosts, logprobs
from ridgeline.compression.quantize import open_decoder, quantized
from ridgeline.compression.schemes import MakeConfig
from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.layer import Layer
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.command import run_here
from tests.weights.loading import CPU, dense_logits, load

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
MIXTURE = EMBEDDED_MODEL.with_name("embedded-moe")


NOISE = bytes(torch.randint(32, 127, (60_000,), generator=torch.Generator().manual_seed(0)).tolist()).decode()


def silent(what: str, fraction: float) -> None:
    assert 0 <= fraction <= 1


# What is refused, in one sentence each


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scheme", "int5"], r"unknown scheme 'int5'; known: fp8, fp8-block, int8, .*\."),
        (["--method", "magic"], r"unknown method 'magic'; known: rtn, gptq, hqq, llm-int8, smoothquant, awq\."),
        (["--method", "gptq+hqq"], r"'gptq\+hqq' names two of a kind; join one of smoothquant, awq with one of .*\."),
        (
            ["--scheme", "fp8", "--method", "awq"],
            r"fp8 is not made by awq; it goes with rtn, smoothquant, gptq, and awq with int8, w8a16, .*\.",
        ),
        (["--scheme", "fp8", "--format", "gptq"], r"the format gptq does not hold fp8; use compressed-tensors\."),
        (["--scheme", "fp8", "--scheme", "w4a16"], r"2 schemes were given, but no --budget to choose between them\."),
        (
            ["--scheme", "nf4", "--scheme", "fp8", "--budget", "1MB"],
            r"nf4 cannot be mixed with others, since compressed-tensors does not hold it\.",
        ),
        (["--budget", "much"], r"budget 'much' is no size; .*\."),
        (["--act-order"], r"act-order is an option of the method gptq, and the method is rtn\."),
        (["--damping", "2"], r"damping must lie between 0 and 1, got 2\.0\."),
        (["--group", "12"], r"a group must be a multiple of 8 inputs, or 0 for whole rows, got 12\."),
        (
            ["--group", "96"],
            r"model\.layers\.0\.self_attn\.q_proj has 128 inputs, which groups of 96 do not divide; .*",
        ),
        (["--format", "awq", "--symmetric"], r"AWQ's files hold zeros; leave --symmetric out, .*\."),
        (["--calibration", "no.txt"], r"the method rtn reads no text; leave --calibration out, or add --clip\."),
        (["--method", "gptq", "--calibration", "no.txt"], r"no\.txt cannot be read: No such file or directory\."),
        (["--method", "gptq", "--length", "4096"], r"sequences of 4096 tokens exceed the model's context, 256\."),
        (["--method", "gptq", "--sequences", "0"], r"at least 1 sequence of 2 tokens, got 0 of 256\."),
        (["--ignore", "*"], r"nothing of .* is left to quantize; ignore fewer modules\."),
    ],
)
def test_what_does_not_go_together_is_said(arguments: list[str], sentence: str, source: Path, tmp_path: Path) -> None:
    if "--length" not in arguments and "--sequences" not in arguments and "--group" not in arguments:
        arguments = [*arguments, "--group", "32"]
    result = run_here("quantize", source, "--out", tmp_path / "out", *arguments)
    assert result.returncode == 2
    assert_one_sentence(result.stderr, sentence)
    assert not list(tmp_path.iterdir())


def assert_one_sentence(printed: str, pattern: str) -> None:
    import re

    assert printed.count("\n") == 1, printed
    assert re.search(pattern, printed), printed


def test_a_quantized_model_is_not_quantized_again(source: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert run_here("quantize", source, "--out", made, "--group", "32").returncode == 0
    again = run_here("quantize", made, "--out", tmp_path / "again", "--group", "32")
    assert again.returncode == 2
    assert_one_sentence(again.stderr, r"made is quantized already \(gptq\); give the model that it was made from\.")
    taken = run_here("quantize", source, "--out", made, "--group", "32")
    assert taken.returncode == 2
    assert_one_sentence(taken.stderr, "made exists already; name a folder that does not")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_disk_without_room_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    result = run_here("quantize", source, "--out", tmp_path / "out", "--group", "32")
    assert result.returncode == 2
    assert_one_sentence(result.stderr, r"needs [\d,]+ bytes, and its disk has 1,000 left; make room\.")
    monkeypatch.undo()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "out"))

    monkeypatch.setattr(folders, "write_shards", full)
    result = run_here("quantize", source, "--out", tmp_path / "out", "--group", "32")
    assert result.returncode == 2
    assert_one_sentence(result.stderr, r"out cannot be used: No space left on device\.")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_another_model_is_said(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "model"))
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", copy)
    with pytest.raises(InvalidConfig, match=r"gives the id \d+, and the model has 640 tokens"):
        quantized(copy, MakeConfig(method="gptq", group=32), count=4, length=32)


def test_too_little_text_is_said() -> None:
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    with pytest.raises(InvalidConfig, match=r"has \d tokens, and a sequence 64; give more text or a smaller --length"):
        sequences(["x = 1"], tokenizer, count=1, length=64, bos=0)


# What is written


def test_the_command_writes_what_it_says(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 100)
    result = run_here(
        *("quantize", source, "--out", tmp_path / "out", "--method", "gptq", "--group", "32", "--calibration", text),
        *("--sequences", "4", "--length", "32", "--ignore", "*.down_proj", "--shard-size", "200KB", "--json"),
    )
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["scheme"] == {"w4a16": 12}
    assert record["kept"] == [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert record["calibration tokens"] == 4 * 32
    assert record["bits per weight"] == 4.5  # a scale of 16 bits for 32 weights
    tensors = {name: t for path in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(path).items()}
    assert record["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    rules = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["dynamic"]
    assert list(rules) == [r"-:model\.layers\.0\.mlp\.down_proj$", r"-:model\.layers\.1\.mlp\.down_proj$"]
    before = load_file(source / "model.safetensors")
    assert torch.equal(tensors["model.layers.1.mlp.down_proj.weight"], before["model.layers.1.mlp.down_proj.weight"])


# Factors


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma2", "neox", "mixtral", "qwen2_moe", "gpt_oss", "qwen3_next"]
)
def test_factors_change_no_output(family: str, tiny_model: object) -> None:
    """They move between a layer's weights; only float32's rounding tells."""
    decoder = load(tiny_model(family))  # type: ignore[operator]
    decoder.requires_grad_(False)
    before, count = dense_logits(decoder, IDS), 0
    generator = torch.Generator().manual_seed(0)
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        for fold in folds(layer, torch.float32):
            factor_I = fold.tie(torch.rand(fold.consumers[0].shape[-1], generator=generator) + 0.5)
            factor_I = fold.divide(factor_I)
            for weight in fold.consumers:
                weight.mul_(factor_I)
            count += 1
    assert count >= 2 * len(decoder.layers)
    torch.testing.assert_close(dense_logits(decoder, IDS), before, rtol=1e-3, atol=1e-4)


# What it costs


@pytest.fixture(scope="module")
def held_out() -> Tensor:
    """Code that the embedded model was never trained on: int64 [4, 256]."""
    texts = [inspect.getsource(module) for module in (json.decoder, json.encoder, json)]
    return sequences(texts, Tokenizer.from_folder(EMBEDDED_MODEL), count=4, length=256, bos=0)


@pytest.fixture(scope="module")
def before(held_out: Tensor) -> list[Tensor]:
    decoder = open_decoder(EMBEDDED_MODEL, CPU, silent)[1]
    return [logprobs(decoder, tokens) for tokens in held_out]


def costs(before: Sequence[Tensor], after: Sequence[Tensor], held_out: Tensor) -> TokenCosts:
    return TokenCosts.joined([TokenCosts.between(*each) for each in zip(before, after, held_out, strict=True)])


OPTIONS: dict[str, dict[str, object]] = {"gptq": {"act_order": True}, "awq": {"clip": True}}


@pytest.fixture(scope="module")
def quality_of(held_out: Tensor, before: list[Tensor]) -> Callable[..., TokenCosts]:
    """`quality_of(method, noise=False)`: the embedded model with its first two layers at three bits."""

    @cache
    def find(method: str, noise: bool = False) -> TokenCosts:
        options = OPTIONS.get(method, {})
        config = MakeConfig(schemes=("w3a16",), method=method, ignore=("model.layers.[2-6].*",), **options)  # type: ignore[arg-type]
        documents = [NOISE] if noise else None
        model = quantized(EMBEDDED_MODEL, config, documents=documents, count=16, length=512)
        return costs(before, [logprobs(model.decoder, tokens) for tokens in held_out], held_out)

    return find


@pytest.mark.dealt
@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["gptq", "awq", "hqq"])
def test_methods_beat_rounding_at_three_bits(method: str, quality_of: Callable[..., TokenCosts]) -> None:
    found, rounded = quality_of(method), quality_of("rtn")
    assert found.kl_mean < rounded.kl_mean
    assert found.equal_greedy > rounded.equal_greedy - 0.02
    if method != "hqq":  # which has no look at what the weights multiply
        assert found.perplexity < rounded.perplexity


def test_rounding_costs_something(
    before: list[Tensor], held_out: Tensor, quality_of: Callable[..., TokenCosts]
) -> None:
    plain = costs(before, before, held_out)
    assert plain.kl_mean == 0
    assert plain.equal_greedy == 1
    assert plain.perplexity < quality_of("awq").perplexity


@pytest.mark.dealt
def test_calibration_on_noise_is_worse_than_on_code(quality_of: Callable[..., TokenCosts]) -> None:
    assert quality_of("gptq").kl_mean < quality_of("gptq", noise=True).kl_mean


@pytest.mark.dealt
def test_an_engine_predicts_like_the_model_in_memory(held_out: Tensor, tmp_path: Path) -> None:
    model = quantized(EMBEDDED_MODEL, MakeConfig(schemes=("w4a16",)))
    folders.write(model, tmp_path / "made", progress=silent)
    tokens = held_out[:1]
    q_TV = logprobs(model.decoder, tokens[0])
    want = TokenCosts.between(q_TV, q_TV, tokens[0]).perplexity
    exact = {"coded_linear": "torch"}  # a CPU's own products round activations
    with LLM(tmp_path / "made", device="cpu", dtype="float32", max_model_len=512, kernels=exact) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        [result] = llm.generate([{"prompt_token_ids": tokens[0].tolist()}], params, use_tqdm=False)
    found = [
        entry[token].logprob for token, entry in zip(tokens[0, 1:].tolist(), result.prompt_logprobs[1:], strict=True)
    ]
    assert float(torch.tensor(found).mean().neg().exp()) == pytest.approx(want, rel=1e-3)


def test_experts_are_quantized_one_by_one(tmp_path: Path) -> None:
    config = MakeConfig(schemes=("w4a16",), method="gptq", group=64, ignore=("model.layers.[123].*",))
    model = quantized(MIXTURE, config, count=8, length=256)
    folders.write(model, tmp_path / "made", progress=silent)
    names = [f"model.layers.0.mlp.experts.{e}.{part}_proj" for e in range(16) for part in ("gate", "up", "down")]
    assert set(names) < set(model.outcome.made)
    assert "model.layers.0.mlp.gate" in model.kept
    poor = [note for note in model.outcome.notes if "too few tokens" in note]
    assert len(poor) <= 1
    ids = torch.randint(3, 4000, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        dense_logits(load(tmp_path / "made"), ids), dense_logits(model.decoder, ids), rtol=1e-3, atol=1e-3
    )


def test_experts_that_saw_little_are_rounded_to_nearest() -> None:
    config = MakeConfig(schemes=("w4a16",), method="gptq", group=64, ignore=("model.layers.[123].*",), min_tokens=1e6)
    model = quantized(MIXTURE, config, count=1, length=64)
    plain = quantized(MIXTURE, MakeConfig(schemes=("w4a16",), group=64, ignore=config.ignore))
    assert model.outcome.notes == [
        "32 matrices of experts saw too few tokens and were rounded to nearest, such as "
        "model.layers.0.mlp.experts.0.gate_proj."
    ]
    name = "model.layers.0.mlp.experts.3.down_proj"
    assert torch.equal(model.outcome.made[name].dequantized(), plain.outcome.made[name].dequantized())


def test_a_budget_gives_the_experts_of_a_layer_one_scheme() -> None:
    ignored = ("model.layers.[23].*", "*.self_attn.*")
    config = MakeConfig(schemes=("w4a16", "w8a8"), group=64, ignore=ignored, budget=3_700_000)
    made = quantized(MIXTURE, config, count=2, length=64).outcome.made
    schemes = [{each.scheme for name, each in made.items() if f"layers.{layer}." in name} for layer in range(2)]
    assert sorted(map(list, schemes)) == [["w4a16"], ["w8a8"]]


def test_default_text_is_found_everywhere() -> None:
    assert sum(map(len, default_documents())) > 200_000


def test_a_decoder_is_left_as_it_was_by_measuring(source: Path) -> None:
    config = MakeConfig(schemes=("w4a16", "w8a8"), budget=10**9, group=32)
    model = quantized(source, config, documents=["a = 1\n" * 200], count=2, length=32)
    assert {each.scheme for each in model.outcome.made.values()} == {"w8a8"}, "there was room for all"
    assert isinstance(model.decoder, Decoder)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "w8a8", "w4a16", "nf4", "mxfp4", "nvfp4"])
def test_a_gpu_makes_as_good_a_model_as_a_cpu(scheme: str, source: Path, tmp_path: Path) -> None:
    """GPTQ carries each rounding on to the columns behind it, so the last digit of a sum may move many weights.

    Noise of 3e-7 in a Hessian moved 18 % of mxfp4's here and 13 % of fp8's; the logits' squared error changed by 1 %.
    """
    config = MakeConfig(schemes=(scheme,), method="gptq", group=32)
    plain, errors = dense_logits(load(source), IDS), {}
    for device in ("cuda", "cpu"):
        made = quantized(
            source, config, documents=["a = 1\n" * 400], count=4, length=32, device=torch.device(device)
        )  # fmt: skip
        folders.write(made, tmp_path / device, progress=silent)
        errors[device] = (dense_logits(load(tmp_path / device), IDS) - plain).pow(2).mean().item()
    assert 0.97 < errors["cuda"] / errors["cpu"] < 1.03
