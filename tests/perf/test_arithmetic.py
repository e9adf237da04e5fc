"""The worked answers of docs/arithmetic.md, each through our own functions."""

from __future__ import annotations

import pytest

from ridgeline.core.specs.experts import ExpertsSpec, RoutingSpec
from ridgeline.kernels.attention.paged.cost import attention_cost
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.gemm.plain.cost import linear_cost
from ridgeline.models.experts import with_experts
from ridgeline.perf.footprint import active_parameters, kv_bytes, kv_bytes_per_token, parameters, weight_bytes
from ridgeline.perf.hardware import find
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import bound, seconds, step_ops
from tests.perf.arithmetic import (
    chinchilla_tokens,
    forward_flops,
    mha_cache_bytes,
    mla_cache_bytes,
    score_matrix_bytes,
    tile_bytes,
    training_flops,
    zero3_bytes,
)
from tests.perf.models import spec

A100 = find("A100-80GB")
FP16 = precision("float16")
LLAMA2 = spec("llama-2-7b")
LLAMA3_70B = spec("llama-3-70b")
ONE_EXPERT = spec("mixtral-8x7b-one-expert")
EXPERTS = ExpertsSpec(routing=RoutingSpec(experts=8, top_k=2), intermediate_size=14336)
MIXTRAL = with_experts(ONE_EXPERT, dict.fromkeys(range(len(ONE_EXPERT.layers)), EXPERTS))


def test_a_square_product_on_an_a100() -> None:
    cost = linear_cost(4096, 4096, 4096, itemsize=2)
    assert cost.flops == pytest.approx(137.4e9, rel=1e-3)
    assert cost.bytes == pytest.approx(100.7e6, rel=1e-3)
    assert cost.intensity == pytest.approx(1365.3, abs=0.1)
    assert A100.ridge("float16") == pytest.approx(153.0, abs=0.1)
    assert A100.rate("float16") / 2.0e12 == 156  # with the memory rate rounded to 2 TB/s
    assert bound(cost, A100, A100.rate("float16")) == "compute"
    assert seconds(cost, A100, A100.rate("float16")) == pytest.approx(440e-6, rel=2e-3)


def test_llama_2_7b_in_memory() -> None:
    assert weight_bytes(LLAMA2, FP16) == pytest.approx(13.48e9, rel=1e-3)
    assert kv_bytes_per_token(LLAMA2, "float16") == 524_288
    assert 32 * kv_bytes(LLAMA2, 2048, "float16") == pytest.approx(34.36e9, rel=1e-3)


def test_llama_2_7b_in_flops() -> None:
    """2 N D counts the embedding table, which is looked up and not multiplied, and leaves attention out."""
    tokens, weights = 2048, parameters(LLAMA2).total
    ops = step_ops(LLAMA2, StepShape([tokens], [tokens], tokens), dtype="float16")
    products = sum(op.count * op.cost.flops for op in ops if op.name in ("qkv", "out", "gate_up", "down", "unembed"))
    attention = sum(op.count * op.cost.flops for op in ops if op.name == "attention")
    assert forward_flops(weights, tokens) == pytest.approx(27.6e12, rel=1e-2)
    assert products == pytest.approx(27.06e12, rel=1e-3)
    assert attention == pytest.approx(1.10e12, rel=1e-2)
    assert products + attention == pytest.approx(forward_flops(weights, tokens), rel=0.03)
    assert training_flops(weights, tokens) == 3 * forward_flops(weights, tokens)


def test_written_out_scores_of_70b() -> None:
    whole = score_matrix_bytes(64, 8192, 8192, 2)
    assert whole == pytest.approx(8.59e9, rel=1e-3)
    assert tile_bytes(128, 64, 128, 2) == 163_840
    assert tile_bytes(128, 64, 128, 2) < 164 * 1024  # shared memory of an SM of an A100


@pytest.mark.parametrize("length", [2048, 32768])
def test_doubling_the_sequence(length: int) -> None:
    def flops(n: int) -> float:
        return attention_cost([n], [n], num_heads=32, num_kv_heads=32, head_dim=128, itemsize=2, kv_itemsize=2).flops

    assert flops(2 * length) / flops(length) == pytest.approx(4, rel=1e-3)
    assert kv_bytes(LLAMA2, 2 * length, "float16") == 2 * kv_bytes(LLAMA2, length, "float16")


def test_int4_on_an_a100() -> None:
    plan = Plan(Deployment(model=LLAMA2, hardware=A100, input=1792, output=256, dtype="int4", kv_dtype="float16"))
    assert plan.weights == pytest.approx(3.76e9, rel=1e-2)
    assert plan.max_requests == 63


def test_llava_users() -> None:
    assert 16 * kv_bytes(LLAMA2, 576 + 64, "float16") == pytest.approx(5.37e9, rel=1e-3)


def test_mixtral() -> None:
    assert parameters(MIXTRAL).total == pytest.approx(46.7e9, rel=1e-3)
    assert active_parameters(MIXTRAL) == pytest.approx(12.88e9, rel=1e-3)
    plan = Plan(Deployment(model=MIXTRAL, hardware=A100, input=1024, output=256, ep=8))
    assert plan.weights == pytest.approx(14.5e9, rel=1e-2)
    assert 2 * plan.exchanged == 917_504
    assert 4096 * 917_504 / find("H100").interconnect == pytest.approx(8e-3, rel=0.05)


def test_llama_3_70b_at_32k_on_four_a100() -> None:
    assert kv_bytes_per_token(LLAMA3_70B, "bfloat16") == 327_680
    assert 8 * kv_bytes(LLAMA3_70B, 32768, "bfloat16") == pytest.approx(85.9e9, rel=1e-3)
    plan = Plan(Deployment(model=LLAMA3_70B, hardware=A100, input=32_512, output=256, tp=4))
    assert plan.weights == pytest.approx(35.3e9, rel=1e-2)
    assert 8 * plan.kv_per_request == pytest.approx(21.5e9, rel=1e-2)
    assert plan.max_requests == 13


@pytest.mark.parametrize(("layers", "latent_bytes"), [(60, 69_120), (61, 70_272)])
def test_latent_caches(layers: int, latent_bytes: int) -> None:
    assert mla_cache_bytes(layers, 512, 64, 2) == latent_bytes
    assert mha_cache_bytes(layers, 128, 128, 2) / latent_bytes == pytest.approx(56.9, abs=0.05)


def test_training() -> None:
    assert zero3_bytes(13e9, 8) == 26e9
    assert chinchilla_tokens(7e9) == 140e9
    assert training_flops(7e9, chinchilla_tokens(7e9)) == pytest.approx(5.88e21)
