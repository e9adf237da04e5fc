"""Kernels whose results for a token do not depend on the tokens beside it, and the mode made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import AttentionShape, paged_attention_reference
from ridgeline.kernels.gemm.plain import cases as gemm_cases
from ridgeline.kernels.gemm.plain import op as gemm
from ridgeline.kernels.gemm.plain.cases import LinearCase
from tests.driving import ask, rig

pytest.importorskip("triton")
from ridgeline.kernels.attention.paged.schedule import fixed_schedule
from ridgeline.kernels.attention.paged.triton import paged_attention
from ridgeline.kernels.gemm.plain import batch_invariant

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", gemm_cases.CASES[:7], ids=str)
def test_batch_invariant_products_are_products(case: LinearCase, device: str) -> None:
    arguments = case.inputs(torch.float16, torch.device(device))
    wanted = gemm.linear(*arguments).float()
    tolerance = 2 * torch.finfo(torch.float16).eps * (1 + wanted.abs()) + case.in_width * 2.0**-24
    assert ((batch_invariant.linear(*arguments).float() - wanted).abs() <= tolerance).all()


def test_a_tile_leaves_enough_programs_or_is_the_smallest() -> None:
    assert batch_invariant.choose(1, 2048).rows == 16
    assert batch_invariant.choose(64, 128_256).rows == 128
    assert batch_invariant.choose(1024, 2048) == batch_invariant.ALONE
    assert batch_invariant.choose(8192, 2048) == batch_invariant.HOPPER[0]
    assert batch_invariant.choose(1, 16) == batch_invariant.HOPPER[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 528), (1000, 520), (72, 130)])
def test_no_bit_depends_on_the_tile(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x_TI, weight_OI, bias_O = LinearCase(300, inputs, outputs, bias=True).inputs(dtype, torch.device("cuda"))
    expected = batch_invariant.linear(x_TI, weight_OI, bias_O, batch_invariant.ANY)
    for tile in (batch_invariant.ALONE, *batch_invariant.HOPPER):
        for tokens in (1, 5, 64, 65, 300):
            assert torch.equal(batch_invariant.linear(x_TI[:tokens], weight_OI, bias_O, tile), expected[:tokens])
            assert torch.equal(batch_invariant.linear(x_TI[-tokens:], weight_OI, bias_O, tile), expected[-tokens:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tile", [batch_invariant.ALONE, *batch_invariant.HOPPER], ids=str)
def test_every_tile_multiplies(tile: batch_invariant.Tile, device: str) -> None:
    x_TI, weight_OI, bias_O = LinearCase(130, 1000, 260, bias=True).inputs(torch.float16, torch.device(device))
    wanted = gemm.linear(x_TI, weight_OI, bias_O).float()
    tolerance = 2 * torch.finfo(torch.float16).eps * (1 + wanted.abs()) + 1000 * 2.0**-24
    assert ((batch_invariant.linear(x_TI, weight_OI, bias_O, tile).float() - wanted).abs() <= tolerance).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("window", "alibi"), [(None, False), (40, False), (None, True), (40, True)])
def test_every_row_is_a_tile_however_short(device: str, window: int | None, alibi: bool) -> None:
    case = AttentionCase(rows=((1, 3), (1, 150), (70, 90), (2, 2)), head_dim=32, window=window, alibi=alibi)
    q, k, v, batch = case.inputs(torch.float16, torch.device(device))
    shape = AttentionShape(num_tokens=len(q), tokens_each=0, num_heads=4, num_kv_heads=2, window=window)
    schedule = fixed_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)
    assert schedule.counts_2.tolist() == [0, 1 + 1 + 2 + 1]
    again = type(batch)(**{**vars(batch), "schedule": schedule})
    options = case.options(torch.float16, torch.device(device))
    out = paged_attention(q, k, v, again, **options)
    wanted = paged_attention_reference(q, k, v, batch, **options)
    assert torch.allclose(out.float(), wanted.float(), atol=8 * torch.finfo(torch.float16).eps, rtol=0)


@pytest.mark.parametrize("family", ["mixtral", "mamba2"])
def test_without_a_gpu_the_mode_is_for_plain_layers(family: str, tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidConfig, match="or use a GPU"), rig(tiny_model(family), deterministic=True):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "bfloat16"),
        ("llama", "float16"),
        ("qwen3", "bfloat16"),
        ("mistral", "bfloat16"),
        ("bloom", "bfloat16"),
        ("gemma2", "bfloat16"),
    ],
)
def test_a_request_gets_the_same_bits_in_any_company(
    tiny_model: Callable[[str], Path], family: str, dtype: str
) -> None:
    """Alone; beside others; with its prompt in small chunks; in graphs of other sizes and without any."""
    folder = tiny_model(family)
    prompt = tuple(3 + i % 90 for i in range(77))
    seen = []
    for company, settings in (
        (0, {"max_num_seqs": 1}),
        (0, {"enforce_eager": True}),
        (5, {"max_num_seqs": 6}),
        (3, {"max_num_batched_tokens": 16}),
        (9, {"max_num_seqs": 8, "max_num_batched_tokens": 64}),
    ):
        options = {"max_num_batched_tokens": 128, "kv_cache_memory": 1 << 26, "block_size": 16, **settings}
        with rig(folder, device="cuda", dtype=dtype, deterministic=True, debug_checks=False, **options) as own:
            others = [ask(f"o{i}", prompt[: 5 + 7 * i], max_tokens=20) for i in range(company)]
            own.run(*others[: company // 2], ask("it", prompt, max_tokens=24, logprobs=2), *others[company // 2 :])
            assert not own.errors
            seen.append(own.outcomes["it"].scored)
    assert len(seen[0]) == 24
    assert all(run == seen[0] for run in seen), "the same request, other bits"
