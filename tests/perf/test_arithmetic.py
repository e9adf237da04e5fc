"""The worked answers of docs/arithmetic.md, each through our own functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.attention.paged.cost import attention_cost
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.gemm.plain.cost import linear_cost
from ridgeline.perf.batching import batched, longest_of, static_room
from ridgeline.perf.beside import beside, with_model
from ridgeline.perf.explain import explain_table
from ridgeline.perf.footprint import active_parameters, kv_bytes, kv_bytes_per_token, parameters, weight_bytes
from ridgeline.perf.hardware import find
from ridgeline.perf.links import OPS, Line, Links, bus_factor
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import bound, seconds, step_ops
from ridgeline.perf.speculation import speedup
from ridgeline.perf.stack import parsed, stacked, weight_bits
from ridgeline.perf.training import chinchilla_tokens, forward_flops, sharded, training_flops
from tests.perf.arithmetic import mha_cache_bytes, mla_cache_bytes, score_matrix_bytes, tile_bytes
from tests.perf.models import spec

A100 = find("A100-80GB")
FP16 = precision("float16")
LLAMA2 = spec("llama-2-7b")
LLAMA3_70B = spec("llama-3-70b")
LLAMA2_13B = spec("llama-2-13b")
MIXTRAL = spec("mixtral-8x7b")


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


def test_mixtral_beside_a_dense_13b() -> None:
    """The same FLOPs a token; other bytes: of weights on a device, of a step, and between devices."""
    mixture = Deployment(model=MIXTRAL, hardware=A100, input=1024, output=256, ep=8)
    dense = with_model(mixture, LLAMA2_13B)
    assert (dense.tp, dense.ep) == (8, 1)
    (one, two) = (beside(each, (1, 8, 64, 512)) for each in (mixture, dense))
    assert one.used / two.used == pytest.approx(12.88 / 13.02, rel=1e-3)
    assert one.flops / two.flops == pytest.approx(1, rel=0.03)
    assert one.flops == pytest.approx(2 * (one.used - 32000 * 4096), rel=0.03), "attention comes to 2 %"
    assert (one.weights, two.weights) == (pytest.approx(14.5e9, rel=0.01), pytest.approx(13.02e9 * 2 / 8, rel=0.01))
    assert one.sent == 917_504
    assert two.sent == (2 * 40 + 1) * 5120 * 2 * 2 * 7 / 8 == 1_451_520  # a sum behind the embedding too
    assert one.read[0] == pytest.approx(2 * 12.75e9, rel=0.01), "one request reads two of eight experts"
    assert one.read[2] == pytest.approx(2 * 46.57e9 + 64 * 1152 * 131_072, rel=0.01), "64 read all eight"
    assert two.read[2] == pytest.approx(2 * 12.85e9 + 64 * 1152 * 819_200, rel=0.02)
    assert one.rates[0] is None, "eight groups of devices need eight requests"
    assert one.rates[1] < two.rates[1]
    assert one.rates[3] > 2 * two.rates[3]


def test_llama_3_70b_at_32k_on_four_a100() -> None:
    assert kv_bytes_per_token(LLAMA3_70B, "bfloat16") == 327_680
    assert 8 * kv_bytes(LLAMA3_70B, 32768, "bfloat16") == pytest.approx(85.9e9, rel=1e-3)
    plan = Plan(Deployment(model=LLAMA3_70B, hardware=A100, input=32_512, output=256, tp=4))
    assert plan.weights == pytest.approx(35.3e9, rel=1e-2)
    assert 8 * plan.kv_per_request == pytest.approx(21.5e9, rel=1e-2)
    assert plan.max_requests == 13


def test_evicting_half_of_it() -> None:
    """Half the cache: half the bytes of a request, twice the requests, and steps whose attention reads half."""
    whole = Deployment(model=LLAMA3_70B, hardware=A100, input=32_512, output=256, tp=4)
    all_kept, half = Plan(whole), Plan(replace(whole, kv_kept=0.5))
    assert 8 * 4 * half.kv_per_request == 8 * 4 * all_kept.kv_per_request / 2 == 8 * 16_384 * 327_680  # 42.9 GB
    assert (all_kept.max_requests, half.max_requests) == (13, 27)
    read = 8 * 16_320 * 81_920 / A100.bandwidth  # what attention no longer reads for eight requests
    assert all_kept.point(8).step - half.point(8).step == pytest.approx(read, rel=1e-3)
    with pytest.raises(InvalidConfig, match="kv_kept must be above 0"):
        replace(whole, kv_kept=0.0)


def test_latency_by_chunk() -> None:
    """Smaller chunks read the weights and the keys before them more often; larger ones make decoding requests wait."""
    plan = Plan(Deployment(model=LLAMA3_70B, hardware=A100, input=32_768, output=256, tp=4))
    found = [plan.chunked(size, 8) for size in (128, 512, 2048, 8192, 32_768)]
    assert [each.steps for each in found] == [256, 64, 16, 4, 1]
    ttft, longest = ([getattr(each, name) for each in found] for name in ("ttft", "longest"))
    assert ttft == sorted(ttft, reverse=True)
    assert longest == sorted(longest)
    products = 2 * 69.5e9 / 4 * 32_768 / A100.rate("bfloat16")
    pairs = 32_768**2 / 2 * 4 * 80 * 64 * 128 / 4 / A100.rate("bfloat16")
    sums = 161 * 32_768 * 8192 * 2 * 2 * 3 / 4 / (0.66 * A100.interconnect)
    assert ttft[-1] == pytest.approx(products + pairs + sums, rel=0.05)
    # A step of 128 + 8 tokens takes as long as reading 35 GB of weights, and the cache of the eight.
    reading = 256 * (34.7e9 + 8 * 32_896 * 81_920) / A100.bandwidth
    assert reading + pairs + sums < ttft[0] < 1.1 * (reading + pairs + sums)
    assert ttft[1] < 1.35 * ttft[-1], "512 costs a third more in all"
    assert longest[-1] / longest[1] > 40, "and one chunk of all stops the others for more than forty times as long"


def test_static_batches_on_an_a100() -> None:
    """63 answers of 1 to 511 tokens: the longest has 504, so 51 % of the rows' steps bring a token."""
    assert longest_of(1, 511) == 256
    assert longest_of(63, 511) == pytest.approx(511 * 63 / 64 + 0.5, rel=1e-3)
    drawn = np.random.default_rng(0).integers(1, 512, size=(20_000, 63)).max(axis=1).mean()
    assert longest_of(63, 511) == pytest.approx(drawn, rel=1e-3)
    plan = Plan(Deployment(model=LLAMA2, hardware=A100, input=1792, output=256, dtype="int4", kv_dtype="float16"))
    *_, last = batched(plan)
    assert (last.batch, static_room(plan)) == (63, 56)  # a static row keeps 1792 + 511 tokens, in blocks of 16
    assert last.useful == pytest.approx(256 / 503.5, rel=1e-3)
    prompts = 63 * plan.divided.busy(1792)
    step = plan.divided.decode(63, 1792 + 251).total
    assert last.static == pytest.approx(63 * 256 / (prompts + 502.5 * step), rel=1e-3)
    assert 1.6 < last.gain < 1 / last.useful, "prompts cost the same either way"
    assert next(each.gain for each in batched(plan)) == 1.0


WANDA, AQLM = parsed("wanda:kept=0.5,points=0.86"), parsed("aqlm:bits=2.07,points=0.82")
EAGLE2 = parsed("eagle-2:drafts=48,tokens=4,head=0.99e9,passes=6")


def test_half_the_weights_of_70b_at_two_bits_with_drafts() -> None:
    """One request on two H200s. Layers have 68.5 billion weights, the output layer 1.05 in 16 bits."""
    h200 = find("H200").attained()
    deployment = Deployment(model=LLAMA3_70B, hardware=h200, input=1024, output=256, tp=2)
    wanda, aqlm, eagle, *_ = stacked(deployment, [WANDA, AQLM, EAGLE2], (1, 64))
    assert (wanda.bits, aqlm.bits, eagle.bits) == (9, pytest.approx(2.035), pytest.approx(2.035))
    plain, layers = wanda.alone / wanda.gain, parameters(LLAMA3_70B).products
    assert layers == pytest.approx(68.5e9, rel=2e-3)
    other = 1 / plain - layers * 2 / 2 / h200.bandwidth  # output layer, cache, sums: they stay
    for found, bits in ((wanda.alone, 9), (wanda.stacked, 9), (aqlm.alone, 2.07), (aqlm.stacked, 2.035)):
        assert 1 / found == pytest.approx(other + layers * bits / 8 / 2 / h200.bandwidth, rel=1e-6)
    assert aqlm.stacked / aqlm.alone < 1.02, "below two bits the index takes what sparsity saves"
    head = 6 * 0.99e9 * 2 / 2 / h200.bandwidth
    assert 4 / eagle.alone == pytest.approx(1 / plain + head, rel=0.1), "49 tokens of one row are nearly free"
    assert eagle.gain > 3.3
    assert eagle.more < 1.4, "but the head takes more of a step that has become six times as short"
    assert aqlm.per_point == pytest.approx((aqlm.alone - plain) / 0.82)
    assert aqlm.per_point > 5 * wanda.per_point, "two bits bring the most for a point"
    assert eagle.per_point is None


def test_drafts_do_not_pay_in_large_batches_and_dense_zeros_save_nothing() -> None:
    deployment = Deployment(model=LLAMA3_70B, hardware=find("H200"), input=1024, output=256, tp=2)
    (eagle,) = stacked(deployment, [EAGLE2], (64,))
    assert eagle.gain < 0.5
    zeros, pattern = parsed("zeros:kept=0.5,form=dense"), parsed("2of4:kept=0.5,form=2:4")
    assert weight_bits([zeros], 16) == 16
    assert weight_bits([pattern], 16) == 0.5 * 16 + 2 * 0.5 == weight_bits([WANDA], 16)
    assert weight_bits([WANDA, AQLM], 16) == weight_bits([AQLM, WANDA], 16)
    for text, sentence in (
        ("wanda", "is no technique"),
        ("wanda:keep=0.5", "has the key 'keep'"),
        ("wanda:kept=half", "which is no number"),
        ("wanda:kept=0", "kept is 0"),
        ("two:kept=0.25,form=2:4", "of the form 2:4 it is 0.5"),
        ("x:kept=0.5,form=coo", "form is 'coo'"),
        ("eagle:drafts=2,tokens=4", "2 drafts bring from 1 to 3"),
        ("x:bits=-1", "bits is -1"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            parsed(text)


@given(st.floats(0, 0.99), st.integers(1, 12), st.floats(1, 4), st.floats(0, 0.5))
def test_the_speedup_of_drafts(share: float, drafts: int, cost: float, draft: float) -> None:
    """Leviathan et al., theorem 3.8, with a step that takes `cost` instead of 1."""
    expected = (1 - share ** (drafts + 1)) / ((1 - share) * (drafts * draft + cost))
    assert speedup(share, drafts, cost, draft) == pytest.approx(expected, rel=1e-9)


def test_intensities_of_each_kind_of_op() -> None:
    """Llama-3.1-8B's shape, FLOPs per byte by hand: products T·I·O over (T·I + I·O + T·O); attention of one query each
    as many as query heads share a key head; of a whole prompt nearly half its length for each of these."""
    decode, prompt = (
        {row.name: row.intensity for row in explain_table(spec("llama-8b"), shape, find("H200"))}
        for shape in (StepShape([1] * 64, [1024] * 64, 64), StepShape([4096], [4096], 1))
    )
    for tokens, found in ((64, decode), (4096, prompt)):
        for name, (inputs, outputs) in {"qkv": (4096, 6144), "out": (4096, 4096), "down": (14336, 4096)}.items():
            by_hand = tokens * inputs * outputs / (tokens * inputs + inputs * outputs + tokens * outputs)
            assert found[name] == pytest.approx(by_hand, rel=1e-3)
    assert decode["attention"] == pytest.approx(32 / 8, rel=0.01)
    heads, keys = 2 * 4096 * 32 * 128, 2 * 4096 * 8 * 128  # queries and outputs; keys and values
    assert prompt["attention"] == pytest.approx(4 * 32 * 128 * 4096 * 4097 / 2 / (2 * (heads + keys)), rel=1e-3)
    assert decode["embed"] == prompt["embed"] == 0
    assert decode["mixer_norm"] < 1 > decode["sample"]


@pytest.mark.parametrize(("layers", "latent_bytes"), [(60, 69_120), (61, 70_272)])
def test_latent_caches(layers: int, latent_bytes: int) -> None:
    assert mla_cache_bytes(layers, 512, 64, 2) == latent_bytes
    assert mha_cache_bytes(layers, 128, 128, 2) / latent_bytes == pytest.approx(56.9, abs=0.05)


def test_zero3_beside_ddp() -> None:
    """13 billion parameters on 8 devices: memory 16 bytes a parameter, and 3/2 of DDP's bytes between devices."""
    ddp, one, two, three = (sharded(13e9, 8, stage) for stage in (0, 1, 2, 3))
    assert (ddp.memory, one.memory, two.memory, three.memory) == (208e9, 71.5e9, 48.75e9, 26e9)
    assert (three.weights, three.gradients, three.state) == (3.25e9, 3.25e9, 19.5e9)
    assert ddp.sent == one.sent == two.sent == 2 * 26e9 * 7 / 8 == 45.5e9
    assert three.sent == 3 * 26e9 * 7 / 8 == 68.25e9
    lines = tuple(Line(op, "nccl", 8, 0.0, bus_factor(op, 8) / 100e9) for op in OPS)
    links = Links(device="a link of 100 GB/s", lines=lines, source="")
    assert [sharded(13e9, 8, stage, links).seconds for stage in (0, 3)] == [
        pytest.approx(0.455),
        pytest.approx(0.6825),
    ]
    assert sharded(13e9, 1, 3).sent == 0
    with pytest.raises(InvalidConfig, match="stage must be 0"):
        sharded(13e9, 8, 4)


def test_training() -> None:
    assert chinchilla_tokens(7e9) == 140e9
    assert training_flops(7e9, chinchilla_tokens(7e9)) == pytest.approx(5.88e21)


def test_the_page_has_the_figures_that_the_functions_give() -> None:
    page = (Path(__file__).parents[2] / "docs/arithmetic.md").read_text()
    mixture = Deployment(model=MIXTRAL, hardware=A100, input=1024, output=256, ep=8)
    one, two = (beside(each, (8, 64, 512)) for each in (mixture, with_model(mixture, LLAMA2_13B)))
    rows = [f"| {a:,.0f} | {b:,.0f} |" for a, b in zip(one.rates, two.rates, strict=True) if a and b]
    chunks = Plan(Deployment(model=LLAMA3_70B, hardware=A100, input=32_768, output=256, tp=4))
    for size in (128, 512, 2048, 8192, 32_768):
        found = chunks.chunked(size, 8)
        longest = f"{1e3 * found.longest:.0f} ms" if found.longest < 1 else f"{found.longest:.2f} s"
        rows.append(f"| {size:,} | {found.steps} | {found.ttft:.2f} s | {longest} |")
    deployment = Deployment(model=LLAMA3_70B, hardware=find("H200").attained(), input=1024, output=256, tp=2)
    for each in stacked(deployment, [WANDA, AQLM, EAGLE2], (1,)):
        figures = f"| {each.alone:.0f} | {each.gain:.2f} | {each.stacked:.0f} | {each.more:.2f} |"
        rows.append(figures if each.per_point is None else f"{figures} {each.per_point:.0f} |")
    plan = Plan(Deployment(model=LLAMA2, hardware=A100, input=1792, output=256, dtype="int4", kv_dtype="float16"))
    for each in (each for each in batched(plan) if each.batch in (8, 63)):
        rows.append(f"| {each.useful:.0%} | {each.static:,.0f} | {each.continuous:,.0f} | {each.gain:.2f} |")
    plain = page.replace("*", "").replace(" %", "%")
    assert len(rows) == 13
    assert [row for row in rows if row not in plain] == []
