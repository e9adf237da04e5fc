"""Experts in the host's memory, of which the device holds some: the same results, and counts of what was there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.expert_cache import ExpertCacheFigures
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.experts.op import grouped_down, grouped_gate_up
from ridgeline.kernels.gemm.route.op import Routes, in_order
from ridgeline.kernels.ops import Ops
from ridgeline.layers.expert_cache import ExpertCache
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests import tiny_models

OPS = Ops(Platform(device_type="cpu"))
CPU = torch.device("cpu")
MIXTURE = Path(EMBEDDED_MODEL).with_name("embedded-moe")
MIXTURES = [family for family in ("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss") if family in tiny_models.FAMILIES]
EXPERTS, WIDTH, INNER = 6, 16, 12


def cache_of(slots: int, *, bias: bool = False) -> tuple[ExpertCache, list[Tensor | None]]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(EXPERTS, 2 * INNER, WIDTH), (EXPERTS, 2 * INNER), (EXPERTS, WIDTH, INNER), (EXPERTS, WIDTH)]
    host = [torch.randn(shape, generator=generator) if bias or len(shape) == 3 else None for shape in shapes]
    return ExpertCache(host, slots, CPU, OPS, "silu"), host


def routes_of(*experts: list[int]) -> tuple[Routes, list[int]]:
    expert_TK = torch.tensor(experts, dtype=torch.int32)
    routes = in_order(expert_TK, torch.rand(expert_TK.shape, generator=torch.Generator().manual_seed(1)), EXPERTS)
    return routes, routes.start_E1.tolist()


def step(cache: ExpertCache, *experts: list[int]) -> None:
    routes, start = routes_of(*experts)
    cache.begin(start)
    cache.sum(torch.zeros(len(experts), WIDTH), routes, start, None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_products_are_those_of_the_whole_stack(slots: int, bias: bool) -> None:
    """With room for all experts of a step and without, after other experts lay in the slots."""
    cache, host = cache_of(slots, bias=bias)
    gate_up, gate_up_bias, down, down_bias = host
    assert gate_up is not None
    assert down is not None
    for number, experts in enumerate([[[0, 1]], [[5, 2], [3, 0], [6, 6]], [[4, 5], [5, 4]], [[0, 1], [2, 3], [4, 5]]]):
        routes, start = routes_of(*experts)
        x_TM = torch.randn(len(experts), WIDTH, generator=torch.Generator().manual_seed(number))
        add_TM = x_TM * 2 if number % 2 else None
        cache.begin(start)
        got = cache.sum(x_TM, routes, start, add_TM)
        h_PF = grouped_gate_up(x_TM, gate_up, gate_up_bias, routes, "silu")
        torch.testing.assert_close(got, grouped_down(h_PF, down, down_bias, routes, add_TM), rtol=1e-4, atol=1e-4)


def test_who_was_needed_longest_ago_goes_first() -> None:
    cache, _ = cache_of(3)
    for experts in ([0, 1], [2, 1], [0, 2], [3, 2]):
        step(cache, experts)
    assert set(cache._slot_of) == {0, 2, 3}  # 1 went, though 0 came before it
    assert cache.figures == ExpertCacheFigures(needed=8, found=4, copied=4 * cache._expert_bytes)


def test_foreseen_experts_are_there_when_they_are_needed() -> None:
    cache, _ = cache_of(4)
    step(cache, [0, 1])
    cache.foresee([2, 3])
    step(cache, [2, 4])
    figures = cache.figures
    assert (figures.needed, figures.found) == (4, 1)  # 2 was; 0, 1 and 4 were not
    assert (figures.foreseeable, figures.foreseen) == (2, 1)
    cache.foresee([0, 1, 2, 3, 4])  # more than there is room for
    assert cache.figures.copied == figures.copied
    step(cache, [2, 3])
    assert cache.figures.foreseeable == figures.foreseeable
    assert "of 6 experts needed" in str(cache.figures)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_model_answers_as_with_all_experts_on_the_device(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder, prompts = tiny_model(family), [{"prompt_token_ids": list(range(3, 40))}, {"prompt_token_ids": [9, 8]}]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)

    def answers(slots: int) -> list[tuple[list[int], float]]:
        options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "moe_expert_cache_size": slots}
        with LLM(folder, **options) as llm:  # type: ignore[arg-type]
            assert (llm.assembly.local.figures().expert_cache is None) == (slots == 0)
            outputs = [r.outputs[0] for r in llm.generate(prompts, params, use_tqdm=False)]  # type: ignore[arg-type]
            return [(list(o.token_ids), float(o.cumulative_logprob or 0)) for o in outputs]

    want = answers(0)
    for slots in (2, 3):
        for (tokens, score), (own, own_score) in zip(want, answers(slots), strict=True):
            assert own == tokens
            assert own_score == pytest.approx(score, abs=1e-3)


def test_the_trained_mixture_finds_and_foresees_most_of_its_experts(caplog: pytest.LogCaptureFixture) -> None:
    """Half of 16 experts on the device; two of them are needed by each token. By chance half would be there, and two
    of 16 foreseen."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    texts = []
    for slots in (0, 8):
        with LLM(MIXTURE, device="cpu", dtype="float32", moe_expert_cache_size=slots) as llm:
            texts.append(llm.generate("The engine of a train", params, use_tqdm=False)[0].outputs[0].text)
            figures = llm.assembly.local.figures().expert_cache
            caplog.set_level(logging.INFO, "ridgeline")
    assert texts[0] == texts[1]
    assert figures is not None
    assert figures.needed > 4 * 2 * 59
    assert figures.found / figures.needed > 0.6
    assert figures.foreseen / figures.foreseeable > 0.4
    assert "were foreseen" in caplog.text


def test_what_cannot_be_offloaded_is_one_sentence(tiny_model: Callable[[str], Path]) -> None:
    def refused(folder: Path, **options: object) -> str:
        with pytest.raises(InvalidConfig) as caught, LLM(folder, device="cpu", **options):  # type: ignore[arg-type]
            pass
        return str(caught.value)

    assert "the model is none" in refused(tiny_model("llama"), moe_expert_cache_size=2)
    assert "for one device" in refused(
        MIXTURE, moe_expert_cache_size=2, tensor_parallel_size=2, enable_expert_parallel=True
    )
    assert "leave one of them out" in refused(MIXTURE, moe_expert_cache_size=2, quantization="int8")
    assert "must not be negative" in refused(MIXTURE, moe_expert_cache_size=-1)
