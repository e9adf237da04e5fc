"""Attention inside chunks: rows that are cut at their chunks, against each token by itself in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.core.specs.state import ChunkedKVSpec
from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import PAGED_ATTENTION, AttentionShape, RaggedBatch
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.base.op import Platform
from ridgeline.worker.state.chunked import by_chunk
from ridgeline.worker.state.states import DeviceRows
from tests.driving import ask, rig
from tests.kernels.attention.test_attention import DEVICES, IMPLEMENTATIONS, tolerance
from tests.models import test_near_families as near
from tests.test_triton_engine import TRITON

CHUNK = 32
CASES = (
    AttentionCase(rows=((1, 1), (1, 32), (1, 33), (1, 100), (1, 64))),  # a token each
    AttentionCase(rows=((4, 34), (4, 4), (4, 96), (4, 131)), block_size=4),  # drafts, of which some cross
    AttentionCase(rows=((40, 100), (1, 90), (0, 0), (33, 33), (5, 69)), block_size=8, sinks=True),
    AttentionCase(rows=((200, 250), (1, 64)), block_size=32, captured=True),  # over seven chunks
    AttentionCase(rows=((2, 20), (9, 31))),  # in the first chunk
)


def rows_of(batch: RaggedBatch) -> DeviceRows:
    return DeviceRows(
        slots_R=batch.slots_R, start_R1=batch.start_R1, kv_len_R=batch.kv_len_R, last_R=batch.start_R1[1:] - 1,
        num_tokens=int(batch.start_R1[-1]), tokens_each=batch.tokens_each, num_tokens_R=batch.num_tokens_R,
        kv_bound_R=batch.kv_bound_R,
    )  # fmt: skip


def one_by_one(case: AttentionCase, inputs: tuple) -> Tensor:
    q_THD, k_cache, v_cache, batch = (x.cpu() if isinstance(x, Tensor) else x for x in inputs)
    softmax, found, token = case.softmax(torch.float32, torch.device("cpu")), [], 0
    for row, (new, length) in enumerate(case.rows):
        table = batch.block_table_SC[batch.slots_R[row]].tolist()
        for position in range(length - new, length):
            first = position - position % CHUNK
            places = [(table[p // case.block_size], p % case.block_size) for p in range(first, position + 1)]
            k, v = (torch.stack([cache[b, :, o] for b, o in places]).double() for cache in (k_cache, v_cache))
            per_kv = case.num_heads // case.num_kv_heads
            k_KHD, v_KHD = (x.repeat_interleave(per_kv, dim=1) for x in (k, v))
            scores_HK = softmax.scale * torch.einsum("hd,khd->hk", q_THD[token].double(), k_KHD)
            if softmax.sinks_H is not None:
                scores_HK = torch.cat((scores_HK, softmax.sinks_H.double()[:, None]), -1)
            weights_HK = scores_HK.softmax(-1)[:, : len(places)]
            found.append(torch.einsum("hk,khd->hd", weights_HK, v_KHD))
            token += 1
    return torch.stack(found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_sees_its_own_chunk_and_nothing_before_it(case: AttentionCase, name: str, device: str) -> None:
    inputs = q_THD, k, v, batch = case.inputs(torch.float32, torch.device(device))
    rows, table_SB = by_chunk(rows_of(batch), batch.block_table_SC, CHUNK, case.block_size)
    assert len(rows.start_R1) == len(rows.slots_R) + 1
    shape = AttentionShape(len(q_THD), rows.tokens_each, case.num_heads, case.num_kv_heads)
    schedule = None
    if name != "sdpa":
        schedule = make_schedule(rows.start_R1, rows.kv_len_R, rows.slots_R, shape)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), name)
    out_THD = attend(q_THD, k, v, rows.batch(table_SB, schedule), case.softmax(torch.float32, torch.device(device)))
    assert (out_THD.cpu().double() - one_by_one(case, inputs)).abs().max() <= tolerance(torch.float32)


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("drafts", [0, 2])
def test_steps_on_the_kernels_of_a_gpu_write_what_the_plain_ops_do(drafts: int, tmp_path: Path) -> None:
    """Tokens of decode steps too, whose positions are not their rows' lengths here."""
    near.oracle("llama4").save_pretrained(tmp_path)
    how = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    settings: dict[str, Any] = {"speculative_config": how} if drafts else {}
    requests = [ask("a", near.prompt(34, 1), max_tokens=4), ask("b", near.prompt(7, 2) * 2, max_tokens=4)]
    with rig(tmp_path, **settings) as own:
        want = own.run(*requests)
    with rig(tmp_path, kernels=TRITON, **settings) as own:
        found = own.run(*requests)
        assert not own.errors
    assert {name: each.tokens for name, each in found.items()} == {name: each.tokens for name, each in want.items()}


def test_a_row_that_has_stopped_stays_in_the_first_block() -> None:
    """It runs as many tokens as others do, and one of them counts."""
    rows = DeviceRows(
        slots_R=torch.tensor([1, 0]), start_R1=torch.tensor([0, 3, 6], dtype=torch.int32),
        kv_len_R=torch.tensor([1, 70], dtype=torch.int32), last_R=torch.tensor([2, 5]), num_tokens=6, tokens_each=3,
    )  # fmt: skip
    cut, table_SB = by_chunk(rows, torch.arange(40).view(2, 20), CHUNK, 4)
    assert cut.start_R1.tolist() == [0, 3, 3, 6, 6]
    assert cut.kv_len_R.tolist() == [1, 0, 6, 0]
    assert table_SB[[0, 2], 0].tolist() == [20, 16]


def test_blocks_before_a_chunk_are_given_up() -> None:
    spec = ChunkedKVSpec(num_kv_heads=1, head_dim=8, chunk=CHUNK)
    assert [spec.first_needed(position) for position in (0, 31, 32, 63, 64)] == [0, 0, 32, 32, 64]
    assert spec.blocks_needed(1000, 16, 4) == -(-(CHUNK - 1 + 16) // 4) + 1
