"""Quantized checkpoints: the numbers of the files, in the forms of the files, and transformers' logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.quantization.held import dequantized, keeping
from ridgeline.quantization.scheme import scheme
from ridgeline.weights.loader import check_files, load_weights, read_model_config, stored_forms
from tests.weights.loading import CPU, OPS, dense_logits, load
from tests.weights.quantized_files import PLAIN, SCHEMES, quantize, round_inputs

IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(3))


def kept(folder: Path, *, load_format: str = "auto", seed: int = 0) -> Decoder:
    """The model with its weights in the forms of its files, before they are settled."""
    config = read_model_config(folder)
    check_files(folder, config)
    forms = stored_forms(folder, config)
    decoder = Decoder(config.spec, OPS, dtype=torch.float32, device=CPU, scheme_of=keeping(forms, scheme(None)))
    load_weights(decoder, folder, config.weights, load_format=load_format, seed=seed)
    return decoder


def numbers(module: Linear | ExpertStack) -> Tensor:
    """What the tensors of a module stand for."""
    parts = [
        filling.tensors["weight_OI"] if filling.held is None else dequantized(filling.held, filling.tensors)
        for filling in module.fillings
    ]
    return torch.cat(parts, -2)


def assert_same_numbers(decoder: Decoder, plain: Decoder) -> int:
    """Every weight that is kept in its form stands for the numbers of the other decoder; returns how many there are."""
    count = 0
    for name, module in decoder.named_modules():
        if isinstance(module, (Linear, ExpertStack)) and module.fillings:
            count += 1
            wanted = plain.get_parameter(f"{name}.weight")
            torch.testing.assert_close(numbers(module), wanted, rtol=1e-6, atol=0)
    return count


@torch.no_grad()
@pytest.mark.parametrize("name", SCHEMES)
def test_a_llama_in_each_format_is_the_model_of_its_numbers(name: str, tmp_path: Path) -> None:
    folder, oracle = quantize("llama", SCHEMES[name], tmp_path / "model")
    widened, plain = load(folder), load(tmp_path / "model-plain")
    for parameter, tensor in plain.named_parameters():
        torch.testing.assert_close(widened.get_parameter(parameter), tensor, rtol=1e-6, atol=0)
    decoder = kept(folder)
    held = 0 if name in PLAIN else 8  # qkv, out, gate_up and down of two layers
    assert assert_same_numbers(decoder, plain) == held
    before = decoder.weight_bytes
    decoder.prepare()
    assert before * 0.9 < decoder.weight_bytes <= before * 1.1
    round_inputs(oracle, SCHEMES[name])
    wanted, got = oracle(IDS).logits, dense_logits(decoder, IDS)
    if SCHEMES[name].rounds is None:
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    else:  # where both sides round a number differently, since it lies between two, they differ by that much
        assert (got - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("name", ["fp8 blocks", "ct int8", "gptq order", "ct nvfp4", "ct mxfp4"])
def test_a_config_alone_gives_random_weights_in_its_form(name: str, tmp_path: Path) -> None:
    """As benchmarks need them: of the usual size, and the same again for a seed."""
    folder, _ = quantize("llama", SCHEMES[name], tmp_path / "model")
    (folder / "model.safetensors").unlink()
    config = read_model_config(folder)
    forms = stored_forms(folder, config, files=False)
    assert len(forms) == 8

    def random(seed: int) -> Decoder:
        made = Decoder(config.spec, OPS, dtype=torch.float32, device=CPU, scheme_of=keeping(forms, scheme(None)))
        load_weights(made, folder, config.weights, load_format="dummy", seed=seed)
        return made

    one, same, other = (random(seed) for seed in (1, 1, 2))
    for (module, ours), again, unlike in zip(one.named_modules(), same.modules(), other.modules(), strict=True):
        if isinstance(ours, Linear) and ours.fillings:
            assert isinstance(again, Linear)
            assert isinstance(unlike, Linear)
            assert torch.equal(numbers(ours), numbers(again))
            assert not torch.equal(numbers(ours), numbers(unlike))
            assert 0.012 < numbers(ours).std() < 0.03, module  # a power of two is 0.02 by a factor of at most 1.5


EXACT = {"coded_linear": "reference"}


@pytest.mark.parametrize("kernels", [{}, EXACT], ids=["as the platform likes", "exact"])
def test_the_engine_runs_a_quantized_checkpoint(kernels: dict[str, str], tmp_path: Path) -> None:
    folder, oracle = quantize("llama", SCHEMES["gptq order"], tmp_path / "model")
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory": 1 << 22}
    with LLM(folder, kernels=kernels, quantization="gptq", **options) as llm:
        [result] = llm.generate(
            {"prompt_token_ids": [5, 9, 77]}, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False
        )
        kept_bytes = llm.assembly.memory.weights
    with torch.no_grad():
        ids = torch.tensor([[5, 9, 77]])
        for _ in range(8):
            ids = torch.cat((ids, oracle(ids).logits[:, -1:].argmax(-1)), 1)
    assert len(result.outputs[0].token_ids) == 8
    if kernels:  # others may round activations
        assert result.outputs[0].token_ids[: len(ids[0]) - 3] == ids[0, 3:].tolist()
        with LLM(tmp_path / "model-plain", **options) as llm:
            assert kept_bytes < llm.assembly.memory.weights * 0.7
    with pytest.raises(InvalidConfig, match="quantization is 'awq', and the checkpoint is quantized as 'gptq'"):
        LLM(folder, quantization="awq", **options)
    with LLM(folder, load_format="dummy", kernels=kernels, **options) as llm:
        assert llm.assembly.memory.weights == kept_bytes
