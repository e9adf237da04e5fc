"""What is written is what was made: by readers of the formats' descriptions, by our loader, and by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from ridgeline.compression.folder import write
from ridgeline.compression.quantize import QuantizedModel, quantized
from ridgeline.compression.schemes import MakeConfig
from ridgeline.core.errors import InvalidConfig
from tests import tiny_models
from tests.compression.readers import READERS
from tests.text.sample_tokenizers import byte_level, write_folder
from tests.weights.loading import dense_logits, load

IDS = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
TEXT = ["def f(x):\n    return x + 1\n" * 40]

CASES: dict[str, dict[str, Any]] = {
    "fp8": {"schemes": ("fp8",)},
    "fp8-block": {"schemes": ("fp8-block",)},
    "int8": {"schemes": ("int8",)},
    "llm-int8": {"schemes": ("int8",), "method": "llm-int8"},
    "w8a8": {"schemes": ("w8a8",), "method": "smoothquant"},
    "w8a16": {"schemes": ("w8a16",), "group": 0},
    "w4a16": {"schemes": ("w4a16",)},
    "w4a16 zeros": {"schemes": ("w4a16",), "symmetric": False, "method": "hqq"},
    "w4a16 ordered": {"schemes": ("w4a16",), "method": "gptq", "act_order": True, "static_groups": False},
    "w4a16 awq": {"schemes": ("w4a16",), "method": "awq"},
    "w4a16 packed": {"schemes": ("w4a16",), "format": "compressed-tensors"},
    "w4a16 packed zeros": {"schemes": ("w4a16",), "format": "compressed-tensors", "symmetric": False},
    "w3a16": {"schemes": ("w3a16",)},
    "w2a16": {"schemes": ("w2a16",)},
    "nf4": {"schemes": ("nf4",)},
    "mxfp4": {"schemes": ("mxfp4",)},
    "nvfp4": {"schemes": ("nvfp4",)},
    "mixed": {"schemes": ("w4a16", "w8a8"), "budget": 560_000},
}

Made = Callable[[str], tuple[QuantizedModel, Path]]


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made(case)`: the model in memory, and its folder."""

    @cache
    def make(case: str) -> tuple[QuantizedModel, Path]:
        config = MakeConfig(**{"group": 32, **CASES[case]})
        model = quantized(source, config, documents=TEXT, count=4, length=32)
        folder = tmp_path_factory.mktemp("made") / case.replace(" ", "-")
        write(model, folder, progress=lambda what, fraction: None)
        return model, folder

    return make


@pytest.mark.few(9)
@pytest.mark.parametrize("case", CASES)
def test_a_reader_of_the_format_finds_the_made_weights(case: str, made: Made) -> None:
    model, folder = made(case)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    assert config["quant_method"] == model.make.file_format
    assert len(model.outcome.made) == 14
    for name, each in model.outcome.made.items():
        want = each.form.dequantized().double().numpy()
        got = READERS[model.make.file_format](name, tensors, config)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_our_loader_finds_the_made_weights(case: str, made: Made) -> None:
    model, folder = made(case)
    decoder = load(folder)  # as plain numbers, which leaves activations as they are
    found = {name: parameter for name, parameter in decoder.named_parameters() if ".mixer.out" in name}
    assert len(found) == 2
    for name, parameter in found.items():
        stored = name.replace(".mixer.out.weight", ".self_attn.o_proj")
        want = model.outcome.made[f"model.{stored}"].form.dequantized()
        torch.testing.assert_close(parameter, want, rtol=1e-5, atol=1e-8)
    if not any(scheme in ("fp8", "fp8-block", "w8a8") for scheme in model.make.schemes) and case != "llm-int8":
        want, got = (dense_logits(each, IDS) for each in (model.decoder, decoder))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if "ordered" not in case])
def test_what_was_not_quantized_is_as_it_was(case: str, made: Made, source: Path) -> None:
    model, folder = made(case)
    before, after = (load_file(each / "model.safetensors") for each in (source, folder))
    plain = [name for name in before if name.removesuffix(".weight") not in model.outcome.made]
    assert "model.embed_tokens.weight" in plain
    assert "lm_head.weight" in plain
    for name in plain:
        assert after[name].dtype == before[name].dtype
        if model.make.folding is None or "layernorm" not in name:
            assert torch.equal(after[name], before[name])
    assert {path.name for path in source.iterdir()} <= {path.name for path in folder.iterdir()}


def oracle(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)


def assert_weights_are(model: QuantizedModel, theirs: Any, read: Callable[[Any], torch.Tensor]) -> None:
    for name, each in model.outcome.made.items():
        want = each.form.dequantized()
        # two roundings to bfloat16: of the scale and of the weight
        torch.testing.assert_close(read(theirs.get_submodule(name)).float(), want, rtol=2.0**-7, atol=1e-7)


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
@pytest.mark.parametrize("case", ["fp8", "int8", "w8a8", "w4a16 packed", "w4a16 packed zeros", "mxfp4", "mixed"])
def test_transformers_finds_what_compressed_tensors_holds(case: str, made: Made) -> None:
    model, folder = made(case)
    theirs = oracle(folder)
    with torch.no_grad():
        theirs(IDS)  # it unpacks weights when it first runs
    assert_weights_are(model, theirs, lambda module: module.weight)
    for name, each in model.outcome.made.items():
        rounded = theirs.get_submodule(name).quantization_scheme.input_activations
        assert (rounded is not None) is (each.scheme in ("fp8", "w8a8"))
        assert rounded is None or (rounded.dynamic and rounded.strategy == "token" and rounded.num_bits == 8)
    assert not hasattr(theirs.lm_head, "quantization_scheme")


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("case", ["nf4", "llm-int8"])
def test_transformers_finds_what_bitsandbytes_holds(case: str, made: Made) -> None:
    from bitsandbytes.functional import dequantize_4bit

    def read(module: Any) -> torch.Tensor:
        weight = module.weight
        if case == "nf4":
            return dequantize_4bit(weight.data, weight.quant_state)
        return weight.data.float() * weight.SCB[:, None] / 127

    model, folder = made(case)
    assert_weights_are(model, oracle(folder), read)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers reads FP8 with accelerate")
def test_transformers_finds_blocks_of_fp8(made: Made) -> None:
    model, folder = made("fp8-block")
    how = transformers.FineGrainedFP8Config(dequantize=True)
    assert_weights_are(model, oracle(folder, quantization_config=how), lambda module: module.weight)


@pytest.mark.parametrize(
    "family",
    [
        "bloom",
        "neox",
        "phi3",
        "gemma2",
        "mixtral",
        "qwen2_moe",
        "gpt_oss",
        "qwen3_next",
        "qwen3_5",
        "jamba",
        "falcon_h1",
        "zamba2",
    ],
)
@torch.no_grad()
def test_every_kind_of_checkpoint_is_quantized(family: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Fused tensors, rows in orders of their own, biases, experts one by one; stacked experts stay."""
    model = quantized(tiny_model(family), MakeConfig(schemes=("w8a16",), group=8))
    write(model, tmp_path / "made", progress=lambda what, fraction: None)
    decoder = load(tmp_path / "made")
    torch.testing.assert_close(dense_logits(decoder, IDS), dense_logits(model.decoder, IDS), rtol=1e-3, atol=1e-3)
    plain = dense_logits(load(tiny_model(family)), IDS)
    # the median, since a mixture may send a token to another expert
    assert 0 < (dense_logits(decoder, IDS) - plain).abs().median() < 0.1 * plain.abs().median()
    assert bool(model.outcome.notes) is (family == "gpt_oss")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_layers_without_a_norm_in_front_are_seen_by_methods_that_look_at_inputs(method: Any, tmp_path: Path) -> None:
    """OLMo 2 norms what layers give, so its gated pairs get their inputs as they are."""
    tiny_models.build("olmo2", hidden_size=128, intermediate_size=256, vocab_size=640).save_pretrained(tmp_path)
    write_folder(tmp_path, byte_level())
    text = "".join(chr(32 + 7 * n % 95) for n in range(4_000))
    config = MakeConfig(schemes=("w4a16",), method=method)
    assert quantized(tmp_path, config, documents=[text], count=2, length=64).outcome.made


@pytest.mark.parametrize(("scheme", "method"), [("w8a16", "awq"), ("w8a8", "smoothquant")])
def test_factors_that_move_leave_the_model_what_it_was(scheme: str, method: str, source: Path, tmp_path: Path) -> None:
    """Eight bits err by far less than a factor that moves on one side alone."""
    model = quantized(source, MakeConfig(schemes=(scheme,), method=method, group=32), documents=TEXT, length=32)
    write(model, tmp_path / "made", progress=lambda what, fraction: None)
    before, after = (load_file(each / "model.safetensors") for each in (source, tmp_path / "made"))
    norm = "model.layers.1.post_attention_layernorm.weight"
    assert not torch.equal(after[norm], before[norm]), "nothing moved"
    plain = dense_logits(load(source), IDS)
    assert (dense_logits(load(tmp_path / "made"), IDS) - plain).abs().median() < 0.05 * plain.abs().median()


def test_what_is_stored_transposed_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidConfig, match=r"h\.0\.attn\.c_attn\.weight is stored as \[inputs, outputs\]"):
        quantized(tiny_model("gpt2"), MakeConfig(group=16))


def test_a_mixed_folder_keeps_the_budget_and_fused_projections_together(made: Made) -> None:
    model, folder = made("mixed")
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert size <= 560_000
    assert {each.scheme for each in model.outcome.made.values()} == {"w4a16", "w8a8"}
    for layer in range(2):
        for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            ours = [each for name, each in model.outcome.made.items() if f".{layer}." in name and name.endswith(fused)]
            assert len({each.scheme for each in ours}) == 1
