"""Quantized checkpoints on a GPU: the tensors that a CPU gets, and an engine that runs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.quantization.held import Filling, keeping
from ridgeline.quantization.scheme import scheme
from ridgeline.weights.loader import load_weights, read_model_config, stored_forms
from tests.devices import placed
from tests.weights.quantized_files import PLAIN, SCHEMES, quantize, round_inputs
from tests.weights.test_kv_scales import scales_of, with_scales

pytestmark = pytest.mark.gpu

CASES = [("llama", name) for name in SCHEMES] + [("qwen3_moe", "fp8 blocks"), ("mixtral", "gptq order")]


def fillings(folder: Path, device: str, load_format: str = "auto") -> list[Filling]:
    """The tensors of all weights that are kept."""
    config, place = read_model_config(folder), torch.device(device)
    decoder = Decoder(
        config.spec,
        Ops(Platform.of(place)),
        dtype=torch.bfloat16,
        device=place,
        scheme_of=keeping(stored_forms(folder, config), scheme(None)),
    )
    load_weights(decoder, folder, config.weights, load_format=load_format, seed=1)
    modules = [module for module in decoder.modules() if isinstance(module, (Linear, ExpertStack))]
    return [filling for module in modules for filling in module.fillings]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_gpu_gets_the_tensors_that_a_cpu_gets(family: str, name: str, tmp_path: Path) -> None:
    folder, _ = quantize(family, SCHEMES[name], tmp_path / "model")
    here, there = (fillings(folder, device) for device in ("cpu", "cuda"))
    assert bool(here) == (name not in PLAIN)
    for one, other in zip(here, there, strict=True):
        for field, tensor in one.tensors.items():
            assert torch.equal(
                tensor.flatten().view(torch.uint8), other.tensors[field].cpu().flatten().view(torch.uint8)
            ), field
    again = [fillings(folder, "cuda", "dummy") for _ in range(2)]
    for one, other in zip(*again, strict=True):
        for field, tensor in one.tensors.items():
            assert torch.equal(tensor.flatten().view(torch.uint8), other.tensors[field].flatten().view(torch.uint8)), (
                field
            )


def test_scales_of_a_cache_arrive_on_a_gpu(tmp_path: Path) -> None:
    folder, _ = quantize("llama", SCHEMES["fp8 static"], tmp_path / "model")
    scales = scales_of(2, by_head=True)
    with_scales(folder, scales, "{}_scale", True, {**SCHEMES["fp8 static"].config, "kv_cache_scheme": "static"})
    options = {"device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True, "kv_cache_memory": 1 << 24}
    with LLM(folder, **options) as llm:
        layers = llm.assembly.model.spec.layers
        assert {str(layer.attention.kv_format) for layer in layers} == {"fp8_e4m3 with scales of the model"}
        llm.generate({"prompt_token_ids": [5, 9, 77]}, SamplingParams(max_tokens=2), use_tqdm=False)
        decoder = llm.assembly.worker._runner.decoder
        found = torch.stack([layer.mixer.kv_scales.cpu() for layer in decoder.layers])
    assert torch.equal(found, torch.from_numpy(scales).float().mT)


def scores(model: Path, dtype: str = "bfloat16", **settings: Any) -> tuple[list[list[int]], list[Tensor]]:
    """Two texts that an engine on a GPU wrote behind prompts in chunks, and the log-probabilities that it gave to all
    of their tokens behind the first."""
    prompts = [torch.randint(3, 300, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 23)]
    limits: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 64}
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(model, dtype=dtype, **placed("cuda"), **limits, **{"skip_tokenizer_init": True, **settings}) as llm:
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    texts = [[*result.prompt_token_ids, *result.outputs[0].token_ids] for result in results]
    entries = [[*result.prompt_logprobs, *result.outputs[0].logprobs] for result in results]
    return texts, [
        torch.tensor([entry[token].logprob for token, entry in zip(text[1:], own[1:], strict=True)])
        for text, own in zip(texts, entries, strict=True)
    ]


@torch.inference_mode()
def apart(found: tuple[list[list[int]], list[Tensor]], oracle: Any) -> float:
    """The median of how far log-probabilities are from those of transformers' model."""
    wrong = []
    for text, own in zip(*found, strict=True):
        want = oracle(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        wrong.append((own - want.gather(1, torch.tensor(text[1:])[:, None])[:, 0]).abs())
    return torch.cat(wrong).median().item()


@pytest.mark.parametrize("name", SCHEMES)
def test_an_engine_on_a_gpu_scores_as_the_model_of_its_numbers(name: str, tmp_path: Path) -> None:
    """Beside the errors of a model in bfloat16 that is not quantized. On CPUs, whose kernels also round activations to
    8 bits, they are up to 2.2 times as large; in FP8 up to 7.4 times, since a number between two of FP8 goes to another
    one than the oracle's. A wrong scale or order of groups makes them a hundred times as large."""
    scheme = SCHEMES[name]
    folder, oracle = quantize("llama", scheme, tmp_path / "model")
    usual = apart(scores(tmp_path / "model-plain"), oracle)
    round_inputs(oracle, scheme)
    found = apart(scores(folder), oracle)
    print(f"{name}: {found:.3g}, unquantized {usual:.3g}")
    assert found < (2.5 if scheme.rounds is None else 12) * usual


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 static", "ct int8", "gptq", "gptq order", "awq", "bnb nf4"])
def test_an_engine_on_a_gpu_prefers_what_the_models_numbers_prefer(name: str, tmp_path: Path) -> None:
    """The first token, and its log-probability beside that of the plain numbers, which are rounded no more than this:
    bfloat16 throughout, and three bits of mantissa in the activations of FP8."""
    folder, _ = quantize("llama", SCHEMES[name], tmp_path / "model")
    found = []
    for model in (folder, tmp_path / "model-plain"):
        options = {"device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True, "kv_cache_memory": 1 << 24}
        with LLM(model, **options) as llm:
            params = SamplingParams(max_tokens=1, temperature=0, logprobs=1)
            [result] = llm.generate({"prompt_token_ids": [5, 9, 77]}, params, use_tqdm=False)
            [entry] = result.outputs[0].logprobs[0].values()
            found.append(entry.logprob)
    assert found[0] == pytest.approx(found[1], abs=0.7)
