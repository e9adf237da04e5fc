"""Kernels whose results for a token do not depend on the tokens beside it, and the mode made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.attention.op import Case, make_case, paged_attention_reference
from ridgeline.kernels.gemm import op as gemm
from tests.driving import ask, rig

pytest.importorskip("triton")
from ridgeline.kernels.attention.schedule import fixed_schedule
from ridgeline.kernels.attention.triton import paged_attention
from ridgeline.kernels.gemm import fixed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", gemm.CASES[:7], ids=str)
def test_fixed_products_are_products(case: gemm.Case, device: str) -> None:
    arguments = case.inputs(torch.float16, torch.device(device))
    wanted = gemm.linear(*arguments).float()
    tolerance = 2 * torch.finfo(torch.float16).eps * (1 + wanted.abs()) + case.in_width * 2.0**-24
    assert ((fixed.linear(*arguments).float() - wanted).abs() <= tolerance).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 40])
def test_every_row_is_a_tile_however_short(device: str, window: int | None) -> None:
    case = Case(rows=((1, 3), (1, 150), (70, 90), (2, 2)), head_dim=32, window=window)
    q, k, v, batch = make_case(case, torch.float16, torch.device(device))
    schedule = fixed_schedule(
        batch.start_R1, batch.kv_len_R, batch.slots_R, num_tokens=len(q), num_heads=4, num_kv_heads=2, window=window
    )
    assert schedule.counts_2.tolist() == [0, 1 + 1 + 2 + 1]
    again = type(batch)(**{**vars(batch), "schedule": schedule})
    out = paged_attention(q, k, v, again, scale=0.2, window=window)
    wanted = paged_attention_reference(q, k, v, batch, scale=0.2, window=window)
    assert torch.allclose(out.float(), wanted.float(), atol=8 * torch.finfo(torch.float16).eps, rtol=0)


def test_without_a_gpu_the_mode_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidConfig, match="needs a GPU"), rig(tiny_model("llama"), deterministic=True):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "bfloat16"), ("llama", "float16"), ("qwen3", "bfloat16"), ("mistral", "bfloat16")]
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
